"""Running heavy NumPy work beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Offload(Protocol):
    def __call__(self, job: Callable[[], Result]) -> Awaitable[Result]: ...


async def inline(job: Callable[[], Result]) -> Result:
    """Runs `job` in the event loop itself: for tests in virtual time, and for small models."""
    return job()


async def in_thread(job: Callable[[], Result]) -> Result:
    """Runs `job` in the loop's executor; NumPy and hashing release the interpreter lock for most of it."""
    return await asyncio.get_running_loop().run_in_executor(None, job)
