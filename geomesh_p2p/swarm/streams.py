"""One byte stream of frames, read by callbacks straight into place: no task, no copy of small pieces, no queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from geomesh_p2p.swarm.wire import FrameError, FrameReader

HIGH_WATER_BYTES = 128 * 1024
EARLY_BYTES = 64 * 1024      # limit of what comes before the first frame

Body = bytes | bytearray


class FrameStream(asyncio.BufferedProtocol):
    """Callbacks, to be set by the owner: `on_body(stream, body)`, `on_bytes()` (some of a body has come),
    `on_lost(stream)`, `on_writable(stream)`, `on_bad(stream, error)`; a bad frame ends the stream."""

    def __init__(self) -> None:
        self.on_body: Callable[[FrameStream, Body], None] = _ignore
        self.on_bytes: Callable[[], None] = _ignore
        self.on_lost: Callable[[FrameStream], None] = _ignore
        self.on_writable: Callable[[FrameStream], None] = _ignore
        self.on_bad: Callable[[FrameStream, FrameError], None] = _ignore
        self.paused = False
        self.lost = False
        self.remote_address = ""     # of the connection that carries it, as far as it is known
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._early = bytearray()
        self._awaited: list[tuple[int, Callable[[bytes], None]]] = []
        self._early_buffer = bytearray(4096)
        self._on_early_loss: Callable[[], Any] | None = None

    def budget(self, begin: Callable[[type, int], bool], end: Callable[[int], None]) -> None:
        """What FrameReader asks and tells about each frame that arrives."""
        self._reader.begin, self._reader.end = begin, end

    # ------------------------------------------------------------ before the first frame

    def expect_preface(self, callback: Callable[[bytes], None]) -> None:
        """The next thing to arrive is one message behind a varint length."""
        self._awaited.append((-1, callback))

    def expect_bytes(self, count: int, callback: Callable[[bytes], None]) -> None:
        self._awaited.append((count, callback))

    def on_early_loss(self, callback: Callable[[], Any]) -> None:
        self._on_early_loss = callback

    def _take_early(self) -> bool:
        size, callback = self._awaited[0]
        at = 0
        if size < 0:
            found = _varint(self._early)
            if found is None:
                return False
            size, at = found
        if size > EARLY_BYTES:
            raise FrameError(f"stream: {size} bytes before the first frame")
        if len(self._early) < at + size:
            return False
        taken = bytes(self._early[at : at + size])
        del self._early[: at + size]
        self._awaited.pop(0)
        callback(taken)
        return True

    # ------------------------------------------------------------ writing

    @property
    def backlog(self) -> int:
        """Bytes written that the daemon has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None and not self.lost else 0

    def write_raw(self, data: bytes) -> None:
        if self._transport is not None and not self.lost:
            self._transport.write(data)

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Buffers must not change until they are sent. Nothing happens on a stream that is lost."""
        if self._transport is not None and not self.lost and not self._transport.is_closing():
            self._transport.writelines(buffers)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=HIGH_WATER_BYTES // 2)  # type: ignore[union-attr]

    def get_buffer(self, sizehint: int) -> Any:
        return self._early_buffer if self._awaited else self._reader.buffer()

    def buffer_updated(self, count: int) -> None:
        try:
            if self._awaited:
                self._early += self._early_buffer[:count]
                while self._awaited:
                    if not self._take_early():
                        return
                bodies = self._reader.feed(bytes(self._early))
                self._early.clear()
            else:
                bodies = self._reader.advance(count)
            self.on_bytes()
            for body in bodies:
                self.on_body(self, body)
        except FrameError as error:
            self.on_bad(self, error)
            self.abort()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.on_writable(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._reader.abandon()
        if self._on_early_loss is not None:
            self._on_early_loss()
        self.on_lost(self)


def _ignore(*_: Any) -> None:
    pass


def _varint(data: bytearray) -> tuple[int, int] | None:
    """(value, bytes it took), or None if it is not whole yet."""
    value = 0
    for index, byte in enumerate(data[:10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 1
    if len(data) >= 10:
        raise FrameError("stream: bad length before the first frame")
    return None
