"""Asking whether anybody listens at an address."""

from __future__ import annotations

import asyncio
import socket

from geomesh_p2p.swarm.addresses import answering


async def test_whether_a_port_answers() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    live = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"
        assert "refused" in await answering((dead,))
        assert await answering((live,)) == await answering((dead, live)) == ""
    server.close()


async def test_what_cannot_be_asked_is_left_to_libp2p() -> None:
    """Addresses come from other peers: an odd one is no error here."""
    for odd in ("/ip4/127.0.0.1/udp/1/quic", "nonsense", "/ip4/127.0.0.1/tcp/1/p2p-circuit", "/ip4/127.0.0.1/tcp/99999"):
        assert await answering((odd,)) == ""


async def test_a_port_that_never_speaks_has_an_end() -> None:
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
