"""The simulated world's surroundings: a lossy network, disks that survive crashes, and a planner. Virtual time only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.events import Durable, NeedPlan
from geomesh_p2p.core.log import RoundLog
from geomesh_p2p.core.types import NO_TERM, Assignment, Founding, Held, PeerId, Plan, Range, Update


@dataclass
class Disk:
    """What one identity has on its disk: all of it fsynced, since a driver goes on only after the fsync."""

    founding: Founding
    view: tuple[PeerId, ...]
    durable: Durable = field(default_factory=lambda: Durable(NO_TERM, False))
    held: Held | None = None
    updates: list[Update] = field(default_factory=list)

    def log(self) -> RoundLog:
        log = RoundLog(replace(RoundLog.founded(self.founding).state, voters=self.view))
        for update in self.updates:
            log.append(update)
        return log


class Network:
    """Who reaches whom, how late, and how often not. `effect` is told whenever one of these things has made a difference."""

    def __init__(self, random: Random, effect: Callable[[str], None]) -> None:
        self.random, self.effect = random, effect
        self.loss = 0.0
        self.groups: dict[str, int] = {}            # site -> island; empty: no partition
        self.slow: dict[tuple[str, str], float] = {}
        self.silent: set[tuple[str, str]] = set()   # half-open: nothing passes this way, and nobody is told
        self.unplugged: set[str] = set()            # sites whose transport is gone, while they live
        self.connections: dict[frozenset[str], int] = {}

    def connection(self, source: str, target: str) -> int:
        """Which connection a message goes over now; what is under way on an earlier one is lost."""
        return self.connections.get(frozenset((source, target)), 0)

    def reset(self, a: str, b: str) -> None:
        pair = frozenset((a, b))
        self.connections[pair] = self.connections.get(pair, 0) + 1

    def reaches(self, source: str, target: str) -> bool:
        return self.groups.get(source, 0) == self.groups.get(target, 0)

    def delay(self, source: str, target: str) -> float | None:
        """Seconds to the other end; None: this message is lost."""
        if why := self._hindered(source, target):
            self.effect(why)
            return None
        late = self.slow.get((source, target), 0.0)
        if late:
            self.effect("slow")
        return 0.01 + 0.04 * self.random.random() + late

    def _hindered(self, source: str, target: str) -> str:
        if not self.reaches(source, target):
            return "partition"
        if self.unplugged & {source, target}:
            return "helper"
        if (source, target) in self.silent:
            return "half-open"
        return "loss" if self.loss and self.random.random() < self.loss else ""

    def heal(self) -> None:
        self.loss, self.groups, self.slow = 0.0, {}, {}
        self.silent.clear()
        self.unplugged.clear()


POSITIONS = 4            # of the stream, for each member and round: one step each


def make_plan(need: NeedPlan, run: bytes, sites: dict[PeerId, str], log: RoundLog, random: Random) -> Plan:
    """A plan with the members asked for. Who was in the previous attempt keeps its ranges; others get the lowest free ones,
    in an order that depends on the term, as a leader that knows nothing of an earlier attempt would do it."""
    kept: dict[PeerId, tuple[Range, ...]] = {}
    if need.previous is not None and random.random() < 0.8:
        for member in need.previous.members:
            if member.peer in need.members and all(log.overlap(r) is None for r in member.ranges):
                kept[member.peer] = member.ranges
    taken = [r for ranges in kept.values() for r in ranges]
    order = sorted(need.members, key=lambda peer: digest_bytes(peer.encode(), str(need.term).encode()))
    for peer in order:
        if peer not in kept:
            kept[peer] = log.next_ranges(POSITIONS, taken)
            taken += kept[peer]
    members = tuple(
        Assignment(peer, sites[peer], 1, POSITIONS, 1, kept[peer], 1.0, 0.8)
        for peer in sorted(need.members, key=lambda peer: sites[peer])
    )
    reduce = not need.gather and len(members) > 1 and random.random() < 0.4
    shares = tuple(Range(8 * i, 8 * i + 8) for i in range(len(members))) if reduce else ()
    return Plan(
        run,
        need.round,
        need.term,
        need.attempt,
        need.base,
        members,
        "reduce" if reduce else "gather",
        shares,
        log.tokens,
        POSITIONS * len(members),
        0.8,
        0.2,
        0.5,
        random.random() < 0.7,
    )
