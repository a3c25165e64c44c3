"""Who comes back to commit a round that the others committed long ago does not lead its voters by the votes it had before."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest

from geomesh_p2p.core import events as ev
from geomesh_p2p.core.types import Term
from tests.injection.proof import fired, injecting
from tests.mesh.bulk import Node
from tests.mesh.checker import Violation
from tests.mesh.simulator import World

FOUNDER = "p0"
GO_ON_SECONDS = 60.0


class FounderReturns(World):
    """The founder, elected by itself alone, ends when everybody but itself has its commit of the round that makes the others
    voters. They hold the next round, and end when their leader has sent that commit, which nobody gets. Then all but that
    leader come back, the founder in a term above theirs."""

    def __init__(self, seed: int, off: frozenset[str] = frozenset()) -> None:
        super().__init__(seed, off, bias="plain", scripted=False)
        self.heap = [(0.0 if kind == "start" else when, *rest, kind, what) for when, *rest, kind, what in self.heap]
        heapq.heapify(self.heap)
        self.heals = True
        self.left_at = 0                          # the round that the founder did not append
        self.alone_at = 0                         # the round that is committed by one that then ended

    def crash_point(self, node: Node, actions: list[ev.Action]) -> int:
        appended = next((i for i, action in enumerate(actions) if isinstance(action, ev.AppendCommit)), -1)
        if appended < 0 or node.replica is None or not node.replica.is_leader or not injecting():
            return -1
        update = actions[appended].update  # type: ignore[attr-defined]
        if not self.left_at and node.peer == FOUNDER and len(update.voters) == len(self.nodes):
            self.left_at = update.round
            return appended
        if self.left_at and not self.alone_at and update.round == self.left_at + 1:
            self.alone_at = update.round
            return appended
        return -1

    def crash(self, node: Node, back: tuple[float, ...] = ()) -> None:
        super().crash(node, (3 * GO_ON_SECONDS,))
        if self.alone_at and node.replica is None and not self.fired["all"]:
            self.fired["all"] += 1
            for other in self.nodes.values():
                if other.up:
                    self.crash(other)
            founder = self.nodes[FOUNDER].disk
            founder.durable = replace(founder.durable, term=Term(9, FOUNDER))
            for peer in self.nodes:
                if peer != node.peer:
                    self.at(self.now + 1.0, "start", peer)


def scene(off: frozenset[str] = frozenset()) -> FounderReturns:
    """With four peers, all of which take part in the first round that has more than one."""
    for seed in range(100):
        world = FounderReturns(seed, off)
        if len(world.nodes) == 4:
            while world.now < 30.0 and not world.alone_at:
                world.play_until(world.heap[0][0])
            if world.alone_at:
                return world
    fired(0, "all ended while they held a round that was committed")
    raise AssertionError


@pytest.mark.fault
def test_voters_that_have_gone_on_without_a_leader_have_to_elect_it() -> None:
    world = scene()
    fired(world.fired["all"], "all ended while they held a round that was committed")
    before = world.committed[world.alone_at][0]
    world.play_until(world.now + GO_ON_SECONDS)
    assert len(world.nodes[FOUNDER].disk.updates) > world.alone_at + 1, "the run went on, and the founder with it"
    assert world.committed[world.alone_at][0] == before


@pytest.mark.fault
def test_without_that_rule_the_round_would_be_committed_twice() -> None:
    world = scene(frozenset(["elected_by_view"]))
    fired(world.fired["all"], "all ended while they held a round that was committed")
    with pytest.raises(Violation, match="another update for round"):
        world.play_until(world.now + GO_ON_SECONDS)
