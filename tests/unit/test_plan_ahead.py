"""Overlap: what a plan reserves for the next round, who gets it, and the arithmetic of rounds that are begun early."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomesh_p2p.config import PlannerSection
from geomesh_p2p.core import ahead
from geomesh_p2p.core.bounds import plan_fault
from geomesh_p2p.core.log import Credited, covers, first_positions, joined, later_positions, merged
from geomesh_p2p.core.plan import AHEAD_SHARE, PlanInputs, plan_round, replan_attempt
from geomesh_p2p.core.ports import InnerResult
from geomesh_p2p.core.reasons import explain
from geomesh_p2p.core.types import Assignment, Plan, Profile, Range
from tests.unit.test_plan import INNER, SEQUENCE_LENGTH, check, full_links, inputs, paper, profile, reports

DELAYED = PlannerSection(overlap="delayed")


def size(ranges: tuple[Range, ...]) -> int:
    return sum(map(len, ranges))


def following(plan: Plan, profiles: tuple[Profile, ...], free: tuple[Range, ...] | None = None, **sites: object) -> PlanInputs:
    """The round after `plan`, all of it credited, or `free` being what is not."""
    given = inputs(profiles, plan, round=plan.round + 1, **sites)
    used = Credited(r for a in plan.members for r in a.ranges)
    return replace(given, work=replace(given.work, next_positions=free or tuple(used.gaps())))


def after(plan: Plan, profiles: tuple[Profile, ...], section: PlannerSection = DELAYED, **more: object) -> Plan:
    return plan_round(following(plan, profiles, **more), section, INNER)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is reserved


def test_every_member_gets_steps_for_the_time_of_the_exchange_and_a_margin() -> None:
    plan = plan_round(inputs(paper()), DELAYED, INNER)
    for a in plan.members:
        step = a.finish_seconds / a.sequences * a.batch
        assert a.ahead_steps == pytest.approx(1.5 * (plan.exchange_seconds + 0.2) / step, abs=1.5)
        assert size(a.ahead) == a.ahead_steps * a.batch
        assert a.ahead_seconds > plan.exchange_seconds
        assert any(f"with {a.ahead_steps} steps" in reason for reason in a.reasons)
    assert plan.idle_exchange_seconds == 0
    assert plan.round_seconds == plan.train_seconds
    text = "\n".join(explain(plan))
    assert "overlap = delayed" in text
    first = plan.members[0].ahead[0]
    assert f"ahead {first.start:,} to {first.stop - 1:,}" in text
    assert plan_fault(plan) == ""


def test_without_overlap_nothing_is_reserved_and_plans_are_as_they_were() -> None:
    plain = plan_round(inputs(paper()), PlannerSection(), INNER)
    assert all(a.ahead == () for a in plain.members)
    assert plain.round_seconds == plain.train_seconds + plain.exchange_seconds
    delayed = plan_round(inputs(paper()), DELAYED, INNER)
    assert [a.ranges for a in delayed.members] == [a.ranges for a in plain.members]


def test_a_long_exchange_is_covered_by_some_of_the_steps_and_never_all() -> None:
    profiles = paper()
    plan = plan_round(inputs(profiles, links=full_links(profiles, bytes_per_second=2e3)), DELAYED, INNER)
    assert plan.exchange_seconds > plan.train_seconds
    assert [a.ahead_steps for a in plan.members] == [int(AHEAD_SHARE * a.inner_steps) for a in plan.members]
    assert all(0 < a.ahead_steps < a.inner_steps for a in plan.members)
    assert 0 < plan.idle_exchange_seconds < plan.exchange_seconds
    assert any("s of it" in reason for reason in plan.reasons)
    assert any("what is left of the exchange takes" in reason for reason in plan.reasons)


def test_the_last_round_reserves_nothing() -> None:
    given = inputs(paper())
    plan = plan_round(replace(given, work=replace(given.work, last=True)), DELAYED, INNER)
    assert all(a.ahead == () for a in plan.members)


def test_slow_links_that_are_trained_through_leave_nobody_out() -> None:
    """The exchange adds nothing to the round, so there is nothing to gain without the slow site."""
    profiles = paper()
    links = tuple(
        replace(link, bytes_per_second=3e4) if "id-rtx" in (link.source, link.target) else link for link in full_links(profiles)
    )
    section = PlannerSection(round_tokens=200_000)
    assert len(plan_round(inputs(profiles, links=links), section, INNER).members) == 3
    delayed = plan_round(inputs(profiles, links=links), section.model_copy(update={"overlap": "delayed"}), INNER)
    assert len(delayed.members) == 4


# ---------------------------------------------------------------- the next round


def test_the_next_round_begins_with_what_was_reserved() -> None:
    first = plan_round(inputs(paper()), DELAYED, INNER)
    second = after(first, paper())
    for before, a in zip(first.members, second.members, strict=True):
        assert a.batch == before.batch
        assert first_positions(a.ranges, size(before.ahead)) == joined(before.ahead)
        assert all(ahead.goes_on(before, done, a) for done in range(before.ahead_steps + 1))
    check(second, inputs(paper()), DELAYED)


def test_a_lost_members_positions_go_to_others() -> None:
    first = plan_round(inputs(paper()), DELAYED, INNER)
    fewer = tuple(p for p in paper() if p.site != "h100")
    second = after(first, fewer)
    lost = first.of("id-h100")
    assert lost is not None
    given = merged(r for a in second.members for r in a.ranges)
    assert covers(given, lost.ahead)


def test_another_batch_drops_what_was_trained_ahead() -> None:
    """A site that is four times as slow gets another batch; the others keep theirs, and their positions."""
    first = plan_round(inputs(paper()), DELAYED, INNER)
    second = after(first, paper(), reports=reports(first, paper(), {"h100": 6.0}))
    old, new = first.of("id-h100"), second.of("id-h100")
    assert old is not None
    assert new is not None
    assert old.batch != new.batch
    assert not ahead.goes_on(old, old.ahead_steps, new)
    check(second, inputs(paper()), DELAYED)


def test_what_has_been_credited_since_is_not_handed_out_again() -> None:
    first = plan_round(inputs(paper()), DELAYED, INNER)
    taken = first.members[0].ahead[0]
    free = tuple(Credited([*(r for a in first.members for r in a.ranges), taken]).gaps())
    second = after(first, paper(), free=free)
    assert not covers((r for a in second.members for r in a.ranges), (taken,))
    check(second, following(first, paper(), free), DELAYED)


def test_a_plan_of_an_earlier_round_pins_nothing() -> None:
    first = plan_round(inputs(paper()), DELAYED, INNER)
    given = replace(following(first, paper()), slot=replace(following(first, paper()).slot, round=first.round + 2))
    second = plan_round(given, DELAYED, INNER)
    assert second.members[0].ranges[0].start == first.members[-1].ranges[-1].stop


def test_a_retry_keeps_what_is_reserved() -> None:
    given = inputs(paper())
    first = plan_round(given, DELAYED, INNER)
    fewer = (*(p for p in paper() if p.site != "h100"), profile("new", 0.1, 0.2, 8))
    later = replace(given, slot=replace(given.slot, attempt=2), previous=first, sites=replace(given.sites, profiles=fewer))
    again = replan_attempt(later, DELAYED, INNER)
    for a in again.members:
        old = first.of(a.peer)
        assert a.ahead == (() if old is None else old.ahead)
    assert plan_fault(again) == ""


@settings(max_examples=15)
@given(st.integers(2, 5), st.sampled_from([64, 500, 3000]), st.randoms(use_true_random=False))
def test_rounds_in_which_anything_may_happen_credit_each_position_once(count: int, sequences: int, draw: random.Random) -> None:
    """Speeds, links and members change from round to round, members are closed early, and rounds are planned anew. Each
    member does any number of its steps ahead and then what its plan gives it."""
    everybody = [profile(f"s{k}", 0.02, draw.uniform(0.01, 0.2), draw.randint(4, 32)) for k in range(count)]
    section = PlannerSection(overlap="delayed", round_tokens=sequences * SEQUENCE_LENGTH, min_steps=2)
    credited, previous, kept = Credited(), None, 0
    for round in range(1, 9):
        there = tuple(draw.sample(everybody, draw.randint(1, count)) if draw.random() < 0.4 else everybody)
        links = full_links(there, bytes_per_second=draw.choice((1e4, 1e5, 1e6)))
        live = reports(previous, tuple(everybody), {p.site: draw.choice((1.0, 1.02, 2.5)) for p in there}) if previous else ()
        live = tuple(r for r in live if r.peer in {p.peer for p in there})
        given = inputs(there, previous, round=round, links=links, reports=live)
        given = replace(given, work=replace(given.work, next_positions=tuple(credited.gaps()), last=round == 8))
        fresh = plan = plan_round(given, section, INNER)
        check(plan, given, section)
        assert plan_fault(plan) == ""
        if draw.random() < 0.3:
            slot = replace(given.slot, attempt=2)
            anew = draw.sample(there, draw.randint(1, len(there)))
            later = replace(given, slot=slot, previous=plan, sites=replace(given.sites, profiles=tuple(anew)))
            plan = replan_attempt(later, section, INNER)
            assert plan_fault(plan) == ""
        for a in plan.members:
            before = previous.of(a.peer) if previous else None
            done = draw.randint(0, before.ahead_steps) if before else 0
            if before and done and ahead.goes_on(before, done, a):
                kept += 1
                trained = first_positions(before.ahead, done * before.batch)
                _, rest = ahead.steps_left(plan, a, done)
                assert joined(trained, rest.ranges) == joined(a.ranges)
            for r in first_positions(a.ranges, draw.choice((a.sequences, max(1, a.sequences // 2)))):
                credited.add(r)  # raises if it was credited
        previous = fresh


# ---------------------------------------------------------------- arithmetic


def assignment(**changes: object) -> Assignment:
    fields = {
        "peer": "id-a", "site": "a", "batch": 4, "inner_steps": 10, "last_batch": 2, "ranges": (Range(0, 30), Range(50, 58)),
        "lr_scale": 1.0, "finish_seconds": 9.5, "ahead": (Range(100, 110), Range(200, 202)),
    }  # fmt: skip
    return Assignment(**{**fields, **changes})  # type: ignore[arg-type]


def plan_of(mine: Assignment) -> Plan:
    return replace(plan_round(inputs(paper()), DELAYED, INNER), members=(mine,), committed_tokens=1000, planned_tokens=380)


def tokens_at(plan: Plan, mine: Assignment, index: int) -> float:
    """What the learning rate of a step follows (engine/inner.py)."""
    return plan.committed_tokens + (index + 1) / mine.inner_steps * plan.planned_tokens


def test_ranges_are_cut_and_joined_in_their_order() -> None:
    ranges = (Range(5, 9), Range(20, 22), Range(1, 3))
    for count in range(10):
        assert joined(first_positions(ranges, count), later_positions(ranges, count)) == ranges
    assert joined((Range(1, 3), Range(3, 5)), (Range(5, 6), Range(2, 2), Range(0, 1))) == (Range(1, 6), Range(0, 1))


def test_steps_done_early_have_the_learning_rates_of_their_round() -> None:
    mine = assignment()
    plan = plan_of(mine)
    after_it = replace(plan, committed_tokens=1380)
    for done in range(3):
        ahead_plan, begun = ahead.steps_ahead(plan, mine, done)
        assert (ahead_plan.round, begun.inner_steps, begun.last_batch) == (plan.round + 1, 3 - done, 4)
        assert size(begun.ranges) == begun.sequences == 12 - 4 * done
        for index in range(begun.inner_steps):
            assert tokens_at(ahead_plan, begun, index) == pytest.approx(tokens_at(after_it, mine, done + index), abs=1)
    for done in range(10):
        rest_plan, rest = ahead.steps_left(plan, mine, done)
        assert size(rest.ranges) == rest.sequences == mine.sequences - 4 * done
        for index in range(rest.inner_steps):
            assert tokens_at(rest_plan, rest, index) == pytest.approx(tokens_at(plan, mine, done + index), abs=1)
    assert ahead.steps_left(plan, mine, 0) == (plan, mine)


@pytest.mark.parametrize(
    ("done", "changes", "goes_on"),
    [
        (3, {"ranges": (Range(100, 110), Range(200, 230))}, True),
        (2, {"ranges": (Range(100, 108), Range(300, 330))}, True),
        (3, {"ranges": (Range(100, 108), Range(300, 330))}, False),
        (1, {"ranges": (Range(101, 139),)}, False),
        (1, {"ranges": (Range(100, 138),), "batch": 5}, False),
        (3, {"ranges": (Range(100, 110), Range(200, 202)), "inner_steps": 3, "last_batch": 4}, False),
        (0, {"ranges": (Range(7, 45),)}, True),
    ],
)
def test_whether_steps_done_early_are_the_first_ones_of_an_assignment(done: int, changes: dict, goes_on: bool) -> None:
    assert ahead.goes_on(assignment(), done, assignment(**changes)) == goes_on


def result(steps: int, start: int, **changes: object) -> InnerResult:
    fields = {
        "tokens": 10 * steps, "ranges": (Range(start, start + steps),) if steps else (), "steps": steps, "loss": float(steps),
        "seconds": 2.0 * steps, "data_wait_seconds": 0.5, "step_seconds": (2.0,) * steps, "skipped_steps": 0,
        "overrun_seconds": 0.0, "learning_rate": 0.1 * steps, "stopped": "" if steps else "closed",
    }  # fmt: skip
    return InnerResult(**{**fields, **changes})  # type: ignore[arg-type]


def test_two_runs_of_steps_as_one() -> None:
    both = ahead.together(result(2, 0), result(4, 2))
    assert (both.tokens, both.ranges, both.steps, both.seconds) == (60, (Range(0, 6),), 6, 12.0)
    assert both.loss == pytest.approx((2 * 2 + 4 * 4) / 6)
    assert (both.data_wait_seconds, len(both.step_seconds), both.learning_rate) == (1.0, 6, 0.4)
    closed = ahead.together(result(2, 0), result(0, 2, loss=0.0))
    assert (closed.tokens, closed.loss, closed.stopped) == (20, 2.0, "")
    nothing = ahead.together(result(0, 0), result(0, 0))
    assert (nothing.tokens, nothing.stopped) == (0, "closed")
    assert not math.isnan(nothing.loss)
    assert ahead.together(None, result(3, 0)) == result(3, 0)


# ---------------------------------------------------------------- what a leader may not say


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        ((Range(0, 4),), "given to two"),
        ((Range(1000, 1003),), "positions ahead"),
        ((Range(1000, 1040),), "positions ahead"),
        ((Range(1000, 1008), Range(1004, 1008)), "given to two"),
        ((Range(9, 5), Range(1000, 1008)), "none"),
        ((Range(-4, 0),), "none"),
        ((Range(0, 2**80),), "positions ahead"),
    ],
)
def test_a_plan_that_reserves_what_it_must_not_is_refused(spoilt: tuple[Range, ...], why: str) -> None:
    mine = assignment()
    plan = replace(plan_of(mine), topology="gather", shares=())
    assert plan_fault(plan) == ""
    assert why in plan_fault(replace(plan, members=(replace(mine, ahead=spoilt),)))
