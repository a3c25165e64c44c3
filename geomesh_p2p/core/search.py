"""The joint search for a round: how long it trains, and each member's batch and inner steps.

Objective: predicted seconds per effective sequence, (train + exchange) / sum of n_i e(b_i), with e(b) = 1/(1 + b/critical).
The search is over windows of inner steps and lengths T: roughly first (core/windows.py), then on the integer grid (`fit`),
where a smaller last batch takes up the rounding.

While the critical batch is unknown (e = 1), token rates within 3% of a site's best count as the best: a larger batch that
gains less is not worth its fewer inner steps. Ties go to the smaller batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from geomesh_p2p.core.forecast import Array, StepTimes
from geomesh_p2p.core.windows import Constraints, Integers, Limits, Members, Window, best_windows

IDLE_AIM = 0.005
# How much fewer sequences than wanted a round may have, so that all finish together: the first that meets IDLE_AIM.
TOKEN_SLACKS = (0.03, 0.06, 0.1)
CALM_PRICE = 0.003  # and may cost this much more a sequence for it
SINGLE_IDLE_AIM = 0.0025  # a member keeps the batch of the rough search if it idles no longer than this
NEIGHBOURS = 16
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Work:
    """`steps` inner steps of `batch` sequences, the last one of `last`."""

    batch: int
    steps: int
    last: int

    @property
    def sequences(self) -> int:
        return self.batch * (self.steps - 1) + self.last

    @classmethod
    def of(cls, batch: int, sequences: int) -> Work:
        steps = -(-sequences // batch)
        return cls(batch, steps, sequences - batch * (steps - 1))


@dataclass(frozen=True)
class Schedule:
    """An answer: one Work per member. `objective` is in seconds per effective sequence, `idle` the mean share of the
    training time that a member waits for the last one."""

    members: Members
    works: tuple[Work, ...]
    low: int
    high: int
    seconds: float
    idle: float
    objective: float

    @property
    def sequences(self) -> int:
        return sum(work.sequences for work in self.works)


def evaluate(
    times: Sequence[StepTimes],
    members: Members,
    works: Sequence[Work],
    window: tuple[int, int],
    limits: Limits,
    exchange_seconds: float,
) -> Schedule:
    """The figures of given works."""
    finish = [times[i].finish(work.batch, work.steps, work.last) for i, work in zip(members, works, strict=True)]
    seconds = max(finish)
    idle = sum(seconds - f for f in finish) / (seconds * len(finish))
    worth = limits.worth(np.array([work.batch for work in works], dtype=np.float64))
    effective = float(sum(work.sequences * e for work, e in zip(works, worth, strict=True)))
    added = float(limits.idle_exchange(exchange_seconds, seconds))
    return Schedule(members, tuple(works), *window, seconds, idle, (seconds + added) / effective)


def search(times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, constraints: Constraints) -> Schedule:
    """The best schedule with batches from `choices` (ascending, per site). Sites that cannot make the least number of inner
    steps within the round, even at their smallest batch, are not among its members, as far as `allowed` permits."""
    windows = best_windows(times, choices, limits, constraints)
    first, *others = [fit(times, choices, limits, window, constraints.exchange(window.members)) for window in windows]
    # Where rates near the best count as the best, a later window must win by more than that.
    best = min(others, key=_price, default=first)
    return best if _price(best) < limits.near * _price(first) else first


def _price(schedule: Schedule) -> float:
    return schedule.objective * (1 if schedule.idle <= IDLE_AIM else 1 + CALM_PRICE)


# ---------------------------------------------------------------- exactly: the integer grid around the window's length


def fit(
    times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, window: Window, exchange_seconds: float
) -> Schedule:
    """The best works on the integer grid with lengths near the window's and batches near its batches."""
    sites = [times[i] for i in window.members]
    near = [_neighbours(choices[i], batch) for i, batch in zip(window.members, window.batches, strict=True)]
    lengths = _lengths(sites, near, window)
    columns = [
        _fill(site, batches, batch, lengths, window, limits)
        for site, batches, batch in zip(sites, near, window.batches, strict=True)
    ]
    batch, sequences, finish, worth = (np.array(part) for part in zip(*columns, strict=True))
    possible = np.all(sequences > 0, axis=0)
    total, ends, effective = sequences.sum(axis=0), finish.max(axis=0), worth.sum(axis=0)
    idle = (ends - finish).mean(axis=0) / np.where(ends > 0, ends, 1.0)
    effective *= np.minimum(1.0, window.sequences / np.maximum(total, 1.0))  # what is too much will be taken off
    whole = ends + limits.idle_exchange(exchange_seconds, ends)
    objective = np.where(possible, whole / np.where(possible, effective, 1.0), np.inf)
    at = _choose(total, idle, ends / np.where(possible, effective, 1.0), objective, window.sequences, limits.exact)
    works = [Work.of(int(b), int(n)) for b, n in zip(batch[:, at], sequences[:, at], strict=True)]
    if total[at] > window.sequences:
        works = _trimmed(sites, works, window.low, window.sequences)
    return evaluate(times, window.members, works, (window.low, window.high), limits, exchange_seconds)


def _neighbours(choices: Integers, batch: int) -> Integers:
    near = choices[(choices >= min(batch - 1, batch * 0.8)) & (choices <= max(batch + 1, batch * 1.25))]
    if len(near) > NEIGHBOURS:
        near = near[np.unique(np.linspace(0, len(near) - 1, NEIGHBOURS).round().astype(np.int64))]
    return np.unique(np.append(near, batch))


def _lengths(sites: Sequence[StepTimes], near: Sequence[Integers], window: Window) -> Array:
    """Lengths to try: an even grid around the window's, as far as the neighbouring batches are faster or slower, and the
    very finish times of those whose sequences take longest."""
    rates = [batches / site.seconds[batches] for site, batches in zip(sites, near, strict=True)]
    rough = sum(batch / site.seconds[batch] for site, batch in zip(sites, window.batches, strict=True))
    first = window.seconds * 0.9 * rough / sum(rate.max() for rate in rates)
    last = window.seconds * 1.05 * rough / sum(rate.min() for rate in rates)
    found = [np.linspace(first, last, 128), np.array([window.seconds * (1 + _ROUNDING)])]
    room = 512
    pairs = [(-float(site.seconds[b] / b), k, int(b)) for k, site in enumerate(sites) for b in near[k]]
    for _, k, b in sorted(pairs):
        seconds = sites[k].seconds
        fewest, most = math.floor(first / seconds[b]), math.ceil(last / seconds[b])
        if (most - fewest - 2) * b > room:  # so many lie within for certain; whoever claims tiny steps would fill all memory
            break
        steps = np.arange(fewest, most + 1)
        ends = (steps[:, None] * seconds[b] + seconds[None, :b]).ravel()
        ends = ends[(ends >= first) & (ends <= last)]
        if len(ends) > room:
            break
        room -= len(ends)
        found.append(ends * (1 + _ROUNDING))
    return np.unique(np.concatenate(found))


def _fill(
    site: StepTimes, batches: Integers, preferred: int, lengths: Array, window: Window, limits: Limits
) -> tuple[Array, Array, Array, Array]:
    """What one site does within each length: (batch, sequences, finish, effective sequences), 0 sequences if it cannot make
    `low` steps. The preferred batch if it leaves next to no idle time, else the batch with the most effective sequences."""
    seconds = site.seconds[batches][:, None]
    whole = np.minimum(np.floor(lengths / seconds), window.high)
    left = np.where(whole < window.high, lengths - whole * seconds, 0.0)
    last = np.searchsorted(site.seconds, left, side="right") - 1
    last = np.minimum(last, batches[:, None] - 1)
    sequences = whole * batches[:, None] + last
    finish = whole * seconds + site.seconds[last]
    valid = whole + (last > 0) >= window.low
    worth = np.where(valid, sequences * limits.worth(batches.astype(np.float64))[:, None], -1.0)
    row = int(np.searchsorted(batches, preferred))
    good = valid[row] & (finish[row] >= lengths * (1 - SINGLE_IDLE_AIM))
    pick, column = np.where(good, row, worth.argmax(axis=0)), np.arange(len(lengths))
    valid = valid[pick, column]
    return (
        batches[pick].astype(np.float64),
        np.where(valid, sequences[pick, column], 0.0),
        finish[pick, column],
        np.where(valid, worth[pick, column], 0.0),
    )


def _choose(total: Array, idle: Array, cost: Array, objective: Array, wanted: int, exact: bool) -> int:
    """Which of the lengths tried is taken (those with a finite objective). `cost` is the objective without the exchange:
    by it, a few sequences fewer are no worse."""
    possible = np.isfinite(objective)
    most = min(float(total[possible].max()), wanted)
    pools = [possible & (total >= (1 - slack) * most) for slack in ((0.0,) if exact else TOKEN_SLACKS)]
    affordable = cost[pools[0]].min() * (1 + CALM_PRICE)
    for pool in pools:
        calm = pool & (idle <= IDLE_AIM) & (total <= wanted) & (cost <= affordable)
        if calm.any():
            return int(np.where(calm, objective, np.inf).argmin())
    return int(np.where(pools[0], objective, np.inf).argmin())


def _trimmed(sites: Sequence[StepTimes], works: Sequence[Work], low: int, wanted: int) -> list[Work]:
    """Take sequences off the members that finish last until `wanted` are left, or nobody can give one up."""
    works, excess = list(works), sum(work.sequences for work in works) - wanted
    latest = [(-sites[k].finish(work.batch, work.steps, work.last), k) for k, work in enumerate(works)]
    heapify(latest)
    while excess and latest:
        _, k = heappop(latest)
        if works[k].sequences == 1 or (fewer := Work.of(works[k].batch, works[k].sequences - 1)).steps < low:
            continue
        works[k], excess = fewer, excess - 1
        heappush(latest, (-sites[k].finish(fewer.batch, fewer.steps, fewer.last), k))
    return works
