"""Where this peer's time in a round goes. All times are this peer's own monotonic seconds.

A round lasts from the moment the last one was folded (or the peer became ready) until its own update is folded. Inside it
compute, data wait, straggler idle, WAN idle and codec are measured; control is what remains. What is trained ahead, of the next
round, is compute of the round in which it is done, and idle is only who has nothing to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geomesh_p2p.core.observations import PeerTimes
from geomesh_p2p.core.ports import LocalRound
from geomesh_p2p.core.types import PeerId, Plan


@dataclass(frozen=True)
class Ahead:
    """A time in which the next round's steps were done, and how much of it went into waiting for data."""

    begun: float
    ended: float
    data_wait_seconds: float

    def within(self, begin: float, end: float) -> float:
        return max(0.0, min(self.ended, end) - max(self.begun, begin))


@dataclass
class Stopwatch:
    """One round in which this peer is a member. Fill in as things happen; `times_of` at the end."""

    plan: Plan
    planned: float
    encoded: float = 0.0
    local: LocalRound | None = None
    reused: bool = False
    finished: dict[PeerId, float] = field(default_factory=dict)

    def inner_steps_ended(self, local: LocalRound, now: float) -> None:
        """`now` is right after the encoding."""
        self.local, self.encoded = local, now

    def member_finished(self, peer: PeerId, arrived: float, rtt_seconds: float) -> None:
        """A member's 'finished' arrived: it was sent half a round trip ago."""
        self.finished.setdefault(peer, arrived - rtt_seconds / 2)


def times_of(
    watch: Stopwatch | None, opened: float, folded: float, fold_seconds: float, ahead: Sequence[Ahead] = ()
) -> PeerTimes:
    """The round from `opened` until its update was `folded`, which took `fold_seconds`; `watch` None: no member of it.
    `ahead` is what was trained in the meantime of the next round, or of this one before its plan was here.

    The parts add up to `wall`; only `control` is a remainder.
    """
    wall = max(0.0, folded - opened)
    data_wait = sum(one.data_wait_seconds for one in ahead)
    compute = sum(one.ended - one.begun for one in ahead) - data_wait
    if watch is None or watch.local is None:
        codec = min(fold_seconds, wall)
        return PeerTimes(compute, data_wait, 0.0, 0.0, codec, wall - codec - compute - data_wait, wall)
    local = watch.local
    codec = local.codec_seconds + fold_seconds
    # What was done ahead of this round is counted where it was done.
    own_wait = local.result.data_wait_seconds - local.ahead_data_wait_seconds
    compute += local.result.seconds - local.ahead_seconds - own_wait
    data_wait += own_wait
    last = max([watch.encoded, *watch.finished.values()])
    straggler = last - watch.encoded - sum(one.within(watch.encoded, last) for one in ahead)
    over = folded - fold_seconds
    wan = max(0.0, over - last - sum(one.within(last, over) for one in ahead))
    rest = wall - compute - data_wait - straggler - wan - codec
    return PeerTimes(compute, data_wait, straggler, wan, codec, rest, wall)
