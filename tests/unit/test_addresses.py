"""Asking whether anybody listens at an address."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.swarm.addresses import LIBP2P_GREETING, answering, check_port_free, parse
from geomesh_p2p.swarm.sockets import PREFIX


async def listening(says: bytes) -> tuple[asyncio.Server, str]:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    return server, f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"


@pytest.mark.case("C001")
async def test_whether_a_peer_answers() -> None:
    server, live = await listening(LIBP2P_GREETING + b"more")
    other, no_peer = await listening(b"HTTP/1.1 400 Bad Request\r\n")
    closing, closed = await listening(b"")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"
        assert "refused" in await answering((dead,))
        assert await answering((no_peer,)) == "what answers there is no peer"
        assert await answering((closed,)) == "the connection was closed at once"
        assert await answering((live,)) == await answering((dead, closed, no_peer, live)) == ""
    for one in (server, other, closing):
        one.close()


async def test_what_cannot_be_asked_is_left_to_libp2p() -> None:
    """Addresses come from other peers: an odd one is no error here."""
    for odd in ("/ip4/127.0.0.1/udp/1/quic", "nonsense", "/ip4/127.0.0.1/tcp/1/p2p-circuit", "/ip4/127.0.0.1/tcp/99999"):
        assert await answering((odd,)) == ""


async def test_a_port_that_never_speaks_has_an_end() -> None:
    async def listen(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    silent = await asyncio.start_server(listen, "127.0.0.1", 0)
    address = f"/ip4/127.0.0.1/tcp/{silent.sockets[0].getsockname()[1]}"
    assert "no answer within 0.2 s" in await answering((address,), 0.2)
    silent.close()


async def test_a_connection_that_is_reset_leaves_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio keeps the error of the connection for whoever waits for its end. It takes it itself when the protocol is
    collected, but that may come too late: the error is part of a cycle, which is taken apart in any order."""
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__")
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))

    def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asyncio.get_running_loop().call_later(0.02, writer.transport.abort)

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    address = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
    assert "reset" in await answering((address,))
    gc.collect()
    assert complaints == []
    server.close()


async def test_a_port_that_accepts_nobody_has_an_end() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        crowd = [socket.socket() for _ in range(4)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        try:
            assert "no answer within 0.2 s" in await answering((f"/ip4/127.0.0.1/tcp/{port}",), 0.2)
        finally:
            for one in crowd:
                one.close()


LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@pytest.mark.parametrize(("name", "socket_folder", "step"), [
    ("p2pd", PREFIX, "(p2pd), the libp2p daemon of another geomesh peer: choose another port"),
    ("p2pd", "kubo-", "(p2pd): stop that process, or choose another port"),
    ("other", PREFIX, "(other): stop that process, or choose another port"),
])  # fmt: skip
def test_nobody_is_told_to_stop_the_daemon_of_a_living_peer(name: str, socket_folder: str, step: str, tmp_path: Path) -> None:
    named = tmp_path / name
    named.symlink_to(os.path.realpath(sys.executable))
    command = [str(named), "-I", "-S", "-c", LISTENS, f"-listen=/unix/tmp/{socket_folder}x/p2pd.sock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        assert running.stdout is not None
        port = int(running.stdout.readline())
        try:
            with pytest.raises(TemporaryError) as caught:
                check_port_free(parse(f"/ip4/127.0.0.1/tcp/{port}", "net.listen"), 0.0)
            assert str(caught.value).endswith(step)
        finally:
            running.communicate("\n")
