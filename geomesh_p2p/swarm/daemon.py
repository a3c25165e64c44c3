"""The libp2p daemon: started, watched, and spoken to. It ends with its parent, even if that is killed with -9.

hivemind starts it and speaks its control protocol; the byte streams that carry frames are opened here, so that they are
read by callbacks into place, without a task or a copy per frame.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.swarm.connections import Connection, connected
from geomesh_p2p.swarm.sockets import SocketFolder
from geomesh_p2p.swarm.streams import FrameStream

log = logging.getLogger("geomesh.daemon")
OUTPUT_LINES = 20
STOP_SECONDS = 5.0
PING, PING_BYTES = "/ipfs/ping/1.0.0", 32
MOST_ANSWER_BYTES = 4096         # of a short question to another peer's daemon
RELAY_CIRCUITS, RELAY_PLACES = 256, 256
RELAY_BUFFER_BYTES = 256 * 1024  # of each way of each relayed connection: the daemon's own choice is 16 MiB

# Run in between: asks the kernel to kill this process when its parent ends, then becomes the daemon. Looks at its parent
# afterwards, which may have ended just before. In a session of its own, as Ctrl-C in a terminal reaches all processes of the
# terminal's: the parent still needs its daemon then, to leave the run in good order.
LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.setsid()
os.environ["GOLOG_LOG_LEVEL"] = "error"
os.execv(sys.argv[2], sys.argv[2:])
"""

OnExit = Callable[[int, str], None]
Handler = Callable[[PeerId, FrameStream], None]


class Daemon:
    """A running daemon, made by start()."""

    def __init__(self, p2p: P2P, sockets: SocketFolder, output: deque[str]) -> None:
        self.p2p = p2p
        self.ended = False
        self._sockets = sockets
        self._output = output
        self._server: asyncio.AbstractServer | None = None
        self.handlers: dict[str, Handler] = {}
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(_heard)

    @classmethod
    async def start(cls, net: NetSection, identity_path: Path | None, on_exit: OnExit) -> Daemon:
        """Raises TemporaryError, with the daemon's last words, if it does not come up in net.daemon_start_seconds. Without an
        identity it has a new one and does not listen: to ask others something."""
        nameless = identity_path is None
        output: deque[str] = deque(maxlen=OUTPUT_LINES)
        made: list[P2P] = []
        running: list[Daemon] = []
        sockets = SocketFolder()

        def ended(code: int) -> None:
            for daemon in running:
                daemon._has_ended()
            on_exit(code, last_words(output))

        class Watched(P2P):
            """hivemind's daemon, tied to this process; keeps its last lines and tells when it ends."""

            _UNIX_SOCKET_PREFIX = f"/unix{sockets.path}/"

            def __init__(self) -> None:
                super().__init__()
                made.append(self)

            @staticmethod
            def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
                launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]
                # libp2p closes connections beyond its marks: room for each peer twice, and for as many strangers
                marks = {"connLo": max(256, 4 * net.most_peers), "connHi": max(512, 8 * net.most_peers)}
                kwargs.pop("dhtServer")  # libp2p's own directory dials whomever it hears of: that is the transport's part
                return launcher + P2P._make_process_args(*args, **kwargs, **marks, **({} if nameless else relay_service(net)))

            async def _read_outputs(self, ready: asyncio.Future[None]) -> None:
                while True:
                    try:
                        line = await self._child.stdout.readline()
                    except ValueError:  # longer than the reader's limit
                        continue
                    if not line:
                        break
                    text = line.rstrip().decode(errors="replace")
                    output.append(text)
                    log.debug("%s", text)
                    if text.startswith("Peer ID:") and not ready.done():
                        ready.set_result(None)
                code = await self._child.wait()
                if not ready.done():
                    ready.set_exception(P2PDaemonError(f"it ended with code {code}"))
                elif self._alive:
                    ended(code)

        try:
            p2p = await Watched.create(
                host_maddrs=None if nameless else [net.listen],
                no_listen=nameless,
                announce_maddrs=[net.announce] if net.announce and not nameless else None,
                identity_path=None if nameless else str(identity_path),
                startup_timeout=net.daemon_start_seconds,
                nat_port_map=net.port_mapping and not nameless,
                use_relay=net.relay and not nameless,
                auto_nat=net.relay and not nameless,  # with it comes hole punching
                use_ipfs=False,
            )
        except BaseException as error:
            for half_started in made:
                await _end(half_started)
            sockets.remove()
            if not isinstance(error, (P2PDaemonError, OSError, asyncio.IncompleteReadError)):
                raise
            raise TemporaryError(
                f"the libp2p daemon did not start ({error}; net.daemon_start_seconds is {net.daemon_start_seconds:g}). "
                f"Its last words: {last_words(output) or 'none'}"
            ) from None
        running.append(cls(p2p, sockets, output))
        return running[0]

    @property
    def process_id(self) -> int:
        return int(self.p2p._child.pid)

    @property
    def socket_folder(self) -> str:
        return self._sockets.path

    def _has_ended(self) -> None:
        """What still waits for the daemon gets an error: hivemind itself would let it wait for ever."""
        self.ended = True
        control = self.p2p._client.control
        calls, control._pending_calls = control._pending_calls, _Failing()
        control._pending_calls.update(calls)

    async def answers(self) -> None:
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))

    def kill(self, why: str) -> None:
        """End it at once, with `why` as its last words."""
        self._output.append(why)
        if self.p2p._child.returncode is None:
            self.p2p._child.kill()

    async def addresses(self) -> tuple[str, ...]:
        """Where this peer can be dialled, the bound port and the peer id included."""
        return tuple(str(address) for address in await self.p2p.get_visible_maddrs(latest=True))

    async def connect(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Dial `peer`, if it is not connected. Raises Unreachable with libp2p's reason."""
        try:
            to = PeerID.from_base58(peer).to_bytes()
            bare = [packed_address(address) for address in addresses]
            connect = p2pd_pb2.ConnectRequest(peer=to, addrs=bare)
            answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise Unreachable(str(error)) from None
        if answer.type == p2pd_pb2.Response.ERROR:
            raise Unreachable(answer.error.msg)

    async def connected(self, peer: PeerId) -> bool:
        return peer in await self.connections()

    async def connections(self) -> dict[PeerId, tuple[str, ...]]:
        """Who is connected, and over which addresses of theirs: one that ends in /p2p-circuit/... is through a relay."""
        try:
            answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        except (OSError, asyncio.IncompleteReadError):
            return {}
        found: dict[PeerId, tuple[str, ...]] = {}
        for info in answer.peers:
            peer = PeerID(info.id).to_base58()
            found[peer] = (*found.get(peer, ()), *(text_of(packed) for packed in info.addrs))
        return found

    async def ask_peer(self, peer: PeerId, protocol: str, packed: bytes) -> bytes:
        """Send one message behind its length over a new stream of `protocol`, and return the one that answers it. Raises
        Unreachable. The caller sets the deadline."""
        try:
            request = _stream_request(peer, protocol)
            async with self._connection() as (reader, writer):
                opened = await _answer(reader, writer, request)
                if opened.type == p2pd_pb2.Response.ERROR:
                    raise Unreachable(opened.error.msg or "stream refused")
                writer.write(delimited(packed))
                size = await _read_varint(reader)
                if size > MOST_ANSWER_BYTES:
                    raise Unreachable(f"{peer} answers {protocol} with {size} bytes")
                return await reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise Unreachable(f"{peer} did not answer {protocol}: {error}") from None

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection with `peer`."""
        to = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer).to_bytes())
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=to))

    async def ping(self, peer: PeerId) -> None:
        """Returns when libp2p at the other end has answered, over the connection that there is. Raises Unreachable."""
        stream, answered = FrameStream(), asyncio.Event()
        try:
            await self.open(peer, PING, stream)
            stream.expect_bytes(PING_BYTES, lambda data: answered.set())
            stream.on_lost = lambda _stream: answered.set()
            stream.write_raw(os.urandom(PING_BYTES))
            if not stream.lost:
                await answered.wait()
            if stream.lost:
                raise Unreachable(f"{peer} closed the connection")
        finally:
            stream.abort()

    async def _ask(self, request: Any) -> Any:
        """One question on a connection of its own, which is closed whatever happens."""
        async with self._connection() as (reader, writer):
            return await _answer(reader, writer, request)

    def _connection(self) -> AbstractAsyncContextManager[Connection]:
        """With the daemon itself."""
        return connected(asyncio.open_unix_connection(self.p2p._daemon_listen_maddr["unix"]))

    async def open(self, peer: PeerId, protocol: str, stream: FrameStream) -> None:
        """Connect `stream` to the handler of `protocol` at `peer`. Raises Unreachable with libp2p's reason."""
        request = _stream_request(peer, protocol)
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def heard(packed: bytes) -> None:
            if not answered.done():  # whoever asked may have given up in the meantime
                answered.set_result(packed)

        stream.expect_preface(heard)

        def closed() -> None:
            if not answered.done():
                answered.set_exception(Unreachable("the daemon closed the stream"))

        stream.on_early_loss(closed)
        try:
            path = self.p2p._daemon_listen_maddr["unix"]
            await asyncio.get_running_loop().create_unix_connection(lambda: stream, path)
            stream.write_raw(delimited(request.SerializeToString()))
            answer = p2pd_pb2.Response.FromString(await answered)
        except BaseException as error:
            answered.cancel()  # nobody waits for it any more
            stream.abort()
            if isinstance(error, OSError):
                raise Unreachable(f"the daemon does not answer: {error}") from None
            raise
        if answer.type == p2pd_pb2.Response.ERROR:
            stream.abort()
            raise Unreachable(answer.error.msg or "stream refused")
        stream.remote_address = text_of(answer.streamInfo.addr)

    async def accept(self, handlers: dict[str, Handler]) -> None:
        """Serve streams by protocol: `handlers[protocol](peer, stream)` sets the stream's callbacks, or aborts it. `peer` is
        the id that libp2p has authenticated."""
        self.handlers = dict(handlers)
        path = os.path.join(self._sockets.path, "accept.sock")
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _incoming(self.handlers), path)
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{path}").to_bytes(), proto=list(handlers), balanced=False
            ),
        )
        answer = await self._ask(request)
        if answer.type == p2pd_pb2.Response.ERROR:
            raise TemporaryError(f"the libp2p daemon refused to serve {', '.join(handlers)}: {answer.error.msg}")

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await _end(self.p2p)
        self._sockets.remove()


async def _end(p2p: P2P) -> None:
    """Stop the process, by force if it does not go by itself."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await p2p.shutdown()
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()
    if p2p._child is not None:
        p2p._child._transport.close()  # else its pipes are closed when they are collected, perhaps after the loop


def _heard(task: asyncio.Task[None]) -> None:
    """A connection of hivemind's that broke: the end of the daemon says so."""
    if not task.cancelled():
        task.exception()


class _Failing(dict[Any, "asyncio.Future[Any]"]):
    """Calls of a daemon that has ended: each fails as soon as it is made."""

    def __setitem__(self, call: Any, waiting: asyncio.Future[Any]) -> None:
        if not waiting.done():
            waiting.set_exception(P2PDaemonError("the libp2p daemon has ended"))
        super().__setitem__(call, waiting)

    def update(self, calls: Any) -> None:  # type: ignore[override]
        for call, waiting in calls.items():
            self[call] = waiting


def _incoming(handlers: dict[str, Handler]) -> FrameStream:
    stream = FrameStream()

    def introduced(packed: bytes) -> None:
        info = p2pd_pb2.StreamInfo.FromString(packed)
        stream.remote_address = text_of(info.addr)
        handlers[info.proto](PeerID(info.peer).to_base58(), stream)

    stream.expect_preface(introduced)
    return stream


def relay_service(net: NetSection) -> dict[str, Any]:
    """What the daemon is told of relaying. It relays only for certain if it takes itself for public (see relaying.py)."""
    if not net.relay:
        return {}
    return {
        "relayService": 1,
        "forceReachabilityPublic": 1,
        "relayDataLimit": net.relay_bytes,
        "relayTimeLimit": f"{net.relay_seconds}s",
        "relayMaxCircuits": RELAY_CIRCUITS,
        "relayMaxReservations": RELAY_PLACES,
        "relayBufferSize": RELAY_BUFFER_BYTES,
    }


P2P_BYTES, CIRCUIT_BYTES = b"\xa5\x03", b"\xa2\x02"


def packed_address(text: str) -> bytes:
    """`text` in libp2p's binary form, without the peer id at its end. hivemind's own packing of a relay's id is wrong."""
    before, circuit, _ = text.partition("/p2p-circuit")
    bare, _, relay = before.partition("/p2p/")
    if not circuit:
        return bytes(Multiaddr(bare).to_bytes())
    relay_id = PeerID.from_base58(relay).to_bytes()
    return bytes(Multiaddr(bare).to_bytes()) + P2P_BYTES + _varint(len(relay_id)) + relay_id + CIRCUIT_BYTES


def text_of(packed: bytes) -> str:
    """A binary multiaddress as text, "" if it cannot be read."""
    try:
        return str(Multiaddr(packed)) if packed else ""
    except Exception:
        return ""


def last_words(output: deque[str]) -> str:
    return " | ".join(line for line in output if line)[-2000:]


def delimited(packed: bytes) -> bytes:
    """A protobuf message behind its length as a varint: how the daemon frames its own messages."""
    return _varint(len(packed)) + packed


def _varint(value: int) -> bytes:
    head = bytearray()
    while value >= 0x80:
        head.append(value & 0x7F | 0x80)
        value >>= 7
    head.append(value)
    return bytes(head)


def _stream_request(peer: PeerId, protocol: str) -> Any:
    """Asks the daemon for a stream to `peer`. Raises ValueError: no peer id."""
    ask = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol])
    return p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=ask)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Any) -> Any:
    """The daemon's answer to `request`, asked over a connection with it."""
    writer.write(delimited(request.SerializeToString()))
    return p2pd_pb2.Response.FromString(await reader.readexactly(await _read_varint(reader)))


async def _read_varint(reader: asyncio.StreamReader) -> int:
    value, shift = 0, 0
    while True:
        byte = (await reader.readexactly(1))[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
