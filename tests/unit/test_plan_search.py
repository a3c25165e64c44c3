"""The joint search against brute force, proportional rounding and its own constraints."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomesh_p2p.core.forecast import StepTimes, step_times
from geomesh_p2p.core.search import IDLE_AIM, Schedule, Work, evaluate, search
from geomesh_p2p.core.types import BatchTime, Profile, StepReport
from geomesh_p2p.core.windows import Constraints, Limits, knee, options

EXCHANGE_SECONDS = 0.02


def site(fixed: float, each: float, largest: int, name: str = "s") -> StepTimes:
    points = tuple(BatchTime(b, fixed + b * each) for b in sorted({1, largest}))
    return step_times(Profile(name, name, "emulated", points), None)


def found(sites: list[StepTimes], limits: Limits, exchange_seconds: float = EXCHANGE_SECONDS) -> Schedule:
    constraints = Constraints(exchange=lambda members: exchange_seconds, allowed=lambda members: len(members) == len(sites))
    return search(sites, [options(times) for times in sites], limits, constraints)


def small_sites(largest: int) -> st.SearchStrategy[StepTimes]:
    return st.builds(
        site,
        st.sampled_from([0.0, 0.1, 0.3, 1.0]),
        st.floats(0.2, 1.2).map(lambda seconds: round(seconds, 2)),
        st.integers(1, largest),
    )


# ---------------------------------------------------------------- brute force


def brute_force(sites: list[StepTimes], limits: Limits) -> Schedule | None:
    """The best of all combinations of batch, steps and last batch that meet every limit and the aim for tokens."""
    works = [
        [
            Work(batch, steps, last)
            for batch in range(1, times.max_batch + 1)
            for steps in range(limits.min_steps, limits.max_steps + 1)
            for last in range(1, batch + 1)
            if batch * (steps - 1) + last <= limits.sequences
        ]
        for times in sites
    ]
    count = [np.array([w.sequences for w in mine]) for mine in works]
    steps = [np.array([w.steps for w in mine]) for mine in works]
    worth = [c * limits.worth(np.array([float(w.batch) for w in mine])) for c, mine in zip(count, works, strict=True)]
    finish = [np.array([t.finish(w.batch, w.steps, w.last) for w in mine]) for t, mine in zip(sites, works, strict=True)]

    def over(arrays, operation):  # type: ignore[no-untyped-def]
        result = arrays[0]
        for array in arrays[1:]:
            result = operation(result[..., None], array)
        return result

    total, ends, effective = over(count, np.add), over(finish, np.maximum), over(worth, np.add)
    possible = over(steps, np.maximum) <= limits.steps_ratio * over(steps, np.minimum)
    possible &= (total <= limits.sequences) & (total >= 0.97 * limits.sequences)
    if not possible.any():
        return None
    objective = np.where(possible, (ends + EXCHANGE_SECONDS) / effective, np.inf)
    at = np.unravel_index(objective.argmin(), objective.shape)
    chosen = [mine[k] for mine, k in zip(works, at, strict=True)]
    return evaluate(sites, tuple(range(len(sites))), chosen, (limits.min_steps, limits.max_steps), limits, EXCHANGE_SECONDS)


@settings(max_examples=40)
@given(st.lists(small_sites(4), min_size=2, max_size=2), st.integers(100, 160), st.sampled_from([4.0, 10.0, 40.0]))
def test_within_half_a_percent_of_brute_force(sites: list[StepTimes], sequences: int, critical: float) -> None:
    limits = Limits(2, 200, 4.0, sequences, critical_batch=critical)
    best = brute_force(sites, limits)
    if best is not None:
        assert found(sites, limits).objective <= best.objective * 1.005


def test_brute_force_can_be_told_from_a_worse_plan() -> None:
    sites, limits = [site(0.0, 0.5, 1), site(1.0, 1.0, 1)], Limits(2, 200, 4.0, 100, critical_batch=4.0)
    best = brute_force(sites, limits)
    assert best is not None
    worse = evaluate(sites, (0, 1), [Work(1, 70, 1), Work(1, 30, 1)], (2, 200), limits, EXCHANGE_SECONDS)
    assert worse.objective > best.objective * 1.005


# ---------------------------------------------------------------- against what one would do by hand


def in_proportion(sites: list[StepTimes], batches: list[int], sequences: int, limits: Limits) -> Schedule:
    """Whole steps in proportion to each site's token rate."""
    rates = [batch / times.seconds[batch] for times, batch in zip(sites, batches, strict=True)]
    parts = [sequences * rate / sum(rates) for rate in rates]
    works = [Work(batch, max(1, round(part / batch)), batch) for batch, part in zip(batches, parts, strict=True)]
    return evaluate(sites, tuple(range(len(sites))), works, (1, limits.max_steps), limits, EXCHANGE_SECONDS)


mesh = st.lists(small_sites(48), min_size=2, max_size=6)


@settings(max_examples=40)
@given(mesh, st.integers(300, 3000))
def test_as_good_as_steps_in_proportion_to_speed(sites: list[StepTimes], sequences: int) -> None:
    limits = Limits(1, 5000, 1000.0, sequences)
    schedule = found(sites, limits)
    by_hand = in_proportion(sites, [knee(times, limits) for times in sites], sequences, limits)
    assert schedule.seconds / schedule.sequences <= by_hand.seconds / by_hand.sequences * 1.001


@settings(max_examples=40)
@given(mesh, st.integers(50, 3000), st.integers(1, 8), st.sampled_from([1.5, 2.0, 4.0]), st.sampled_from([None, 16.0]))
def test_limits_hold(sites: list[StepTimes], sequences: int, fewest: int, ratio: float, critical: float | None) -> None:
    limits = Limits(fewest, 200, ratio, sequences, critical_batch=critical)
    schedule = found(sites, limits)
    steps = [work.steps for work in schedule.works]
    assert fewest <= min(steps) <= max(steps) <= min(200, ratio * min(steps))
    assert schedule.members == tuple(range(len(sites)))
    for times, work in zip(sites, schedule.works, strict=True):
        assert 1 <= work.last <= work.batch <= times.max_batch
        assert times.finish(work.batch, work.steps, work.last) <= schedule.seconds
    # More than wanted only if the slowest site's fewest steps take that long (and the others then train as long).
    longest = fewest * max(float(times.seconds[1]) for times in sites)
    assert schedule.sequences <= sequences or schedule.seconds <= longest * 1.05


@settings(max_examples=40)
@given(mesh, st.integers(1000, 5000))
def test_whole_rounds_leave_hardly_any_idle_time(sites: list[StepTimes], sequences: int) -> None:
    """With room for steps on all sides, members finish within half a percent of each other."""
    schedule = found(sites, Limits(1, 10_000, 10_000.0, sequences))
    assert schedule.idle <= IDLE_AIM
    assert 0.89 * sequences <= schedule.sequences <= sequences


@settings(max_examples=40)
@given(mesh, st.integers(0, 5), st.floats(1.1, 3.0), st.integers(1000, 5000))
def test_a_faster_site_gets_no_fewer_tokens(sites: list[StepTimes], which: int, factor: float, sequences: int) -> None:
    slow = sites[which % len(sites)]
    fast = StepTimes("fast", "fast", slow.seconds / factor, 1.0, False)
    schedule = found([*sites, fast], Limits(1, 10_000, 10_000.0, sequences))
    assert schedule.works[-1].sequences >= schedule.works[which % len(sites)].sequences


def test_the_rest_of_a_budget_is_used_exactly() -> None:
    sites = [site(0.1, 0.25, 16), site(0.2, 0.5, 8), site(0.4, 1.0, 8)]
    for sequences in (97, 100, 101, 313):
        assert found(sites, Limits(1, 500, 4.0, sequences, exact=True)).sequences == sequences


def test_a_fast_site_gets_a_larger_batch_before_more_steps() -> None:
    sites = [site(0.0, 0.01, 64), site(0.0, 0.2, 64)]  # equally good at any batch: one sequence a step would be chosen
    fast, slow = found(sites, Limits(4, 500, 4.0, 1000)).works
    assert fast.steps <= 4 * slow.steps
    assert fast.batch >= 4 * slow.batch
    assert fast.sequences == pytest.approx(20 * slow.sequences, rel=0.05)


def test_while_the_critical_batch_is_unknown_hardly_better_batches_are_not_taken() -> None:
    times = site(1.0, 1.0, 512)
    limits = Limits(1, 10_000, 10.0, 100_000)
    assert knee(times, limits) == pytest.approx(32, abs=2)  # b/(1 + b) >= 0.97 * 512/513
    assert found([times, site(1.0, 1.1, 512)], limits).works[0].batch <= 48
    limits = Limits(1, 10_000, 10.0, 100_000, critical_batch=100.0)
    assert knee(times, limits) == pytest.approx(10, abs=1)  # b/(1 + b)/(1 + b/100) is largest at sqrt(100)


# ---------------------------------------------------------------- step times


def profile(*points: tuple[int, float]) -> Profile:
    return Profile("p", "s", "gpu", tuple(BatchTime(b, seconds) for b, seconds in points))


def test_step_times_are_piecewise_linear_and_pass_through_the_live_step() -> None:
    times = step_times(profile((1, 1.0), (3, 2.0), (7, 6.0)), None)
    assert times.seconds.tolist() == [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert times.finish(3, 4, 2) == 7.5
    live = step_times(profile((1, 1.0), (3, 2.0), (7, 6.0)), StepReport("p", 2, 3.0))
    assert live.seconds.tolist() == [0.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert live.live == 2.0


def test_below_the_first_point_a_step_is_no_slower_and_no_better_than_in_proportion() -> None:
    assert step_times(profile((4, 4.0)), None).seconds.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert step_times(profile((2, 2.0), (4, 2.0)), None).seconds.tolist() == [0.0, 2.0, 2.0, 2.0, 2.0]


def test_a_noisy_curve_never_falls_and_a_senseless_report_is_ignored() -> None:
    times = step_times(profile((1, 1.0), (2, 0.9), (4, 2.0)), StepReport("p", 9, 1.0))
    assert all(a <= b for a, b in itertools.pairwise(times.seconds.tolist()))
    assert (times.live, times.reported) == (1.0, False)
    assert step_times(profile((1, 1.0)), StepReport("p", 1, float("inf"))).live == 1.0
    for points in ([(1, 0.0)], [(1, float("nan"))], [(0, 1.0)], [(10**9, 1.0)], []):
        with pytest.raises(ValueError, match="profile of s"):
            step_times(profile(*points), None)
