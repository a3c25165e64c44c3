"""How far other peers' clocks are from this one's. Nothing that keeps a run safe depends on a clock: leases, deadlines and the
age of records go by each peer's own monotonic one. But logs of hosts whose clocks differ cannot be read side by side, and
the directory takes no records of clocks that are days off; so a difference is measured, and said.

A question is answered with the time of day; half of the round trip is what the answer may be wrong by.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from geomesh_p2p.core.messages import Fetch, Fetched, Request
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.transport import Libp2pTransport

CLOCK = "clock"
TOLERATED_SECONDS = 2.0
LOOK_SECONDS = 30.0
ANSWER_SECONDS = 3.0
_TIME = struct.Struct("<d")


@dataclass(frozen=True)
class Offset:
    """Their clock less ours, wrong by at most `error_seconds`."""

    seconds: float
    error_seconds: float

    @property
    def notable(self) -> bool:
        return abs(self.seconds) - self.error_seconds > TOLERATED_SECONDS

    def of(self, other: str) -> str:
        """In words, from this host's point of view."""
        where = "behind" if self.seconds > 0 else "ahead of"
        return f"this host's clock is {abs(self.seconds):.1f} s (give or take {self.error_seconds:.2g}) {where} that of {other}"


ADVICE = "set the clocks of both by NTP, for instance with chrony (training goes on, but logs cannot be compared)"


def answer_clock(fetch: Request, clock: Callable[[], float] = time.time) -> Fetched | None:
    """The answer to a question for the time, None if `fetch` is none."""
    if fetch.what != CLOCK:
        return None
    return Fetched(True, _TIME.pack(clock()), 0, 0, b"", 0)


async def measure(
    transport: Libp2pTransport, peer: PeerId, clock: Callable[[], float] = time.time, tries: int = 3
) -> Offset | None:
    """The best of a few questions, None if `peer` does not answer them."""
    best: Offset | None = None
    for _ in range(tries):
        asked, begun = clock(), time.monotonic()
        try:
            found = await transport.request(peer, Fetch(CLOCK, 0, b"", 0, 0), ANSWER_SECONDS)
        except Unreachable:
            return best
        took = time.monotonic() - begun
        if not found.found or len(found.header) != _TIME.size:
            return best
        (theirs,) = _TIME.unpack(found.header)
        if theirs != theirs or abs(theirs) > 1e12:
            return best
        offset = Offset(theirs - (asked + took / 2), took / 2)
        if best is None or offset.error_seconds < best.error_seconds:
            best = offset
    return best


class ClockWatch:
    """Which differences are news: one that is notable, and has changed by more than is tolerated since it was last said."""

    def __init__(self) -> None:
        self._said: dict[PeerId, float] = {}

    def news(self, peer: PeerId, site: str, offset: Offset) -> str:
        """A line to warn with, "" if there is nothing new."""
        before = self._said.get(peer)
        if not offset.notable:
            if before is not None:
                del self._said[peer]
                return f"clock: this host and {site} agree again within {TOLERATED_SECONDS:g} s"
            return ""
        if before is not None and abs(offset.seconds - before) - offset.error_seconds <= TOLERATED_SECONDS:
            return ""
        self._said[peer] = offset.seconds
        return f"clock: {offset.of(f'{site} ({peer[-8:]})')}: {ADVICE}"

    def keep(self, peers: set[PeerId]) -> None:
        """Forget all but `peers`."""
        self._said = {peer: seconds for peer, seconds in self._said.items() if peer in peers}


async def watch_clocks(
    transport: Libp2pTransport, acquaintances: Callable[[], dict[PeerId, str]], warn: Callable[[str, str], None]
) -> None:
    """Compare with every acquaintance (peer id to site name) now and then, until cancelled."""
    watch = ClockWatch()
    while True:
        known = acquaintances()
        watch.keep(set(known))
        for peer, site in known.items():
            offset = await measure(transport, peer)
            if offset is not None and (text := watch.news(peer, site, offset)):
                warn("clock", text)
        await asyncio.sleep(LOOK_SECONDS if known else 1.0)
