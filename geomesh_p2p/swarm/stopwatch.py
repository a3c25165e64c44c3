"""Where this peer's time in a round goes. All times are this peer's own monotonic seconds.

A round lasts from the moment the last one was folded (or the peer became ready) until its own update is folded. Inside it
compute, data wait, straggler idle, WAN idle and codec are measured; control is what remains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geomesh_p2p.core.observations import PeerTimes
from geomesh_p2p.core.ports import LocalRound
from geomesh_p2p.core.types import PeerId, Plan


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


def times_of(watch: Stopwatch | None, opened: float, folded: float, fold_seconds: float) -> PeerTimes:
    """The round from `opened` until its update was `folded`, which took `fold_seconds`; `watch` None: no member of it.

    The parts add up to `wall`; only `control` is a remainder.
    """
    wall = max(0.0, folded - opened)
    if watch is None or watch.local is None:
        codec = min(fold_seconds, wall)
        return PeerTimes(0.0, 0.0, 0.0, 0.0, codec, wall - codec, wall)
    local = watch.local
    codec = local.codec_seconds + fold_seconds
    compute = local.result.seconds - local.result.data_wait_seconds
    last = max([watch.encoded, *watch.finished.values()])
    straggler = last - watch.encoded
    wan = max(0.0, folded - fold_seconds - last)
    rest = wall - compute - local.result.data_wait_seconds - straggler - wan - codec
    return PeerTimes(compute, local.result.data_wait_seconds, straggler, wan, codec, rest, wall)
