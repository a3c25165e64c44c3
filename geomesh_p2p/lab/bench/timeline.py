"""Rounds in virtual time: who trains what, for how long, and where each site's time goes. Nothing is trained here.

The plans are those of the product's planner, from the same figures that a leader would have: profiles measured at the start,
the median step of the last round, links measured by the transfers of the last exchange. What then really happens follows the
setting: other speeds, other rates, a noise that nobody planned for. A late site is closed as the protocol does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from geomesh_p2p.config import PlannerSection, RunConfig
from geomesh_p2p.core.ahead import goes_on
from geomesh_p2p.core.forecast import LinkTable, Volume, codec_seconds, folded_seconds
from geomesh_p2p.core.plan import PlanInputs, Sites, Slot, WorkLeft, lr_scale, plan_round
from geomesh_p2p.core.types import Assignment, Link, Plan, Range, StepReport, Term
from geomesh_p2p.lab.bench.clock import Moment, World
from geomesh_p2p.lab.bench.methods import Method
from geomesh_p2p.lab.bench.settings import Array
from geomesh_p2p.lab.whatif import sent_bytes
from geomesh_p2p.swarm.links import RATE_WEIGHT, RTT_WEIGHT

ENDLESS = 2**62
EVEN_ROUNDS = 3  # the last ones, which share what is left
_ROUNDING = 1e-9
MUCH_LEFT = 100     # rounds
ALL = "all"
"""The worker that trains what sites train together which exchange after every step."""


@dataclass(frozen=True)
class Part:
    """One site's part of a round, and where its time went (seconds that add up to the round's). `steps` were done, which may
    be fewer than planned; zero: it did not take part. `ahead_steps` of the next round were done, the last perhaps in part, when
    the update came. `deltas` were sent where there are no rounds; None: a part of a round."""

    site: str
    steps: int
    tokens: int
    compute: float
    straggler_idle: float
    wan_idle: float
    codec: float
    sent_bytes: float
    planned_finish: float
    ahead_steps: int = 0
    deltas: int | None = None

    @property
    def seconds(self) -> float:
        return self.compute + self.straggler_idle + self.wan_idle + self.codec


@dataclass(frozen=True)
class Stage:
    """A piece of a run: a round, or whatever lies between two validations. `begins` and `ends` are seconds since the first
    inner step, `tokens` what it added to the anchor."""

    number: int
    begins: float
    ends: float
    parts: tuple[Part, ...]
    tokens: int


@dataclass(frozen=True)
class Round(Stage):
    """`exchange_seconds` from the last finish to the commit. `plan` is what is trained; it may be by one worker for all sites,
    where that is the same. `changed`: while a change of the setting lasts."""

    plan: Plan
    exchange_seconds: float
    changed: bool = False

    def steps(self, site: str) -> int:
        """Inner steps that a member of the plan did."""
        return next((p.steps for p in self.parts if p.site == site), self.parts[0].steps)

    def ahead_steps(self, site: str) -> int:
        return next((p.ahead_steps for p in self.parts if p.site == site), 0)


@dataclass(frozen=True)
class Head:
    """What a member has done of a round when it begins: `steps`, the last of which takes `seconds` more."""

    steps: int = 0
    seconds: float = 0.0


def rounds(method: Method, run: RunConfig, volume: Volume, world: World, budget_tokens: int) -> Iterator[Round]:
    """The rounds of a method of kind `rounds` until `budget_tokens` are committed."""
    return _Leader(method, run, volume, world, budget_tokens).lead()


def foreseen(run: RunConfig, volume: Volume, world: World) -> Plan:
    """The plan of a round under the setting as it is at the start, if all its links are known and much is left to train."""
    leader = _Leader(Method("", ""), run, volume, world, MUCH_LEFT * run.planner.round_tokens)
    leader.rates = world.setting.rates * world.rate_scale
    return leader.plan(1)


def repeated(plan: Plan, run: RunConfig, volume: Volume, world: World, count: int) -> Iterator[Round]:
    """Rounds of one plan, under the setting as it is at the start."""
    clock = 0.0
    for number in range(1, count + 1):
        played = _play(plan, volume, run, world.at(number, 0.0), number, clock, plan.term.candidate)
        yield played
        clock = played.ends


def retold(plans: Iterable[Plan], run: RunConfig, volume: Volume, world: World) -> Iterator[Round]:
    """What becomes of `plans` that were made elsewhere, one after the other, under the setting as it is at the start."""
    clock, before, heads = 0.0, None, dict[str, Head]()
    for plan in plans:
        heads = {site: _head(before, plan, site, head) for site, head in heads.items()}
        moment = world.at(plan.round, 0.0)
        played, heads = _play_ahead(plan, volume, run, moment, plan.round, clock, plan.term.candidate, heads)
        yield played
        clock, before = played.ends, plan


def gradient_rounds(
    run: RunConfig, volume: Volume, world: World, budget_tokens: int, steps: int
) -> Iterator[Round]:
    """As `rounds`, with an exchange after every step: one worker with all sites' batches trains the same. A round is `steps`
    steps, so that there is something to validate."""
    names, batch = world.setting.names, run.planner.batch
    together = batch * len(names)
    uniform = run.model_copy(update={"planner": run.planner.model_copy(update={"inner_steps": 1})})
    one_step = Method("", "")
    clock, number, committed = 0.0, 1, 0
    while committed < budget_tokens:
        share = committed / budget_tokens
        single = _Leader(one_step, uniform, volume, world, budget_tokens).plan(1)
        played = _play(single, volume, run, world.at(number, share), number, 0.0, names[0])
        left = -(-(budget_tokens - committed) // (together * run.model.sequence_length))
        count = min(steps, left)
        start = committed // run.model.sequence_length
        member = replace(
            single.members[0], peer=ALL, site=ALL, batch=together, last_batch=together, inner_steps=count,
            ranges=(Range(start, start + count * together),), lr_scale=lr_scale(together, run.inner)[0],
        )  # fmt: skip
        tokens = count * together * run.model.sequence_length
        plan = replace(
            single, round=number, members=(member,), topology="gather", shares=(),
            committed_tokens=committed, planned_tokens=tokens,
        )  # fmt: skip
        parts = tuple(_times(part, count) for part in played.parts)
        yield Round(number, clock, clock + count * played.ends, parts, tokens, plan, played.exchange_seconds)
        clock, number, committed = clock + count * played.ends, number + 1, committed + tokens


def _times(part: Part, count: int) -> Part:
    scaled = {name: getattr(part, name) * count for name in
              ("steps", "tokens", "compute", "straggler_idle", "wan_idle", "codec", "sent_bytes")}  # fmt: skip
    return replace(part, **scaled)


class _Leader:
    def __init__(self, method: Method, run: RunConfig, volume: Volume, world: World, budget_tokens: int) -> None:
        self.method, self.run, self.volume, self.world, self.budget = method, run, volume, world, budget_tokens
        self.names = world.setting.names
        self.profiles = world.profiles()
        self.reports: tuple[StepReport, ...] = ()
        self.rates: Array | None = None
        self.rtts: Array = world.setting.rtts
        self.committed, self.position = 0, 0
        self.previous: Plan | None = None
        self.heads: dict[str, Head] = {}
        self.leader = self.names[0]

    def lead(self) -> Iterator[Round]:
        clock, number = 0.0, 1
        while self.budget - self.committed >= max(1, self.run.planner.round_tokens // 2) or number == 1:
            share = self.committed / self.budget
            moment = self.world.at(number, share)
            plan = self.plan(number)
            heads = {site: _head(self.previous, plan, site, head) for site, head in self.heads.items()}
            played, following = _play_ahead(plan, self.volume, self.run, moment, number, clock, self.leader, heads)
            played = replace(played, changed=self.world.changed(share))
            yield played
            self.learn(played, moment)
            self.heads = following
            clock, number = played.ends, number + 1

    def plan(self, number: int) -> Plan:
        left = self.budget - self.committed
        settings = self._of_what_is_left(left)
        if self.method.frozen and self.previous is not None and left >= self.previous.planned_tokens:
            return self._again(self.previous, number)
        # The leader's own votes and histories are the protocol's; here it is always the first site.
        inputs = PlanInputs(
            slot=Slot(b"", number, Term(1, self.leader), 1, b""),
            sites=Sites(self.profiles, self._links(), self.reports, min_members=self.run.run.min_peers),
            work=WorkLeft(
                self.volume,
                self.run.model.sequence_length,
                (Range(self.position, ENDLESS),),
                self.committed,
                left,
                last=settings.round_tokens >= left,
            ),
            previous=self.previous,
        )
        return plan_round(inputs, settings, self.run.inner)

    def _of_what_is_left(self, left: int) -> PlannerSection:
        """What is left is divided evenly: a last round of a few tokens would cost an exchange, and move the anchor by noise."""
        settings = self.run.planner
        usual = max(settings.round_tokens, self.previous.planned_tokens if self.previous else 0)
        rounds_left = max(1, round(left / usual))
        if settings.max_round_tokens is None:
            return settings.model_copy(update={"round_tokens": -(-left // rounds_left)})
        if rounds_left > EVEN_ROUNDS:
            return settings
        return settings.model_copy(update={"round_tokens": -(-left // rounds_left), "max_round_tokens": None})

    def _again(self, plan: Plan, number: int) -> Plan:
        members, start = [], self.position
        for member in plan.members:
            members.append(replace(member, ranges=(Range(start, start + member.sequences),), ahead=()))
            start += member.sequences
        return replace(plan, round=number, members=tuple(members), committed_tokens=self.committed, may_close=False)

    def _links(self) -> tuple[Link, ...] | LinkTable:
        """A site knows its round trips from the start, its rates from the first exchange on."""
        if self.rates is None:
            ends = [(i, j) for i in range(len(self.names)) for j in range(len(self.names)) if i != j]
            return tuple(Link(self.names[i], self.names[j], float(self.rtts[i, j]), 0.0) for i, j in ends)
        return LinkTable(self.rates, self.rtts, 0)

    def learn(self, played: Round, moment: Moment) -> None:
        self.previous = played.plan
        self.committed += played.tokens
        self.position = max(r.stop for member in played.plan.members for r in member.ranges)
        self.reports = tuple(
            StepReport(member.peer, member.batch, moment.step_seconds(self.names.index(member.site), member.batch))
            for member, part in zip(played.plan.members, played.parts, strict=True)
            if part.steps
        )
        if len(self.names) > 1:
            known = moment.rates if self.rates is None else self.rates
            with np.errstate(invalid="ignore"):                    # of the diagonal, which is infinite
                self.rates = known + RATE_WEIGHT * (moment.rates - known)
            np.fill_diagonal(self.rates, np.inf)
            self.rtts = self.rtts + RTT_WEIGHT * (moment.rtts - self.rtts)


def _head(before: Plan | None, plan: Plan, site: str, head: Head) -> Head:
    """What `plan` lets a site keep of what it did ahead after `before`."""
    old, mine = (next((m for m in one.members if m.site == site), None) if one else None for one in (before, plan))
    kept = old is not None and mine is not None and goes_on(old, head.steps, mine)
    return head if kept else replace(head, steps=0)


def _play(
    plan: Plan, volume: Volume, run: RunConfig, moment: Moment, number: int, begins: float, leader: str
) -> Round:
    return _play_ahead(plan, volume, run, moment, number, begins, leader, {})[0]


def _play_ahead(
    plan: Plan, volume: Volume, run: RunConfig, moment: Moment, number: int, begins: float, leader: str, heads: dict[str, Head]
) -> tuple[Round, dict[str, Head]]:
    """What becomes of a plan of which its members have done `heads`, and what they then have done of the next one. Each sends
    what it has as soon as it has it, also while others still train."""
    names = moment.setting.names
    sites = [names.index(member.site) for member in plan.members]
    deadline = plan.train_seconds + plan.grace_seconds if plan.may_close else math.inf
    done = [
        _trained(member, site, moment, deadline, heads.get(member.site, Head()))
        for member, site in zip(plan.members, sites, strict=True)
    ]
    finish = np.array([seconds for _, _, seconds in done])
    tokens = [sequences * run.model.sequence_length for _, sequences, _ in done]
    at = plan.peers.index(leader) if leader in plan.peers else 0
    pairs = np.ix_(sites, sites)
    links = LinkTable(moment.rates[pairs], moment.rtts[pairs], 0)
    folded = folded_seconds(links, volume, plan.topology, plan.shares, finish, at)
    end, last = float(folded.max()), float(finish.max())
    codec, sent = sum(codec_seconds(volume, plan.topology, len(sites))), sent_bytes(plan, volume).sum(axis=1)
    parts, following = [], {}
    for k, (member, site, (steps, _, _), count) in enumerate(zip(plan.members, sites, done, tokens, strict=True)):
        straggler, wan = last - float(finish[k]), end - last - codec
        step, head = moment.step_seconds(site, member.batch), Head()
        if member.ahead:
            early = min(member.ahead_steps, max(0, math.ceil((straggler + wan) / step - _ROUNDING)))
            head = Head(early, max(0.0, early * step - straggler - wan))
            following[member.site] = head
        busy = head.steps * step - head.seconds
        waited = min(straggler, busy)
        if head.steps:
            straggler, wan = straggler - waited, max(0.0, wan - (busy - waited))
        parts.append(Part(
            member.site, steps, count, float(finish[k]) + busy, straggler, wan, codec, float(sent[k]),
            member.finish_seconds, head.steps,
        ))  # fmt: skip
    return Round(number, begins, begins + end, tuple(parts), sum(tokens), plan, end - last), following


def _trained(member: Assignment, site: int, moment: Moment, deadline: float, head: Head) -> tuple[int, int, float]:
    """(steps, sequences, seconds) that a member really does, `head` included; closed at a step's end after `deadline`."""
    step, last = moment.step_seconds(site, member.batch), moment.step_seconds(site, member.last_batch)
    whole = member.inner_steps - 1 - head.steps
    if head.seconds + whole * step + last <= deadline:
        return member.inner_steps, member.sequences, head.seconds + whole * step + last
    more = min(whole, max(0 if head.steps else 1, math.ceil((deadline - head.seconds) / step)))
    return head.steps + more, (head.steps + more) * member.batch, head.seconds + more * step


@dataclass(frozen=True)
class Idle:
    """Shares of time, over sites and rounds; `fastest` of the site with the highest rate alone, `steady` from round 3 on."""

    straggler: float
    straggler_fastest: float
    straggler_steady: float
    wan: float
    wan_steady: float
    compute: float


STEADY_FROM_ROUND = 3


def idle_shares(played: Sequence[Stage], fastest: str) -> Idle:
    def share(what: str, parts: list[Part]) -> float:
        whole = sum(part.seconds for part in parts)
        return sum(getattr(part, what) for part in parts) / whole if whole else 0.0

    every = [part for one in played for part in one.parts]
    steady = [part for one in played if one.number >= STEADY_FROM_ROUND for part in one.parts] or every
    return Idle(
        straggler=share("straggler_idle", every),
        straggler_fastest=share("straggler_idle", [part for part in every if part.site == fastest]),
        straggler_steady=share("straggler_idle", steady),
        wan=share("wan_idle", every),
        wan_steady=share("wan_idle", steady),
        compute=share("compute", every),
    )


