"""From what a leader knows of its members to what the planner is given."""

from __future__ import annotations

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core import codec
from geomesh_p2p.core.events import NeedPlan
from geomesh_p2p.core.forecast import Volume
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.log import LogState, RoundLog
from geomesh_p2p.core.messages import Heartbeat
from geomesh_p2p.core.plan import PlanInputs, Sites, Slot, WorkLeft, plan_round, replan_attempt
from geomesh_p2p.core.types import PeerId, Plan, StepReport

ALL_POSITIONS = 2**40
FIRST_TRY_ROUNDS, LAST_TRY_ROUNDS = 8, 64


class LeftOut:
    """Peers that plans leave out: their links are measured in exchanges alone, so each is tried again after a while, which
    doubles each time."""

    def __init__(self) -> None:
        self._waits: dict[PeerId, tuple[int, int]] = {}      # the round to try it in, and rounds until the try after that

    def due(self, round: int) -> frozenset[PeerId]:
        return frozenset(peer for peer, (again, _) in self._waits.items() if round >= again)

    def planned(self, round: int, among: frozenset[PeerId], members: frozenset[PeerId]) -> None:
        """The plan of `round` has taken `members` of those there are."""
        due = self.due(round)
        for peer in set(self._waits) - among | (members - due):
            self._waits.pop(peer, None)
        for peer in due | (among - members - set(self._waits)):
            wait = self._waits[peer][1] if peer in self._waits else FIRST_TRY_ROUNDS
            self._waits[peer] = round + wait, min(2 * wait, LAST_TRY_ROUNDS)


class LeadersPlanner:
    """Plans rounds for one leader. Pure but for `previous`, the plan it made last, which damps changes."""

    def __init__(self, run: RunConfig, layout: Layout) -> None:
        self.run = run
        self.volume = Volume(
            parameters=layout.parameters,
            payload_bytes=codec.payload_bytes(layout, run.codec),
            answer_bytes=codec.part_bytes(layout, run.codec, 0, layout.parameters),
        )
        self.previous: Plan | None = None
        self._left_out = LeftOut()

    def make(self, need: NeedPlan, beats: tuple[Heartbeat, ...], log: LogState) -> Plan:
        """The plan for `need`, whose members' newest heartbeats are `beats`. Raises ValueError, saying what is missing."""
        profiles = tuple(beat.profile for beat in beats if beat.profile is not None and beat.profile.peer in need.members)
        missing = set(need.members) - {profile.peer for profile in profiles}
        if missing:
            raise ValueError(f"no profile yet of {', '.join(sorted(missing))}")
        inputs = PlanInputs(
            slot=Slot(log.run, need.round, need.term, need.attempt, need.base),
            sites=Sites(
                profiles=profiles,
                links=tuple(link for beat in beats for link in beat.links),
                reports=tuple(
                    StepReport(beat.profile.peer, beat.step_batch, beat.step_seconds)
                    for beat in beats
                    if beat.profile is not None and beat.step_batch > 0
                ),
                view=log.voters,
                min_members=self.run.run.min_peers,
                try_again=self._left_out.due(need.round),
            ),
            work=WorkLeft(
                volume=self.volume,
                sequence_length=self.run.model.sequence_length,
                next_positions=RoundLog(log).next_ranges(ALL_POSITIONS),
                committed_tokens=log.tokens,
                last=need.round >= self.run.run.rounds,
            ),
            previous=need.previous or self.previous,
        )
        make = plan_round if need.previous is None else replan_attempt
        plan = make(inputs, self.run.planner, self.run.inner)
        if need.previous is None:
            self.previous = plan
            self._left_out.planned(need.round, frozenset(need.members), frozenset(plan.peers))
        return plan
