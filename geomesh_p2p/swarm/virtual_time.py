"""Hours in milliseconds: an event loop whose clock jumps instead of waiting. Every run on it is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for the next timer, moves the loop's clock to it. Waits really only for worker threads."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.loop.jobs:
            return super().select(None)  # a worker thread takes no virtual time
        if timeout is None:
            raise RuntimeError("nothing is scheduled and nobody can wake this loop: it waits for ever")
        self.loop.now += timeout
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time begins at 0 and jumps to the next timer when idle. Deterministic; never sleeps.

    A loop that waits for something that nothing can bring about raises RuntimeError at once.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.jobs = 0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self.jobs += 1
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _future: Any) -> None:
        self.jobs -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        self.jobs += 1  # ends in a thread, too
        await super().shutdown_default_executor(*args)
        self.jobs -= 1


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run() in virtual time."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
