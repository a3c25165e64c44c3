"""The round log's bookkeeping: the chain of committed updates, who votes next, which data was credited.

Pure: it holds no bodies and does no I/O. What has been committed is never undone; a log only grows, one round at a time. A
rollback is a round of its own, whose state is that of an earlier one: whoever was away meets it in the log like any other.
Data that was credited stays so: what led to a rollback is not trained again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.types import GENESIS_ROUND, Founding, PeerId, Range, Update

# ---------------------------------------------------------------- ranges


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions as few ascending ranges that do not touch; empty ranges vanish, overlaps are allowed."""
    result: list[Range] = []
    for r in sorted(r for r in ranges if r.start < r.stop):
        if result and r.start <= result[-1].stop:
            result[-1] = Range(result[-1].start, max(result[-1].stop, r.stop))
        else:
            result.append(r)
    return tuple(result)


def covers(outer: Iterable[Range], inner: Iterable[Range]) -> bool:
    """Whether every position of `inner` is in `outer`."""
    whole = merged(outer)
    return all(any(w.start <= r.start and r.stop <= w.stop for w in whole) for r in merged(inner))


def first_positions(ranges: Iterable[Range], count: int) -> tuple[Range, ...]:
    """The first `count` positions of `ranges`, as ranges."""
    taken: list[Range] = []
    for part in ranges:
        if count <= 0:
            break
        stop = min(part.stop, part.start + count)
        if stop > part.start:
            taken.append(Range(part.start, stop))
            count -= stop - part.start
    return tuple(taken)


def later_positions(ranges: Iterable[Range], count: int) -> tuple[Range, ...]:
    """All but the first `count` positions of `ranges`, as ranges."""
    left: list[Range] = []
    for part in ranges:
        start = min(part.stop, part.start + max(0, count))
        count -= start - part.start
        if start < part.stop:
            left.append(Range(start, part.stop))
    return tuple(left)


def joined(*parts: Iterable[Range]) -> tuple[Range, ...]:
    """All positions in the order given, in as few ranges as that takes."""
    result: list[Range] = []
    for r in (r for part in parts for r in part if r.start < r.stop):
        if result and result[-1].stop == r.start:
            result[-1] = Range(result[-1].start, r.stop)
        else:
            result.append(r)
    return tuple(result)


class Credited:
    """A growing set of credited positions; no position is credited twice."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        for r in ranges:
            self.add(r)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(self._ranges)

    def overlap(self, wanted: Range) -> Range | None:
        """The first positions of `wanted` that are credited already, or None."""
        for known in self._ranges[max(0, bisect_right(self._ranges, wanted) - 1) :]:
            if known.start >= wanted.stop:
                return None
            start, stop = max(known.start, wanted.start), min(known.stop, wanted.stop)
            if start < stop:
                return Range(start, stop)
        return None

    def add(self, new: Range) -> None:
        """Raises ValueError if a position of `new` is credited already, or if it is empty or negative."""
        if not 0 <= new.start < new.stop:
            raise ValueError(f"positions [{new.start}, {new.stop}) are not a range of the stream")
        twice = self.overlap(new)
        if twice is not None:
            raise ValueError(f"positions [{twice.start}, {twice.stop}) are credited already")
        at = bisect_left(self._ranges, new)
        start, stop, first, last = new.start, new.stop, at, at
        if at > 0 and self._ranges[at - 1].stop == new.start:
            start, first = self._ranges[at - 1].start, at - 1
        if at < len(self._ranges) and self._ranges[at].start == new.stop:
            stop, last = self._ranges[at].stop, at + 1
        self._ranges[first:last] = [Range(start, stop)]

    def gaps(self, taken: Iterable[Range] = ()) -> Iterator[Range]:
        """Ascending ranges of positions neither credited nor in `taken`; the last one is endless (its stop is huge)."""
        start = 0
        for known in merged([*self._ranges, *taken]):
            if start < known.start:
                yield Range(start, known.start)
            start = known.stop
        yield Range(start, start + 2**62)


# ---------------------------------------------------------------- voters


def is_quorum(peers: Iterable[PeerId], view: Sequence[PeerId]) -> bool:
    """Whether `peers` hold a majority of `view`; exactly half counts when it holds the view's lowest peer id."""
    present = set(peers) & set(view)
    if 2 * len(present) == len(set(view)):
        return bool(view) and min(view) in present
    return 2 * len(present) > len(set(view))


def next_voters(
    view: Sequence[PeerId], members: Sequence[PeerId], contributors: Iterable[PeerId], round: int
) -> tuple[PeerId, ...]:
    """The view that the update of `round` names, in the order of `members` (site order): the attempt's members that are in
    the view, contributing or not, and contributing newcomers: at most as many as there were voters before, in site order,
    so that a crowd of joiners who vanish cannot easily stop a run. The first round takes all who contributed."""
    contributing, room = set(contributors), len(members) if round == GENESIS_ROUND + 1 else len(view)
    newcomers = [peer for peer in members if peer in contributing and peer not in view][:room]
    return tuple(peer for peer in members if peer in view or peer in newcomers)


# ---------------------------------------------------------------- the log


def lineage(round: int, header: Callable[[int], Update | None]) -> Iterator[int]:
    """The rounds whose states the state after `round` was made from, from itself back to the founding: a rollback leads past
    those that it undoes. Ends early at a round whose update `header` does not know."""
    yield round
    while round > GENESIS_ROUND and (update := header(round)) is not None:
        round = round - 1 if update.rollback is None else update.rollback.to_round
        yield round


class BrokenChain(ValueError):
    """An update does not follow from the log; nothing was changed."""


REMEMBERED_ROUNDS = 256
REMEMBERED_SITES = 256


@dataclass(frozen=True)
class LogState:
    """All that a log must remember to go on: kept with snapshots, and enough to continue without the rounds before."""

    run: Digest
    round: int
    digest: Digest
    voters: tuple[PeerId, ...]
    credited: tuple[Range, ...]
    tokens: int


class RoundLog:
    """Committed rounds, from the founding or from a snapshot's state on."""

    def __init__(self, state: LogState) -> None:
        self.run = state.run
        self.round = state.round
        self.voters = state.voters
        self.tokens = state.tokens
        self._credited = Credited(state.credited)
        self._digests = {state.round: state.digest}
        self.sites: dict[PeerId, str] = {}  # of voters, and of who contributed last since the founding or snapshot

    @classmethod
    def founded(cls, founding: Founding) -> RoundLog:
        return cls(LogState(founding.run, GENESIS_ROUND, founding.base, (founding.founder,), (), 0))

    @property
    def state(self) -> LogState:
        return LogState(self.run, self.round, self.digest, self.voters, self.credited, self.tokens)

    @property
    def digest(self) -> Digest:
        return self._digests[self.round]

    @property
    def credited(self) -> tuple[Range, ...]:
        return self._credited.ranges

    def digest_of(self, round: int) -> Digest | None:
        """The digest of a round this log knows: the newest REMEMBERED_ROUNDS since its founding or snapshot."""
        return self._digests.get(round)

    def append(self, update: Update) -> None:
        """Adds the next round. Raises BrokenChain, naming what does not fit, and then leaves the log as it was."""
        self._credited = self._checked(update)
        self.round = update.round
        self.voters = update.voters
        self.tokens = self.tokens + update.tokens if update.rollback is None else update.rollback.tokens
        self._digests[update.round] = update.digest
        self._digests.pop(update.round - REMEMBERED_ROUNDS, None)
        for c in update.contributors:
            self.sites.pop(c.peer, None)  # to the end: the newest are remembered
            self.sites[c.peer] = c.site
        self._forget_sites()

    def _forget_sites(self) -> None:
        gone = [peer for peer in self.sites if peer not in self.voters]
        for peer in gone[: max(0, len(self.sites) - REMEMBERED_SITES)]:
            del self.sites[peer]

    def _checked(self, update: Update) -> Credited:
        if update.round != self.round + 1:
            raise BrokenChain(f"an update of round {update.round} does not follow round {self.round}")
        if update.base != self.digest:
            raise BrokenChain(f"round {update.round} builds on {update.base.hex()[:12]}, this log has {self.digest.hex()[:12]}")
        if not update.voters or len(set(update.voters)) != len(update.voters):
            raise BrokenChain(f"round {update.round} names no voters, or one twice: {update.voters}")
        if (back := update.rollback) is not None and (update.contributors or not 0 <= back.to_round < update.round - 1):
            raise BrokenChain(f"round {update.round} cannot go back to round {back.to_round}")
        sites = [c.site for c in update.contributors]
        if sites != sorted(set(sites)) or len({c.peer for c in update.contributors}) != len(sites):
            raise BrokenChain(f"contributors of round {update.round} are not distinct and in site order: {sites}")
        credited = Credited(self.credited)
        for c in update.contributors:
            if c.tokens <= 0 or (c.round, c.base) != (update.round, update.base):
                raise BrokenChain(f"{c.site} contributes {c.tokens} tokens for round {c.round} to round {update.round}")
            try:
                for r in c.ranges:
                    credited.add(r)
            except ValueError as error:
                raise BrokenChain(f"{c.site} in round {update.round}: {error}") from None
        return credited

    def overlap(self, wanted: Range) -> Range | None:
        """The first positions of `wanted` that are credited already, or None."""
        return self._credited.overlap(wanted)

    def next_ranges(self, count: int, taken: Iterable[Range] = ()) -> tuple[Range, ...]:
        """The lowest `count` positions neither credited nor in `taken`, so that a lost range is handed out again, once."""
        result = []
        for gap in self._credited.gaps(taken):
            if count <= 0:
                break
            result.append(Range(gap.start, min(gap.stop, gap.start + count)))
            count -= len(result[-1])
        return tuple(result)
