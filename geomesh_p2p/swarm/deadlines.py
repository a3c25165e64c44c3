"""How long an exchange waits for a stream, and whom it asks meanwhile. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from geomesh_p2p.core.types import PeerId, Plan


@dataclass(frozen=True)
class ExchangeLimits:
    """Knobs of an exchange. A stream misses its deadline when no byte of it arrives for
    max(deadline_seconds, deadline_factor * the plan's exchange_seconds); each miss makes the next wait longer.

    `rates` are bytes per second to other members, where known: the slowest is served first.
    """

    chunk_bytes: int = 131_072
    parallel_chunks: int = 4
    """Chunks under way to one member at a time (they take several of the transport's streams)."""
    deadline_seconds: float = 2.0
    deadline_factor: float = 4.0
    deadline_growth: float = 1.5
    misses_until_lost: int = 2
    """The first misses only make the receiver ask again, the owner and others; from this one on the owner is reported."""
    acknowledge_chunks: int = 8
    rates: Mapping[PeerId, float] = field(default_factory=dict)

    def patience_seconds(self, plan: Plan) -> float:
        return max(self.deadline_seconds, self.deadline_factor * plan.exchange_seconds)


@dataclass(frozen=True)
class Waiting:
    """`peer`'s `what` has been due for `since_seconds`; in `remaining_seconds` its deadline is missed (again)."""

    peer: PeerId
    what: str
    since_seconds: float
    remaining_seconds: float
    misses: int


@dataclass(frozen=True)
class Missed:
    """No byte of a stream of `peer` for `silent_seconds`, whoever was asked."""

    peer: PeerId
    silent_seconds: float


class Due:
    """A stream that is due, from the moment that its owner is known to have made it.

    At a miss the owner is asked again, and then the other members in turn: the next one as soon as one says that it has
    nothing, or a quarter of the wait later. When all have been asked it begins again with the first, after a quarter too.
    """

    def __init__(self, owner: PeerId, others: tuple[PeerId, ...], patience_seconds: float, growth: float, now: float) -> None:
        self.owner = owner
        self.misses = 0
        self.since = self.silent_since = now
        self.blocked_by: tuple[PeerId, ...] = ()
        self._others = others
        self._patience = patience_seconds
        self._growth = growth
        self._deadline = now + patience_seconds
        self._untried: list[PeerId] = []
        self._nudge_at = float("inf")

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def next_at(self) -> float:
        return min(self._deadline, self._nudge_at)

    def progressed(self, now: float) -> None:
        self.silent_since = now
        self._wait(now)
        self._untried = []
        self._nudge_at = float("inf")
        self.blocked_by = ()

    def blocked(self, peers: tuple[PeerId, ...]) -> None:
        """The owner is there, and waits for `peers` itself."""
        self.blocked_by = peers
        self._untried = []
        self._nudge_at = float("inf")

    def check(self, now: float) -> list[PeerId]:
        """Whom to ask now; a deadline that has passed counts as a miss."""
        if now >= self._deadline:
            self.misses += 1
            self._wait(now)
            self._untried = list(self._others)
            return [self.owner, *self.ask_next(now)]
        if now >= self._nudge_at:
            self._untried = self._untried or list(self._others)
            return self.ask_next(now)
        return []

    def ask_next(self, now: float) -> list[PeerId]:
        """The next member that may hold what the owner does not deliver; none if all have been asked just now."""
        self._nudge_at = now + self._span / 4
        return [self._untried.pop(0)] if self._untried else []

    @property
    def _span(self) -> float:
        return self._patience * self._growth**self.misses

    def _wait(self, now: float) -> None:
        self._deadline = now + self._span
