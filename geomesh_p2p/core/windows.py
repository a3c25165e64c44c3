"""The rough half of the search for a round: which sites take part, how many inner steps they may have, how long it is.

Steps are real numbers here. In a window [low, high] of inner steps and a length T the members do not depend on each other:
each takes the batch that fits the most effective sequences into T. A site that cannot make `low` steps in T, even with
single sequences, takes no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.forecast import Array, StepTimes

NEAR_BEST_RATE = 0.97
SMALL_MESH = 16  # sites; in larger ones rounding to whole steps and sequences averages out
COARSE, COARSER = 0.04, 0.15  # distance of the lows first tried, as a share, in small and in larger meshes
FINE = 12  # lows tried between the neighbours of the best
LENGTH_PRECISION = 1e-4
LENGTHS = 24  # tried where a window cannot reach the round's sequences
ENOUGH = 0.97  # of the sequences wanted
LONGER = 1.1  # lengths up to this times the one for ENOUGH are tried for all of them
CELLS = 100_000  # of a table worked on at once
TIE = 1e-3  # windows whose objectives differ by less are taken for equally good
ROUNDING_GAIN = 0.05  # what rounding to whole steps and sequences may turn round
WINDOWS = 3  # handed on to be tried on the integer grid, in small meshes
FOREVER = 1e30  # seconds
_ROUNDING = 1e-9

Integers = npt.NDArray[np.int64]
Members = tuple[int, ...]
"""Ascending indices into the sites of a search."""


@dataclass(frozen=True)
class Limits:
    """`sequences` is the aim for the whole round, exceeded only where `min_steps` demands it; `exact`: all of them (the
    rest of a budget) rather than a few fewer. `critical_batch` is in sequences, None if unknown. Of an exchange, as much is
    trained through as takes `ahead_share` of the round's training."""

    min_steps: int
    max_steps: int
    steps_ratio: float
    sequences: int
    exact: bool = False
    critical_batch: float | None = None
    ahead_share: float = 0.0

    def idle_exchange(self, exchange_seconds: float, train_seconds: Any) -> Any:
        """What an exchange adds to a round of training; for a number or an array."""
        if not self.ahead_share:
            return exchange_seconds
        return np.maximum(0.0, exchange_seconds - self.ahead_share * train_seconds)

    def training_for(self, exchange_seconds: float, share: float) -> float:
        """Seconds of training with which what an exchange adds is this share of the round."""
        ratio = 1 / share - 1
        return exchange_seconds * ratio / (1 + self.ahead_share * ratio)

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
    """A rough answer: members, their batches, a length, the inner steps that each may have, the sequences aimed at."""

    low: int
    high: int
    seconds: float
    members: Members
    batches: tuple[int, ...]
    sequences: int


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

    def at(self, lengths: Array, lows: Integers, highs: Integers) -> tuple[Integers, Array, Array, Array]:
        """For windows side by side, [window, site]: each site's choice within the length (-1: none has `low` steps), its
        steps, its sequences, and its effective sequences (counted no higher than near its best rate)."""
        length, low, high = (x[:, None, None] for x in (lengths, lows, highs))
        steps = np.minimum(length / self.seconds, high)
        possible = (low - 1) * self.seconds + self.single <= length * (1 + _ROUNDING)  # the last step may be of one sequence
        value = np.where(possible, np.minimum(self.effective * steps, self.enough * length), -1.0)
        pick = value.argmax(axis=2)
        steps, worth = (np.take_along_axis(x, pick[..., None], axis=2)[..., 0] for x in (steps, value))
        part = worth >= 0
        sequences = np.where(part, self.batches[np.arange(len(self.batches)), pick] * steps, 0.0)
        return np.where(part, pick, -1), steps, sequences, np.where(part, worth, 0.0)


@dataclass(frozen=True)
class _Try:
    """`cost` is in seconds of training per effective sequence; `room` how far the steps are from both ends of the window."""

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

    def tries(self, lows: Sequence[int], reaching: bool) -> list[_Try]:
        """Windows that reach (nearly) the round's sequences at the shortest lengths that do, or those that never do at
        several lengths."""
        together = max(1, CELLS // self.table.batches.size)
        parts = [np.array(lows[k : k + together]) for k in range(0, len(lows), together)]
        return [found for part in parts for found in (self._reaching(part) if reaching else self._short(part))]

    def _highs(self, lows: Integers) -> Integers:
        return np.minimum(self.limits.max_steps, np.floor(lows * self.limits.steps_ratio + _ROUNDING)).astype(np.int64)

    def _reaching(self, lows: Integers) -> list[_Try]:
        highs = self._highs(lows)
        longest = highs.astype(np.float64) * (self.slowest * (1 + _ROUNDING))
        able = self._reach(longest, lows, highs, ENOUGH)
        lows, highs, longest = lows[able], highs[able], longest[able]
        fewer: Array = self._smallest(lows.astype(np.float64) * self.quickest, longest, lows, highs, ENOUGH)
        found = self._at(fewer, lows, highs)
        longer: Array = np.minimum(longest, fewer * LONGER)
        able = self._reach(longer, lows, highs, 1.0)
        lows, highs = lows[able], highs[able]
        return found + self._at(self._smallest(fewer[able], longer[able], lows, highs, 1.0), lows, highs)

    def _short(self, lows: Integers) -> list[_Try]:
        highs = self._highs(lows)
        lengths = np.geomspace(lows * self.quickest, highs * self.slowest * (1 + _ROUNDING), LENGTHS)
        return [found for length in lengths for found in self._at(length, lows, highs)]

    def _members(self, pick: Integers) -> Members:
        """Those that take part, or nobody if they may not do so without the others. Everybody together always may."""
        members = tuple(np.flatnonzero(pick >= 0).tolist())
        return members if members == self.everybody or (members and self.constraints.allowed(members)) else ()

    def _reach(self, lengths: Array, lows: Integers, highs: Integers, share: float) -> npt.NDArray[np.bool_]:
        pick, _, sequences, _ = self.table.at(lengths, lows, highs)
        enough = sequences.sum(axis=1) >= self.limits.sequences * share
        return np.array([bool(e and self._members(p)) for e, p in zip(enough, pick, strict=True)], dtype=np.bool_)

    def _smallest(self, low: Array, high: Array, lows: Integers, highs: Integers, share: float) -> Array:
        """About the smallest lengths in (low, high] that reach `share`, as `high` does."""
        while (high > low * (1 + LENGTH_PRECISION)).any():
            middle = np.sqrt(low * high)
            reached = self._reach(middle, lows, highs, share)
            low, high = np.where(reached, low, middle), np.where(reached, middle, high)
        return high

    def stretched(self, low: int) -> list[_Try]:
        """Lengths at which one more site can just make its `low` steps. All that is trained then counts: the time is spent
        anyway."""
        lengths = low * np.unique(self.table.single)
        lows = np.full(len(lengths), low, dtype=np.int64)
        tries = self._at(lengths, lows, self._highs(lows), capped=False)
        return [t for t in tries if t.window.sequences > self.limits.sequences]

    def _at(self, lengths: Array, lows: Integers, highs: Integers, capped: bool = True) -> list[_Try]:
        """`capped`: more sequences than wanted are no gain."""
        found = []
        for k, (pick, steps, sequences, worth) in enumerate(zip(*self.table.at(lengths, lows, highs), strict=True)):
            if members := self._members(pick):
                inside, low, high, length = list(members), int(lows[k]), int(highs[k]), float(lengths[k])
                total, wanted = float(sequences.sum()), self.limits.sequences
                wanted = wanted if capped else max(wanted, int(total))
                effective = float(worth.sum()) * min(1.0, wanted / total)
                room = min(float(steps[inside].min()) / low, high / float(steps[inside].max()))
                batches = tuple(self.table.batches[inside, pick[inside]].astype(np.int64).tolist())
                found.append(_Try(length / effective, room, Window(low, high, length, members, batches, wanted)))
        return found


def best_windows(
    times: Sequence[StepTimes], choices: Sequence[Integers], limits: Limits, constraints: Constraints
) -> list[Window]:
    """The best window first, then those that rounding might prove better, each with other batches.

    Order of wishes: enough sequences, the objective, the most room for steps to differ. The exchange is taken to be that of
    all sites, so that windows differ by what is trained alone."""
    rough, exchange = _Rough(times, choices, limits, constraints), constraints.exchange(tuple(range(len(times))))
    lows = _lows(limits, COARSE if len(times) <= SMALL_MESH else COARSER)
    tries = rough.tries(lows, True)
    if not tries:
        return _ranked(rough.tries(lows, False), limits, exchange)
    place = lows.index(min(tries, key=lambda t: (t.cost, t.window.low)).window.low)
    below, above = lows[max(0, place - 1)], lows[min(len(lows) - 1, place + 1)]
    between = {round(low) for low in np.linspace(below, above, FINE).tolist()} - set(lows)
    tries += rough.tries(sorted(between), True)
    if not limits.exact:
        tries += rough.stretched(limits.min_steps)
    return _ranked(tries, limits, exchange)


def _ranked(tries: Sequence[_Try], limits: Limits, exchange_seconds: float) -> list[Window]:
    def score(t: _Try) -> float:
        return t.cost * (1 + float(limits.idle_exchange(exchange_seconds, t.window.seconds)) / t.window.seconds)

    found = [(score(t), t) for t in tries]
    best = min(price for price, _ in found)
    found = [(price, t) for price, t in found if price <= best * (1 + ROUNDING_GAIN)]
    found.sort(key=lambda item: (max(item[0], best * (1 + TIE)), -item[1].room, item[1].window.low))
    distinct: dict[tuple[Members, tuple[int, ...]], Window] = {}
    for _, t in found:
        distinct.setdefault((t.window.members, t.window.batches), t.window)
    windows = list(distinct.values())
    return windows[: WINDOWS if len(windows[0].members) <= SMALL_MESH else 1]


def _lows(limits: Limits, distance: float) -> list[int]:
    """Fewest steps of the windows first tried, from min_steps to max_steps."""
    lows, low = [], limits.min_steps
    while low <= limits.max_steps:
        lows.append(low)
        low = max(low + 1, round(low * (1 + distance)))
    return lows
