"""The way to one other peer: a control stream, several bulk streams, a few for requests, and the emulated link in front.

All are opened on demand, kept, and opened again with back-off after a failure. Everything runs in one event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from geomesh_p2p.core.messages import Fetched
from geomesh_p2p.core.ports import PeerTraffic, Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.retrying import Retrying
from geomesh_p2p.swarm.shaping import WINDOW_BYTES, Shape, Shaper
from geomesh_p2p.swarm.streams import FrameStream

CONTROL, BULK, REQUEST = "/geomesh/1/control", "/geomesh/1/bulk", "/geomesh/1/request"
CONTROL_QUEUE = 1024          # control messages that wait; the oldest is dropped beyond
CONCURRENT_REQUESTS = 8
OPEN_SECONDS = 20.0           # the question whether a port answers included
SMALL_ANSWER_BYTES = 16 * 1024    # an answer up to this size is no bulk
STALL_SECONDS = 15.0          # bulk streams that take nothing for so long are given up

Buffers = Sequence[bytes | memoryview]
Opener = Callable[[PeerId, str, tuple[str, ...], FrameStream], Awaitable[None]]


@dataclass(eq=False)
class _Waiting:
    """A control frame not yet written; `ready` once it has passed the emulated link."""

    buffers: Buffers
    size: int
    ready: bool = False


@dataclass(frozen=True)
class ToldSpeed:
    """What the log said last of the speed of a link."""

    way: str
    bytes_per_second: float
    at: float


class Remote:
    def __init__(
        self, peer: PeerId, open_stream: Opener, bulk_streams: int, shape: Shape, uplink: Shaper | None = None
    ) -> None:
        """`uplink` is shared with the other remotes: all bulk passes it first."""
        self.peer = peer
        self.addresses: tuple[str, ...] = ()
        self.incarnation: bytes | None = None
        self.traffic = PeerTraffic()
        self.shaper = Shaper(shape)
        self._uplink = uplink or Shaper(Shape())
        self._open_stream = open_stream
        self._loop = asyncio.get_running_loop()
        self.name: str = peer              # its site, once it has said so
        self.heard_at: float | None = None
        self.ways: set[str] = set()        # its addresses that connections went over
        self.way = ""                      # the newest
        self.told: ToldSpeed | None = None
        self._retrying = Retrying()
        self._news = asyncio.Event()
        self._opened_at: dict[FrameStream, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._touched_at = self._loop.time()

        self._control: FrameStream | None = None
        self._control_opening = False
        self._waiting: deque[_Waiting] = deque()

        self._bulk_wanted = bulk_streams
        self._bulk: list[FrameStream] = []
        self._bulk_opening = False
        self._turn: deque[asyncio.Future[None]] = deque()

        self._idle: list[FrameStream] = []
        self._asking: dict[FrameStream, tuple[int, asyncio.Future[Fetched]]] = {}
        self._request_slots = asyncio.Semaphore(CONCURRENT_REQUESTS)

    # ------------------------------------------------------------ opening

    async def _open(self, protocol: str) -> FrameStream:
        """A new stream. Raises Unreachable; each failure lengthens the pause before the next try."""
        while (pause := self._retrying.wait_seconds(self._loop.time())) > 0:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()
        stream = FrameStream()
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await self._open_stream(self.peer, protocol, self.addresses, stream)
        except (Unreachable, TimeoutError) as error:
            self._retrying.failed(self._loop.time())
            raise Unreachable(str(error) or f"no stream to {self.peer} within {OPEN_SECONDS:g} s") from None
        self._retrying.opened()
        self._opened_at[stream] = self._loop.time()
        if stream.lost:
            self._lost(stream)
            raise Unreachable(f"{self.peer} closed the stream")
        return stream

    def _lost(self, stream: FrameStream) -> None:
        if (opened_at := self._opened_at.pop(stream, None)) is not None:
            self._retrying.lost(self._loop.time(), opened_at)

    def try_now(self) -> None:
        """There is news of this peer (an address, a stream from it): no more waiting for one that could not be reached."""
        self._retrying.news()
        self._news.set()

    def touch(self) -> None:
        """Somebody wants something of it, or tells of it."""
        self._touched_at = self._loop.time()

    @property
    def untouched_seconds(self) -> float:
        return self._loop.time() - self._touched_at

    def called(self, site: str) -> None:
        """It says that it is the peer of `site`."""
        if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", site):
            self.name = site

    @property
    def in_use(self) -> bool:
        """There are streams to it."""
        return bool(self._opened_at)

    @property
    def connection(self) -> object | None:
        """The control stream, which is opened anew with each connection."""
        return self._control

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ control

    def send(self, buffers: Buffers) -> None:
        self.touch()
        entry = _Waiting(buffers, sum(len(buffer) for buffer in buffers))
        self._waiting.append(entry)
        if len(self._waiting) > CONTROL_QUEUE:
            self._waiting.popleft()
            self.traffic.dropped += 1
        self.shaper.submit_control(entry.size, lambda: self._passed(entry))

    def _passed(self, entry: _Waiting) -> None:
        entry.ready = True
        self._flush()

    def _flush(self) -> None:
        while self._waiting and self._waiting[0].ready:
            if self._control is None:
                if not self._control_opening and not self._closed:
                    self._control_opening = True
                    self._spawn(self._open_control())
                return
            if self._control.paused:
                return
            entry = self._waiting.popleft()
            self._control.write(entry.buffers)
            self.traffic.overhead_sent += entry.size

    async def _open_control(self) -> None:
        try:
            stream = await self._open(CONTROL)
        except Unreachable:
            while self._waiting and self._waiting[0].ready:
                self._waiting.popleft()
                self.traffic.dropped += 1
            return
        finally:
            self._control_opening = False
        stream.on_lost = self._control_lost
        stream.on_writable = lambda _stream: self._flush()
        self._control = stream
        self._flush()
        self._start_bulk()  # so that the first chunk need not wait for its stream

    def _control_lost(self, stream: FrameStream) -> None:
        self._lost(stream)
        if self._control is stream:
            self._control = None
            self._flush()

    # ------------------------------------------------------------ bulk

    async def send_bulk(self, buffers: Buffers, payload: int) -> None:
        """Returns when a stream has taken the frame. Raises Unreachable."""
        size = sum(len(buffer) for buffer in buffers)
        await self._uplink.room()
        while True:
            await self.shaper.room()
            if self._closed:
                raise Unreachable("this transport was stopped")
            self._start_bulk()
            if self._least_loaded() is not None:
                break
            await self._wait_turn()
        self._submit_bulk(size, lambda: self._write_bulk(buffers))
        self.traffic.payload_sent += payload
        self.traffic.overhead_sent += size - payload

    def _submit_bulk(self, size: int, deliver: Callable[[], None]) -> None:
        self._uplink.submit(size, lambda: self.shaper.submit(size, deliver))

    def _write_bulk(self, buffers: Buffers) -> None:
        stream = self._least_loaded() or min(self._bulk, key=lambda s: s.backlog, default=None)
        if stream is None:
            self.traffic.dropped += 1
        else:
            self._bulk.remove(stream)
            self._bulk.append(stream)
            stream.write(buffers)

    def _least_loaded(self) -> FrameStream | None:
        """The stream that the next chunk goes to; None if every one is full. Of streams alike the one that was used least
        recently: the daemon takes more than a stream's window lets through, so that it has taken all says little."""
        return min((stream for stream in self._bulk if not stream.paused), key=lambda s: s.backlog, default=None)

    async def _wait_turn(self) -> None:
        """Until some stream has room. In order; gives the streams up if none takes anything for STALL_SECONDS."""
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turn.append(turn)
        try:
            while True:
                before = self._backlog()
                done, _ = await asyncio.wait({turn}, timeout=STALL_SECONDS)
                if done:
                    return turn.result()
                if not self._bulk_opening and self._backlog() >= before:
                    for stream in list(self._bulk):
                        stream.abort()
                    raise Unreachable(f"{self.peer} has taken nothing for {STALL_SECONDS:g} s")
        finally:
            if turn in self._turn:
                self._turn.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._next_turn()  # whoever is next may still find room

    def _backlog(self) -> int:
        return sum(stream.backlog for stream in self._bulk)

    def _next_turn(self, _stream: FrameStream | None = None) -> None:
        while self._turn:
            turn = self._turn.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _start_bulk(self) -> None:
        if not self._bulk_opening and not self._closed and len(self._bulk) < self._bulk_wanted:
            self._bulk_opening = True
            self._spawn(self._open_bulk())

    async def _open_bulk(self) -> None:
        missing = self._bulk_wanted - len(self._bulk)
        results = await asyncio.gather(*(self._open_one_bulk() for _ in range(missing)), return_exceptions=True)
        self._bulk_opening = False
        error = next((result for result in results if isinstance(result, BaseException)), None)
        if not self._bulk:
            while self._turn:
                turn = self._turn.popleft()
                if not turn.done():
                    turn.set_exception(Unreachable(str(error) if error else f"{self.peer} closed its streams"))

    async def _open_one_bulk(self) -> None:
        stream = await self._open(BULK)
        stream.on_lost = self._bulk_lost
        stream.on_writable = self._next_turn
        self._bulk.append(stream)
        self._next_turn()

    def _bulk_lost(self, stream: FrameStream) -> None:
        self._lost(stream)
        if stream in self._bulk:
            self._bulk.remove(stream)
        if not self._bulk and self._turn:
            self._start_bulk()

    # ------------------------------------------------------------ requests

    async def request(self, sequence: int, buffers: Buffers, on_bytes: Callable[[], None]) -> Fetched:
        """One question on a stream of its own. The caller sets the deadline; `on_bytes` tells it whenever some of the answer
        has come. Raises Unreachable."""
        async with self._request_slots:
            stream = self._idle.pop() if self._idle else await self._open_request()
            answer: asyncio.Future[Fetched] = self._loop.create_future()
            self._asking[stream] = sequence, answer
            stream.on_bytes = on_bytes
            size = sum(len(buffer) for buffer in buffers)
            self.shaper.submit_control(size, lambda: stream.write(buffers))
            self.traffic.overhead_sent += size
            try:
                result = await answer
            except BaseException:
                stream.abort()  # a late answer has nobody to go to
                raise
            finally:
                self._asking.pop(stream, None)
                stream.on_bytes = _nothing
            if not stream.lost:
                self._idle.append(stream)
            return result

    async def _open_request(self) -> FrameStream:
        stream = await self._open(REQUEST)
        stream.on_lost = self._request_lost
        stream.on_body = self._answered
        return stream

    def _answered(self, stream: FrameStream, body: bytes | bytearray) -> None:
        frame = wire.decode(body)
        self.traffic.overhead_received += len(body) + wire.LENGTH_BYTES
        sequence, answer = self._asking.get(stream, (None, None))
        if answer is None or frame.sequence != sequence or not isinstance(frame.message, Fetched):
            raise wire.FrameError(f"{type(frame.message).__name__}: not an answer to what was asked")
        if not answer.done():
            answer.set_result(frame.message)

    def _request_lost(self, stream: FrameStream) -> None:
        self._lost(stream)
        if stream in self._idle:
            self._idle.remove(stream)
        _, answer = self._asking.get(stream, (None, None))
        if answer is not None and not answer.done():
            answer.set_exception(Unreachable(f"{self.peer} closed the stream before it answered"))

    async def answer(self, stream: FrameStream, buffers: Buffers, before_last: Callable[[], None]) -> None:
        """Send an answer on the stream of its question, in pieces: over an emulated link it leaves room for other frames,
        and the other end sees it coming. `before_last` is called before the piece with which the other end may ask again."""
        left = sum(len(buffer) for buffer in buffers)
        bulk = left > SMALL_ANSWER_BYTES
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), WINDOW_BYTES):
                if bulk:
                    await self._uplink.room()
                await self.shaper.room()
                if stream.lost:
                    return
                piece = view[start : start + WINDOW_BYTES]
                left -= len(piece)
                if left == 0:
                    before_last()
                submit = self._submit_bulk if bulk else self.shaper.submit_control
                submit(len(piece), partial(stream.write, [piece]))
                self.traffic.overhead_sent += len(piece)

    # ------------------------------------------------------------ ends

    def restarted(self) -> None:
        """The other end is a new process, or behind another connection: streams to the old one lead nowhere."""
        self._retrying.another()
        self._news.set()
        self._opened_at.clear()
        for stream in self._streams():
            stream.abort()

    def _streams(self) -> list[FrameStream]:
        return [*([self._control] if self._control else []), *self._bulk, *self._idle, *self._asking]

    def close(self) -> None:
        self._closed = True
        self.shaper.close()
        for task in self._tasks:
            task.cancel()
        for stream in self._streams():
            stream.abort()
        for turn in self._turn:
            if not turn.done():
                turn.set_exception(Unreachable("this transport was stopped"))
        self._turn.clear()


def _nothing() -> None:
    pass
