"""The rough half of the search for a round: which sites take part, how many inner steps they may have, how long it is.

Steps are real numbers here. In a window [low, high] of inner steps and a length T the members do not depend on each other:
each takes the batch that fits the most effective sequences into T. A site that cannot make `low` steps in T, even with
single sequences, takes no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.forecast import Array, StepTimes

NEAR_BEST_RATE = 0.97
COARSE, FINE = 0.04, 8  # distance of the lows first tried, as a share; and how many more between the neighbours of the best
LENGTH_PRECISION = 1e-4
LENGTHS = 24  # tried where a window cannot reach the round's sequences
ENOUGH = 0.97  # of the sequences wanted
TIE = 1e-3  # windows whose objectives differ by less are taken for equally good
ROUNDING_GAIN = 0.05  # what rounding to whole steps and sequences may turn round
WINDOWS = 3  # handed on to be tried on the integer grid
FOREVER = 1e30  # seconds
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


class _Table:
    """All choices of all sites side by side, [site, choice], padded with choices that take for ever."""

    def __init__(self, times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits) -> None:
        shape = (len(times), max(len(c) for c in choices))
        self.batches, self.seconds = np.zeros(shape), np.full(shape, FOREVER)
        for row, (site, batches) in enumerate(zip(times, choices, strict=True)):
            self.batches[row, : len(batches)] = batches
            self.seconds[row, : len(batches)] = site.seconds[batches]
        self.effective = self.batches * limits.worth(self.batches)
        self.enough = limits.near * (self.effective / self.seconds).max(axis=1, keepdims=True)
        self.single = np.array([[site.seconds[1]] for site in times])
        self.rows = np.arange(len(times))

    def at(self, seconds: float, low: int, high: int) -> tuple[Integers, Array, Array, Array]:
        """Each site's choice within `seconds` (-1: none has `low` steps), its steps, sequences, and effective sequences
        (counted no higher than near its best rate)."""
        steps = seconds / self.seconds
        capped = np.minimum(steps, high)
        # The last step may be a single sequence.
        enough = (low - 1) * self.seconds + self.single <= seconds * (1 + _ROUNDING)
        value = np.where(enough, np.minimum(self.effective * capped, self.enough * seconds), -1.0)
        pick = value.argmax(axis=1)
        worth, steps = value[self.rows, pick], capped[self.rows, pick]
        out = worth < 0
        sequences = np.where(out, 0.0, self.batches[self.rows, pick] * steps)
        return np.where(out, -1, pick), steps, sequences, np.where(out, 0.0, worth)


@dataclass(frozen=True)
class _Try:
    """`cost` is in seconds of training per effective sequence; `room` how far the steps are from both ends of the window;
    `reached` says whether there is time for the round's sequences."""

    reached: bool
    cost: float
    room: float
    window: Window


class _Rough:
    def __init__(
        self, times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, constraints: Constraints
    ) -> None:
        self.table, self.limits, self.constraints = _Table(times, choices, limits), limits, constraints
        self.everybody = tuple(range(len(times)))
        seconds = self.table.seconds
        self.quickest, self.slowest = float(seconds.min()), float(seconds[seconds < FOREVER].max())

    def tries(self, lows: Iterable[int]) -> list[_Try]:
        return [found for low in lows for seconds in self._lengths(low) if (found := self._at(seconds, low))]

    def high(self, low: int) -> int:
        return min(self.limits.max_steps, math.floor(low * self.limits.steps_ratio + _ROUNDING))

    def _members(self, pick: Integers) -> Members:
        """Those that take part, or nobody if they may not do so without the others. Everybody together always may."""
        members = tuple(np.flatnonzero(pick >= 0).tolist())
        return members if members == self.everybody or (members and self.constraints.allowed(members)) else ()

    def _lengths(self, low: int) -> list[float]:
        """The shortest lengths that reach the round's sequences and a few fewer; several if none does."""
        high = self.high(low)

        def reaches(seconds: float, share: float) -> bool:
            pick, _, sequences, _ = self.table.at(seconds, low, high)
            return bool(sequences.sum() >= self.limits.sequences * share and self._members(pick))

        shortest, longest = low * self.quickest, high * self.slowest * (1 + _ROUNDING)
        if not reaches(longest, ENOUGH):
            return [float(seconds) for seconds in np.geomspace(shortest, longest, LENGTHS)]
        fewer = _smallest(lambda seconds: reaches(seconds, ENOUGH), shortest, longest)
        within = min(longest, fewer * 1.1)
        return [fewer, _smallest(lambda seconds: reaches(seconds, 1.0), fewer, within)] if reaches(within, 1.0) else [fewer]

    def _at(self, seconds: float, low: int) -> _Try | None:
        high = self.high(low)
        pick, steps, sequences, worth = self.table.at(seconds, low, high)
        if not (members := self._members(pick)):
            return None
        inside, total, wanted = list(members), float(sequences.sum()), self.limits.sequences
        effective = float(worth.sum()) * min(1.0, wanted / total)  # more than wanted are no gain
        room = min(float(steps[inside].min()) / low, high / float(steps[inside].max()))
        batches = tuple(int(self.table.batches[i, pick[i]]) for i in members)
        return _Try(total >= wanted * ENOUGH, seconds / effective, room, Window(low, high, seconds, members, batches))


def best_windows(
    times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, constraints: Constraints
) -> list[Window]:
    """The best window first, then those that rounding might prove better, each with other batches.

    Order of wishes: enough sequences, the objective, the most room for steps to differ."""
    rough = _Rough(times, choices, limits, constraints)
    lows = _lows(limits)
    tries = rough.tries(lows)
    best = min(tries, key=lambda t: (not t.reached, t.cost, t.window.low)).window.low
    place = lows.index(best)
    below, above = lows[max(0, place - 1)], lows[min(len(lows) - 1, place + 1)]
    between = {round(low) for low in np.linspace(below, above, FINE).tolist()}
    tries += rough.tries(sorted(between - set(lows)))
    return _ranked([t for t in tries if t.reached] or tries, constraints)


def _ranked(tries: Iterable[_Try], constraints: Constraints) -> list[Window]:
    best, found = math.inf, []
    for t in sorted(tries, key=lambda t: (t.cost, t.window.low)):
        if t.cost > best * (1 + ROUNDING_GAIN):
            break  # an exchange only adds to it
        score = t.cost * (1 + constraints.exchange(t.window.members) / t.window.seconds)
        best = min(best, score)
        found.append((score, t))
    found = [(score, t) for score, t in found if score <= best * (1 + ROUNDING_GAIN)]
    found.sort(key=lambda item: (max(item[0], best * (1 + TIE)), -item[1].room, item[1].window.low))
    distinct: dict[tuple[Members, tuple[int, ...]], Window] = {}
    for _, t in found:
        distinct.setdefault((t.window.members, t.window.batches), t.window)
    return list(distinct.values())[:WINDOWS]


def _lows(limits: Limits) -> list[int]:
    """Fewest steps of the windows first tried, from min_steps to max_steps."""
    lows, low = [], limits.min_steps
    while low <= limits.max_steps:
        lows.append(low)
        low = max(low + 1, round(low * (1 + COARSE)))
    return lows


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """About the smallest value in (low, high] for which `holds`, which it does at `high`."""
    while high > low * (1 + LENGTH_PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
