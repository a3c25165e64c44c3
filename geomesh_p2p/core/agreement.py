"""How far each member's signs agree with the others': a member that trains as they do stands out from chance, one that
sends other signs than it should does not, or stands out on the wrong side.

A score has two shares: of its signs that agree with the mean of all, its own included, and of those that agree with the mean
of the *others* alone. The first says how far it pulled with the update; the second is what can be judged: chance is one half
whatever the number of members, flipped signs lie below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from statistics import median

import numpy as np
import numpy.typing as npt

STRETCHES, STRETCH_PARAMETERS = 16, 2048
SMOOTHING = 0.2          # of a new score in the moving average
ROUNDS_TO_JUDGE = 5
SEPARABLE = 0.02         # the others' agreement must lie this far above chance before anybody can be judged
LEAST_SHARE = 0.25       # of the others' distance from chance
FEWEST_TO_JUDGE = 4


@dataclass(frozen=True)
class Agreement:
    """Shares of signs, 0 ... 1: `with_update` with the mean of all, `with_others` with the mean of the others (0.5 if nobody
    else contributed)."""

    with_update: float
    with_others: float


def agreements(
    terms: Callable[[int, int], npt.NDArray[np.float32]], members: int, start: int, stop: int, seed: bytes
) -> list[Agreement]:
    """Scores of `members` over a sample of parameters [start, stop), `start` a multiple of 8, that `seed` chooses.
    `terms(low, high)` gives [member, parameter]: what each adds to the mean. Parameters that say nothing do not count."""
    update, others = np.zeros((members, 2)), np.zeros((members, 2))
    for low, high in _sample(start, stop, seed):
        values = terms(low, high).astype(np.float64)
        total = values.sum(axis=0)
        tied = 1e-6 * np.abs(values).sum(axis=0)
        for index, own in enumerate(values):
            for counts, against in ((update[index], total), (others[index], total - own)):
                product = np.sign(own) * np.where(np.abs(against) > tied, np.sign(against), 0.0)
                counts += (np.count_nonzero(product > 0), np.count_nonzero(product))
    return [Agreement(_share(u), _share(o)) for u, o in zip(update, others, strict=True)]


def _share(counts: npt.NDArray[np.float64]) -> float:
    return float(counts[0] / counts[1]) if counts[1] else 0.5


def _sample(start: int, stop: int, seed: bytes) -> list[tuple[int, int]]:
    if stop - start <= STRETCHES * STRETCH_PARAMETERS:
        return [(low, min(low + STRETCH_PARAMETERS, stop)) for low in range(start, stop, STRETCH_PARAMETERS)]
    random, units = Random(seed), (stop - start) // STRETCH_PARAMETERS
    chosen = sorted(random.sample(range(units), STRETCHES))
    return [(start + unit * STRETCH_PARAMETERS, start + (unit + 1) * STRETCH_PARAMETERS) for unit in chosen]


class AgreementBook:
    """Smoothed scores by member; says once of whom a person should know. It judges nobody: whoever is flagged goes on."""

    def __init__(self) -> None:
        self.scores: dict[str, Agreement] = {}
        self._rounds: dict[str, int] = {}
        self._flagged: set[str] = set()

    def add(self, scores: Mapping[str, Agreement]) -> dict[str, Agreement]:
        """Take a committed round's scores. Returns those newly flagged, with their smoothed scores."""
        for member, new in scores.items():
            old = self.scores.get(member)
            self.scores[member] = new if old is None else Agreement(
                old.with_update + SMOOTHING * (new.with_update - old.with_update),
                old.with_others + SMOOTHING * (new.with_others - old.with_others),
            )  # fmt: skip
            self._rounds[member] = self._rounds.get(member, 0) + 1
        below = self._below(set(scores))
        news, self._flagged = below - self._flagged, below | (self._flagged - set(scores))
        return {member: self.scores[member] for member in sorted(news)}

    def keep(self, members: set[str]) -> None:
        """Forget everybody else."""
        for known in (self.scores, self._rounds):
            for member in [member for member in known if member not in members]:
                del known[member]
        self._flagged &= members

    def _below(self, members: set[str]) -> set[str]:
        judged = {m for m in members if self._rounds[m] >= ROUNDS_TO_JUDGE}
        if len(judged) < FEWEST_TO_JUDGE:
            return set()
        typical = median(self.scores[member].with_others for member in judged) - 0.5
        if typical < SEPARABLE:
            return set()
        return {member for member in judged if self.scores[member].with_others - 0.5 < LEAST_SHARE * typical}
