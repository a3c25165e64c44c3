"""One suite, two transports: a `Site` of either kind behaves as ports.Transport says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.messages import Chunk, Fetch, Fetched, Message
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.transport import Libp2pTransport

PATIENCE_SECONDS = 20.0


@dataclass
class Site:
    """A transport with what it has heard, and handlers that a test may replace."""

    transport: Any
    heard: list[tuple[PeerId, Message]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Callable[[PeerId, Fetch], Any] | None = None

    @property
    def peer(self) -> PeerId:
        return self.transport.peer

    def on_message(self, sender: PeerId, message: Message) -> None:
        self.heard.append((sender, message))
        self.news.set()

    async def on_request(self, sender: PeerId, fetch: Fetch) -> Fetched:
        if self.answer is not None:
            return await self.answer(sender, fetch)
        return Fetched(True, sender.encode(), fetch.offset, fetch.length, bytes(fetch.length), 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def start(self) -> None:
        await self.transport.start(self.on_message, self.on_request)

    def messages(self, kind: type) -> list[Any]:
        return [message for _, message in self.heard if isinstance(message, kind)]

    async def chunks(self, count: int) -> list[Chunk]:
        await self.until(lambda: len(self.messages(Chunk)) >= count)
        return self.messages(Chunk)


class Mesh(Protocol):
    async def site(self, name: str) -> Site: ...
    async def restart(self, site: Site) -> Site: ...
    async def kill(self, site: Site) -> None: ...
    def stranger(self) -> PeerId: ...


class MemoryMesh:
    def __init__(self, _folder: Path) -> None:
        self.network = Network(latency_seconds=0.001, bytes_per_second=200e6, stall_seconds=0.3)
        self.sites: list[Site] = []

    async def site(self, name: str) -> Site:
        site = Site(self.network.transport(name))
        await site.start()
        self.sites.append(site)
        return site

    async def restart(self, site: Site) -> Site:
        await self.kill(site)
        return await self.site(site.peer)

    async def kill(self, site: Site) -> None:
        self.network.crash(site.peer)

    def stranger(self) -> PeerId:
        return "nobody"

    async def stop(self) -> None:
        for site in self.sites:
            await site.transport.stop()


class Libp2pMesh:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sites: list[Site] = []

    async def site(self, name: str, listen: str = "/ip4/127.0.0.1/tcp/0") -> Site:
        site = Site(Libp2pTransport(NetSection(listen=listen, streams=4), self.folder / name / "identity.key"))
        await site.start()
        self.sites.append(site)
        self._introduce()
        return site

    def _introduce(self) -> None:
        for one in self.sites:
            for other in self.sites:
                if one is not other:
                    one.transport.learn(other.peer, other.transport.addresses())

    async def restart(self, site: Site) -> Site:
        await self.kill(site)
        name = site.transport.identity_path.parent.name
        return await self.site(name, site.transport.addresses()[0].split("/p2p/")[0])

    async def kill(self, site: Site) -> None:
        self.sites.remove(site)
        await site.transport.stop()

    def stranger(self) -> PeerId:
        return "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"

    async def stop(self) -> None:
        for site in self.sites:
            await site.transport.stop()
