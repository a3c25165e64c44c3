"""JSON lines between a peer and the `geomesh mesh` that started it: what the table shows, and the calibration.

Child to parent: {"event": E, ...} with E one of address, ready_to_calibrate, calibration, exit, or an observation's kind
(phase, plan, round, validated, progress, exchange, ...).
Parent to child: {"calibrate": true}, {"time_scale": x}. The end of the parent's side means: stop, as SIGTERM does.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

from geomesh_p2p.core import observations as seen
from geomesh_p2p.telemetry.sinks import METRICS_KINDS, jsonable

TOLD: dict[type, str] = {**METRICS_KINDS, seen.TrainingProgress: "progress", seen.ExchangeProgress: "exchange"}


class ControlChannel:
    """One end of the pipe pair. `on_closed` is called once, in the event loop, when the parent is gone."""

    def __init__(self, fd_in: int, fd_out: int) -> None:
        self._fd_in, self._fd_out = fd_in, fd_out
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._buffer = b""
        self._on_closed: Callable[[], None] = lambda: None

    def start(self, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        os.set_blocking(self._fd_in, False)
        asyncio.get_running_loop().add_reader(self._fd_in, self._readable)

    def tell(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **jsonable(fields)}).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._fd_out, line) :]
        except OSError:
            pass  # the parent is gone; on_closed says so

    def __call__(self, event: Any) -> None:
        """An observer: tells the parent of what it shows."""
        kind = TOLD.get(type(event))
        if kind is not None:
            self.tell(kind, **jsonable(event))

    async def answer(self, key: str) -> Any:
        """The value of the parent's next line that has `key`; other lines before it are dropped."""
        while True:
            line = await self._answers.get()
            if key in line:
                return line[key]

    def _readable(self) -> None:
        try:
            data = os.read(self._fd_in, 65536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd_in)
            self._on_closed()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._answers.put_nowait(json.loads(line))
