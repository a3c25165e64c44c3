"""The joint search for a round: how long it trains, and each member's batch and inner steps.

Objective: predicted seconds per effective sequence, (train + exchange) / sum of n_i e(b_i), with e(b) = 1/(1 + b/critical).
For a given length T and window [low, high] of inner steps the members do not depend on each other: each takes the batch
that fits the most effective sequences into T. So the search is over windows and T: roughly first (`best_window`, steps as
real numbers), then on the integer grid (`fit`), where a smaller last batch takes up the rounding.

While the critical batch is unknown (e = 1), token rates within 3% of a site's best count as the best: a larger batch that
gains less is not worth its fewer inner steps. Ties go to the smaller batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.forecast import Array, StepTimes

NEAR_BEST_RATE = 0.97
IDLE_AIM = 0.005
# How much fewer sequences than wanted a round may have, so that all finish together: the first that meets IDLE_AIM.
TOKEN_SLACKS = (0.03, 0.06, 0.1)
SINGLE_IDLE_AIM = 0.0025  # a member keeps the batch of the rough search if it idles no longer than this
NEIGHBOURS = 16
LENGTH_PRECISION = 1e-4
SCORE_TIE = 1e-3  # windows whose objectives differ by less are taken for equally good
LENGTHS = 24  # tried where no window reaches the round's sequences
_ROUNDING = 1e-9

Integers = npt.NDArray[np.int64]
Members = tuple[int, ...]
"""Ascending indices into the sites of a search."""


@dataclass(frozen=True)
class Limits:
    """`sequences` is the aim for the whole round, never exceeded unless `min_steps` demands it; `exact`: all of them (the
    rest of a budget) rather than a few fewer. `critical_batch` is in sequences, None if unknown."""

    min_steps: int
    max_steps: int
    steps_ratio: float
    sequences: int
    exact: bool = False
    critical_batch: float | None = None

    def worth(self, batch: Array) -> Array:
        """e(b): how much a sequence in a step of `batch` sequences counts."""
        return np.ones_like(batch) if self.critical_batch is None else 1 / (1 + batch / self.critical_batch)

    @property
    def near(self) -> float:
        return NEAR_BEST_RATE if self.critical_batch is None else 1.0


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
class Constraints:
    """What a set of members costs and whether it may be one: `exchange(members)` is in seconds, `allowed(members)` says
    whether the round can be committed by them."""

    exchange: Callable[[Members], float]
    allowed: Callable[[Members], bool]


@dataclass(frozen=True)
class Window:
    """A rough answer: members, their batches, a length, and the inner steps that each may have."""

    low: int
    high: int
    seconds: float
    members: Members
    batches: tuple[int, ...]


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


def options(times: StepTimes) -> Integers:
    """Batches worth looking at: all up to 24, then 8% apart, and the largest that fits."""
    found, batch = list(range(1, min(24, times.max_batch) + 1)), 24
    while batch < times.max_batch:
        batch = min(times.max_batch, math.ceil(batch * 1.08))
        found.append(batch)
    return np.array(found, dtype=np.int64)


def knee(times: StepTimes, limits: Limits) -> int:
    """The smallest batch whose rate of effective sequences is near the site's best."""
    batches = options(times)
    rates = batches * limits.worth(batches.astype(np.float64)) / times.seconds[batches]
    return int(batches[np.argmax(rates >= limits.near * rates.max() * (1 - _ROUNDING))])


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
    return Schedule(members, tuple(works), *window, seconds, idle, (seconds + exchange_seconds) / effective)


def search(times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, constraints: Constraints) -> Schedule:
    """The best schedule with batches from `choices` (ascending, per site). Sites that cannot make the least number of inner
    steps within the round, even at their smallest batch, are not among its members, as far as `allowed` permits."""
    window = best_window(times, choices, limits, constraints)
    return fit(times, choices, limits, window, constraints.exchange(window.members))


# ---------------------------------------------------------------- roughly: the window of inner steps, the members


class _Table:
    """All choices of all sites side by side, [site, choice], padded with choices that take for ever."""

    def __init__(self, times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits) -> None:
        shape = (len(times), max(len(c) for c in choices))
        self.batches, self.seconds = np.zeros(shape), np.full(shape, np.inf)
        for row, (site, batches) in enumerate(zip(times, choices, strict=True)):
            self.batches[row, : len(batches)] = batches
            self.seconds[row, : len(batches)] = site.seconds[batches]
        self.effective = self.batches * limits.worth(self.batches)
        self.enough = limits.near * (self.effective / self.seconds).max(axis=1, keepdims=True)
        self.rows = np.arange(len(times))

    def at(self, seconds: float, low: int, high: int) -> tuple[Integers, Array, Array, Array]:
        """Each site's choice within `seconds` (-1: none has `low` steps), its steps, sequences, and effective sequences
        (counted no higher than near its best rate)."""
        steps = seconds / self.seconds
        capped = np.minimum(steps, high)
        value = np.where(steps >= low * (1 - _ROUNDING), np.minimum(self.effective * capped, self.enough * seconds), -1.0)
        pick = value.argmax(axis=1)
        worth, steps = value[self.rows, pick], capped[self.rows, pick]
        out = worth < 0
        sequences = np.where(out, 0.0, self.batches[self.rows, pick] * steps)
        return np.where(out, -1, pick), steps, sequences, np.where(out, 0.0, worth)


def best_window(times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, constraints: Constraints) -> Window:
    """The window, with steps as real numbers. Order of wishes: allowed members, the round's sequences, the objective; then
    the most room on both sides of the steps. Everybody together is always allowed."""
    table = _Table(times, choices, limits)
    everybody = tuple(range(len(times)))

    def members_of(pick: Integers) -> Members:
        """Those that take part, or nobody if they may not do so alone."""
        members = tuple(np.flatnonzero(pick >= 0).tolist())
        return members if members == everybody or (members and constraints.allowed(members)) else ()

    def reaches(seconds: float, low: int, high: int) -> bool:
        pick, _, sequences, _ = table.at(seconds, low, high)
        return bool(sequences.sum() >= limits.sequences * (1 - _ROUNDING) and members_of(pick))

    windows = []
    for low in _lows(limits):
        high = min(limits.max_steps, math.floor(low * limits.steps_ratio + _ROUNDING))
        longest = high * float(table.seconds[np.isfinite(table.seconds)].max()) * (1 + _ROUNDING)
        windows.append((low, high, low * float(table.seconds.min()), longest))
    lengths = [
        (low, high, _smallest(partial(reaches, low=low, high=high), shortest, longest))
        for low, high, shortest, longest in windows
        if reaches(longest, low, high)
    ] or [(low, high, float(t)) for low, high, shortest, longest in windows for t in np.geomspace(shortest, longest, LENGTHS)]

    rough = []
    for low, high, seconds in lengths:
        pick, steps, _, worth = table.at(seconds, low, high)
        if members := members_of(pick):
            inside = list(members)
            room = min(float(steps[inside].min()) / low, high / float(steps[inside].max()))
            batches = tuple(int(table.batches[i, pick[i]]) for i in members)
            rough.append((seconds / float(worth.sum()), -room, Window(low, high, seconds, members, batches)))
    best, found = math.inf, []
    for cost, no_room, window in sorted(rough, key=lambda item: (item[0], item[2].low)):
        if cost > best * (1 + SCORE_TIE):
            break  # an exchange only adds to it
        score = cost * (1 + constraints.exchange(window.members) / window.seconds)
        best = min(best, score)
        found.append((score, no_room, window))
    near = [item for item in found if item[0] <= best * (1 + SCORE_TIE)]
    return min(near, key=lambda item: (item[1], item[2].low))[2]


def _lows(limits: Limits) -> list[int]:
    """Smallest steps of the windows tried: from min_steps to max_steps, about 15% apart."""
    lows, low = [], limits.min_steps
    while low <= limits.max_steps:
        lows.append(low)
        low = max(low + 1, round(low * 1.15))
    return lows


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """About the smallest value in (low, high] for which `holds`, which it does at `high`."""
    while high > low * (1 + LENGTH_PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# ---------------------------------------------------------------- exactly: the integer grid around the window's length


def fit(
    times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, window: Window, exchange_seconds: float
) -> Schedule:
    """The best works on the integer grid with lengths near the window's and batches near its batches."""
    sites = [times[i] for i in window.members]
    near = [_neighbours(choices[i], batch) for i, batch in zip(window.members, window.batches, strict=True)]
    lengths = _lengths(sites, window)
    columns = [
        _fill(site, batches, batch, lengths, window, limits)
        for site, batches, batch in zip(sites, near, window.batches, strict=True)
    ]
    batch, sequences, finish, worth = (np.array(part) for part in zip(*columns, strict=True))
    possible = np.all(sequences > 0, axis=0)
    total, ends, effective = sequences.sum(axis=0), finish.max(axis=0), worth.sum(axis=0)
    idle = (ends - finish).mean(axis=0) / np.where(ends > 0, ends, 1.0)
    objective = np.where(possible, (ends + exchange_seconds) / np.where(possible, effective, 1.0), np.inf)
    at = _choose(total, idle, objective, possible, limits)
    works = [Work.of(int(b), int(n)) for b, n in zip(batch[:, at], sequences[:, at], strict=True)]
    if limits.exact:
        works = _trimmed(sites, works, window.low, limits.sequences)
    return evaluate(times, window.members, works, (window.low, window.high), limits, exchange_seconds)


def _neighbours(choices: Integers, batch: int) -> Integers:
    near = choices[(choices >= min(batch - 1, batch * 0.8)) & (choices <= max(batch + 1, batch * 1.25))]
    if len(near) > NEIGHBOURS:
        near = near[np.unique(np.linspace(0, len(near) - 1, NEIGHBOURS).round().astype(np.int64))]
    return np.unique(np.append(near, batch))


def _lengths(sites: Sequence[StepTimes], window: Window) -> Array:
    """Lengths to try: an even grid, and the very finish times of those sites whose sequences take longest."""
    first, last = window.seconds * 0.88, window.seconds * 1.05
    found = [np.linspace(first, last, 128), np.array([window.seconds * (1 + _ROUNDING)])]
    room = 512
    pairs = [(float(site.seconds[b] / b), site.seconds, b) for site, b in zip(sites, window.batches, strict=True)]
    for _, seconds, b in sorted(pairs, key=lambda pair: -pair[0]):
        steps = np.arange(max(0, math.floor(first / seconds[b])), math.ceil(last / seconds[b]) + 1)
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


def _choose(total: Array, idle: Array, objective: Array, possible: npt.NDArray[np.bool_], limits: Limits) -> int:
    """Which of the lengths tried is taken."""
    wanted = limits.sequences
    if limits.exact and (possible & (total >= wanted)).any():
        return int(np.where(possible & (total >= wanted), objective * 0 + total, np.inf).argmin())
    calm = idle <= IDLE_AIM
    below = possible & (total <= wanted)
    if not below.any():
        least = total[possible].min()
        pool = possible & (total <= least * 1.03)
        return int(np.where(pool & calm if (pool & calm).any() else pool, objective, np.inf).argmin())
    most = total[below].max()
    pools = [below & (total >= (1 - slack) * most) for slack in TOKEN_SLACKS]
    pool = next((pool & calm for pool in pools if (pool & calm).any()), pools[0])
    return int(np.where(pool, objective, np.inf).argmin())


def _trimmed(sites: Sequence[StepTimes], works: list[Work], low: int, wanted: int) -> list[Work]:
    """Take sequences off the members that finish last until `wanted` are left, or nobody can give one up."""
    works = list(works)
    while sum(work.sequences for work in works) > wanted:
        fewer = [Work.of(work.batch, work.sequences - 1) if work.sequences > 1 else work for work in works]
        able = [k for k, work in enumerate(fewer) if works[k].sequences > 1 and work.steps >= low]
        if not able:
            break
        latest = max(able, key=lambda k: (sites[k].finish(works[k].batch, works[k].steps, works[k].last), -k))
        works[latest] = fewer[latest]
    return works
