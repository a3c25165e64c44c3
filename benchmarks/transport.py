"""What a path carries: chunks from one process to another over the real transport. Prints one JSON line.

    python benchmarks/transport.py serve --listen /ip4/10.0.0.2/tcp/4100           # on one host; prints its address
    python benchmarks/transport.py send ADDRESS --megabytes 64 --cold               # on the other
    python benchmarks/transport.py pair                                            # both here, over loopback

`--wire` also counts the bytes on the daemon's own sockets (Linux: `ss`), to compare with the payload. `--silence` waits
that many seconds between the first small exchange and the transfer, with only heartbeats passing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.messages import Chunk, ChunkAck, Fetch, Fetched, HeartbeatEcho, Message
from geomesh_p2p.swarm.addresses import parse
from geomesh_p2p.swarm.shaping import Shape
from geomesh_p2p.swarm.transport import Libp2pTransport

PLAN = bytes(32)


class Receiver:
    """Acknowledges the last chunk of each transfer, and says how the time went."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self.transport = transport
        self.received: dict[str, int] = {}

    def on_message(self, sender: str, message: Message) -> None:
        if isinstance(message, Chunk):
            got = self.received.get(message.owner, 0) + len(message.data)
            self.received[message.owner] = got
            if got == message.total:
                self.transport.send(sender, ChunkAck(PLAN, "part", message.owner, 0, got))
        elif isinstance(message, HeartbeatEcho):
            self.transport.send(sender, message)

    async def on_request(self, sender: str, fetch: Fetch) -> Fetched:
        return Fetched(True, b"", fetch.offset, fetch.length, bytes(fetch.length), 0)


async def serve(options: argparse.Namespace, ready: Any = None) -> None:
    net = NetSection(listen=options.listen or "/ip4/127.0.0.1/tcp/0", streams=options.streams)
    transport = Libp2pTransport(net, Path(options.folder) / "serve.key")
    receiver = Receiver(transport)
    await transport.start(receiver.on_message, receiver.on_request)
    print(transport.addresses()[0], flush=True)
    await asyncio.Event().wait()


class Sender:
    def __init__(self, transport: Libp2pTransport, peer: str, chunk_bytes: int) -> None:
        self.transport, self.peer, self.chunk_bytes = transport, peer, chunk_bytes
        self.acknowledged: asyncio.Future[float] | None = None
        self.echoed: asyncio.Future[float] | None = None
        self.clock = asyncio.get_running_loop().time

    def on_message(self, sender: str, message: Message) -> None:
        waiting = self.acknowledged if isinstance(message, ChunkAck) else self.echoed
        if waiting is not None and not waiting.done():
            waiting.set_result(self.clock())

    async def on_request(self, sender: str, fetch: Fetch) -> Fetched:
        return Fetched(False, b"", 0, 0, b"", 0)

    async def transfer(self, name: str, size: int) -> float:
        """Seconds from the first byte until the receiver's word that it has the last."""
        body = memoryview(bytes(size))
        self.acknowledged = asyncio.get_running_loop().create_future()
        start = self.clock()
        for offset in range(0, size, self.chunk_bytes):
            data = body[offset : offset + self.chunk_bytes]
            await self.transport.send_bulk(self.peer, Chunk(PLAN, "part", name, PLAN, 0, offset, size, data))  # type: ignore[arg-type]
        return await self.acknowledged - start

    async def echo(self) -> float:
        self.echoed = asyncio.get_running_loop().create_future()
        start = self.clock()
        self.transport.send(self.peer, HeartbeatEcho(start))
        return await self.echoed - start


def wire_bytes(process_id: int) -> int:
    """Bytes acknowledged by the other end on all TCP connections of a process."""
    listing = subprocess.run(["ss", "-tinpOH"], capture_output=True, text=True, check=True).stdout
    return sum(int(m.group(1)) for line in listing.splitlines() if f"pid={process_id}," in line
               for m in [re.search(r"bytes_sent:(\d+)", line)] if m)  # fmt: skip


def own_address_towards(address: str) -> str:
    """That of this host on the way to `address`, with any free port."""
    family, kind, _, _, target = socket.getaddrinfo(parse(address, "address").host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return f"/ip{'6' if family == socket.AF_INET6 else '4'}/{probe.getsockname()[0]}/tcp/0"


async def send(options: argparse.Namespace) -> None:
    peer = options.address.rsplit("/p2p/", 1)[1]
    listen = options.listen or own_address_towards(options.address)
    net = NetSection(listen=listen, streams=options.streams, seeds=(options.address,))
    transport = Libp2pTransport(net, Path(options.folder) / "send.key")
    sender = Sender(transport, peer, options.chunk_bytes)
    await transport.start(sender.on_message, sender.on_request)
    await transport.seeds.connect(net.seeds)
    if options.rtt_ms or options.mbps:
        transport.shape(peer, Shape(options.rtt_ms / 1000, options.mbps * 1e6 / 8 if options.mbps else None))
    result: dict[str, Any] = {"streams": options.streams, "chunk_bytes": options.chunk_bytes, "megabytes": options.megabytes}
    if not options.cold:
        result["first_echo_seconds"] = round(await sender.echo(), 4)
        for _ in range(options.silence):
            await asyncio.sleep(1)
            await sender.echo()
    before = wire_bytes(transport.daemon.process_id) if options.wire and transport.daemon else 0
    size = int(options.megabytes * 1e6)
    runs = []
    for number in range(options.repeat):
        seconds = await sender.transfer(f"transfer-{number}", size)
        runs.append({"seconds": round(seconds, 4), "mbps": round(size * 8 / seconds / 1e6, 2)})
        if number + 1 < options.repeat:
            for _ in range(options.silence):
                await asyncio.sleep(1)
                await sender.echo()
    result["runs"] = runs
    if options.wire and transport.daemon:
        payload = size * options.repeat
        result["wire_over_payload"] = round((wire_bytes(transport.daemon.process_id) - before) / payload, 4)
        traffic = transport.traffic()[peer]
        result["stream_over_payload"] = round((traffic.payload_sent + traffic.overhead_sent) / payload, 5)
    print(json.dumps(result), flush=True)
    await transport.stop()


async def pair(options: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "serve", "--streams", str(options.streams)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        options.address = (await server.stdout.readline()).decode().strip()
        await send(options)
    finally:
        server.terminate()
        await server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("serve", "send", "pair"))
    parser.add_argument("address", nargs="?")
    parser.add_argument("--listen", default="", help="default: loopback; for send: this host's address on the way to the other")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--chunk-bytes", type=int, default=131_072)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--silence", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="no exchange at all before the transfer")
    parser.add_argument("--wire", action="store_true")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="emulate one way of this delay in the sender")
    parser.add_argument("--mbps", type=float, default=0.0, help="emulate this rate in the sender")
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or folder
        uvloop.run({"serve": serve, "send": send, "pair": pair}[options.verb](options))


if __name__ == "__main__":
    main()
