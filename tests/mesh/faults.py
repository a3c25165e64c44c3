"""What goes wrong in a simulated schedule, and when. A bias makes a kind of schedule in which one rare fault is likely.

A fault counts (`fired`) once it has made a difference: a message that did not arrive or came late, an event that waited for
a paused process, a save that failed, a process that ended. Joins and leaves are no faults. Clocks that jump are none here:
a replica knows differences of its monotonic clock alone, so there is nothing that could jump. Damaged bytes are a matter of
the exchange, which finds them by their hash; to a replica they are bytes that come late.
"""

from __future__ import annotations

from typing import Any

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.types import Plan
from tests.injection.proof import injecting
from tests.mesh.bulk import Node
from tests.mesh.network import Disk

FAULTS_END = 40.0
BROADCASTS = {
    "commit": m.Commit, "held": m.HeldReport, "plan": m.PlanOffer, "again": m.HoldAgain, "vote": m.Vote, "stand": m.VoteRequest,
}
WEIGHTS = {
    "plain": {
        "crash": 4, "armed": 3, "pause": 3, "partition": 3, "loss": 2, "slow": 2, "fsync": 1, "disk": 1, "leave": 1, "join": 1,
        "half-open": 2, "reset": 2, "helper": 1, "donor": 1,
    },
    "commit-crash": {"armed": 10, "crash": 3, "loss": 1, "slow": 2, "partition": 1},
    "slow-out": {"slow": 8, "armed": 4, "crash": 3, "partition": 1, "pause": 1},
    "restarts": {"crash": 8, "armed": 5, "disk": 3, "pause": 2, "all": 2, "loss": 1},
    "partitions": {"partition": 8, "armed": 4, "crash": 2, "slow": 2, "leave": 1, "join": 1},
    # A leader ends inside its commits, and all but one of the others are away for a while.
    "blackout": {"blackout": 8, "crash": 2, "armed": 1},
    # One member alone gets the whole update in time, and then often ends.
    "partial-hold": {"armed": 2, "crash": 1, "partition": 1, "slow": 1},
    # The leader's own exchange stalls, and the others' held reports come late.
    "late-reports": {"armed": 4, "crash": 3, "slow": 1},
    # A leader is heard and hears late, but for held reports; candidates end while they stand.
    "old-leader": {"old-leader": 6, "armed": 2, "crash": 1},
    # Connections break, are half open, or gone on one side; those who come back are served late.
    "connections": {"half-open": 6, "reset": 6, "helper": 3, "donor": 4, "crash": 3, "armed": 3, "pause": 1, "join": 1},
}
LASTING = ("partition", "loss", "slow", "half-open", "reset", "helper", "donor", "pause")     # they may come to nothing
BIASES = tuple(WEIGHTS)


class Faults:
    """The part of a World that breaks things, and mends them."""

    # -------------------------------------------------------------- what counts

    def effect(self, kind: str) -> None:
        """A fault of this kind has made a difference; each counts once."""
        if self.pending[kind]:
            self.fired[kind] += self.pending.pop(kind)

    def held_up(self, node: Node) -> bool:
        """Whether `node` is paused, and what comes now has to wait."""
        if node.paused_until <= self.now:
            return False
        self.effect("pause")
        return True

    @property
    def faults_fired(self) -> int:
        return self.fired.total()

    # -------------------------------------------------------------- faults

    def faults(self) -> None:
        """Write this schedule's faults."""
        r = self.random
        self.heals = r.random() < 0.5
        weights = WEIGHTS[self.bias]
        kinds, shares = list(weights), list(weights.values())
        when = r.uniform(2.0, 5.0)
        while when < FAULTS_END - 2.0:
            self.at(when, "fault", r.choices(kinds, shares)[0])
            when += r.expovariate(0.12 if self.bias == "partial-hold" else 0.5)
        if self.heals:
            self.at(FAULTS_END, "heal", None)

    def pick(self, leader: float = 0.5) -> Node | None:
        """Some node that is up; the leader with this probability."""
        up = [node for node in self.nodes.values() if node.replica is not None]
        leaders = [node for node in up if node.replica is not None and node.replica.is_leader]
        if leaders and self.random.random() < leader:
            return self.random.choice(leaders)
        return self.random.choice(up) if up else None

    def on_fault(self, kind: str) -> None:
        if not injecting():
            return
        r, node = self.random, self.pick()
        self.counts[f"fault {kind}"] += 1
        if node is not None and kind in LASTING:
            self.pending[kind] = 1              # two of a kind at once are one
        if kind == "join" and len(self.nodes) < 6:
            name = f"j{len(self.nodes)}{len(self.retired)}"
            self.add(name, f"site-{name}", ("p0",), self.now)
            return
        if node is None:
            return
        if kind == "crash":
            self.crash(node)
        elif kind == "all":
            for other in list(self.nodes.values()):
                if other.up:
                    self.crash(other)
            self.fired["all"] += 1
        elif kind == "armed":
            commit = self.bias == "commit-crash" and r.random() < 0.6
            node.armed = "commit" if commit else r.choice((*BROADCASTS, "any"))
            if self.bias == "restarts" and r.random() < 0.6:
                node.armed = "finished"
        elif kind == "pause":
            node.paused_until = self.now + r.choice((1.0, 4.0, 8.0))
        elif kind == "partition":
            sites = {n.site: r.randrange(2) for n in self.nodes.values()}
            if r.random() < 0.5:
                sites = {n.site: int(n is node) for n in self.nodes.values()}
            self.network.groups = sites
            self.at(self.now + r.choice((2.0, 5.0, 10.0)), "heal_network", None)
        elif kind == "loss":
            self.network.loss = r.choice((0.05, 0.2, 0.5))
            self.at(self.now + 5.0, "heal_network", None)
        elif kind == "slow":
            late = r.choice((0.5, 2.0, 5.0, 9.0))
            others = [n for n in self.nodes.values() if n is not node and r.random() < 0.8]
            self.network.slow.update({(node.site, n.site): late for n in others})
            self.at(self.now + r.choice((4.0, 10.0, 16.0)), "fast", node.site)
        elif kind == "blackout":
            node.armed, self.blackout = "commit", True
        elif kind == "old-leader":
            self.old_leader(node)
        elif kind == "half-open":
            others = [n.site for n in self.nodes.values() if n is not node and r.random() < 0.6]
            ways = [(node.site, other) for other in others] if r.random() < 0.5 else [(other, node.site) for other in others]
            both = r.random() < 0.3
            self.network.silent |= {*ways, *((b, a) for a, b in ways if both)}
            self.at(self.now + r.choice((2.0, 5.0, 12.0)), "speak", node.site)
        elif kind == "reset":
            others = [other.site for other in self.nodes.values() if other is not node and r.random() < 0.7]
            for i in range(r.choice((2, 5, 10))):           # again and again: a connection that does not hold
                self.at(self.now + 0.2 * i, "reset", (node.site, others))
        elif kind == "helper":
            self.network.unplugged.add(node.site)
            self.at(self.now + r.choice((1.0, 4.0, 8.0)), "plug", node.site)
        elif kind == "donor":
            for other in self.nodes.values():
                if r.random() < 0.7:
                    other.answers_late = self.now + 15.0, r.choice((1.0, 4.0, 16.0))
        elif kind == "fsync":
            node.fsync_fails = True
        elif kind == "disk":
            self.lose_disk(node)
        elif kind == "leave":
            self.handle(node, ev.LeaveWanted("drain"))

    def old_leader(self, node: Node) -> None:
        """`node` is heard late, and hears late, for about as long as the others follow it unheard."""
        r = self.random
        self.pending["slow"] = 1
        for other in self.nodes.values():
            if other is not node:
                self.network.slow[(node.site, other.site)] = r.uniform(1.5, 6.0)
                if r.random() < 0.7:
                    self.network.slow[(other.site, node.site)] = r.uniform(2.0, 6.0)
                if r.random() < 0.2:
                    other.armed = "stand"
        until = self.now + r.choice((1.0, 3.2, 4.0, 8.0))
        for other in self.nodes.values():
            self.at(until, "fast", other.site)

    def lose_disk(self, node: Node) -> None:
        """The folder is gone: the site comes back with a new identity, or (without the rule) with its old one and no memory."""
        self.fired["disk"] += 1
        self.crash(node)
        if self.rules.on("identity_unit"):
            self.retired.append(self.nodes.pop(node.peer))
            peer = f"{node.peer[:2]}-{len(self.retired)}"
            self.add(peer, node.site, ("p0",), self.now + 1.0)
        else:
            node.disk = Disk(self.founding, ("p0",))

    def on_heal_network(self, _: Any) -> None:
        self.network.groups, self.network.loss = {}, 0.0

    def on_speak(self, site: str) -> None:
        self.network.silent = {way for way in self.network.silent if site not in way}

    def on_reset(self, what: tuple[str, list[str]]) -> None:
        for other in what[1]:
            self.network.reset(what[0], other)

    def on_plug(self, site: str) -> None:
        self.network.unplugged.discard(site)

    def on_fast(self, site: str) -> None:
        for pair in [pair for pair in self.network.slow if pair[0] == site]:
            del self.network.slow[pair]

    def on_heal(self, _: Any) -> None:
        self.healed = True
        self.network.heal()
        self.at(self.now + 8.0, "look", None)
        self.round_at_heal = max(self.committed, default=0)
        needed = self.committed[self.round_at_heal][1].voters if self.committed else ("p0",)
        # A leaver whose time was up before the others knew is still needed: somebody starts it again.
        unknown = any(len(node.disk.updates) < self.round_at_heal for node in self.nodes.values() if not node.left)
        for node in self.nodes.values():
            node.paused_until, node.armed, node.fsync_fails = min(node.paused_until, self.now), "", False
            node.answers_late = (0.0, 0.0)
            if node.left and (node.peer in needed or unknown):
                node.left = False
            self.at(self.now + 0.1, "start", node.peer)

    def black_out(self, gone: Node) -> None:
        """All but one of the others are away for a while too, but not as long as `gone`."""
        self.blackout = False
        others = [node for node in self.nodes.values() if node.up and node is not gone]
        if others:
            stays = self.random.choice(others)
            for node in others:
                if node is not stays:
                    self.crash(node, (4.0, 5.0, 6.0))

    def spoil(self, leader: Node, plan: Plan) -> None:
        """Some plans' exchanges go badly, as this schedule's bias wants it."""
        if not injecting():
            return
        r = self.random
        if self.bias == "partial-hold" and r.random() < (0.7 if plan.round == self.unlucky_round else 0.2):
            self.unlucky_round = plan.round              # its next attempt, by whomever, is likely to go badly too
            lucky = r.choice(plan.peers)
            self.stalled[plan.digest] = ({peer for peer in plan.peers if peer != lucky}, self.now + r.choice((4.0, 8.0)))
            self.pending["stall"] = 1
            if r.random() < 0.8:
                self.dooming.add(plan.digest)
        elif self.bias == "late-reports" and plan.attempt > 1:
            lucky = r.choice([peer for peer in plan.peers if peer != leader.peer] or plan.peers)
            self.stalled[plan.digest] = ({peer for peer in plan.peers if peer != lucky}, self.now + r.choice((2.0, 4.0)))
            self.pending["stall"] = 1
            if r.random() < 0.7:
                leader.armed = "commit"
        elif self.bias == "late-reports" and r.random() < 0.4:
            self.stalled[plan.digest] = ({leader.peer}, self.now + r.choice((4.0, 8.0)))
            self.pending["stall"] = self.pending["late report"] = 1
            self.late_reports[plan.digest] = r.uniform(1.0, 4.0)
            if r.random() < 0.5:
                leader.armed = "commit"
