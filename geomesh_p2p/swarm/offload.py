"""Running heavy NumPy work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Offload(Protocol):
    def __call__(self, job: Callable[[], Result]) -> Awaitable[Result]: ...


async def inline(job: Callable[[], Result]) -> Result:
    """Runs `job` in the event loop itself: for tests in virtual time, and for small models."""
    return job()


async def in_thread(job: Callable[[], Result]) -> Result:
    """Runs `job` in the loop's executor; NumPy and hashing release the interpreter lock for most of it."""
    return await asyncio.get_running_loop().run_in_executor(None, job)


async def in_own_thread(job: Callable[[], Result]) -> Result:
    """Runs `job` in a thread of its own, which nobody waits for if this is cancelled, nor at the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def tell(result: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            result(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, job())
        except BaseException as error:
            outcome = (done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="start", daemon=True).start()
    return await done
