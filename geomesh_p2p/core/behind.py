"""Catching up: what this peer has heard of rounds beyond its own, and when to fetch them."""

from __future__ import annotations

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.events import CatchUp
from geomesh_p2p.core.state import State
from geomesh_p2p.core.types import PeerId


class Behind:
    """The newest round heard of. One CatchUp is under way at a time (`state.catching_up`).

    A peer that is one round behind and holds, or is exchanging, that round's update waits a little: the commit, a small
    message, is probably on its way."""

    def __init__(self, state: State) -> None:
        self.s = state
        self.round = state.round
        self.digest: Digest = state.log.digest
        self.sources: set[PeerId] = set()
        self.start_at = float("inf")

    def learn(self, peer: PeerId, round: int, digest: Digest, soon: bool) -> None:
        """`peer` has committed `round` with `digest`. `soon`: its commit may still arrive by itself."""
        s = self.s
        if round <= s.round:
            known = s.log.digest_of(round)
            if known is not None and digest and known != digest:
                s.diverged(round, digest, peer)
            return
        if round > self.round or self.round <= s.round:
            self.round, self.digest, self.sources = round, digest, set()
        self.sources.add(peer)
        wait = 2 * s.timing.retry_seconds if soon and round == s.round + 1 else 0.0
        self.start_at = min(self.start_at, s.now + wait)

    def now(self) -> None:
        """Do not wait for the commit any longer."""
        if self.round > self.s.round:
            self.start_at = min(self.start_at, self.s.now)

    def due(self) -> bool:
        if self.round <= self.s.round:
            self.start_at = float("inf")
        return not self.s.catching_up and self.s.now >= self.start_at

    def start(self) -> None:
        s = self.s
        s.catching_up = True
        self.start_at = float("inf")
        sources = {peer for peer, seen in s.peers.items() if seen.beat.round >= self.round and s.alive(peer)} | self.sources
        s.out.append(CatchUp(self.round, self.digest, tuple(sorted(sources))))

    def failed(self) -> None:
        """Nobody asked could help: try again in a while, from whoever is there then."""
        self.s.catching_up = False
        self.start_at = self.s.now + self.s.timing.retry_seconds

    def next_deadline(self) -> float:
        return float("inf") if self.s.catching_up else self.start_at
