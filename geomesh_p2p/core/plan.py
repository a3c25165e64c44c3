"""The planner: measured speeds, links and the data that is left -> who trains what in a round, with a reason for each number.

Pure: same inputs, same plan, in whatever order they are listed. Which limit gives way to which, where they clash:
memory > steps (least, most, ratio between members) > tokens a round > share of the exchange. What cannot be met is stated
as a reason, never forced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from geomesh_p2p.config import InnerSection, PlannerSection
from geomesh_p2p.core import reasons
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.forecast import Exchange, LinkTable, Volume, choose_exchange, equal_exchange, step_times
from geomesh_p2p.core.log import first_positions, is_quorum, joined, merged
from geomesh_p2p.core.search import IDLE_AIM, TOKEN_SLACKS, Schedule, Work, evaluate, search
from geomesh_p2p.core.types import Assignment, Bystander, Link, PeerId, Plan, Profile, Range, StepReport, Term
from geomesh_p2p.core.windows import Constraints, Limits, Members, knee, options

HYSTERESIS = 0.10  # batch, topology and shares change only for a gain above this
OLD_PLAN_IDLE = 0.01  # the steps of the last round stand as long as they leave no more idle time than this
SPEED_CHANGE = 0.15  # a site whose steps changed more than this is planned without regard to its last batch
SLOW_WAY = 0.5    # of the median rate: a way slower than this is named
EXCHANGE_SLACK = 0.03  # a round that was lengthened for its exchange stands while that takes no more than this above its share
LONGER = 1.1      # rounds are lengthened by this, or by its powers
SITE_GAIN = 0.02  # a site with slow links is left out if the round gains more than this without it
STEPS_GAIN = 0.02  # a round is made shorter for a site that can make no more steps if it gains more than this
GRACE_SHARE = 0.2  # of the training time, on top of planner.grace_seconds
LR_SCALES = (0.5, 2.0)
AHEAD_MARGIN = 1.5  # of the time from the last finish to the next plan, so much may be trained ahead, and at most
AHEAD_SHARE = 0.8   # of a member's steps
PLANNING_SECONDS = 0.2


# ---------------------------------------------------------------- what the planner is given


@dataclass(frozen=True)
class Slot:
    """Which attempt of which round is planned."""

    run: Digest
    round: int
    term: Term
    attempt: int
    base: Digest


@dataclass(frozen=True)
class Sites:
    """The peers to plan for, one profile each; their links and the steps of their last round as far as known (a table of links
    holds all of them, in the order of the sites' names). The members of the plan contain a quorum of `view` if `profiles` do,
    and are at least `min_members`. Those to `try_again` are not left out for their links, which may be better by now, unless
    the round would more than double for it."""

    profiles: tuple[Profile, ...]
    links: tuple[Link, ...] | LinkTable = ()
    reports: tuple[StepReport, ...] = ()
    view: tuple[PeerId, ...] = ()
    min_members: int = 1
    try_again: frozenset[PeerId] = frozenset()


@dataclass(frozen=True)
class WorkLeft:
    """What there is to train and to send. `next_positions` are the lowest ranges of the stream that are not credited, more
    than a round can use; `budget_tokens` is what may still be trained in all, None without a limit. `last`: none follows."""

    volume: Volume
    sequence_length: int
    next_positions: tuple[Range, ...]
    committed_tokens: int = 0
    budget_tokens: int | None = None
    last: bool = False


@dataclass(frozen=True)
class PlanInputs:
    """`previous` is the plan of the last committed round; for a further attempt, the plan of the attempt before."""

    slot: Slot
    sites: Sites
    work: WorkLeft
    previous: Plan | None = None


# ---------------------------------------------------------------- a fresh round


def plan_round(inputs: PlanInputs, settings: PlannerSection, inner: InnerSection) -> Plan:
    """The plan of a fresh round. Raises ValueError if there is no profile, nothing left in the budget, or fewer next
    positions than the round needs."""
    ground = _Ground(inputs, settings)
    everybody = tuple(range(len(ground.times)))
    if settings.mode != "planned":
        schedule = ground.evaluated(everybody, [_configured(ground, i) for i in everybody], (1, settings.max_steps))
        why = [reasons.configured(settings)] * len(everybody)
        return _assembled(ground, inner, schedule, why, ())
    free = ground.search(everybody)
    dropped = _slow_links(ground, free)
    if dropped:
        free = ground.search(tuple(i for i in everybody if i not in dropped))
    if ground.lengthen(free):
        free = ground.search(free.members)
    free = _without_waiting_for_steps(ground, free)
    schedule, kept = _steady(ground, free)
    bystanders = tuple(
        Bystander(site.site, dropped.get(i) or reasons.too_slow(site, schedule))
        for i, site in enumerate(ground.times)
        if i not in schedule.members
    )
    why = [
        reasons.member(ground.times[i], work, schedule, ground.limits, kept.get(i, "nothing"))
        for i, work in zip(schedule.members, schedule.works, strict=True)
    ]
    return _assembled(ground, inner, schedule, why, bystanders)


class _Ground:
    """The inputs in site order, and what is computed from them more than once."""

    def __init__(self, inputs: PlanInputs, settings: PlannerSection) -> None:
        if not inputs.sites.profiles:
            raise ValueError("sites.profiles is empty: nobody to plan for")
        self.inputs, self.settings = inputs, settings
        profiles = sorted(inputs.sites.profiles, key=lambda profile: profile.site)
        reports = {report.peer: report for report in sorted(inputs.sites.reports, key=lambda r: (r.peer, r.batch, r.seconds))}
        self.times = tuple(step_times(profile, reports.get(profile.peer)) for profile in profiles)
        self.peers = tuple(profile.peer for profile in profiles)
        known = inputs.sites.links
        self.links = known if isinstance(known, LinkTable) else LinkTable.of(self.peers, known)
        self.round_tokens = settings.round_tokens
        self._needs_quorum = is_quorum(self.peers, inputs.sites.view)
        self._exchanges: dict[Members, Exchange] = {}

    def lengthen(self, schedule: Schedule) -> bool:
        """Whether rounds are to be longer than that of `schedule`, because its exchange takes too much of it. They grow by
        whole steps of LONGER, so that links that are measured anew each round do not change them."""
        settings, seconds = self.settings, self.exchange(schedule.members).seconds
        share = max(settings.exchange_share, 1e-3)
        idle = self.idle_exchange(schedule.members, schedule.seconds)
        if settings.max_round_tokens is None or idle <= share * (idle + schedule.seconds):
            return False
        needed = self.limits.training_for(seconds, share) / schedule.seconds * schedule.sequences
        needed *= self.inputs.work.sequence_length
        steps = math.ceil(math.log(needed / settings.round_tokens, LONGER) - 1e-9)
        longer = min(settings.max_round_tokens, math.ceil(settings.round_tokens * LONGER**steps))
        if longer <= self.round_tokens:
            return False
        self.aim(longer)
        return True

    def aim(self, round_tokens: int) -> None:
        self.round_tokens = round_tokens
        del self.limits

    def too_short(self, same: Schedule, free: Schedule) -> bool:
        """Whether `same`, of fewer tokens than `free`, was made for a shorter exchange than it has: its links are known better
        now, or have changed."""
        shorter = same.sequences * math.sqrt(LONGER) < free.sequences
        most = self.settings.exchange_share * (1 + EXCHANGE_SLACK)
        idle = self.idle_exchange(same.members, same.seconds)
        return shorter and self.settings.max_round_tokens is not None and idle > most * (idle + same.seconds)

    @cached_property
    def limits(self) -> Limits:
        work, settings = self.inputs.work, self.settings
        budget = self.round_tokens if work.budget_tokens is None else work.budget_tokens
        if budget < 1:
            raise ValueError(f"work.budget_tokens is {budget}: nothing is left to train")
        critical = settings.critical_batch_tokens
        return Limits(
            min_steps=settings.min_steps,
            max_steps=max(settings.max_steps, settings.min_steps),
            steps_ratio=max(1.0, settings.max_steps_ratio),
            sequences=max(1, min(self.round_tokens, budget) // work.sequence_length),
            exact=work.budget_tokens is not None and budget <= self.round_tokens,
            critical_batch=None if critical is None else critical / work.sequence_length,
            ahead_share=AHEAD_SHARE if self.overlaps else 0.0,
        )

    @property
    def overlaps(self) -> bool:
        return self.settings.overlap == "delayed" and not self.inputs.work.last

    def allowed(self, members: Members) -> bool:
        peers = [self.peers[i] for i in members]
        if len(peers) < min(self.inputs.sites.min_members, len(self.peers)):
            return False
        return not self._needs_quorum or is_quorum(peers, self.inputs.sites.view)

    def exchange(self, members: Members) -> Exchange:
        if members not in self._exchanges:
            peers, links, volume = [self.peers[i] for i in members], self.links.only(members), self.inputs.work.volume
            candidate, previous, named = self.inputs.slot.term.candidate, self.inputs.previous, self.settings.topology
            leader = peers.index(candidate) if candidate in peers else None
            if self.settings.mode == "planned":
                last = (previous.topology, previous.shares) if previous and list(previous.peers) == peers else None
                wanted = None if named == "auto" else named
                found = choose_exchange(links, volume, leader, wanted, last, HYSTERESIS)
            else:
                found = equal_exchange(links, volume, leader, "gather" if named == "auto" else named)
            self._exchanges[members] = found
        return self._exchanges[members]

    def slowest(self, members: Members) -> str:
        """The way that is much slower than most, if there is one, in words."""
        links = self.links.only(members)
        if len(links) < 2:
            return ""
        rates = links.rates[~np.eye(len(links), dtype=bool)]
        source, target = divmod(int(np.argmin(links.rates)), len(links))
        if rates.min() > SLOW_WAY * float(np.median(rates)):
            return ""
        sites = [self.times[i].site for i in members]
        return f"{sites[source]} to {sites[target]}, {rates.min() * 8 / 1e6:.3g} Mbit/s"

    def search(self, among: Members, batches: Mapping[int, int] | None = None) -> Schedule:
        """The best schedule of the sites `among`; those in `batches` keep the batch given there."""
        pinned = batches or {}
        times = [self.times[i] for i in among]
        choices = [np.array([pinned[i]]) if i in pinned else options(self.times[i]) for i in among]
        constraints = Constraints(
            exchange=lambda members: self.exchange(tuple(among[k] for k in members)).seconds,
            allowed=lambda members: self.allowed(tuple(among[k] for k in members)),
        )
        found = search(times, choices, self.limits, constraints)
        return replace(found, members=tuple(among[k] for k in found.members))

    def idle_exchange(self, members: Members, train_seconds: float) -> float:
        return float(self.limits.idle_exchange(self.exchange(members).seconds, train_seconds))

    def begun(self, site: int, work: Work) -> tuple[Range, ...]:
        """What the plan before reserved for a site to train ahead, as the first positions of its `work`; nothing if that has
        another batch. It may have done all of it, or none."""
        previous, slot = self.inputs.previous, self.inputs.slot
        before = previous.of(self.peers[site]) if previous is not None and previous.round == slot.round - 1 else None
        if before is None or before.batch != work.batch:
            return ()
        found = first_positions(before.ahead, min(before.ahead_steps, work.steps - 1) * work.batch)
        return () if without(found, self.inputs.work.next_positions) else found

    def ahead(self, site: int, work: Work, members: Members) -> int:
        """Steps of the next round that a site may do while this one's update is on its way."""
        if not self.overlaps:
            return 0
        most = int(AHEAD_SHARE * work.steps)
        if self.links.only(members).guessed:  # the exchange may take any time
            return most
        wait = AHEAD_MARGIN * (self.exchange(members).seconds + PLANNING_SECONDS)
        return min(math.ceil(wait / self.times[site].step(work.batch)), most)

    def evaluated(self, members: Members, works: Sequence[Work], window: tuple[int, int]) -> Schedule:
        return evaluate(self.times, members, works, window, self.limits, self.exchange(members).seconds)


def _slow_links(ground: _Ground, schedule: Schedule) -> dict[int, str]:
    """Sites without which a sequence costs less, because the others then exchange sooner: {index: reason}.

    Tried one after the other: the two ends of the slowest pair and the site that trains least. The rest is taken to train
    as fast as in `schedule`."""
    rates = {i: work.sequences / schedule.seconds for i, work in zip(schedule.members, schedule.works, strict=True)}
    payload = ground.inputs.work.volume.payload_bytes

    def cost(members: Members) -> float:
        return 1 / sum(rates[i] for i in members) + ground.idle_exchange(members, schedule.seconds) / schedule.sequences

    kept, dropped = schedule.members, dict[int, str]()
    bearable = ground.idle_exchange(kept, schedule.seconds) <= schedule.seconds
    tried = {i for i in kept if ground.peers[i] in ground.inputs.sites.try_again} if bearable else set()
    while len(kept) > 1 and ground.idle_exchange(kept, schedule.seconds) > SITE_GAIN * schedule.seconds:
        pairs = ground.links.only(kept)
        slowest = int(np.argmax(payload / pairs.rates + pairs.rtts / 2))
        candidates = {kept[slowest // len(kept)], kept[slowest % len(kept)], min(kept, key=lambda i: (rates[i], i))}
        rest = [tuple(i for i in kept if i != out) for out in sorted(candidates - tried)]
        rest = [members for members in rest if ground.allowed(members)]
        if not rest:
            break
        best = min(rest, key=cost)
        gain = 1 - cost(best) / cost(kept)
        if gain <= SITE_GAIN:
            break
        (out,) = set(kept) - set(best)
        dropped[out] = reasons.slow_links(ground.exchange(kept).seconds, ground.exchange(best).seconds, gain)
        kept = best
    return dropped


def _without_waiting_for_steps(ground: _Ground, schedule: Schedule) -> Schedule:
    """A shorter round instead of `schedule` if a sequence is cheaper in it: a site that can make no more steps waits for the
    rest of a longer one."""
    limits, aim = ground.limits, ground.round_tokens
    sites = [
        (work, ground.times[i].finish(work.batch, work.steps, work.last))
        for i, work in zip(schedule.members, schedule.works, strict=True)
    ]
    full = min((finish for work, finish in sites if work.steps == limits.max_steps), default=schedule.seconds)
    if limits.exact or full >= (1 - IDLE_AIM) * schedule.seconds:
        return schedule
    sequences = sum(work.sequences * min(1.0, full / finish) for work, finish in sites)
    ground.aim(math.floor(sequences) * ground.inputs.work.sequence_length)
    shorter = ground.search(schedule.members)
    if shorter.objective < (1 - STEPS_GAIN) * schedule.objective:
        return shorter
    ground.aim(aim)
    return schedule


def _steady(ground: _Ground, free: Schedule) -> tuple[Schedule, dict[int, reasons.Kept]]:
    """`free`, or what the last round did if that is nearly as good: steps too while it leaves hardly any idle time, else
    its batches alone, except those of sites whose speed has changed. Also says what each site keeps."""
    previous, limits = ground.inputs.previous, ground.limits
    if previous is None or limits.exact:
        return free, {}
    assigned = {i: previous.of(ground.peers[i]) for i in free.members}
    old = {i: a for i, a in assigned.items() if a and a.inner_steps and a.batch <= ground.times[i].max_batch}
    enough = free.objective * (1 + HYSTERESIS)
    if len(old) == len(free.members) == len(previous.members):
        works = [Work(a.batch, a.inner_steps, a.last_batch) for a in old.values()]
        least, most = min(work.steps for work in works), max(work.steps for work in works)
        within = limits.min_steps <= least and most <= min(limits.max_steps, least * limits.steps_ratio)
        same = ground.evaluated(free.members, works, (least, most))
        aim = free.sequences * (1 - TOKEN_SLACKS[-1]) <= same.sequences <= max(limits.sequences, free.sequences)
        if within and aim and same.idle <= OLD_PLAN_IDLE and same.objective <= enough and not ground.too_short(same, free):
            return same, dict.fromkeys(old, "steps")
    pinned = {}
    for i, a in old.items():
        change = ground.times[i].finish(a.batch, a.inner_steps, a.last_batch) / max(a.finish_seconds, 1e-9)
        if abs(change - 1) <= SPEED_CHANGE:
            pinned[i] = a.batch
    if pinned:
        same = ground.search(free.members, pinned)
        # With another batch, what was trained ahead would be lost: a little more idle time is the better choice.
        idle = 2 * IDLE_AIM if ground.overlaps else IDLE_AIM
        if same.members == free.members and same.objective <= enough and same.idle <= max(idle, free.idle):
            return same, dict.fromkeys(pinned, "batch")
    return free, {}


def _configured(ground: _Ground, site: int) -> Work:
    """Modes uniform and fixed: batch and steps as the run file says, as far as memory and the token budget go."""
    settings, times = ground.settings, ground.times
    if settings.mode == "fixed":
        wanted = [settings.fixed.get(t.site, (settings.batch, settings.inner_steps)) for t in times]
        wanted = [(min(batch, t.max_batch), steps) for (batch, steps), t in zip(wanted, times, strict=True)]
    else:
        wanted = [(min(settings.batch, *(t.max_batch for t in times)), settings.inner_steps)] * len(times)
    batch, steps = wanted[site]
    total, budget = sum(b * h for b, h in wanted), ground.inputs.work.budget_tokens
    if budget is None or total * ground.inputs.work.sequence_length <= budget:
        return Work(batch, steps, batch)
    left = budget // ground.inputs.work.sequence_length
    return Work.of(batch, max(1, batch * steps * left // total))


# ---------------------------------------------------------------- a further attempt at a round


def replan_attempt(inputs: PlanInputs, settings: PlannerSection, inner: InnerSection) -> Plan:
    """The next attempt at the round of `inputs.previous`, with exactly the peers of `inputs.sites.profiles` as members.

    Who was a member keeps batch, steps and ranges, so that a contribution already made stands; topology and shares are
    computed anew. A member that was not gets fresh ranges, and no more work than the round's length. Raises ValueError if
    the slot is not one of the same round and base with a later (term, attempt).
    """
    previous, slot = inputs.previous, inputs.slot
    if previous is None or (slot.round, slot.base) != (previous.round, previous.base):
        raise ValueError("a further attempt needs the plan of the attempt before, of the same round and base")
    if (slot.term, slot.attempt) <= (previous.term, previous.attempt):
        raise ValueError(f"attempt {slot.attempt} does not follow attempt {previous.attempt} in term {previous.term.number}")
    ground = _Ground(inputs, settings)
    members = tuple(range(len(ground.times)))
    old = [previous.of(peer) for peer in ground.peers]
    works = [
        Work(a.batch, a.inner_steps, a.last_batch) if a else _newcomer(ground, i, previous)
        for i, a in zip(members, old, strict=True)
    ]
    steps = [work.steps for work in works]
    schedule = ground.evaluated(members, works, (min(steps), max(steps)))
    why = [reasons.again(a.reasons) if a else reasons.new_member() for a in old]
    gone = tuple(Bystander(a.site, reasons.LOST) for a in previous.members if a.peer not in ground.peers)
    left_out = tuple(b for b in previous.bystanders if b.site not in {times.site for times in ground.times})
    return _assembled(ground, inner, schedule, why, (*left_out, *gone), old)


def _newcomer(ground: _Ground, site: int, previous: Plan) -> Work:
    if ground.settings.mode != "planned":
        return _configured(ground, site)
    times, limits = ground.times[site], ground.limits
    steps = [a.inner_steps for a in previous.members if a.inner_steps] or [limits.min_steps]
    low = max(limits.min_steps, math.ceil(max(steps) / limits.steps_ratio))
    high = min(limits.max_steps, math.floor(min(steps) * limits.steps_ratio))
    length = previous.train_seconds
    batch = min(knee(times, limits), max((int(b) for b in options(times) if low * times.seconds[b] <= length), default=1))
    return Work(batch, max(low, min(high, int(length / times.seconds[batch]))), batch)


# ---------------------------------------------------------------- putting a plan together


def _assembled(
    ground: _Ground,
    inner: InnerSection,
    schedule: Schedule,
    why: Sequence[tuple[str, ...]],
    bystanders: tuple[Bystander, ...],
    old: Sequence[Assignment | None] | None = None,
) -> Plan:
    """`old` has the assignments that keep their ranges; the others' are taken from the next positions, in site order."""
    slot, work, settings = ground.inputs.slot, ground.inputs.work, ground.settings
    held = old or [None] * len(schedule.members)
    given = _positions(ground, schedule, held)
    members = []
    for i, w, kept, (ranges, ahead), text in zip(schedule.members, schedule.works, held, given, why, strict=True):
        times = ground.times[i]
        scale, scale_reason = lr_scale(w.batch, inner)
        if kept is None:
            text = (*text, scale_reason, *([reasons.ahead(sum(map(len, ahead)) // w.batch)] if ahead else []))
        members.append(
            Assignment(
                peer=times.peer,
                site=times.site,
                batch=w.batch,
                inner_steps=w.steps,
                last_batch=w.last,
                ranges=ranges,
                lr_scale=scale,
                finish_seconds=times.finish(w.batch, w.steps, w.last),
                reasons=text,
                ahead=ahead,
            )
        )
    exchange = ground.exchange(schedule.members)
    return Plan(
        run=slot.run,
        round=slot.round,
        term=slot.term,
        attempt=slot.attempt,
        base=slot.base,
        members=tuple(members),
        topology=exchange.topology,
        shares=exchange.shares,
        committed_tokens=work.committed_tokens,
        planned_tokens=schedule.sequences * work.sequence_length,
        train_seconds=schedule.seconds,
        exchange_seconds=exchange.seconds,
        grace_seconds=settings.grace_seconds + GRACE_SHARE * schedule.seconds,
        may_close=settings.mode == "planned",
        bystanders=bystanders,
        reasons=reasons.whole_round(
            schedule, exchange, ground.limits, settings, work.sequence_length, ground.links.guessed,
            ground.slowest(schedule.members), ground.round_tokens,
        ),
    )


def _positions(
    ground: _Ground, schedule: Schedule, held: Sequence[Assignment | None]
) -> list[tuple[tuple[Range, ...], tuple[Range, ...]]]:
    """(positions, positions ahead) of each member: those of `held`, else what it may have begun already and then the lowest
    that are free, in site order, those ahead after all others."""
    retry = any(held)  # the next round's plan follows this round's first one, which has no newcomers
    fresh = [
        None if assignment else (
            ground.begun(i, w), w.sequences, 0 if retry else w.batch * ground.ahead(i, w, schedule.members)
        )
        for i, w, assignment in zip(schedule.members, schedule.works, held, strict=True)
    ]
    taken = [r for assignment in held if assignment for r in (*assignment.ranges, *assignment.ahead)]
    taken += [r for one in fresh if one for r in one[0]]
    counts = [one[1] - sum(map(len, one[0])) for one in fresh if one] + [one[2] for one in fresh if one]
    new = hand_out(counts, without(ground.inputs.work.next_positions, taken))
    rest, ahead = iter(new[: len(new) // 2]), iter(new[len(new) // 2 :])
    return [
        (assignment.ranges, assignment.ahead) if assignment else (joined(one[0] if one else (), next(rest)), next(ahead))
        for assignment, one in zip(held, fresh, strict=True)
    ]


def lr_scale(batch: int, inner: InnerSection) -> tuple[float, str]:
    """The factor on the inner learning rate of a batch, and why."""
    if inner.scale_learning_rate == "none":
        return 1.0, "learning rate as given (scale_learning_rate is none)"
    scale = min(LR_SCALES[1], max(LR_SCALES[0], math.sqrt(batch / inner.reference_batch)))
    bounds = f"within {LR_SCALES[0]:g} and {LR_SCALES[1]:g}"
    return scale, f"learning rate x {scale:.3g}: sqrt({batch}/{inner.reference_batch}), {bounds}"


def hand_out(counts: Sequence[int], positions: Iterable[Range]) -> list[tuple[Range, ...]]:
    """The lowest of `positions`, in order, `counts[k]` of them to the k-th. Raises ValueError if there are too few."""
    free, result = list(merged(positions))[::-1], []
    for count in counts:
        mine: list[Range] = []
        while count > 0:
            if not free:
                raise ValueError(f"work.next_positions holds too few positions: {count} more are needed")
            first = free.pop()
            cut = min(first.stop, first.start + count)
            mine.append(Range(first.start, cut))
            count -= cut - first.start
            if cut < first.stop:
                free.append(Range(cut, first.stop))
        result.append(tuple(mine))
    return result


def without(positions: Iterable[Range], taken: Iterable[Range]) -> tuple[Range, ...]:
    """`positions` less those in `taken`."""
    result, gone = [], merged(taken)
    for whole in merged(positions):
        start = whole.start
        for hole in gone:
            if hole.stop > start and hole.start < whole.stop:
                result.append(Range(start, max(start, hole.start)))
                start = hole.stop
        result.append(Range(start, max(start, whole.stop)))
    return tuple(r for r in result if r.start < r.stop)
