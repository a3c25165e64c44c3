"""Random schedules of the protocol in virtual time: replicas over a lossy network, with crashes, pauses and restarts.

    python -m tests.mesh.simulator --schedules 2000 --seed 0 [--without RULE] [--bias BIAS] [--processes 2]

One schedule is one seed. For a while faults happen: loss, delay, partitions, one-way slow links, pauses, crashes between any
two actions (most of all inside a broadcast), failing fsyncs, lost disks, joiners, leavers. Half of the schedules then heal,
and must go on. What must never happen is checked while it runs (`Violation`), and again from the recorded histories
(tests/mesh/checker.py). The exchange is abstract: a member has the update once the bytes of all contributions could have
travelled to it; an update's body is a hash of what went into it.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.log import covers, is_quorum, next_voters
from geomesh_p2p.core.replica import Replica, Settings
from geomesh_p2p.core.rules import RULES
from geomesh_p2p.core.types import BatchTime, Contribution, Founding, PeerId, Plan, Profile, Rules, Timing, Update
from tests.mesh.checker import Violation, check_histories
from tests.mesh.network import Disk, Network, make_plan

TIMING = Timing(
    heartbeat_seconds=1.0,
    heartbeat_limit_seconds=3.0,
    election_seconds=2.0,
    lease_seconds=4.0,
    settle_seconds=1.0,
    retry_seconds=0.5,
    leave_seconds=15.0,
    max_attempts=4,
)
BROADCASTS = {
    "commit": m.Commit, "held": m.HeldReport, "plan": m.PlanOffer, "again": m.HoldAgain, "vote": m.Vote, "stand": m.VoteRequest,
}
WEIGHTS = {
    "plain": {
        "crash": 4, "armed": 3, "pause": 3, "partition": 3, "loss": 2, "slow": 2, "fsync": 1, "disk": 1, "leave": 1, "join": 1,
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
}
BIASES = tuple(WEIGHTS)
FAULTS_END = 40.0
HEALED_END = 100.0
CHUNK_DEADLINE = 1.5
NO_BYTES = digest_bytes()


@dataclass
class Exchange:
    """One node's part in the exchange of one plan."""

    plan: Plan
    headers: dict[PeerId, Contribution] = field(default_factory=dict)
    since: dict[PeerId, float] = field(default_factory=dict)
    bytes: set[PeerId] = field(default_factory=set)
    part: tuple[Digest, ...] | None = None       # reduce: what this node averaged, fixed once made
    parts: dict[PeerId, tuple[Digest, ...]] = field(default_factory=dict)
    stopped: bool = False
    done: bool = False
    complained: float = 0.0


class Node:
    """One site: a process that may be down, its disk, and the driver's memory."""

    def __init__(self, peer: PeerId, site: str, disk: Disk) -> None:
        self.peer, self.site, self.disk = peer, site, disk
        self.life = 0
        self.replica: Replica | None = None
        self.history: list[tuple[str, dict[str, Any]]] = []
        self.paused_until = 0.0
        self.armed = ""                  # crash inside the next list of actions that holds this
        self.doomed = False              # crash after the action being carried out
        self.stays_away = False          # and come back late
        self.fsync_fails = False
        self.left = False
        self.tick_at = float("inf")
        self.forget()

    def forget(self) -> None:
        """What a crash takes: everything but the disk."""
        self.exchanges: dict[Digest, Exchange] = {}
        self.training: tuple[Plan, int] | None = None     # the plan trained for, and the number of this training
        self.closed = False
        self.contribution: Contribution | None = None

    @property
    def up(self) -> bool:
        return self.replica is not None

    @property
    def says(self) -> str:
        r = self.replica
        return "down" if r is None else f"round {r.round} term {r.term.number} {r.phase} {r.waiting_for}"


class World:
    """One schedule."""

    def __init__(self, seed: int, off: frozenset[str] = frozenset(), bias: str = "") -> None:
        self.seed = seed
        self.random = Random(seed)
        self.bias = bias or BIASES[seed % len(BIASES)]
        self.rules = Rules(off)
        self.now = 0.0
        self.heap: list[tuple[float, int, str, Any]] = []
        self.sequence = 0
        self.network = Network(self.random)
        self.founding = Founding(b"f" * 32, seed.to_bytes(8, "little"), seed, b"w" * 32, "p0")
        self.nodes: dict[PeerId, Node] = {}
        self.retired: list[Node] = []
        self.sites: dict[PeerId, str] = {}
        self.trainings = 0
        self.bulk_is_fast = self.random.random() < 0.5       # slow links hold up control messages only
        self.min_peers = self.random.choice((1, 1, 2))
        self.committed: dict[int, tuple[Digest, Update]] = {}
        self.trained: dict[Digest, tuple[PeerId, int, Digest, tuple[Any, ...]]] = {}
        self.bodies: dict[Digest, tuple[tuple[Digest, ...], ...]] = {}
        self.counts: Counter[str] = Counter()
        self.stalled: dict[Digest, tuple[set[PeerId], float]] = {}     # plan -> whose exchange brings nothing until when
        self.unlucky_round = 0
        self.dooming: set[Digest] = set()                # plans whose first holder ends right after the save
        self.late_reports: dict[Digest, float] = {}
        self.blackout = False
        self.healed = self.went_on = False
        narrow = self.bias in ("partial-hold", "late-reports", "old-leader")
        count = self.random.choice((3, 3, 3, 4) if narrow else (3, 3, 4, 5) if self.bias != "plain" else (1, 2, 3, 4, 5))
        names = [f"p{i}" for i in range(count)]
        self.random.shuffle(names)
        islands = {name: self.random.randrange(2) for name in names}
        for i, name in enumerate(names):
            view: tuple[PeerId, ...] = ("p0",)
            if not self.rules.on("found_once"):
                view = tuple(other for other in sorted(names) if islands[other] == islands[name])
            self.add(name, f"site{i}", view, at=0.0 if name == "p0" else self.random.choice((0.0, 0.1, 8.0)))
        if not self.rules.on("found_once"):
            self.network.groups = {self.sites[name]: island for name, island in islands.items()}
            self.at(10.0, "heal_network", None)
        self.faults()

    # -------------------------------------------------------------- time

    def at(self, when: float, kind: str, what: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (when, self.sequence, kind, what))

    def run(self) -> None:
        """Play the schedule to its end. Raises Violation."""
        end = HEALED_END if self.heals else FAULTS_END
        while self.heap:
            when, _, kind, what = heapq.heappop(self.heap)
            if when > end or self.went_on:
                break
            self.now = when
            getattr(self, f"on_{kind}")(what)
        if self.heals and not self.went_on:
            stuck = self.stuck()
            if stuck:
                self.fail(stuck)
        check_histories(self.histories(), self.founding, self.rules)

    def histories(self) -> dict[PeerId, list[tuple[str, dict[str, Any]]]]:
        return {node.peer: node.history for node in (*self.retired, *self.nodes.values())}

    def fail(self, text: str) -> None:
        raise Violation(f"seed {self.seed} ({self.bias}) at {self.now:.2f}: {text}")

    # -------------------------------------------------------------- nodes

    def add(self, peer: PeerId, site: str, view: tuple[PeerId, ...], at: float) -> None:
        self.sites[peer] = site
        self.nodes[peer] = Node(peer, site, Disk(self.founding, view))
        self.at(at, "start", peer)

    def on_start(self, peer: PeerId) -> None:
        node = self.nodes.get(peer)
        if node is None or node.up or node.left:
            return
        node.life += 1
        settings = Settings(TIMING, self.rules, True, self.min_peers, None, self.seed + node.life)
        node.replica = Replica(peer, node.site, node.disk.log(), node.disk.durable, node.disk.held, settings)
        node.forget()
        node.armed, node.doomed, node.stays_away, node.fsync_fails = "", False, False, False
        node.paused_until, node.tick_at = 0.0, float("inf")
        self.handle(node, ev.Tick())
        self.at(self.now + self.random.random(), "beat", (peer, node.life))
        ready = ev.Ready(Profile(peer, node.site, "", CURVE))
        self.at(self.now + self.random.choice((0.2, 1.0, 3.0)), "event", (peer, node.life, ready))

    def crash(self, node: Node, back: tuple[float, ...] = (0.3, 2.0, 6.0, 15.0)) -> None:
        self.counts["crash"] += 1
        node.replica = None
        node.forget()
        self.at(self.now + (0.5 if self.healed else self.random.choice(back)), "start", node.peer)

    def alive(self, peer: PeerId, life: int) -> Node | None:
        node = self.nodes.get(peer)
        return node if node is not None and node.up and node.life == life else None

    def on_event(self, what: tuple[PeerId, int, ev.Event]) -> None:
        peer, life, event = what
        node = self.alive(peer, life)
        if node is None:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, "event", what)
            return
        self.handle(node, event)

    def on_beat(self, what: tuple[PeerId, int]) -> None:
        node = self.alive(*what)
        if node is None or node.replica is None:
            return
        self.at(max(self.now + TIMING.heartbeat_seconds, node.paused_until), "beat", what)
        if node.paused_until > self.now:
            return
        beat = m.Heartbeat(
            **node.replica.heartbeat_fields(), step_batch=0, step_seconds=0.0, links=(), sent_at=self.now
        )
        for other in self.nodes:
            if other != node.peer:
                self.send(node, other, beat)

    def on_tick(self, what: tuple[PeerId, int]) -> None:
        node = self.alive(*what)
        if node is None or node.replica is None or self.now < node.tick_at:
            return
        node.tick_at = float("inf")
        if node.paused_until > self.now:
            node.tick_at = node.paused_until
            self.at(node.tick_at, "tick", what)
        else:
            self.handle(node, ev.Tick())

    def handle(self, node: Node, event: ev.Event) -> None:
        replica = node.replica
        if replica is None:
            return
        self.perform(node, replica.handle(event, self.now))
        if node.replica is not replica:
            return
        deadline = replica.next_deadline()
        if deadline <= self.now and isinstance(event, ev.Tick):
            self.fail(f"{node.peer} asks for a tick at once, after a tick: {node.says}")
        if deadline < node.tick_at:
            node.tick_at = max(deadline, self.now + 0.001)
            self.at(node.tick_at, "tick", (node.peer, node.life))

    # -------------------------------------------------------------- the driver

    def perform(self, node: Node, actions: list[ev.Action]) -> None:
        """Carry actions out in order; the process may end between any two of them."""
        stop_after = self.crash_point(node, actions)
        for i, action in enumerate(actions):
            if i == stop_after or node.doomed:
                self.crash(node, (5.0, 8.0, 12.0, 15.0) if node.stays_away else (0.3, 2.0, 6.0, 15.0))
                if self.blackout and not self.healed:
                    self.black_out(node)
                return
            if isinstance(action, (ev.SaveDurable, ev.SaveHeld, ev.AppendCommit)) and node.fsync_fails:
                node.fsync_fails = False
                self.counts["fsync"] += 1
                self.handle(node, ev.SaveFailed("no space left on device"))
                return
            getattr(self, f"do_{type(action).__name__}")(node, action)
            if not node.up:
                return
        if stop_after == len(actions):
            self.crash(node)

    def black_out(self, gone: Node) -> None:
        """All but one of the others are away for a while too, but not as long as `gone`."""
        self.blackout = False
        others = [node for node in self.nodes.values() if node.up and node is not gone]
        if others:
            stays = self.random.choice(others)
            for node in others:
                if node is not stays:
                    self.crash(node, (4.0, 5.0, 6.0))

    def crash_point(self, node: Node, actions: list[ev.Action]) -> int:
        """Before which action this process ends; -1: it does not."""
        if not node.armed:
            return -1
        wanted = m.Finished if node.armed == "finished" else BROADCASTS.get(node.armed)
        if wanted is None:
            chosen = list(range(1, len(actions)))
        else:
            sends = [i for i, a in enumerate(actions) if isinstance(a, ev.Send) and isinstance(a.message, wanted)]
            if node.armed == "stand" and any(isinstance(a, ev.Send) and getattr(a.message, "pre", False) for a in actions):
                sends = []
            chosen = [i + 1 for i in sends] + sends[:1]
        if not chosen:
            return -1
        self.counts[f"crash in {node.armed}"] += 1
        node.stays_away = node.armed == "commit" and self.bias in ("partial-hold", "blackout", "late-reports")
        node.armed = ""
        return self.random.choice(chosen)

    def send(self, node: Node, to: PeerId, message: m.Message) -> None:
        target = self.nodes.get(to)
        if target is None:
            return
        delay = self.network.delay(node.site, target.site)
        if delay is not None and isinstance(message, m.HeldReport):
            delay = 0.03 if self.bias == "old-leader" else delay + self.late_reports.get(message.plan, 0.0)
        if delay is not None:
            self.at(self.now + delay, "message", (node.peer, to, target.life, message))

    def on_message(self, what: tuple[PeerId, PeerId, int, m.Message]) -> None:
        sender, to, life, message = what
        node = self.alive(to, life)
        if node is None:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, "message", what)
            return
        self.handle(node, ev.Received(sender, message))

    def do_Send(self, node: Node, action: ev.Send) -> None:
        if isinstance(action.message, m.Commit):
            self.check_commit(node, action.message.update)
        elif isinstance(action.message, m.HoldAgain) and self.bias == "partial-hold" and not self.healed:
            node.armed = node.armed or self.random.choice(("", "commit", "commit"))
        self.send(node, action.to, action.message)

    def do_SaveDurable(self, node: Node, action: ev.SaveDurable) -> None:
        node.disk.durable = action.durable

    def do_SaveHeld(self, node: Node, action: ev.SaveHeld) -> None:
        self.check_body(node, action.held.update)
        node.disk.held = action.held
        if action.held.plan in self.dooming:
            self.dooming.remove(action.held.plan)
            node.doomed = node.stays_away = True

    def do_AppendCommit(self, node: Node, action: ev.AppendCommit) -> None:
        update = action.update
        self.check_commit(node, update)
        held = node.disk.held is not None and node.disk.held.update.seal == update.seal
        assembled = any(e.done and e.plan.round == update.round for e in node.exchanges.values())
        if update.body_bytes and not held and not assembled:
            self.fail(f"{node.peer} appends round {update.round} without its body")
        self.append(node, update)

    def append(self, node: Node, update: Update) -> None:
        if update.round != len(node.disk.updates) + 1:
            self.fail(f"{node.peer} appends round {update.round} after round {len(node.disk.updates)}")
        node.disk.updates.append(update)
        if node.disk.held is not None and node.disk.held.update.round <= update.round:
            node.disk.held = None
        node.exchanges = {key: e for key, e in node.exchanges.items() if e.plan.round >= update.round - 1}
        node.training, node.contribution = None, None

    def do_NeedPlan(self, node: Node, action: ev.NeedPlan) -> None:
        assert node.replica is not None
        if self.random.random() < 0.02:
            answer = ev.Planned(None, "no")
        else:
            plan = make_plan(action, self.founding.run, self.sites, node.replica.log, self.random)
            answer = ev.Planned(plan)
            if not self.healed:
                self.spoil(node, plan)
        seconds = self.random.choice((0.01, 0.8, 1.5) if self.bias == "old-leader" else (0.01, 0.01, 0.01, 0.8))
        self.at(self.now + seconds, "event", (node.peer, node.life, answer))

    def spoil(self, leader: Node, plan: Plan) -> None:
        """Some plans' exchanges go badly, as this schedule's bias wants it."""
        r = self.random
        if self.bias == "partial-hold" and r.random() < (0.7 if plan.round == self.unlucky_round else 0.2):
            self.unlucky_round = plan.round              # its next attempt, by whomever, is likely to go badly too
            lucky = r.choice(plan.peers)
            self.stalled[plan.digest] = ({peer for peer in plan.peers if peer != lucky}, self.now + r.choice((4.0, 8.0)))
            if r.random() < 0.8:
                self.dooming.add(plan.digest)
        elif self.bias == "late-reports" and plan.attempt > 1:
            lucky = r.choice([peer for peer in plan.peers if peer != leader.peer] or plan.peers)
            self.stalled[plan.digest] = ({peer for peer in plan.peers if peer != lucky}, self.now + r.choice((2.0, 4.0)))
            if r.random() < 0.7:
                leader.armed = "commit"
        elif self.bias == "late-reports" and r.random() < 0.4:
            self.stalled[plan.digest] = ({leader.peer}, self.now + r.choice((4.0, 8.0)))
            self.late_reports[plan.digest] = r.uniform(1.0, 4.0)
            if r.random() < 0.5:
                leader.armed = "commit"

    def do_Train(self, node: Node, action: ev.Train) -> None:
        plan = action.plan
        base = node.disk.updates[-1].digest if node.disk.updates else self.founding.base
        if plan.round != len(node.disk.updates) + 1 or plan.base != base:
            self.fail(f"{node.peer} trains for round {plan.round} from another base")
        if action.reuse and node.contribution is not None:
            self.at(self.now, "event", (node.peer, node.life, ev.Trained(plan.digest, node.contribution, 0.0)))
        elif action.reuse and node.training is not None:
            node.training = (plan, node.training[1])
        else:
            self.trainings += 1
            node.training, node.closed, node.contribution = (plan, self.trainings), False, None
            self.random_finish(node)

    def random_finish(self, node: Node) -> None:
        assert node.training is not None
        seconds = self.random.choice((0.6, 0.8, 0.8, 1.0, 1.0, 4.0) if not self.healed else (0.6, 0.8, 1.0))
        leads = node.replica is not None and node.replica.is_leader
        if self.bias == "old-leader" and leads and not self.healed:
            seconds = self.random.uniform(1.0, 4.0)
        self.at(self.now + seconds, "trained", (node.peer, node.life, node.training[1]))

    def on_trained(self, what: tuple[PeerId, int, int]) -> None:
        peer, life, number = what
        node = self.alive(peer, life)
        if node is None or node.training is None or node.training[1] != number or node.contribution is not None:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, "trained", what)
            return
        plan = node.training[0]
        mine = plan.of(peer)
        assert mine is not None
        ranges = mine.ranges[:1] if node.closed else mine.ranges
        payload = digest_bytes(f"{peer} {number}".encode())
        if self.random.random() < 0.03:
            ranges, payload = (), b""
        tokens = sum(len(r) for r in ranges)
        node.contribution = Contribution(peer, node.site, plan.round, plan.base, tokens, ranges, payload, 8 if tokens else 0)
        self.trained[payload] = (peer, plan.round, plan.base, ranges)
        self.handle(node, ev.Trained(plan.digest, node.contribution, 0.8))

    def do_CloseTraining(self, node: Node, action: ev.CloseTraining) -> None:
        if node.training is not None and node.training[0].digest == action.plan and not node.closed:
            node.closed = True
            self.at(self.now + 0.2, "trained", (node.peer, node.life, node.training[1]))

    def do_Rewind(self, node: Node, action: ev.Rewind) -> None:
        node.training, node.contribution = None, None

    def do_Note(self, node: Node, action: ev.Note) -> None:
        node.history.append((action.kind, action.fields))
        self.counts[action.kind] += 1

    def do_Halt(self, node: Node, action: ev.Halt) -> None:
        if action.exit_code == 4:
            self.fail(f"{node.peer} halts: {action.reason}")
        node.replica = None
        node.forget()
        self.counts[f"halt {action.exit_code}"] += 1
        if action.exit_code == 0:
            node.left = True
        else:
            self.at(self.now + self.random.choice((0.5, 3.0)), "start", node.peer)

    # -------------------------------------------------------------- exchange

    def do_StartExchange(self, node: Node, action: ev.StartExchange) -> None:
        node.exchanges[action.plan.digest] = Exchange(action.plan)

    def do_StopExchange(self, node: Node, action: ev.StopExchange) -> None:
        if action.plan in node.exchanges:
            node.exchanges[action.plan].stopped = True

    def do_MemberFinished(self, node: Node, action: ev.MemberFinished) -> None:
        exchange = node.exchanges.get(action.plan)
        if exchange is None or exchange.stopped:
            return
        c = action.contribution
        exchange.headers[c.peer], exchange.since[c.peer] = c, self.now
        if c.peer == node.peer or c.abstains:
            exchange.bytes.add(c.peer)
        self.at(self.now + 0.05, "pull", (node.peer, node.life, action.plan))

    def on_pull(self, what: tuple[PeerId, int, Digest]) -> None:
        """Bytes that could have travelled by now have arrived."""
        peer, life, digest = what
        node = self.alive(peer, life)
        exchange = None if node is None else node.exchanges.get(digest)
        if node is None or exchange is None or exchange.stopped or exchange.done:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, "pull", what)
            return
        plan = exchange.plan
        holders = [n for n in self.nodes.values() if n.peer in plan.peers and self.flows(n, node, digest)]
        stalled, until = self.stalled.get(digest, ((), 0.0))
        if peer in stalled and self.now < until:
            holders = []
        for owner, header in exchange.headers.items():
            if owner not in exchange.bytes and any(
                owner in h.exchanges[digest].bytes and h.exchanges[digest].headers.get(owner) == header for h in holders
            ):
                exchange.bytes.add(owner)
        if plan.topology == "reduce":
            self.reduce(node, exchange, holders)
        if self.complete(exchange):
            self.assemble(node, exchange)
            return
        late = tuple(
            p for p in plan.peers if p != peer and p in exchange.since and self.lacks(exchange, p)
            and self.now - exchange.since[p] > CHUNK_DEADLINE * plan.attempt
        )
        if late and self.now - exchange.complained > 2.0:
            exchange.complained = self.now
            self.handle(node, ev.ExchangeLost(digest, late))
        self.at(self.now + 0.25, "pull", what)

    def flows(self, source: Node, target: Node, digest: Digest) -> bool:
        """Whether bulk bytes of this exchange get from one node to another now."""
        exchange = source.exchanges.get(digest)
        if exchange is None or exchange.stopped or source.paused_until > self.now or source is target:
            return False
        delay = self.network.delay(source.site, target.site)
        return source.up and delay is not None and (delay < 1.0 or self.bulk_is_fast)

    def lacks(self, exchange: Exchange, peer: PeerId) -> bool:
        return peer not in exchange.bytes or (exchange.plan.topology == "reduce" and peer not in exchange.parts)

    def reduce(self, node: Node, exchange: Exchange, holders: list[Node]) -> None:
        plan, agree = exchange.plan, self.rules.on("parts_agree")
        started = min(exchange.since.values(), default=self.now)
        impatient = not agree and len(exchange.bytes) > 1 and self.now - started > CHUNK_DEADLINE
        if exchange.part is None and (len(exchange.bytes) == len(plan.peers) or impatient):
            exchange.part = tuple(exchange.headers[p].payload for p in plan.peers if p in exchange.bytes)
        if exchange.part is not None:
            exchange.parts[node.peer] = exchange.part
        for holder in holders:
            part = holder.exchanges[exchange.plan.digest].part
            if part is not None:
                exchange.parts[holder.peer] = part

    def complete(self, exchange: Exchange) -> bool:
        plan = exchange.plan
        if len(exchange.headers) < len(plan.peers):
            return False
        if plan.topology == "gather":
            return len(exchange.bytes) == len(plan.peers)
        if len(exchange.parts) < len(plan.peers):
            return False
        listed = tuple(exchange.headers[p].payload for p in plan.peers)
        return not self.rules.on("parts_agree") or all(part == listed for part in exchange.parts.values())

    def assemble(self, node: Node, exchange: Exchange) -> None:
        assert node.replica is not None
        plan = exchange.plan
        exchange.done = True
        contributors = tuple(exchange.headers[p] for p in plan.peers if not exchange.headers[p].abstains)
        if plan.topology == "gather":
            parts: tuple[tuple[Digest, ...], ...] = (tuple(c.payload for c in contributors),)
        else:
            parts = tuple(tuple(x for x in exchange.parts[p] if x) for p in plan.peers)
        body = digest_bytes(*(x for part in parts for x in (b"|", *part)))
        self.bodies[body] = parts
        voters = next_voters(node.replica.view, plan.peers, (c.peer for c in contributors), plan.round)
        update = Update(
            plan.round, plan.base, plan.topology, plan.shares, contributors, voters, body, 8 * len(contributors)
        )
        self.handle(node, ev.Assembled(plan.digest, update))

    # -------------------------------------------------------------- fetching

    def do_FetchHeld(self, node: Node, action: ev.FetchHeld) -> None:
        self.at(self.now + 0.1, "fetch_held", (node.peer, node.life, action))

    def on_fetch_held(self, what: tuple[PeerId, int, ev.FetchHeld]) -> None:
        peer, life, action = what
        node = self.alive(peer, life)
        if node is None:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, "fetch_held", what)
            return
        for source in action.sources:
            other = self.nodes.get(source)
            if other is not None and self.answers(other, node):
                held = other.disk.held
                seals = [update.seal for update in other.disk.updates[-3:]]
                if held is not None:
                    seals.append(held.update.seal)
                if action.held.update.seal in seals:
                    self.handle(node, ev.FetchedHeld(action.held))
                    return
        self.at(self.now + 0.3, "event", (peer, life, ev.FetchFailed("held", "")))

    def answers(self, source: Node, target: Node) -> bool:
        there, back = self.network.delay(target.site, source.site), self.network.delay(source.site, target.site)
        return source.up and source.paused_until <= self.now and there is not None and back is not None and there + back < 2.0

    def do_CatchUp(self, node: Node, action: ev.CatchUp) -> None:
        self.at(self.now + 0.2, "catch_up", (node.peer, node.life, action))

    def on_catch_up(self, what: tuple[PeerId, int, ev.CatchUp]) -> None:
        peer, life, action = what
        node = self.alive(peer, life)
        if node is None or node.replica is None:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, "catch_up", what)
            return
        mine = len(node.disk.updates)
        for source in action.sources:
            other = self.nodes.get(source)
            if other is None or other is node or not self.answers(other, node) or len(other.disk.updates) <= mine:
                continue
            news = other.disk.updates[mine:]
            state, skipped = None, 0
            if len(news) > 2 and self.random.random() < 0.3:
                skipped = len(news) - 1
                state = Disk(self.founding, node.disk.view, updates=other.disk.updates[: mine + skipped]).log().state
            for update in news:
                self.check_commit(node, update)
                self.append(node, update)
            self.handle(node, ev.CaughtUp(tuple(news[skipped:]), state))
            return
        self.at(self.now + 0.3, "event", (peer, life, ev.FetchFailed("catch_up", "")))

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
        r, node = self.random, self.pick()
        self.counts[f"fault {kind}"] += 1
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
        elif kind == "fsync":
            node.fsync_fails = True
        elif kind == "disk":
            self.lose_disk(node)
        elif kind == "leave":
            self.handle(node, ev.LeaveWanted("drain"))

    def old_leader(self, node: Node) -> None:
        """`node` is heard late, and hears late, for about as long as the others follow it unheard."""
        r = self.random
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
        self.crash(node)
        if self.rules.on("identity_unit"):
            self.retired.append(self.nodes.pop(node.peer))
            peer = f"{node.peer[:2]}-{len(self.retired)}"
            self.add(peer, node.site, ("p0",), self.now + 1.0)
        else:
            node.disk = Disk(self.founding, ("p0",))

    def on_heal_network(self, _: Any) -> None:
        self.network.groups, self.network.loss = {}, 0.0

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
            if node.left and (node.peer in needed or unknown):
                node.left = False
            self.at(self.now + 0.1, "start", node.peer)

    # -------------------------------------------------------------- checks while it runs

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


CURVE = (BatchTime(1, 0.2),)


def play(seed: int, off: frozenset[str] = frozenset(), bias: str = "") -> tuple[str, Counter[str]]:
    """One schedule: the violation found (empty if none), and what happened in it."""
    world = World(seed, off, bias)
    try:
        world.run()
    except Violation as violation:
        return f"seed {seed} ({world.bias}): {violation}", world.counts
    world.counts["rounds"] = max(world.committed, default=0)
    world.counts["healed"] = int(world.heals)
    return "", world.counts


def _play(arguments: tuple[int, frozenset[str], str]) -> tuple[int, str, Counter[str]]:
    text, counts = play(*arguments)
    return arguments[0], text, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", default="", help=f"switch one rule off: {', '.join(RULES)}")
    parser.add_argument("--bias", default="", choices=("", *BIASES), help="one kind of schedule only; all in turn if not given")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop", type=int, default=0, help="stop after so many violations (0: play them all)")
    arguments = parser.parse_args()
    if arguments.without and arguments.without not in RULES:
        parser.error(f"--without {arguments.without}: no such rule; choose from {', '.join(RULES)}")
    off = frozenset([arguments.without]) if arguments.without else frozenset()
    work = ((seed, off, arguments.bias) for seed in range(arguments.seed, arguments.seed + arguments.schedules))
    totals: Counter[str] = Counter()
    found: list[tuple[int, str]] = []
    played, started = 0, time.perf_counter()
    with ProcessPoolExecutor(arguments.processes) as pool:
        for seed, text, counts in pool.map(_play, work, chunksize=10):
            played += 1
            totals += counts
            if text:
                found.append((seed, text))
                print(text, flush=True)
            if arguments.stop and len(found) >= arguments.stop:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.perf_counter() - started
    print(f"{played} schedules, {len(found)} violations, {played / seconds:.0f} schedules a second")
    if found:
        print(f"first after {found[0][0] - arguments.seed + 1} schedules: seed {found[0][0]}")
    for kind, count in sorted(totals.items()):
        print(f"  {kind:<24} {count}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
