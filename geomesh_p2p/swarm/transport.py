"""ports.Transport over libp2p: frames between authenticated peers, through the daemon of daemon.py.

Peers speak over three kinds of streams (remote.py): control, one way each; bulk, one way, several in parallel; requests,
there and back. Whoever opens a stream writes 8 bytes first that are new for each start of a transport, so that the other
end notices a restart and drops streams that lead to the old process. The sender of a frame is the peer id that libp2p has
authenticated, whatever the frame says.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from geomesh_p2p.config import LinkSection, NetSection
from geomesh_p2p.core.messages import Chunk, ChunkAck, Fetch, Fetched, Heartbeat, Hello, Message, Order, Request
from geomesh_p2p.core.ports import PeerTraffic, Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.addresses import MOST_ADDRESSES, Address, answering, check_addresses, check_port_free, parse
from geomesh_p2p.swarm.budgets import REMEMBERED_STRANGERS, Budgets, OverBudget
from geomesh_p2p.swarm.daemon import Daemon
from geomesh_p2p.swarm.identity import Identity, load_identity
from geomesh_p2p.swarm.links import LinkTable
from geomesh_p2p.swarm.relaying import Circuits, choose_route, learn_caps, relay_of, start_daemon
from geomesh_p2p.swarm.remote import BULK, CONTROL, REQUEST, Remote
from geomesh_p2p.swarm.seeds import Seeds
from geomesh_p2p.swarm.shaping import Shape, Shaper
from geomesh_p2p.swarm.streams import FrameStream
from geomesh_p2p.swarm.upkeep import OnExit, Upkeep
from geomesh_p2p.swarm.watching import LinkWatch

INCARNATION_BYTES = 8
PROBE_BEFORE_RELAY_SECONDS = 1.5
ABSENT_SECONDS = 300.0           # without streams, news or wishes: who was no member is forgotten
YIELD_SECONDS = 3.0              # in which, of two that meet, the one with the lower id dials
ENDING_SECONDS = 1.0             # within which the end of a stream is known after the next one has begun
DRAIN_SECONDS = 5.0              # for what is under way, before a relayed connection is replaced
ANSWER_PATIENCE = 8              # times the deadline of a request, for an answer that keeps coming
NOT_RUNNING = "the libp2p daemon does not run"

OnMessage = Callable[[PeerId, Message], None]
OnRequest = Callable[[PeerId, Request], Awaitable[Fetched]]
OnWarning = Callable[[str, str], None]      # (reason from a fixed list, one line)
OnOtherVersion = Callable[[PeerId, int], None]


def shape_of(link: LinkSection) -> Shape:
    """The emulated way of a site file's [links.NAME]: half of the round trip each way."""
    return Shape(link.rtt_ms / 2000.0, link.mbps * 1e6 / 8 if link.mbps is not None else None)


class Libp2pTransport:
    """Made and used in one event loop. Checks its addresses when made (ConfigError); open() starts the daemon, start() opens
    the doors. `links` emulates the ways to other sites, by site name or `default`; a peer's site is read from its greetings.

    A daemon that dies is started again, with the same identity and port, and its streams are opened again; `on_daemon_exit`
    is called when that happened too often.
    """

    def __init__(
        self, net: NetSection, identity_path: str | Path, links: Mapping[str, LinkSection] | None = None,
        on_warning: OnWarning | None = None, on_daemon_exit: OnExit | None = None,
    ) -> None:  # fmt: skip
        self.net = net
        self.listening, _ = check_addresses(net.listen, net.announce, net.seeds)
        self.identity_path = Path(identity_path)
        self.identity: Identity = load_identity(identity_path)
        self.peer: PeerId = self.identity.peer
        self.run = b""
        upload = None if net.upload_mbps is None else net.upload_mbps * 1e6 / 8
        self._uplink = Shaper(Shape(bytes_per_second=upload))
        self.links = LinkTable(lambda peer, rate: self._watch.measured(self._remote(peer), rate), upload)
        self.budgets = Budgets(warn=lambda reason, text: self._on_warning(reason, text))
        self.seeds = Seeds(net, self.peer, self._dial, lambda reason, text: self._on_warning(reason, text))
        self.on_other_version: OnOtherVersion = lambda peer, version: None
        self._emulated = {name: shape_of(link) for name, link in (links or {}).items()}
        self._default_shape = self._emulated.get("default", Shape())
        self._addresses: tuple[str, ...] = ()
        self._met_peers: dict[PeerId, None] = {}
        self._on_warning = on_warning or (lambda reason, text: None)
        given_up = on_daemon_exit or (lambda code, output: None)
        self._upkeep = Upkeep(self._start_daemon, self._opened, self._on_warning, given_up)
        self.circuits = Circuits()
        self._relayed_addresses: tuple[str, ...] = ()
        self._incarnation = os.urandom(INCARNATION_BYTES)
        self._remotes: dict[PeerId, Remote] = {}
        self._watch = LinkWatch(self._remotes, lambda: self.daemon, net.heartbeat_limit_seconds)
        self._incoming: dict[PeerId, set[FrameStream]] = {}
        self._controls: dict[PeerId, FrameStream] = {}  # the newest that each has opened
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequence = 0
        self._on_message: OnMessage | None = None
        self._on_request: OnRequest | None = None

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Start the daemon: addresses() are known from here on. Raises TemporaryError: port in use, or it did not come up."""
        await self._upkeep.start()

    async def start(self, on_message: OnMessage, on_request: OnRequest) -> None:
        """Take frames and requests from now on; open() first, unless that was done."""
        self._on_message, self._on_request = on_message, on_request
        daemon = self.daemon
        self._tasks.add(asyncio.create_task(self._watch.run()))
        if daemon is None:
            await self.open()
            return
        try:
            await self._open_doors(daemon)
        except (OSError, asyncio.IncompleteReadError):
            if not daemon.ended:  # else the next one opens them
                raise

    async def _start_daemon(self, on_exit: OnExit) -> Daemon:
        await asyncio.to_thread(check_port_free, self.listening)
        return await start_daemon(self.net, self.identity_path, on_exit)

    async def _opened(self, daemon: Daemon) -> None:
        """The daemon was started. If it was another one before, this is a restart to the others."""
        try:
            async with asyncio.timeout(self.net.daemon_start_seconds):
                self._addresses = await daemon.addresses()
                if self._on_message is not None:
                    await self._open_doors(daemon)
        except (OSError, P2PDaemonError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise TemporaryError(f"the libp2p daemon does not answer: {error or type(error).__name__}") from None
        if self.listening.port == 0 and not self.net.announce:  # one that is started again listens where the first one did
            bound = self.listening.text.replace("/tcp/0", f"/tcp/{parse(self._addresses[0], 'net.listen').port}")
            self.net, self.listening = self.net.model_copy(update={"listen": bound}), parse(bound, "net.listen")
        self._incarnation = os.urandom(INCARNATION_BYTES)
        for remote in self._remotes.values():
            remote.try_now()

    async def _open_doors(self, daemon: Daemon) -> None:
        await daemon.accept({CONTROL: self._accept_control, BULK: self._accept_frames, REQUEST: self._accept_requests})

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for remote in self._remotes.values():
            remote.close()
        for streams in self._incoming.values():
            for stream in tuple(streams):
                stream.abort()
        self._uplink.close()
        await self._upkeep.stop()

    def addresses(self) -> tuple[str, ...]:
        """Where others dial this peer (net.announce if given), bound port and peer id included; then ways through relays."""
        return self._addresses + self._relayed_addresses

    @property
    def daemon(self) -> Daemon | None:
        """None before open(), after stop(), and while it is started again."""
        return self._upkeep.daemon

    @property
    def p2p(self) -> P2P | None:
        """hivemind's handle on the daemon, for the directory; another one after each start of the daemon."""
        return self.daemon.p2p if self.daemon is not None else None

    def met(self) -> tuple[PeerId, ...]:
        """Peers that there is or was a connection with, for the directory."""
        return tuple(self._met_peers)

    async def _dial(self, target: Address) -> None:
        """Raises Unreachable. An address is believed once it has answered: the peer may be connected from another one."""
        if self.daemon is None:
            raise Unreachable(NOT_RUNNING)
        if not await self.daemon.connected(target.peer):
            if why := await answering((target.text,)):
                raise Unreachable(why)
            await self.daemon.connect(target.peer, (target.text,))
            self.learn(target.peer, (target.text,))
        elif not self._remote(target.peer).addresses:
            self.learn(target.peer, (target.text,))
        self._met_peers[target.peer] = None

    # ------------------------------------------------------------ the other peers

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        remote, newest = self._remote(peer), tuple(addresses)[:MOST_ADDRESSES]
        remote.touch()
        if newest and newest != remote.addresses:
            remote.addresses = newest
            remote.try_now()

    def shape(self, peer: PeerId, shape: Shape) -> None:
        """Emulate this way to `peer` from now on."""
        self._remote(peer).shaper.shape = shape

    def bare_connection(self, peer: PeerId) -> object | None:
        """Stands for the connection with `peer`, another object for each; None without one, and if it goes through a relay, an
        emulated link or a limited uplink."""
        remote = self._remotes.get(peer)
        if remote is None or not remote.shaper.shape.free or self.circuits.relay(peer) or self.net.upload_mbps is not None:
            return None
        return remote.connection

    def forget(self, peer: PeerId) -> None:
        for stream in tuple(self._incoming.get(peer, ())):
            stream.abort()
        if (remote := self._remotes.pop(peer, None)) is not None:
            remote.close()
        self.circuits.forget(peer)
        self._met_peers.pop(peer, None)
        self.links.forget(peer)

    def traffic(self) -> dict[PeerId, PeerTraffic]:
        return {peer: self._traffic_with(peer) for peer in self._remotes}

    def _traffic_with(self, peer: PeerId) -> PeerTraffic:
        traffic = remote.traffic if (remote := self._remotes.get(peer)) is not None else PeerTraffic()
        sent, received = self.circuits.carried(peer, traffic.sent, traffic.received)
        return replace(traffic, relayed_sent=sent, relayed_received=received)

    def _remote(self, peer: PeerId) -> Remote:
        remote = self._remotes.get(peer)
        if remote is None:
            self._forget_strangers()
            remote = self._remotes[peer] = Remote(peer, self._open, self.net.streams, self._default_shape, self._uplink)
        return remote

    def _forget_strangers(self) -> None:
        """Room for one more remote: of those that were not admitted only the newest are remembered, and none for long of whom
        nothing is heard or wanted."""
        for peer, remote in tuple(self._remotes.items()):
            absent = not remote.in_use and peer not in self._incoming and not self.budgets.admitted(peer)
            if absent and remote.untouched_seconds > ABSENT_SECONDS:
                self.forget(peer)
        if len(self._remotes) < REMEMBERED_STRANGERS and len(self._met_peers) < REMEMBERED_STRANGERS:
            return

        def passed(peers: Iterable[PeerId]) -> list[PeerId]:
            gone = [peer for peer in peers if not self.budgets.admitted(peer) and peer not in self._incoming]
            return gone[: max(0, len(gone) - REMEMBERED_STRANGERS // 2)]

        for peer in passed(self._remotes):
            self._remotes.pop(peer).close()
        for peer in passed(self._met_peers):
            del self._met_peers[peer]

    async def _open(self, peer: PeerId, protocol: str, addresses: tuple[str, ...], stream: FrameStream) -> None:
        daemon = self.daemon
        if daemon is None or peer == self.peer:
            raise Unreachable(NOT_RUNNING if daemon is None else "a peer does not dial itself")
        try:
            if addresses and not await daemon.connected(peer):
                await self._connect(daemon, peer, addresses)
            await daemon.open(peer, protocol, stream)
        except ValueError as error:
            raise Unreachable(f"{peer!r} is not a peer id ({error})") from None
        self._saw(peer, stream)
        stream.write_raw(self._incarnation)

    async def _connect(self, daemon: Daemon, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Directly if its port answers, else through a relay. libp2p waits longer and longer after a failed dial, up to
        minutes: it dials once it can succeed. Raises Unreachable."""
        direct = [address for address in addresses if not relay_of(address)]
        if not direct:
            refused = "no direct address of it is known"
        elif len(direct) == len(addresses):
            refused = await answering(direct)
        else:
            refused = await answering(direct, PROBE_BEFORE_RELAY_SECONDS)
        route = choose_route(addresses, refused, self.circuits.caps.get)
        if not route.addresses:
            raise Unreachable(f"{peer}: {route.why}")
        if route.relayed:
            await learn_caps(daemon, route.addresses, self.circuits)
        elif peer not in self._met_peers and self.peer > peer and await self._dialled_by(peer, daemon):
            return
        await daemon.connect(peer, route.addresses)

    @staticmethod
    async def _dialled_by(peer: PeerId, daemon: Daemon) -> bool:
        """Whether `peer` comes by itself in a little while. Daemons dial from the ports at which they listen: two that dial at
        the same moment meet as one TCP connection with two openers, which both give up, not to dial again for 5 s."""
        latest = time.monotonic() + YIELD_SECONDS
        while time.monotonic() < latest:
            if await daemon.connected(peer):
                return True
            await asyncio.sleep(0.05)  # the daemon tells nobody
        return False

    def _saw(self, peer: PeerId, stream: FrameStream) -> None:
        traffic = self._traffic_with(peer)
        self.circuits.seen(peer, stream.remote_address, traffic.sent, traffic.received, asyncio.get_running_loop().time())

    async def _make_room(self, to: PeerId, whole: int, piece: int) -> None:
        """If `to` is reached through a relay whose caps would cut this transfer: let what was sent arrive, and begin anew."""
        loop, remote, daemon = asyncio.get_running_loop(), self._remote(to), self.daemon
        rate, traffic = self.links.bytes_per_second(to), remote.traffic
        if daemon is None or not self.circuits.must_renew(to, traffic.sent, traffic.received, whole, piece, rate, loop.time()):
            return
        self._traffic_with(to)  # what the connection carried counts
        self.circuits.renew(to)
        latest = loop.time() + DRAIN_SECONDS
        while self.links.outstanding(to) and loop.time() < latest:  # noqa: ASYNC110 - acknowledgements end it, or the limit
            await asyncio.sleep(0.02)
        await daemon.disconnect(to)
        with suppress(Unreachable):  # else whoever sends next dials
            await daemon.connect(to, tuple(address for address in remote.addresses if relay_of(address)))

    def dialable(self) -> tuple[tuple[PeerId, str], ...]:
        """Peers connected directly, with an address at which they can be dialled; the seeds first."""
        seeds = {parse(seed, "net.seeds").peer for seed in self.net.seeds}
        found = []
        for peer, streams in self._incoming.items():
            direct = next((a for a in self._remote(peer).addresses if not relay_of(a)), "")
            if streams and direct and not self.circuits.relay(peer):
                found.append((peer, direct if "/p2p/" in direct else f"{direct}/p2p/{peer}"))
        return tuple(sorted(found, key=lambda entry: (entry[0] not in seeds, entry[0])))

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Where `peer` is dialled, as far as is known."""
        return self._remotes[peer].addresses if peer in self._remotes else ()

    def relayed_through(self, addresses: tuple[str, ...]) -> None:
        """The addresses at which relays let others through to this peer: addresses() has them from now on."""
        self._relayed_addresses = addresses

    def seen_at(self, peer: PeerId) -> str:
        """The address at the other end of the connection with `peer`, "" if there is none."""
        return next((stream.remote_address for stream in self._incoming.get(peer, ()) if stream.remote_address), "")

    def send(self, to: PeerId, message: Message) -> None:
        remote = self._remote(to)
        try:
            if self.daemon is None or to == self.peer:
                raise wire.FrameError("nowhere to send it")
            buffers = wire.encode(message, self.run)
        except (wire.FrameError, TypeError) as error:
            remote.traffic.dropped += 1
            if self.daemon is not None:
                self._on_warning("not_sent", f"{type(message).__name__} to {to} was not sent: {error}")
            return
        remote.send(buffers)

    async def send_bulk(self, to: PeerId, chunk: Chunk) -> None:
        if self.daemon is None:
            raise Unreachable(NOT_RUNNING)
        await self._make_room(to, chunk.total - chunk.offset, len(chunk.data))
        self.links.sent(to, chunk, asyncio.get_running_loop().time())
        await self._remote(to).send_bulk(wire.encode(chunk, self.run), len(chunk.data))

    async def request(self, to: PeerId, fetch: Request, timeout_seconds: float) -> Fetched:
        """Gives up once nothing has come for `timeout_seconds`, or if the whole takes ANSWER_PATIENCE times as long."""
        self._sequence += 1
        clock = asyncio.get_running_loop().time
        latest = clock() + ANSWER_PATIENCE * timeout_seconds
        length = fetch.length if isinstance(fetch, Fetch) else 0
        await self._make_room(to, length, length)
        try:
            async with asyncio.timeout(timeout_seconds) as limit:

                def come() -> None:
                    if not limit.expired():
                        limit.reschedule(min(clock() + timeout_seconds, latest))

                return await self._remote(to).request(self._sequence, wire.encode(fetch, self.run, self._sequence), come)
        except TimeoutError:
            raise Unreachable(f"{to} did not answer a request for {fetch.what} within {timeout_seconds:g} s") from None

    # ------------------------------------------------------------ what arrives

    def _accept(self, peer: PeerId, stream: FrameStream) -> None:
        budgets = self.budgets
        try:
            number = budgets.open_stream(peer, stream.abort)
        except OverBudget:
            stream.abort()
            return
        streams = self._incoming.setdefault(peer, set())
        streams.add(stream)

        def lost(stream: FrameStream) -> None:
            budgets.close_stream(number)
            streams.discard(stream)
            if self._controls.get(peer) is stream:
                del self._controls[peer]
            if not streams and self._incoming.get(peer) is streams:
                del self._incoming[peer]
                self._traffic_with(peer)
                self.circuits.closed(peer)

        stream.on_lost = lost
        self._saw(peer, stream)
        stream.on_bad = lambda _stream, error: self._bad(peer, error)
        stream.budget(
            lambda kind, length: budgets.begin_frame(peer, kind, length), lambda length: budgets.end_frame(peer, length)
        )
        stream.expect_bytes(INCARNATION_BYTES, lambda incarnation: self._met(peer, incarnation))

    def _met(self, peer: PeerId, incarnation: bytes) -> None:
        remote = self._remote(peer)
        if remote.incarnation not in (None, incarnation):
            remote.restarted()
        remote.incarnation = incarnation
        remote.heard_at = asyncio.get_running_loop().time()
        self._met_peers[peer] = None
        remote.try_now()

    def _bad(self, peer: PeerId, error: wire.FrameError) -> None:
        if isinstance(error, OverBudget):
            return
        other = isinstance(error, wire.VersionMismatch)
        reason = "other_version" if other else "bad_frame"
        self.budgets.complaints.say(peer, self.budgets.admitted(peer), reason, f"{peer}: {error}")
        if isinstance(error, wire.VersionMismatch):
            self.on_other_version(peer, error.version)

    def _accept_control(self, peer: PeerId, stream: FrameStream) -> None:
        before = tuple(self._incoming.get(peer, ()))
        self._accept_frames(peer, stream)
        if stream not in self._incoming.get(peer, ()):
            return  # over its budget
        older, self._controls[peer] = self._controls.get(peer), stream
        if older is not None and not older.lost:
            asyncio.get_running_loop().call_later(ENDING_SECONDS, self._leave_dead_connection, peer, older, before)

    def _leave_dead_connection(self, peer: PeerId, older: FrameStream, before: Sequence[FrameStream]) -> None:
        """`peer` has opened its control stream anew, and yet nobody has told this end that the older one has ended: its
        connection is dead. What is sent over that is lost, until libp2p gives it up half a minute later."""
        if older.lost or peer not in self._remotes:
            return
        for stream in before:
            stream.abort()
        self._remotes[peer].restarted()

    def _accept_frames(self, peer: PeerId, stream: FrameStream) -> None:
        self._accept(peer, stream)
        stream.on_body = lambda _stream, body: self._heard(peer, body)

    def _heard(self, peer: PeerId, body: bytes | bytearray) -> None:
        frame, remote = wire.decode(body), self._remote(peer)
        traffic, message = remote.traffic, frame.message
        remote.heard_at = asyncio.get_running_loop().time()
        payload = len(message.data) if isinstance(message, Chunk) else 0
        traffic.payload_received += payload
        traffic.overhead_received += len(body) + wire.LENGTH_BYTES - payload
        if isinstance(message, (Fetch, Order, Fetched)):
            raise wire.FrameError(f"{type(message).__name__}: has streams of its own")
        if not wire.concerns(self.run, frame) or self._on_message is None:
            return
        if isinstance(message, ChunkAck):
            self.links.acknowledged(peer, message, asyncio.get_running_loop().time())
        elif isinstance(message, (Hello, Heartbeat)):
            remote.called(message.site)
            if message.site in self._emulated:
                self.shape(peer, self._emulated[message.site])
        try:
            self._on_message(peer, message)
        except Exception as error:  # a bug in a handler must not end the stream
            asyncio.get_running_loop().call_exception_handler({"message": f"on {type(message).__name__}", "exception": error})

    def _accept_requests(self, peer: PeerId, stream: FrameStream) -> None:
        self._accept(peer, stream)
        busy: set[asyncio.Task[None]] = set()

        def asked(stream: FrameStream, body: bytes | bytearray) -> None:
            frame = wire.decode(body)
            self._remote(peer).traffic.overhead_received += len(body) + wire.LENGTH_BYTES
            if not isinstance(frame.message, (Fetch, Order)) or busy:
                raise wire.FrameError(f"{type(frame.message).__name__}: one request at a time expected")
            self.budgets.begin_request(peer)
            task = asyncio.create_task(self._answer(peer, stream, frame, busy.clear))
            for tasks in (busy, self._tasks):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _task: self.budgets.end_request(peer))

        stream.on_body = asked

    async def _answer(self, peer: PeerId, stream: FrameStream, frame: wire.Frame, done: Callable[[], None]) -> None:
        """`done` is called before the other end can know: its next question may be here before this task has ended."""
        assert isinstance(frame.message, (Fetch, Order))
        assert self._on_request is not None
        remote = self._remote(peer)
        if not wire.concerns(self.run, frame):
            stream.abort()
            return
        try:
            answer = await self._on_request(peer, frame.message)
            buffers = wire.encode(answer, self.run, frame.sequence)
        except BaseException:
            stream.abort()  # the other end sees at once that there will be no answer
            raise
        await remote.answer(stream, buffers, done)
