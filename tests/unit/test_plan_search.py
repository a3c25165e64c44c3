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
def test_not_worse_than_brute_force_by_more_than_half_a_percent(sites: list[StepTimes], sequences: int, critical: float) -> None:
    limits = Limits(2, 200, 4.0, sequences, critical_batch=critical)
    best = brute_force(sites, limits)
    if best is not None:
        assert found(sites, limits).objective <= best.objective * 1.005
