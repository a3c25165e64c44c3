"""How long an exchange waits for its streams, whom it asks meanwhile, and whom it reports. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from geomesh_p2p.core.types import PeerId, Plan
from geomesh_p2p.swarm.chunks import PART, StreamKey

MOST_GROWTH = 4.0


@dataclass(frozen=True)
class ExchangeLimits:
    """Knobs of an exchange. A stream misses its deadline when no byte of it arrives for
    max(deadline_seconds, deadline_factor * the plan's exchange_seconds) and the measured round trip; each miss makes the next
    wait longer, up to 4 times.

    `rates` are bytes per second to other members, where known: the slowest is served first.
    """

    chunk_bytes: int = 131_072
    parallel_chunks: int = 4
    """Chunks under way to one member at a time (they take several of the transport's streams)."""
    deadline_seconds: float = 2.0
    deadline_factor: float = 4.0
    deadline_growth: float = 1.5
    misses_until_lost: int = 2
    """Without a byte in between: the first misses only make the receiver ask again, the owner and others; from this one on the
    owner is reported."""
    acknowledge_chunks: int = 8
    rates: Mapping[PeerId, float] = field(default_factory=dict)
    round_trip_seconds: float = 0.0

    def patience_seconds(self, plan: Plan) -> float:
        return max(self.deadline_seconds, self.deadline_factor * plan.exchange_seconds) + self.round_trip_seconds


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


class _Due:
    """A stream that is due, from the moment that its owner is known to have made it.

    At a miss the owner is asked again, and then the other members in turn: the next one as soon as one says that it has
    nothing, or a quarter of the wait later. When all have been asked it begins again with the first, after a quarter too.
    """

    def __init__(self, key: StreamKey, others: tuple[PeerId, ...], patience_seconds: float, growth: float, now: float) -> None:
        self.owner = key.owner
        self.since = self.silent_since = now
        self.deadline = now + patience_seconds
        self.misses = 0
        self.misses_in_a_row = 0
        self.blocked_by: tuple[PeerId, ...] = ()
        self._others = tuple(peer for peer in others if peer != key.owner)
        # a reducer may be there and wait itself; its answer to a question may get lost, so it is asked more than once
        self._may_be_blocked = (key.owner,) if key.kind == PART else ()
        self._patience = patience_seconds
        self._growth = growth
        self._untried: list[PeerId] = []
        self._nudge_at = float("inf")

    @property
    def _wait_seconds(self) -> float:
        return self._patience * min(MOST_GROWTH, self._growth**self.misses)

    @property
    def next_at(self) -> float:
        return min(self.deadline, self._nudge_at)

    def progressed(self, now: float) -> None:
        self.silent_since = now
        self.misses_in_a_row = 0
        self.deadline = now + self._wait_seconds
        self.blocked(())

    def at_work(self, now: float) -> None:
        """The owner says that it goes on: it is asked for that again as soon as it was at first."""
        self.progressed(now)
        self.deadline = now + self._patience

    def blocked(self, peers: tuple[PeerId, ...]) -> None:
        """The owner is there (and waits for `peers` itself): nobody else need be asked until the next miss."""
        self.blocked_by = peers
        self._untried = []
        self._nudge_at = float("inf")

    def check(self, now: float) -> list[PeerId]:
        """Whom to ask now; a deadline that has passed counts as a miss."""
        if now >= self.deadline:
            self.misses += 1
            self.misses_in_a_row += 1
            self.deadline = now + self._wait_seconds
            self.blocked_by = ()  # as of the last miss: the owner is asked anew
            self._untried = list(self._others)
            return [self.owner, *self.ask_next(now)]
        if now >= self._nudge_at:
            self._untried = self._untried or list(self._others)
            return [*self._may_be_blocked, *self.ask_next(now)]
        return []

    def ask_next(self, now: float) -> list[PeerId]:
        """The next member that may hold what the owner does not deliver; none if all have been asked just now."""
        self._nudge_at = now + self._wait_seconds / 4
        return [self._untried.pop(0)] if self._untried else []


class DueStreams:
    """All streams that one member's exchange waits for."""

    def __init__(self, me: PeerId, others: tuple[PeerId, ...], limits: ExchangeLimits, plan: Plan) -> None:
        self._me = me
        self._others = others
        self._limits = limits
        self._patience = limits.patience_seconds(plan)
        self._due: dict[StreamKey, _Due] = {}

    def clear(self) -> None:
        self._due.clear()

    def add(self, key: StreamKey, now: float) -> None:
        """The bytes of `key` are due from now on, if they were not yet."""
        if key not in self._due:
            self._due[key] = _Due(key, self._others, self._patience, self._limits.deadline_growth, now)

    def whole(self, key: StreamKey) -> None:
        self._due.pop(key, None)

    def is_due(self, key: StreamKey) -> bool:
        return key in self._due

    def is_silent(self, key: StreamKey, now: float) -> bool:
        """Whether no byte of a stream that is due has come for as long as the first is waited for."""
        return key in self._due and now - self._due[key].silent_since >= self._patience

    def misses(self, key: StreamKey) -> int:
        return self._due[key].misses if key in self._due else 0

    def progressed(self, key: StreamKey, now: float) -> None:
        if key in self._due:
            self._due[key].progressed(now)

    def sends(self, peer: PeerId, now: float) -> None:
        """Bytes have come from `peer`, whose streams come one after the other: none of them is silent."""
        for key, due in self._due.items():
            if key.owner == peer:
                due.progressed(now)

    def at_work(self, key: StreamKey, now: float) -> None:
        """The owner has said that it still receives, or reckons, what it needs to make the stream."""
        if key in self._due:
            self._due[key].at_work(now)

    def blocked(self, key: StreamKey, peers: tuple[PeerId, ...]) -> None:
        """The owner has said that it waits for `peers` itself: they are reported in its place."""
        if self.misses(key):
            self._due[key].blocked(peers)

    def ask_next(self, key: StreamKey, now: float) -> list[PeerId]:
        """One that was asked has nothing: whom to ask instead."""
        return self._due[key].ask_next(now) if self.misses(key) else []

    def seconds_to_next(self, now: float) -> float:
        """How long `check` may be left alone. Nothing that is added or asked meanwhile needs it earlier."""
        nearest = min((due.next_at for due in self._due.values()), default=float("inf"))
        return max(0.0, min(self._patience / 4, nearest - now))

    def check(self, now: float) -> tuple[list[tuple[StreamKey, list[PeerId]]], tuple[Missed, ...]]:
        """Whom to ask for what now, and whom to report as lost."""
        asks, missed = [], dict[PeerId, float]()
        for key, due in self._due.items():
            misses, culprits, asked = due.misses, due.blocked_by or (due.owner,), due.check(now)
            if asked:
                asks.append((key, asked))
            if due.misses > misses and due.misses_in_a_row >= self._limits.misses_until_lost:
                for peer in culprits:
                    missed[peer] = max(missed.get(peer, 0.0), now - due.silent_since)
        missed.pop(self._me, None)
        return asks, tuple(Missed(peer, seconds) for peer, seconds in sorted(missed.items()))

    def waiting(self, now: float) -> tuple[Waiting, ...]:
        return tuple(
            Waiting(due.owner, key.kind, now - due.since, max(0.0, due.deadline - now), due.misses)
            for key, due in self._due.items()
        )
