"""Where this peer's time in a round goes. All times are this peer's own monotonic seconds.

A round lasts from the moment the last one was folded (or the peer became ready) until its own update is folded. Inside it
compute, data wait, straggler idle, WAN idle and codec are measured; control is what remains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geomesh_p2p.core.observations import PeerTimes
from geomesh_p2p.core.ports import InnerResult
from geomesh_p2p.core.types import Contribution, PeerId, Plan


@dataclass
class Stopwatch:
    """One round of one peer. Fill in as things happen; `times()` at the end."""

    opened: float
    plan: Plan | None = None
    planned: float = 0.0
    trained: float | None = None
    result: InnerResult | None = None
    contribution: Contribution | None = None
    codec_seconds: float = 0.0
    fold_seconds: float = 0.0
    reused: bool = False
    finished: dict[PeerId, float] = field(default_factory=dict)

    def plan_adopted(self, plan: Plan, now: float) -> None:
        self.plan, self.planned = plan, now

    def inner_steps_ended(self, result: InnerResult, contribution: Contribution, codec_seconds: float, now: float) -> None:
        """`now` is after the encoding, which took `codec_seconds`."""
        self.result, self.contribution, self.codec_seconds = result, contribution, codec_seconds
        self.trained = now - codec_seconds

    def member_finished(self, peer: PeerId, arrived: float, rtt_seconds: float) -> None:
        """A member's 'finished' arrived: it was sent half a round trip ago."""
        self.finished.setdefault(peer, arrived - rtt_seconds / 2)

    def times(self, folded: float) -> PeerTimes:
        """`folded`: when the update was applied, which took `fold_seconds` of codec work. The parts add up to `wall`."""
        wall = max(0.0, folded - self.opened)
        codec = self.codec_seconds + self.fold_seconds
        if self.result is None or self.trained is None:
            return PeerTimes(0.0, 0.0, 0.0, 0.0, min(codec, wall), max(0.0, wall - codec), wall)
        compute = self.result.seconds - self.result.data_wait_seconds
        encoded = self.trained + self.codec_seconds
        last = max([encoded, *self.finished.values()])
        straggler = last - encoded
        wan = max(0.0, folded - self.fold_seconds - last)
        rest = wall - compute - self.result.data_wait_seconds - straggler - wan - codec
        return PeerTimes(compute, self.result.data_wait_seconds, straggler, wan, codec, rest, wall)
