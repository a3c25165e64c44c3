"""Frames wait for their turn at a link's rate, then for its one-way delay: an emulated way to one other peer, or what a peer
may send to all of them together.

The rate of an emulated way is shared by control and bulk, as by streams of one real path: control does not stand in line behind
bulk, but what it takes, bulk has not. The limit of an uplink holds for bulk alone. The delay is a pipeline, so it takes nothing
from the rate. A frame is handed on at max(now, when its lane is free) + size / rate + delay.
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


class _Lane:
    """Frames in their order, each handed on when it is due."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def empty(self) -> bool:
        return not self._queue

    def take(self, seconds: float) -> None:
        """It is busy for so long."""
        self.free_at = max(self._loop.time(), self.free_at) + seconds

    def add(self, due: float, deliver: Callable[[], None]) -> None:
        if self._queue:
            due = max(due, self._queue[-1][0])
        self._queue.append((due, deliver))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._run)

    def close(self) -> None:
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _run(self) -> None:
        self._timer = None
        now = self._loop.time() + 0.0005  # timers have a granularity of a millisecond
        while self._queue and self._queue[0][0] <= now:
            self._queue.popleft()[1]()
        if self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._queue[0][0], self._run)


class Shaper:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._turn = asyncio.Lock()
        self._bulk, self._control = _Lane(), _Lane()

    def submit(self, size: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when a bulk frame of `size` bytes would have come through, never before an earlier one."""
        self._submit(self._bulk, size, deliver)

    def submit_control(self, size: int, deliver: Callable[[], None]) -> None:
        """The same for a control frame, which waits for earlier control alone."""
        self._submit(self._control, size, deliver)

    def _submit(self, lane: _Lane, size: int, deliver: Callable[[], None]) -> None:
        if self.shape.free and lane.empty:
            deliver()
            return
        seconds = size / self.shape.bytes_per_second if self.shape.bytes_per_second else 0.0
        lane.take(seconds)
        if lane is self._control:
            self._bulk.take(seconds)
        lane.add(lane.free_at + self.shape.delay_seconds, deliver)

    async def room(self) -> None:
        """Until bulk may be submitted. Who waits is let in one by one and in order, and submits at once."""
        async with self._turn:
            while (wait := self._wait_seconds()) > 0:  # noqa: ASYNC110 - time frees the link
                await asyncio.sleep(wait)

    def _wait_seconds(self) -> float:
        """How long until little of what was submitted stands in line here."""
        rate = self.shape.bytes_per_second
        wait = self._bulk.free_at - asyncio.get_running_loop().time() - WINDOW_BYTES / rate if rate else 0.0
        return wait if wait > LEAST_WAIT_SECONDS else 0.0

    def close(self) -> None:
        self._bulk.close()
        self._control.close()
