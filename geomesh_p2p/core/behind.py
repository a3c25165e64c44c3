"""Catching up: what others claim to have committed beyond this peer's own round, whether it is true, and when to fetch it.

A claim costs its peer's word nothing and would cost this one the round it is at work on. So it is proved first, beside that
work and in few bytes: whoever claims shows the update that follows this peer's log, or a snapshot of a later round. Whoever
shows neither, or shows something that leads nowhere, is asked again after a while that doubles each time; from the second time
on it is named, and what it says of rounds is not believed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.events import CatchUp, ProveClaim
from geomesh_p2p.core.state import State
from geomesh_p2p.core.types import PeerId

ASKED_AT_ONCE = 3
LONGEST_DOUBT_SECONDS = 60.0
NAMED_FROM = 2
"""Failures: one may be a heartbeat that was faster than its sender's disk."""
SILENT_FROM = 6
CLAIMS_KEPT = 1024

Proof = Literal["proved", "refuted", "silent"]


@dataclass
class Claim:
    """`start_at`: when to act on it. `proved_from`: the round of this peer from which it was shown that the log goes on. One
    that has failed gives way to whatever its peer says next."""

    round: int
    digest: Digest
    start_at: float
    proved_from: int = -1
    failed: bool = False


@dataclass
class Doubt:
    """How often a peer's claim could not be followed, how often it did not answer, and until when it is not asked again."""

    failures: int = 0
    silences: int = 0
    until: float = float("-inf")


class Behind:
    """One CatchUp is under way at a time (`state.catching_up`); `round` is where it leads.

    A peer that is one round behind and holds, or is exchanging, that round's update waits a little: the commit, a small
    message, is probably on its way."""

    def __init__(self, state: State) -> None:
        self.s = state
        self.round = state.round
        self.claims: dict[PeerId, Claim] = {}
        self.doubts: dict[PeerId, Doubt] = {}
        self.asking: set[PeerId] = set()

    # -------------------------------------------------------------- what is claimed

    def learn(self, peer: PeerId, round: int, digest: Digest, soon_seconds: float, proved: bool = False) -> None:
        """`peer` says that it has committed `round` with `digest`. `soon_seconds`: for how long the next round's commit, or its
        body, may still arrive by itself. `proved`: it came with that round's update, which follows this peer's log."""
        s = self.s
        if round <= s.round:
            self.claims.pop(peer, None)
            known = s.log.digest_of(round)
            if known is not None and digest and known != digest:
                s.diverged(round, digest, peer)
            return
        wait = soon_seconds if round == s.round + 1 else 0.0
        claim = self.claims.get(peer)
        if claim is None:
            self._make_room()
            claim = self.claims[peer] = Claim(round, digest, s.now + wait)
        if round >= claim.round or claim.failed:
            claim.round, claim.digest, claim.failed = round, digest, False
        claim.start_at = min(claim.start_at, s.now + wait)
        if proved:
            claim.proved_from = s.round

    def _make_room(self) -> None:
        if len(self.claims) >= CLAIMS_KEPT:
            for peer in [peer for peer in self.claims if peer not in self.s.peers]:
                self.forget(peer)

    def forget(self, peer: PeerId) -> None:
        self.claims.pop(peer, None)
        self.doubts.pop(peer, None)

    def believes(self, peer: PeerId) -> bool:
        """Whether what `peer` says of rounds counts, as far as it could be followed so far."""
        doubt = self.doubts.get(peer)
        return doubt is None or (doubt.failures < NAMED_FROM and doubt.silences < SILENT_FROM)

    def wait(self, round: int, seconds: float) -> None:
        """What this peer is at brings the update of `round`, by then."""
        for claim in self.claims.values():
            if claim.round == round:
                claim.start_at = self.s.now + seconds

    def now(self) -> None:
        """Do not wait for the commit any longer."""
        for claim in self.claims.values():
            claim.start_at = min(claim.start_at, self.s.now)

    # -------------------------------------------------------------- is it true?

    def _ready_at(self, peer: PeerId) -> float:
        claim, doubt = self.claims[peer], self.doubts.get(peer)
        return claim.start_at if doubt is None else max(claim.start_at, doubt.until)

    def _settle(self) -> None:
        """Claims that have come true by now, by whatever way, are none, and speak for who made them."""
        for peer in [peer for peer, claim in self.claims.items() if claim.round <= self.s.round]:
            self.forget(peer)

    def ask(self) -> None:
        """Have claims proved for which it is time, a few at once, those of the most trusted first."""
        self._settle()
        s = self.s
        if s.catching_up or any(claim.proved_from == s.round for claim in self.claims.values()):
            return
        due = [peer for peer in self.claims if peer not in self.asking and self._ready_at(peer) <= s.now]
        for peer in sorted(due, key=self._trust)[: ASKED_AT_ONCE - len(self.asking)]:
            self.asking.add(peer)
            s.out.append(ProveClaim(peer, self.claims[peer].round, s.log.state))

    def _trust(self, peer: PeerId) -> tuple[int, int, PeerId]:
        doubt = self.doubts.get(peer, Doubt())
        return doubt.failures, doubt.silences, peer

    def answered(self, peer: PeerId, base: int, proof: Proof) -> None:
        """What `peer` showed when asked, of what follows round `base`."""
        self.asking.discard(peer)
        claim = self.claims.get(peer)
        if claim is None or base != self.s.round:
            return
        if proof == "proved":
            claim.proved_from = base
        elif proof == "silent":
            doubt = self.doubts.setdefault(peer, Doubt())
            doubt.silences += 1
            doubt.until = self.s.now + self.s.timing.retry_seconds
            if doubt.silences == SILENT_FROM:
                self._name(peer, claim)
        else:
            self._doubt(peer, claim)

    def _doubt(self, peer: PeerId, claim: Claim) -> None:
        s = self.s
        doubt = self.doubts.setdefault(peer, Doubt())
        doubt.failures += 1
        seconds = min(s.timing.retry_seconds * 2 ** min(doubt.failures - 1, 16), LONGEST_DOUBT_SECONDS)
        doubt.until, claim.proved_from, claim.failed = s.now + seconds, -1, True
        if doubt.failures == NAMED_FROM:
            self._name(peer, claim)

    def _name(self, peer: PeerId, claim: Claim) -> None:
        self.s.note("unproved", peer_id=peer, peer_site=self.s.site_of(peer), round=self.s.round, claimed=claim.round)

    # -------------------------------------------------------------- getting there

    def _proved(self) -> dict[PeerId, Claim]:
        s = self.s
        return {p: c for p, c in self.claims.items() if c.proved_from == s.round and self._ready_at(p) <= s.now}

    def due(self) -> bool:
        self._settle()
        return not self.s.catching_up and bool(self._proved())

    def start(self) -> None:
        s, proved = self.s, self._proved()
        s.catching_up = True
        target = max(proved.values(), key=lambda claim: (claim.round, claim.digest))
        self.round = target.round
        equals = {
            peer for peer, seen in s.peers.items()
            if seen.beat.round >= target.round and s.alive(peer) and self.believes(peer) and peer not in proved
        }  # fmt: skip
        s.out.append(CatchUp(target.round, target.digest, (*sorted(proved, key=self._trust), *sorted(equals))))

    def failed(self) -> None:
        """Nobody asked could help: those who claim as much must show it again, after a while."""
        self.s.catching_up = False
        for peer, claim in list(self.claims.items()):
            if claim.round >= self.round and claim.proved_from == self.s.round:
                self._doubt(peer, claim)

    def next_deadline(self) -> float:
        if self.s.catching_up:
            return float("inf")
        of = [peer for peer, claim in self.claims.items() if claim.proved_from == self.s.round]
        if not of and len(self.asking) < ASKED_AT_ONCE:
            of = [peer for peer in self.claims if peer not in self.asking]
        return min(map(self._ready_at, of), default=float("inf"))
