"""Frames wait for their turn at a link's rate, then for its one-way delay: an emulated way to one other peer, or what a peer
may send to all of them together.

The rate of an emulated way is shared by control and bulk; the limit of an uplink holds for bulk alone. The delay is a pipeline,
so it takes nothing from the rate. A frame is handed on at max(now, when the link is free) + size / rate + delay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

WINDOW_BYTES = 64 * 1024     # bulk waits while more than this is queued for the link
LEAST_WAIT_SECONDS = 1e-6    # less may not move a clock at all


@dataclass(frozen=True)
class Shape:
    """Added one-way delay, and a cap on the rate (None: none)."""

    delay_seconds: float = 0.0
    bytes_per_second: float | None = None

    @property
    def free(self) -> bool:
        return self.delay_seconds <= 0 and self.bytes_per_second is None


class Shaper:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._turn = asyncio.Lock()
        self._free_at = 0.0
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, size: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when a frame of `size` bytes would have come through, never out of order."""
        if self.shape.free and not self._queue:
            deliver()
            return
        rate = self.shape.bytes_per_second
        self._free_at = max(self._loop.time(), self._free_at) + (size / rate if rate else 0.0)
        due = self._free_at + self.shape.delay_seconds
        if self._queue:
            due = max(due, self._queue[-1][0])
        self._queue.append((due, deliver))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._run)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def room(self) -> None:
        """Until bulk may be submitted. Who waits is let in one by one and in order, and submits at once."""
        async with self._turn:
            while (wait := self.wait_seconds()) > 0:  # noqa: ASYNC110 - time frees the link
                await asyncio.sleep(wait)

    def wait_seconds(self) -> float:
        """How long bulk should wait before it is submitted, so that control need not wait long behind it."""
        rate = self.shape.bytes_per_second
        wait = self._free_at - self._loop.time() - WINDOW_BYTES / rate if rate else 0.0
        return wait if wait > LEAST_WAIT_SECONDS else 0.0

    def close(self) -> None:
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        now = self._loop.time() + 0.0005  # timers have a granularity of a millisecond
        while self._queue and self._queue[0][0] <= now:
            self._queue.popleft()[1]()
        if self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._queue[0][0], self._run)
