"""Random schedules of the protocol in virtual time: replicas over a lossy network, with crashes, pauses and restarts.

    python -m tests.mesh.simulator --schedules 2000 --seed 0 [--faults 3] [--without RULE] [--bias BIAS] [--processes 2]

One schedule is one seed. For a while faults happen: loss, delay, partitions, one-way slow links, half-open and broken
connections, pauses, crashes between any two actions (most of all inside a broadcast), failing fsyncs, lost disks, lost
transports, slow donors, joiners, leavers. Half of the schedules then heal, and must go on. A schedule in which fewer than
--faults of them made a difference is drawn again, from the same seed. What must never happen is checked while it runs
(`Violation`), and again from the recorded histories (tests/mesh/checker.py). The exchange is abstract: a member has the
update once the bytes of all contributions could have travelled to it; an update's body is a hash of what went into it.

In every fourth schedule an operator also orders rollbacks. With --far-terms peers come back in terms far above the others',
as after elections that nobody else heard of.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.replica import Replica, Settings
from geomesh_p2p.core.rules import RULES
from geomesh_p2p.core.types import BatchTime, Contribution, Founding, PeerId, Profile, Rollback, Rules, Term, Timing, Update
from tests.injection.proof import injecting
from tests.mesh.bulk import Bulk, Node
from tests.mesh.checker import Violation, check_histories
from tests.mesh.faults import BIASES, BROADCASTS, FAULTS_END, Faults
from tests.mesh.network import Disk, Network, make_plan
from tests.mesh.watch import Watch

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
HEALED_END = 100.0


class World(Bulk, Faults, Watch):
    """One schedule."""

    def __init__(
        self, seed: int, off: frozenset[str] = frozenset(), bias: str = "", draw: int = 0, scripted: bool = True,
        far_terms: bool = False,
    ) -> None:  # fmt: skip
        self.seed, self.draw = seed, draw
        self.random = Random(f"{seed}/{draw}" if draw else seed)
        self.bias = bias or BIASES[seed % len(BIASES)]
        self.rules = Rules(off)
        self.now = 0.0
        self.heap: list[tuple[float, int, str, Any]] = []
        self.sequence = 0
        self.fired: Counter[str] = Counter()             # faults that have made a difference
        self.pending: Counter[str] = Counter()           # those that have not yet
        self.network = Network(self.random, self.effect)
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
        self.far_terms = Random(f"terms of {seed}/{draw}") if far_terms else None
        self.orders = Random(f"orders of {seed}/{draw}")     # of their own: other schedules are as they are without orders
        if scripted:
            self.faults()
            for _ in range(self.orders.choice((0, 0, 0, 3))):
                self.at(self.orders.uniform(5.0, FAULTS_END), "order", None)

    # -------------------------------------------------------------- time

    def at(self, when: float, kind: str, what: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (when, self.sequence, kind, what))

    def run(self) -> None:
        """Play the schedule to its end. Raises Violation."""
        self.play_until(HEALED_END if self.heals else FAULTS_END)
        if self.heals and not self.went_on:
            stuck = self.stuck()
            if stuck:
                self.fail(stuck)
        check_histories(self.histories(), self.founding, self.rules)

    def play_until(self, end: float) -> None:
        """Whatever happens until then. Raises Violation."""
        while self.heap and self.heap[0][0] <= end and not self.went_on:
            self.now, _, kind, what = heapq.heappop(self.heap)
            getattr(self, f"on_{kind}")(what)

    def histories(self) -> dict[PeerId, list[tuple[str, dict[str, Any]]]]:
        return {node.peer: node.history for node in (*self.retired, *self.nodes.values())}

    def fail(self, text: str) -> None:
        draw = f" draw {self.draw}" if self.draw else ""
        raise Violation(f"seed {self.seed}{draw} ({self.bias}) at {self.now:.2f}: {text}")

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
        if self.far_terms is not None and node.life > 1 and self.far_terms.random() < 0.4:
            number = node.disk.durable.term.number + self.far_terms.randint(1, 4)
            node.disk.durable = replace(node.disk.durable, term=Term(number, peer))
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
        self.fired["crash"] += 1
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
        if self.held_up(node):
            self.at(node.paused_until, "event", what)
            return
        self.handle(node, event)

    def on_beat(self, what: tuple[PeerId, int]) -> None:
        node = self.alive(*what)
        if node is None or node.replica is None:
            return
        self.at(max(self.now + TIMING.heartbeat_seconds, node.paused_until), "beat", what)
        if self.held_up(node):
            return
        beat = m.Heartbeat(
            **node.replica.heartbeat_fields(), step_batch=0, step_seconds=0.0, links=(), sent_at=self.now
        )
        for other in self.nodes:
            if other != node.peer:
                self.send(node, other, beat)

    def on_order(self, _: Any) -> None:
        leader = next((node for node in self.nodes.values() if node.replica is not None and node.replica.is_leader), None)
        if leader is not None and leader.replica is not None and leader.replica.round > 0 and not self.held_up(leader):
            to_round = self.orders.randrange(leader.replica.round)
            then = Disk(self.founding, leader.disk.view, updates=leader.disk.updates[:to_round]).log()
            self.handle(leader, ev.RollbackWanted(Rollback(to_round, then.tokens)))

    def on_tick(self, what: tuple[PeerId, int]) -> None:
        node = self.alive(*what)
        if node is None or node.replica is None or self.now < node.tick_at:
            return
        node.tick_at = float("inf")
        if self.held_up(node):
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
                self.fired["fsync"] += 1
                self.handle(node, ev.SaveFailed("no space left on device"))
                return
            getattr(self, f"do_{type(action).__name__}")(node, action)
            if not node.up:
                return
        if stop_after == len(actions):
            self.crash(node)

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
            late = self.late_reports.get(message.plan, 0.0)
            delay = 0.03 if self.bias == "old-leader" else delay + late
            if late:
                self.effect("late report")
        if delay is not None:
            ways = (node.site, target.site, self.network.connection(node.site, target.site))
            self.at(self.now + delay, "message", (node.peer, to, target.life, message, ways))

    def on_message(self, what: tuple[PeerId, PeerId, int, m.Message, tuple[str, str, int]]) -> None:
        sender, to, life, message, (source, target, connection) = what
        node = self.alive(to, life)
        if node is None:
            return
        if connection != self.network.connection(source, target):
            self.effect("reset")
            return
        if self.held_up(node):
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
        if update.rollback is not None:
            self.counts["rollback"] += 1
            made = ev.StateChecked(update.round, "rolled_back")
            self.at(self.now + self.orders.choice((0.05, 0.5, 3.0)), "event", (node.peer, node.life, made))

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
        if self.held_up(node):
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


CURVE = (BatchTime(1, 0.2),)


MOST_DRAWS = 100


def play(
    seed: int, off: frozenset[str] = frozenset(), bias: str = "", faults: int = 0, far_terms: bool = False
) -> tuple[str, Counter[str]]:
    """One schedule: the violation found (empty if none), and what happened in it. With fewer than `faults` faults that made a
    difference it is drawn again; what a poor draw violates counts all the same."""
    for draw in range(MOST_DRAWS):
        world = World(seed, off, bias, draw, far_terms=far_terms)
        try:
            world.run()
        except Violation as violation:
            return f"seed {seed} ({world.bias}): {violation}", world.counts
        if world.faults_fired >= faults or not injecting():
            break
    else:
        return f"seed {seed}: no schedule with {faults} faults in {MOST_DRAWS} draws", world.counts
    world.counts["rounds"] = max(world.committed, default=0)
    world.counts["healed"] = int(world.heals)
    world.counts["draws"] = draw + 1
    world.counts["faults fired"] = world.faults_fired
    world.counts.update({f"fired {kind}": count for kind, count in world.fired.items()})
    return "", world.counts


def _play(arguments: tuple[int, frozenset[str], str, int, bool]) -> tuple[int, str, Counter[str]]:
    text, counts = play(*arguments)
    return arguments[0], text, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0, help="as many at least must make a difference in each schedule")
    parser.add_argument("--without", default="", help=f"switch one rule off: {', '.join(RULES)}")
    parser.add_argument("--bias", default="", choices=("", *BIASES), help="one kind of schedule only; all in turn if not given")
    parser.add_argument("--far-terms", action="store_true", help="peers often come back in terms far above the others'")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop", type=int, default=0, help="stop after so many violations (0: play them all)")
    arguments = parser.parse_args()
    if arguments.without and arguments.without not in RULES:
        parser.error(f"--without {arguments.without}: no such rule; choose from {', '.join(RULES)}")
    off = frozenset([arguments.without]) if arguments.without else frozenset()
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    work = ((seed, off, arguments.bias, arguments.faults, arguments.far_terms) for seed in seeds)
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
