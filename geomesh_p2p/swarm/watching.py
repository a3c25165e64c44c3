"""Watches over the connections: which address each goes over, how fast it is, and whether a silent one is still there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.remote import Remote, ToldSpeed

log = logging.getLogger("geomesh.links")
MOST_DOUBLINGS = 5
MOST_WAYS = 16               # addresses of one peer that are told of
TOLD_SECONDS = 60.0          # of one peer and one way, a speed at most so often


class Connected(Protocol):
    """What is asked of the daemon."""

    async def connections(self) -> dict[PeerId, tuple[str, ...]]: ...

    async def ping(self, peer: PeerId) -> None: ...

    async def disconnect(self, peer: PeerId) -> None: ...


class LinkWatch:
    """A connection whose other end has vanished without a word, or that a middlebox has forgotten, looks open for minutes.
    One that was silent for half of `limit_seconds` is asked, and closed if there is no answer for `limit_seconds`, so that
    the peer is dialled again; twice as long after each time that this did not help, so that hosts that are too busy to answer
    are not kept busy with new connections."""

    def __init__(
        self, remotes: Mapping[PeerId, Remote], daemon: Callable[[], Connected | None], limit_seconds: float
    ) -> None:
        self._remotes, self._daemon, self._limit_seconds = remotes, daemon, limit_seconds
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._closed: dict[PeerId, int] = {}   # in a row, without an answer to a ping in between

    async def run(self) -> None:
        """Until cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await asyncio.sleep(self._limit_seconds / 4)
                if (daemon := self._daemon()) is None:
                    continue
                self.say_which_ways(await daemon.connections())
                for peer, remote in list(self._remotes.items()):
                    silent = remote.heard_at is not None and clock() - remote.heard_at > self._limit_seconds / 2
                    if silent and remote.in_use and peer not in self._asking:
                        self._asking[peer] = asyncio.create_task(self._ask(daemon, remote))
        finally:
            for task in self._asking.values():
                task.cancel()

    async def _ask(self, daemon: Connected, remote: Remote) -> None:
        clock, closed = asyncio.get_running_loop().time, self._closed.get(remote.peer, 0)
        patience = self._limit_seconds * 2 ** min(closed, MOST_DOUBLINGS)
        try:
            async with asyncio.timeout(patience):
                await daemon.ping(remote.peer)
            self._closed.pop(remote.peer, None)
        except TimeoutError:
            # one that was heard meanwhile is slow, as a busy host is: closing would cost it more time still
            if remote.heard_at is not None and clock() - remote.heard_at > patience + self._limit_seconds / 2:
                log.info("%s: its connection is dead, it is closed and the peer dialled again", remote.name)
                self._closed[remote.peer] = closed + 1
                remote.ways.clear()
                await daemon.disconnect(remote.peer)
                remote.restarted()
        except Unreachable:
            pass  # it is closed, as its streams tell
        await asyncio.sleep(self._limit_seconds / 2)  # else it is there, and has nothing to say
        del self._asking[remote.peer]

    def say_which_ways(self, connections: Mapping[PeerId, tuple[str, ...]]) -> None:
        """One line for each address of a peer that a connection goes over: of several ways, which one is taken."""
        for peer, remote in self._remotes.items():
            ways = connections.get(peer, ()) if remote.in_use else ()
            dialled = {address.split("/p2p/")[0] for address in remote.addresses}
            for way in ways:
                if way not in remote.ways and len(remote.ways) < MOST_WAYS:
                    remote.ways.add(way)
                    log.info("%s: connected, %s %s", remote.name, "dialled at" if way in dialled else "comes from", way)
            remote.way = ways[0] if ways else remote.way

    def measured(self, remote: Remote, bytes_per_second: float) -> None:
        """One line for the first transfer over each way, and, once in TOLD_SECONDS, for one that is twice as fast or half as
        fast as the last one told of."""
        now, told = asyncio.get_running_loop().time(), remote.told
        if told is not None and told.way == remote.way:
            steady = 0.5 < bytes_per_second / told.bytes_per_second < 2.0
            if steady or now - told.at < TOLD_SECONDS:
                return
        remote.told = ToldSpeed(remote.way, bytes_per_second, now)
        rate = bytes_per_second * 8e-6
        log.info("%s: %.2f Mbit/s measured, over %s", remote.name, rate, remote.way or "a connection just made")
