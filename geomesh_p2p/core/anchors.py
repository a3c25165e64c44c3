"""Whether all peers have the same anchor: what contributions say of their base, compared as rounds are committed.

Each contribution carries the hash of one part of its owner's anchor at the base of its round, another part each round, and
at the base of a snapshot round the hash of that whole state (anchor, outer momentum, where the log stood). So a value that
changed in one peer's anchor shows within ANCHOR_PARTS rounds, one in its momentum with the next snapshot.

Those that differ from the most are odd; if no value is that of the most, all are. An odd peer checks itself against its own
snapshots and the log before it trains again. An update that lists an odd peer's contribution stays valid: it is the mean of
what it lists, the same for all, and a delta made from a wrong anchor is a delta like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from geomesh_p2p.core.canonical import DIGEST_BYTES, Digest
from geomesh_p2p.core.events import CheckState
from geomesh_p2p.core.state import State
from geomesh_p2p.core.types import Contribution, PeerId, Update

ANCHOR_PARTS = 16
REMEMBERED_ROUNDS = 64

Saying = Literal["anchor_part", "state"]


def part_of(round: int, size: int) -> tuple[int, int, int]:
    """(number, start, stop) of the part of an anchor of `size` parameters that is hashed after `round`."""
    part = round % ANCHOR_PARTS
    return part, part * size // ANCHOR_PARTS, (part + 1) * size // ANCHOR_PARTS


def well_formed(contribution: Contribution) -> bool:
    return all(len(said) in (0, DIGEST_BYTES) for said in (contribution.anchor_part, contribution.state))


@dataclass(frozen=True)
class Tally:
    """What contributions say of one thing. `agreed` is what most say; empty if nobody says anything, or none is the most.
    `odd` are those that say something else, in order; `tied`: they are all, for none is the most."""

    agreed: Digest
    odd: tuple[PeerId, ...]
    tied: bool = False


def tally(contributions: Iterable[Contribution], of: Saying) -> Tally:
    said: dict[Digest, list[PeerId]] = {}
    for contribution in contributions:
        if value := getattr(contribution, of):
            said.setdefault(value, []).append(contribution.peer)
    if not said:
        return Tally(b"", ())
    most = max(len(peers) for peers in said.values())
    agreed = [value for value, peers in said.items() if len(peers) == most]
    if len(agreed) > 1:
        return Tally(b"", tuple(peer for peers in said.values() for peer in peers), True)
    return Tally(agreed[0], tuple(peer for value, peers in said.items() for peer in peers if value != agreed[0]))


def state_in_log(following: Update) -> Digest:
    """What the log says of the state at the base of `following`: what most of its contributors had; empty if it does not."""
    return tally(following.contributors, "state").agreed


class AnchorWatch:
    """One peer's comparing. `state.checking` is true while this peer makes sure of its own anchor."""

    def __init__(self, state: State) -> None:
        self.s = state
        self._own: dict[tuple[int, Saying], Digest] = {}
        self._agreed: dict[tuple[int, Saying], Digest] = {}
        self._rolled_back_at = self._checked_at = 0

    def rolled_back(self, round: int) -> None:
        """The update of `round` is a rollback: this peer is not ready before its anchor is the earlier one again (which may be
        before the replica hears of the round, while it catches up)."""
        self._rolled_back_at = round
        self.s.checking = self.s.checking or self._checked_at < round

    def hashed(self, round: int, of: Saying, value: Digest) -> None:
        """This peer's own anchor (or state) after `round`: it may be no contributor to the next one, and is compared too."""
        self._own[(round, of)] = value
        self._judge(round, of)

    def committed(self, update: Update) -> tuple[PeerId, ...]:
        """Compare what `update` lists; returns the odd peers."""
        s, base, odd = self.s, update.round - 1, set[PeerId]()
        self._own = {key: value for key, value in self._own.items() if key[0] > base - REMEMBERED_ROUNDS}
        self._agreed = {key: value for key, value in self._agreed.items() if key[0] > base - REMEMBERED_ROUNDS}
        for of in ("anchor_part", "state"):
            found = tally(update.contributors, of)
            if found.odd:
                s.note("mismatch", round=base, of=of, part=base % ANCHOR_PARTS, odd=found.odd, tied=found.tied)
                odd.update(found.odd)
            if found.agreed:
                self._agreed[(base, of)] = found.agreed
                self._judge(base, of)
        if s.me in odd:
            self._check()
        return tuple(sorted(odd))

    def _judge(self, round: int, of: Saying) -> None:
        own, agreed = self._own.get((round, of)), self._agreed.get((round, of))
        if own and agreed and own != agreed:
            self._check()

    def _check(self) -> None:
        if not self.s.checking:
            self.s.checking = True
            self.s.out.append(CheckState())

    def checked(self, round: int, outcome: str) -> None:
        """This peer's anchor after `round` is what the log makes of a state that the others agreed on."""
        self._checked_at = round
        if round >= self._rolled_back_at:
            self.s.checking = False
        self.s.note("checked", round=round, outcome=outcome)
        self._own = {key: value for key, value in self._own.items() if key[0] > round}
