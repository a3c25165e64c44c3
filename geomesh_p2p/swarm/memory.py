"""The mesh in one process: a network of links with delay, rate, loss and faults, and a transport over it.

It passes the contract tests of the real transport, and every message goes through wire.py, so what works here can be
sent. Time is the running event loop's, virtual or real (virtual_time.py).

    network = Network(seed=1, latency_seconds=0.05, bytes_per_second=1e6)
    a, b = network.transport("a"), network.transport("b")
    network.play([(2.0, lambda n: n.cut("a", "b")), (5.0, lambda n: n.heal())])

What faults have really done is counted where it takes effect (`effects`), apart from their being switched on.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from geomesh_p2p.core.messages import Chunk, ChunkAck, Fetch, Fetched, Message, Order, Request
from geomesh_p2p.core.ports import PeerTraffic, Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.budgets import Budgets, OverBudget
from geomesh_p2p.swarm.links import LinkTable

OnMessage = Callable[[PeerId, Message], None]
OnRequest = Callable[[PeerId, Request], Awaitable[Fetched]]


# ---------------------------------------------------------------- the network


@dataclass(frozen=True)
class LinkSettings:
    """One direction of a pair: one-way delay, rate (None: unlimited), share of control messages and chunks lost, and by how
    much the delay of each varies, at random, both ways. Control messages keep their order all the same."""

    latency_seconds: float = 0.0
    bytes_per_second: float | None = None
    loss: float = 0.0
    jitter_seconds: float = 0.0


@dataclass
class _Entry:
    """A frame under way."""

    source: MemoryTransport
    body: bytes
    connection: int
    due: bool = False
    dropped: bool = False


@dataclass
class _Way:
    """State of one direction: when its transmitter is next idle, and the control frames under way, in order."""

    settings: LinkSettings
    cut: bool = False
    silent: bool = False                    # takes everything, delivers nothing, says nothing
    breaks_after: float | None = None       # bytes until its connection is reset
    corrupt: int = 0                        # chunks whose bytes are still to be damaged
    connection: int = 0                     # what was sent on an earlier one is gone
    control_free_at: float = 0.0
    bulk_free_at: float = 0.0
    control: deque[_Entry] = field(default_factory=deque)


@dataclass
class _Uplink:
    """What all directions from one peer share."""

    bytes_per_second: float
    free_at: float = 0.0


class Network:
    """Links and faults. Peers are named by their ids; a pair without settings of its own has the network's."""

    WINDOW_BYTES = 512 * 1024       # what a sender may have under way in bulk before send_bulk waits
    LARGE_ANSWER_BYTES = 16 * 1024  # an answer of this size travels as bulk does
    CONTROL_QUEUE = 1024            # control messages under way in one direction; the oldest is dropped beyond

    def __init__(
        self, seed: int = 0, latency_seconds: float = 0.0, bytes_per_second: float | None = None, loss: float = 0.0,
        stall_seconds: float = 3.0,
    ) -> None:  # fmt: skip
        self.defaults = LinkSettings(latency_seconds, bytes_per_second, loss)
        self.stall_seconds = stall_seconds
        self.random = random.Random(seed)
        self.live: dict[PeerId, MemoryTransport] = {}
        self.effects: Counter[tuple[str, PeerId, PeerId]] = Counter()   # (what, from, to): see `effect`
        self.played: list[float] = []
        self._ways: dict[tuple[PeerId, PeerId], _Way] = {}
        self._paused: dict[PeerId, list[Callable[[], None]]] = {}
        self._unplugged: set[PeerId] = set()
        self._uplinks: dict[PeerId, _Uplink] = {}

    def effect(self, what: str, peer: PeerId) -> int:
        """How many frames from or to `peer` were so far: sent, cut, lost, silenced, reset, damaged, held, unplugged."""
        return sum(count for (kind, *pair), count in self.effects.items() if kind == what and peer in pair)

    def transport(self, peer: PeerId) -> MemoryTransport:
        """A new transport for `peer`; it is on the network from its start() to its stop() or crash()."""
        return MemoryTransport(self, peer)

    def way(self, source: PeerId, target: PeerId) -> _Way:
        found = self._ways.get((source, target))
        if found is None:
            found = self._ways[source, target] = _Way(self.defaults)
        return found

    def _pairs(self, a: PeerId, b: PeerId, one_way: bool) -> Iterable[tuple[PeerId, PeerId]]:
        return ((a, b),) if one_way else ((a, b), (b, a))

    def set_link(self, a: PeerId, b: PeerId, one_way: bool = False, **changes: Any) -> None:
        """Change fields of LinkSettings between `a` and `b`."""
        for pair in self._pairs(a, b, one_way):
            way = self.way(*pair)
            way.settings = replace(way.settings, **changes)

    def set_uplink(self, peer: PeerId, bytes_per_second: float) -> None:
        """All bulk from `peer` together passes at this rate, in the order in which it is sent."""
        self._uplinks[peer] = _Uplink(bytes_per_second)

    def bulk_wait(self, source: PeerId, target: PeerId, now: float) -> float:
        """How long until bulk may be handed over: a window may be under way, and no more."""
        way, uplink = self.way(source, target), self._uplinks.get(source)
        rate = way.settings.bytes_per_second
        wait = way.bulk_free_at - now - (self.WINDOW_BYTES / rate if rate else 0.0)
        if uplink is not None:
            wait = max(wait, uplink.free_at - now - self.WINDOW_BYTES / uplink.bytes_per_second)
        return wait

    def carry(self, source: PeerId, target: PeerId, size: int, now: float) -> float:
        """When `size` bytes of bulk handed over now arrive."""
        way, uplink = self.way(source, target), self._uplinks.get(source)
        rate = way.settings.bytes_per_second
        way.bulk_free_at = max(now, way.bulk_free_at) + (size / rate if rate else 0.0)
        if uplink is not None:
            uplink.free_at = max(now, uplink.free_at) + size / uplink.bytes_per_second
            way.bulk_free_at = max(way.bulk_free_at, uplink.free_at)
        return way.bulk_free_at + self.delay_seconds(way)

    def cut(self, a: PeerId, b: PeerId, one_way: bool = False) -> None:
        """Nothing passes from `a` to `b` (nor back, unless one_way); what is under way is lost."""
        for pair in self._pairs(a, b, one_way):
            self.way(*pair).cut = True

    def silence(self, a: PeerId, b: PeerId, silent: bool = True, one_way: bool = False) -> None:
        """A half-open connection: both ends go on sending, as if all were well, and nothing arrives."""
        for pair in self._pairs(a, b, one_way):
            self.way(*pair).silent = silent

    def reset(self, a: PeerId, b: PeerId, after_bytes: float = 0.0) -> None:
        """The connection between them breaks once so many more bytes have gone from `a` to `b`: what is under way is lost
        both ways, and the sender of the last bytes is told. The next send makes a new one."""
        self.way(a, b).breaks_after = after_bytes

    def _break(self, a: PeerId, b: PeerId) -> None:
        self.way(a, b).breaks_after = None
        for pair in self._pairs(a, b, one_way=False):
            self.way(*pair).connection += 1

    def corrupt(self, source: PeerId, target: PeerId, chunks: int) -> None:
        """A byte is flipped in each of the next `chunks` chunks."""
        self.way(source, target).corrupt += chunks

    def unplug(self, peer: PeerId) -> None:
        """`peer` lives, but its transport is gone: nothing leaves it or reaches it until plug()."""
        self._unplugged.add(peer)
        for pair, way in self._ways.items():
            if peer in pair:
                way.connection += 1

    def plug(self, peer: PeerId) -> None:
        self._unplugged.discard(peer)

    def isolate(self, peer: PeerId) -> None:
        for other in self.live:
            if other != peer:
                self.cut(peer, other)

    def heal(self, a: PeerId | None = None, b: PeerId | None = None) -> None:
        """Undo all cuts and silences, those of `a`, or those between `a` and `b`."""
        for pair, way in self._ways.items():
            if {a, b} - {None} <= set(pair):
                way.cut = way.silent = False

    def crash(self, peer: PeerId) -> None:
        """`peer` is gone at once, as after kill -9: nothing it has sent is unsent, nothing reaches it any more."""
        self._paused.pop(peer, None)
        transport = self.live.pop(peer, None)
        if transport is not None:
            transport.crashed()

    def pause(self, peer: PeerId) -> None:
        """As after SIGSTOP: what `peer` sends and receives is held back until resume()."""
        self._paused.setdefault(peer, [])

    def resume(self, peer: PeerId) -> None:
        for action in self._paused.pop(peer, []):
            action()

    def hold(self, peer: PeerId, action: Callable[[], None]) -> bool:
        """Keep `action` for the time after a pause of `peer`; False if it is not paused."""
        if peer not in self._paused:
            return False
        self._paused[peer].append(action)
        self.effects["held", peer, peer] += 1
        return True

    def is_paused(self, peer: PeerId) -> bool:
        return peer in self._paused

    def play(self, script: Sequence[tuple[float, Callable[[Network], Any]]]) -> None:
        """Carry out each action so many seconds from now. `played` lists the times of those that were, so that a test can
        tell that its faults happened."""
        loop = asyncio.get_running_loop()
        for seconds, action in script:
            loop.call_later(seconds, self._play, seconds, action)

    def _play(self, seconds: float, action: Callable[[Network], Any]) -> None:
        self.played.append(seconds)
        action(self)

    def hindrance(self, source: PeerId, target: PeerId) -> str:
        """Why nothing passes now: cut or unplugged; empty if it does."""
        return "unplugged" if self._unplugged & {source, target} else "cut" if self.way(source, target).cut else ""

    def passes(self, source: PeerId, target: PeerId, size: int) -> str:
        """Why a frame of `size` bytes that is sent now gets no further: reset, silenced or lost; empty if it does."""
        way = self.way(source, target)
        what = ""
        if way.breaks_after is not None:
            way.breaks_after -= size
            if way.breaks_after < 0:
                self._break(source, target)
                what = "reset"
        elif way.silent:
            what = "silenced"
        elif way.settings.loss and self.random.random() < way.settings.loss:
            what = "lost"
        self.effects[what or "sent", source, target] += 1
        return what

    def delay_seconds(self, way: _Way) -> float:
        jitter = way.settings.jitter_seconds
        return max(0.0, way.settings.latency_seconds + (self.random.uniform(-jitter, jitter) if jitter else 0.0))


# ---------------------------------------------------------------- the transport


def _loop_time() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # made before its loop runs
        return 0.0


class MemoryTransport:
    """ports.Transport over a Network."""

    def __init__(self, network: Network, peer: PeerId) -> None:
        self.peer = peer
        self.run = b""
        self.links = LinkTable()
        self.budgets = Budgets(clock=_loop_time)
        self._network = network
        self._traffic: dict[PeerId, PeerTraffic] = {}
        self._pending: dict[int, asyncio.Future[Fetched]] = {}
        self._sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_message: OnMessage | None = None
        self._on_request: OnRequest | None = None

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer}",)

    async def start(self, on_message: OnMessage, on_request: OnRequest) -> None:
        self._on_message, self._on_request = on_message, on_request
        self._network.live[self.peer] = self

    async def stop(self) -> None:
        if self._network.live.get(self.peer) is self:
            del self._network.live[self.peer]
        self.crashed()

    def crashed(self) -> None:
        for task in self._tasks:
            task.cancel()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Unreachable("this transport was stopped"))

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        pass

    def forget(self, peer: PeerId) -> None:
        self._traffic.pop(peer, None)

    def traffic(self) -> dict[PeerId, PeerTraffic]:
        return {peer: replace(traffic) for peer, traffic in self._traffic.items()}

    def _with(self, peer: PeerId) -> PeerTraffic:
        return self._traffic.setdefault(peer, PeerTraffic())

    @property
    def _alive(self) -> bool:
        return self._network.live.get(self.peer) is self

    # ------------------------------------------------------------ sending

    def send(self, to: PeerId, message: Message) -> None:
        self._send(to, message, None)

    def _send(self, to: PeerId, message: Message, sequence: int | None) -> None:
        if self._alive and self._network.hold(self.peer, lambda: self._send(to, message, sequence)):
            return
        traffic, network = self._with(to), self._network
        try:
            body = wire.encode_bytes(message, self.run, sequence)
        except (wire.FrameError, TypeError):
            traffic.dropped += 1
            return
        if not self._alive or to == self.peer or to not in network.live or self._hindered(to):
            traffic.dropped += 1
            return
        traffic.overhead_sent += len(body)
        way = network.way(self.peer, to)
        if network.passes(self.peer, to, len(body)):
            return
        loop = asyncio.get_running_loop()
        if isinstance(message, Fetched) and len(body) >= network.LARGE_ANSWER_BYTES:
            loop.call_at(network.carry(self.peer, to, len(body), loop.time()), self.deliver, to, body, way.connection)
            return
        seconds = len(body) / way.settings.bytes_per_second if way.settings.bytes_per_second else 0.0
        way.control_free_at = max(loop.time(), way.control_free_at) + seconds
        way.bulk_free_at += seconds  # small words go first, and bulk waits for them
        entry = _Entry(self, body, way.connection)
        way.control.append(entry)
        if len(way.control) > network.CONTROL_QUEUE:
            way.control.popleft().dropped = True
            traffic.dropped += 1
        loop.call_at(way.control_free_at + network.delay_seconds(way), self._control_due, to, way, entry)

    def _hindered(self, to: PeerId) -> bool:
        what = self._network.hindrance(self.peer, to)
        if what:
            self._network.effects[what, self.peer, to] += 1
        return bool(what)

    def _control_due(self, to: PeerId, way: _Way, entry: _Entry) -> None:
        entry.due = True
        while way.control and way.control[0].due:  # in order, whatever order equal timers fire in
            first = way.control.popleft()
            if not first.dropped:
                first.source.deliver(to, first.body, first.connection)

    async def send_bulk(self, to: PeerId, chunk: Chunk) -> None:
        network = self._network
        loop = asyncio.get_running_loop()
        body = wire.encode_bytes(chunk, self.run)
        self.links.sent(to, chunk, loop.time())
        way = network.way(self.peer, to)
        give_up = loop.time() + network.stall_seconds
        while True:
            if not self._alive or to == self.peer or to not in network.live or network.hindrance(self.peer, to) == "unplugged":
                self._with(to).dropped += 1
                raise Unreachable(f"{to} is not there")
            wait = network.bulk_wait(self.peer, to, loop.time())
            if way.cut or network.is_paused(self.peer):
                if loop.time() >= give_up and not network.is_paused(self.peer):
                    self._hindered(to)
                    self._with(to).dropped += 1
                    raise Unreachable(f"{to} has taken nothing for {network.stall_seconds:g} s")
                wait = network.stall_seconds / 10
            elif wait <= 1e-9:  # less cannot be told apart from now
                break
            await asyncio.sleep(max(wait, 1e-6))  # a smaller one may not move the clock at all
        traffic = self._with(to)
        traffic.payload_sent += len(chunk.data)
        traffic.overhead_sent += len(body) - len(chunk.data)
        arrives = network.carry(self.peer, to, len(body), loop.time())
        what = network.passes(self.peer, to, len(body))
        if what == "reset":
            raise Unreachable(f"the connection to {to} broke")
        if what:
            return
        if way.corrupt and chunk.data:
            way.corrupt -= 1
            network.effects["damaged", self.peer, to] += 1
            body = body[:-1] + bytes((body[-1] ^ 1,))   # a chunk's data are the last of its bytes
        loop.call_at(arrives, self.deliver, to, body, way.connection)

    async def request(self, to: PeerId, fetch: Request, timeout_seconds: float) -> Fetched:
        self._sequence += 1
        sequence = self._sequence
        future: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._pending[sequence] = future
        try:
            async with asyncio.timeout(timeout_seconds):
                self._send(to, fetch, sequence)
                return await future
        except TimeoutError:
            raise Unreachable(f"{to} did not answer a request for {fetch.what} within {timeout_seconds:g} s") from None
        finally:
            del self._pending[sequence]

    # ------------------------------------------------------------ receiving

    def deliver(self, to: PeerId, body: bytes, connection: int) -> None:
        """Hand a frame of this transport's to `to`, if the way, its connection and the peer are still there."""
        network = self._network
        target = network.live.get(to)
        if target is None or self._hindered(to):
            self._with(to).dropped += 1
        elif connection != network.way(self.peer, to).connection:
            network.effects["reset", self.peer, to] += 1
        elif not network.hold(to, lambda: self.deliver(to, body, connection)):
            target._receive(self.peer, body)

    def _read(self, sender: PeerId, body: memoryview) -> wire.Frame | None:
        """The frame in `body`, if it is one and its sender may send it."""
        kind = wire.kind_of(body)
        if kind is Fetched:
            return wire.decode(body)
        if not self.budgets.begin_frame(sender, kind, len(body)):
            return None
        try:
            return wire.decode(body)
        finally:
            self.budgets.end_frame(sender, len(body))

    def _receive(self, sender: PeerId, body: bytes) -> None:
        try:
            frame = self._read(sender, memoryview(body)[wire.LENGTH_BYTES :])
        except wire.FrameError as error:
            if not isinstance(error, OverBudget):
                self.budgets.complaints.say(sender, self.budgets.admitted(sender), "bad_frame", f"{sender}: {error}")
            frame = None
        traffic = self._with(sender)
        if frame is None:
            traffic.dropped += 1
            return
        message = frame.message
        payload = len(message.data) if isinstance(message, Chunk) else 0
        traffic.payload_received += payload
        traffic.overhead_received += len(body) - payload
        if not wire.concerns(self.run, frame):
            return
        if isinstance(message, (Fetch, Order)):
            try:
                self.budgets.begin_request(sender)
            except OverBudget:
                return
            task = asyncio.get_running_loop().create_task(self._answer(sender, message, frame.sequence))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _task: self.budgets.end_request(sender))
        elif isinstance(message, Fetched):
            future = self._pending.get(frame.sequence or 0)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            if isinstance(message, ChunkAck):
                self.links.acknowledged(sender, message, asyncio.get_running_loop().time())
            assert self._on_message is not None
            self._on_message(sender, message)

    async def _answer(self, sender: PeerId, fetch: Request, sequence: int | None) -> None:
        assert self._on_request is not None
        self._send(sender, await self._on_request(sender, fetch), sequence)
