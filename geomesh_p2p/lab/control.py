"""One child process of a mesh: its command, its two control pipes, its end.

Control lines are JSON objects, one a line. From the child (each has "event"):

    address              address
    ready_to_calibrate
    calibration          tokens_per_second: what its real device reached while all the children of this host ran steps
    round, phase, discarded, warned, progress: the fields of that observation (core/observations.py)
    exit                 exit_code, reason

To the child: {"calibrate": true} once all are ready, then {"time_scale": x}. Nobody asks to be calibrated but peers with an
emulated device whose site file gives no time scale; on a resumed run the first answer is {"calibrate": false}.
A child takes the end of its control pipe for SIGTERM: it does not outlive the mesh.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 4 * 1024 * 1024
SHOWN_LOG_LINES = 15
DRAIN_SECONDS = 1.0


class Child:
    """A running peer process. Its stdout and stderr are appended to `log`."""

    def __init__(self, site: str, log: Path) -> None:
        self.site = site
        self.log = log
        self.code: int | None = None      # as a shell tells it: 128 + N for an end by signal N
        self.ended_by = 0                 # that signal; 0 for an end of its own
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._inlet: Any = None

    async def start(self, command: Sequence[str]) -> None:
        """Start `command` with `--control-fd-in N --control-fd-out M` appended."""
        child_in, parent_out = os.pipe()
        parent_in, child_out = os.pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("ab") as sink:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    f"--control-fd-in={child_in}",
                    f"--control-fd-out={child_out}",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    pass_fds=(child_in, child_out),
                    start_new_session=True,  # Ctrl-C reaches the mesh alone, which then asks its children to stop
                )
        finally:
            os.close(child_in)
            os.close(child_out)
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        reader = self._reader
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(parent_in, "rb", 0))
        self._inlet = os.fdopen(parent_out, "wb", 0)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The child's control lines, until it has ended; then `code` is set."""
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        while line := await self._line(ended):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event
        status = await ended
        self.code, self.ended_by = (status, 0) if status >= 0 else (128 - status, -status)
        self._close()

    async def _line(self, ended: asyncio.Task[int]) -> bytes:
        """The next line, empty at the end. Some other process may keep the pipe open when the child has ended."""
        assert self._reader is not None
        line = asyncio.ensure_future(self._reader.readline())
        await asyncio.wait({line, ended}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({line}, timeout=DRAIN_SECONDS if ended.done() else None)
        if not line.done():
            line.cancel()
            return b""
        return line.result()

    def tell(self, **words: Any) -> None:
        """A control line to the child; lines are far smaller than a pipe's buffer, so this does not block."""
        with contextlib.suppress(OSError, ValueError):
            self._inlet.write((json.dumps(words) + "\n").encode())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_lines(self) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 16_384))
                return file.read().decode("utf-8", "replace").splitlines()[-SHOWN_LOG_LINES:]
        except OSError:
            return []

    def _close(self) -> None:
        if self._inlet is not None:
            with contextlib.suppress(OSError):
                self._inlet.close()
