"""What a simulated schedule must never do, checked while it runs; and whether it goes on after it has healed."""

from __future__ import annotations

from typing import Any

from geomesh_p2p.core.log import covers, is_quorum
from geomesh_p2p.core.types import Update
from tests.mesh.bulk import Node


class Watch:
    """The part of a World that looks at what the others do. `fail` raises Violation."""

    def check_commit(self, node: Node, update: Update) -> None:
        known = self.committed.get(update.round)
        if known is None:
            self.check_body(node, update)
            self.committed[update.round] = (update.seal, update)
        elif known[0] != update.seal:
            self.fail(f"{node.peer} commits another update for round {update.round}")

    def check_body(self, node: Node, update: Update) -> None:
        """The update is the mean of exactly the contributions it lists, each as it was trained."""
        listed = tuple(c.payload for c in update.contributors)
        if update.body_bytes and any(part != listed for part in self.bodies[update.body]):
            self.fail(f"{node.peer} holds an update of round {update.round} whose parts list other contributions")
        for c in update.contributors:
            peer, round, base, ranges = self.trained[c.payload]
            if (peer, round, base) != (c.peer, update.round, update.base) or not covers(ranges, c.ranges):
                self.fail(f"{c.site} is credited with ranges of round {update.round} that it did not train")

    def on_look(self, _: Any) -> None:
        """Long after the heal: a schedule that has gone on is over."""
        self.went_on = not self.stuck()
        self.at(self.now + 4.0, "look", None)

    def stuck(self) -> str:
        """After healing the run goes on, and whoever is there takes part; empty if so, else what is wrong."""
        newest = max(self.committed, default=0)
        voters = self.committed[newest][1].voters if newest else ("p0",)
        there = [node for node in self.nodes.values() if not node.left]
        voting = [peer for peer in voters if peer in self.nodes and not self.nodes[peer].left]
        known = any(len(node.disk.updates) >= newest for node in there)      # else it was lost with a disk
        if not known or not is_quorum(voting, voters) or len(there) < self.min_peers:
            self.counts["no quorum left"] += 1
            return ""
        said = "; ".join(f"{node.peer}: {node.says}" for node in self.nodes.values())
        if newest < self.round_at_heal + 5:
            return f"no progress: round {self.round_at_heal} at the heal, {newest} at the end. {said}"
        for node in there:
            if node.replica is None or node.replica.s.leaving:
                continue
            if node.replica.round < newest - 1:
                return f"{node.peer} is at round {node.replica.round}, the run at {newest}. {said}"
            if not any(node.peer in self.committed[r][1].voters for r in range(max(1, newest - 3), newest + 1)):
                return f"{node.peer} takes no part at round {newest}. {said}"
        return ""
