"""The simulated exchange and fetching: bytes arrive once they could have travelled; a body is a hash of what went into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geomesh_p2p.core import events as ev
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.log import next_voters
from geomesh_p2p.core.replica import Replica
from geomesh_p2p.core.types import Contribution, PeerId, Plan, Update
from tests.mesh.network import Disk

CHUNK_DEADLINE = 1.5


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
        self.answers_late = (0.0, 0.0)   # until when it serves state, and how many seconds late
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


class Bulk:
    """The part of a World that moves bytes."""

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
        if self.held_up(node):
            self.at(node.paused_until, "pull", what)
            return
        plan = exchange.plan
        holders = [n for n in self.nodes.values() if n.peer in plan.peers and self.flows(n, node, digest)]
        stalled, until = self.stalled.get(digest, ((), 0.0))
        if peer in stalled and self.now < until:
            holders = []
            self.effect("stall")
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
        if self.held_up(node):
            self.at(node.paused_until, "fetch_held", what)
            return
        for source in action.sources:
            other = self.nodes.get(source)
            if other is not None and self.answers(other, node):
                if self.waits_for(other, "fetch_held", what):
                    return
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

    def waits_for(self, source: Node, kind: str, what: Any) -> bool:
        """Whether a slow donor makes this request wait; it is asked again when the answer would have come, once."""
        until, late = source.answers_late
        if self.now >= until:
            return False
        source.answers_late = (0.0, 0.0)
        self.effect("donor")
        self.at(self.now + late, kind, what)
        return True

    def do_ProveClaim(self, node: Node, action: ev.ProveClaim) -> None:
        """Takes a while; but old leaders do wrong only among peers that are soon back, so there every claim is followed."""
        if self.bias == "old-leader":
            self.handle(node, ev.ClaimAnswered(action.peer, action.base.round, "proved"))
        else:
            self.at(self.now + 0.1, "prove", (node.peer, node.life, action))

    def on_prove(self, what: tuple[PeerId, int, ev.ProveClaim]) -> None:
        peer, life, claim = what
        node = self.alive(peer, life)
        if node is None or node.replica is None:
            return
        if self.held_up(node):
            self.at(node.paused_until, "prove", what)
            return
        other, base = self.nodes.get(claim.peer), claim.base.round
        if other is None or not self.answers(other, node):
            self.at(self.now + 0.3, "event", (peer, life, ev.ClaimAnswered(claim.peer, base, "silent")))
        else:
            proved = len(other.disk.updates) > base
            self.handle(node, ev.ClaimAnswered(claim.peer, base, "proved" if proved else "refuted"))

    def do_CatchUp(self, node: Node, action: ev.CatchUp) -> None:
        self.at(self.now + 0.2, "catch_up", (node.peer, node.life, action))

    def on_catch_up(self, what: tuple[PeerId, int, ev.CatchUp]) -> None:
        peer, life, action = what
        node = self.alive(peer, life)
        if node is None or node.replica is None:
            return
        if self.held_up(node):
            self.at(node.paused_until, "catch_up", what)
            return
        mine = len(node.disk.updates)
        for source in action.sources:
            other = self.nodes.get(source)
            if other is None or other is node or not self.answers(other, node) or len(other.disk.updates) <= mine:
                continue
            if self.waits_for(other, "catch_up", what):
                return
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
