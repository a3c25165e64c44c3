"""Whole peers under a fault script in virtual time: everything real but libp2p and torch, the exchange included.

    async def main() -> None:
        async with VirtualMesh(folder, "abcd", script=Script([...])) as mesh:
            await mesh.until(lambda: mesh.round >= 8)
        mesh.check()
    run_mesh(main())

A run is the same every time: threads' work is done in the event loop, and only its clock says how long training takes. A
killed peer does nothing any more from the very call in which it was killed: no send, no write, no line of its history. A
paused one handles nothing and says nothing, and on its return hears its timers and what has piled up, in either order.
`check` has the independent checker of histories look at what all peers recorded, and finds bugs that ended a peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core import ahead
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import digest, digest_bytes
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.types import Founding, Plan, Timing
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.lab.histories import Reading, add_lines
from geomesh_p2p.lab.verify import check as check_readings
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import MemoryTransport, Network
from geomesh_p2p.swarm.virtual_time import VirtualClockLoop
from geomesh_p2p.telemetry.sinks import jsonable
from geomesh_p2p.train import LocalModel, begins, go_ahead, inner_round
from tests.injection.proof import injecting
from tests.injection.script import Fault, Moment, Script, Strike
from tests.mesh.toy import LAYOUT, ToyEngine, ToyPeer, toy_run

TIMING = Timing(settle_seconds=2.0, leave_seconds=60.0)
LIMITS = ExchangeLimits(chunk_bytes=128, parallel_chunks=2)
SEQUENCE_SECONDS = 0.25       # a uniform round of 4 steps of 2 sequences: 2 s
Result = TypeVar("Result")


class Killed(BaseException):
    """Raised in whatever call a peer was killed in: nothing after it happens."""


# ---------------------------------------------------------------- virtual time without threads


class InlineLoop(VirtualClockLoop):
    """Does the work of threads at once and in order; inner steps take their time on its clock."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        if func is inner_round:
            return self.create_task(_paced(*args))
        if func is go_ahead:
            return self.create_task(_paced_ahead(*args))
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


async def _paced(mesh: Any, model: LocalModel, work: Any) -> Any:
    early = model.ahead.steps if model.ahead is not None and begins(model.ahead, work.plan, work.mine) else 0
    rest = ahead.steps_left(work.plan, work.mine, early)[1]
    model.engine.ahead += early
    await model.engine.pace(rest, work.plan, lambda: mesh.should_close(work.plan))
    return inner_round(mesh, model, work)


async def _paced_ahead(mesh: Any, model: LocalModel) -> Any:
    assert model.ahead is not None
    plan, mine = ahead.steps_ahead(model.ahead.plan, model.ahead.mine, model.ahead.steps)
    await model.engine.pace(mine, plan, mesh.has_work)
    return go_ahead(mesh, model)


def run_mesh(main: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run() on an InlineLoop, with fsync left out: a killed process does not take the system's page cache with it."""
    with mock.patch.object(os, "fsync", return_value=None), asyncio.Runner(loop_factory=InlineLoop) as runner:
        return runner.run(main)


class GatedQueue(asyncio.Queue[Any]):
    """Hands out nothing while its peer is paused."""

    def __init__(self, gate: asyncio.Event) -> None:
        super().__init__()
        self._gate = gate

    async def get(self) -> Any:
        item = await super().get()
        await self._gate.wait()
        return item


# ---------------------------------------------------------------- one peer


class PacedEngine(ToyEngine):
    def __init__(self, peer: VirtualPeer, seconds_per_sequence: float) -> None:
        super().__init__(seconds_per_sequence, lambda _: None, peer.layout.parameters)
        self.peer, self.steps, self.not_finite = peer, 0, False
        self.ahead = 0                   # steps done ahead of their plan, and counted as that round's later

    async def pace(self, mine: Any, plan: Plan, should_close: Callable[[], bool]) -> None:
        """Lets the time of the assigned inner steps pass; `train` then takes as many."""
        life = self.peer.life
        for self.steps in range(1, mine.inner_steps + 1):
            self.peer.reached("training", plan.round, self.steps - 1, mine.inner_steps)
            batch = mine.last_batch if self.steps == mine.inner_steps else mine.batch
            await asyncio.sleep(batch * self.seconds_per_sequence * self.peer.slowness)
            await life.gate.wait()
            if should_close():
                break

    def train(self, assignment: Any, plan: Plan, should_close: Callable[[], bool], started: float) -> Any:
        left = iter(range(self.steps - 1, -1, -1))
        result = super().train(assignment, plan, lambda: next(left) == 0, started)
        if self.not_finite:
            self.not_finite = False
            self.peer.effects["nan"] += 1
            self.values[3] = np.nan
        return result


@dataclass
class Life:
    """One process of a peer."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    dead: bool = False
    commits_sent: Counter[int] = field(default_factory=Counter)
    chunks: Counter[bytes] = field(default_factory=Counter)
    requests: int = 0

    def go_on(self) -> None:
        if self.dead:
            raise Killed


class GuardedStore(DiskStore):
    """A folder whose writes are phases of the script, may find the disk full, and are none of a dead process."""

    def __init__(self, peer: VirtualPeer) -> None:
        self.peer, self.life = peer, peer.life
        super().__init__(peer.folder / peer.name)

    def _write(self) -> None:
        self.life.go_on()
        if self.peer.now < self.peer.disk_full_until:
            self.peer.effects["full_disk"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def save_durable(self, durable: Any) -> None:
        self._write()
        super().save_durable(durable)

    def save_held(self, held: Any, body: Any) -> None:
        self.peer.reached("before_held", held.update.round)
        self._write()
        super().save_held(held, body)

    def append(self, update: Any, body: Any) -> None:
        if not self.peer.leads:
            self.peer.reached("before_commit", update.round)
        self._write()
        super().append(update, body)


class GuardedSnapshots(Snapshots):
    def __init__(self, peer: VirtualPeer) -> None:
        self.peer, self.life = peer, peer.life
        super().__init__(peer.folder / peer.name, 2)

    def write(self, state: Any, *args: Any, **more: Any) -> Any:
        self.peer.reached("saving", state.round)
        self.life.go_on()
        if self.peer.now < self.peer.disk_full_until:
            self.peer.effects["full_disk"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(state, *args, **more)


class WatchedTransport(MemoryTransport):
    """Tells the script of commits, chunks and requests as they leave."""

    def __init__(self, peer: VirtualPeer) -> None:
        super().__init__(peer.network, peer.peer)
        self.owner, self.life = peer, peer.life

    def send(self, to: str, message: Any) -> None:
        self.life.go_on()
        owner, sent = self.owner, self.life.commits_sent
        first = isinstance(message, m.Commit) and owner.leads and sent[message.update.round] < owner.others
        if first and not sent[message.update.round]:
            owner.reached("before_commit", message.update.round)
        super().send(to, message)
        if first:
            sent[message.update.round] += 1
            owner.reached("in_commit", message.update.round, sent[message.update.round], owner.others)

    async def send_bulk(self, to: str, chunk: m.Chunk) -> None:
        self.life.go_on()
        plan = self.owner.replica.plan
        round = plan.round if plan is not None and plan.digest == chunk.plan else 0
        number = self.life.chunks[chunk.plan]
        self.life.chunks[chunk.plan] += 1
        if round:
            steps = self.owner.chunks_of(plan)
            self.owner.reached("exchange", round, number, steps, self.owner.mesh.site_of(to))
        await super().send_bulk(to, chunk)
        self.life.go_on()

    async def request(self, to: str, fetch: m.Fetch, timeout_seconds: float) -> m.Fetched:
        self.life.go_on()
        phase = "catching_up" if self.owner.peer in self.owner.replica.view else "joining"
        if fetch.what in ("update", "manifest", "snapshot"):
            self.life.requests += 1
            owner = self.owner
            owner.reached(phase, owner.replica.round, self.life.requests - 1, 0, owner.mesh.site_of(to))
        return await super().request(to, fetch, timeout_seconds)


@dataclass
class VirtualPeer(ToyPeer):
    mesh: VirtualMesh = field(default=None, repr=False)  # type: ignore[assignment]
    life: Life = field(default_factory=Life)
    lives: int = 0
    lines: list[str] = field(default_factory=list)       # its history.jsonl
    outcomes: list[tuple[int, str]] = field(default_factory=list)
    bugs: list[BaseException] = field(default_factory=list)
    effects: Counter[str] = field(default_factory=Counter)
    disk_full_until: float = 0.0
    slow_answers: tuple[float, float] = (0.0, 0.0)       # how late, and until when
    clock_offset: float = 0.0
    slowness: float = 1.0
    back_at: float | None = None                         # when a dead one is started again

    # ---------------------------------------------------------------- what it is made of

    def make_store(self) -> Any:
        return GuardedStore(self)

    def make_snapshots(self) -> Any:
        return GuardedSnapshots(self)

    def make_engine(self) -> ToyEngine:
        return PacedEngine(self, self.seconds_per_sequence)

    def make_transport(self) -> Any:
        return WatchedTransport(self)

    def make_planner(self) -> Callable[..., Plan]:
        make = super().make_planner()

        def planned(need: Any, *known: Any) -> Plan:
            self.reached("before_plan", need.round)
            return make(need, *known)

        return planned

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        self.life.go_on()
        self.notes.append((kind, {**fields, "at": self.now}))
        time = self.now + self.clock_offset
        if self.clock_offset:
            self.effects["clock_jump"] += 1
        head = {"time": time, "uptime_seconds": self.now, "kind": kind}
        head |= {"peer": self.peer, "site": self.name, "run": self.founding.run}
        self.lines.append(json.dumps(jsonable({**head, **fields})))
        if kind == "accept":
            self.reached("after_plan", fields["round"])

    # ---------------------------------------------------------------- where it is

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def replica(self) -> Any:
        assert self.session is not None
        return self.session.replica

    @property
    def up(self) -> bool:
        return self.task is not None and not self.task.done() and not self.life.dead

    @property
    def left(self) -> bool:
        """It has ended as it was asked to."""
        return bool(self.outcomes) and self.outcomes[-1][0] == 0

    @property
    def leads(self) -> bool:
        return self.session is not None and self.replica.is_leader

    @property
    def others(self) -> int:
        return len(self.replica.s.others())

    @property
    def round(self) -> int:
        """The newest round committed: as it says itself, or, if it is dead, as it wrote down."""
        if self.up:
            return int(self.replica.round)
        return max((note["round"] for note in self.commits()), default=0)

    def chunks_of(self, plan: Plan) -> int:
        """How many chunks this peer sends in the exchange of `plan` if nothing goes wrong."""
        assert self.session is not None
        exchange = self.session.desk._current
        if exchange is None:
            return 0
        streams, size = exchange._streams, self.limits.chunk_bytes
        mine = sum(-(-ranges.total // size) for _, _, ranges in streams.sends())
        if plan.shares:
            part = streams.part_ranges(plan.peers.index(self.peer))
            mine += (len(plan.members) - 1) * -(-(part.total if part else 0) // size)
        return mine

    def reached(self, phase: str, round: int, step: int = 0, steps: int = 0, other: str = "") -> None:
        """A phase of the script; raises Killed if that was the end of this peer."""
        voter = self.session is not None and self.peer in self.replica.view
        roles = ("leader" if self.leads else "member", "voter" if voter else "joiner")
        self.mesh.moment(self, Moment(self.name, roles, round, phase, step, steps, other))
        self.life.go_on()

    # ---------------------------------------------------------------- life and death

    def begin(self) -> None:
        """Start, or start again, from its folder."""
        assert not self.up
        self.life, self.back_at = Life(), None
        self.life.gate.set()
        self.lives += 1
        self.network.resume(self.peer)
        self.session, model = self.make_session()
        self.session._events = GatedQueue(self.life.gate)
        if self.replica.round == 0:
            first = {"base": self.founding.base, "founder": self.founding.founder, "view": [self.founding.founder]}
            self.note("founding", first)
        self.task = asyncio.create_task(self._watched(self.session, model), name=f"peer {self.name}")

    async def _watched(self, session: Any, model: LocalModel) -> None:
        """One life, and what it ended with; the mesh then starts the peer again if it ought to."""
        life, store = self.life, self.store
        meeting = asyncio.create_task(self._meet(session))
        try:
            await self._live(session, model, self.mesh.ids)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            if not life.dead:
                self.bugs.append(error)
        finally:
            meeting.cancel()
            store.close()
        if not life.dead and session.outcome is not None:
            self.outcomes.append(session.outcome)
            if session.outcome[0] == 75:      # a supervisor starts it again
                self.back_at = self.now + 2.0
                self.mesh.later(2.0, self.mesh.return_of, self)

    async def _meet(self, session: Any) -> None:
        """As swarm/joining.py does it: greet whoever is not known, again and again."""
        while True:
            for other in self.mesh.ids:
                if other not in session.around.membership.known:
                    session.around.membership.greet(other, self.now)
            await asyncio.sleep(1.0)

    async def _live(self, session: Any, model: LocalModel, everybody: list[str]) -> None:
        answer = session.answer

        async def late_answer(sender: str, fetch: m.Fetch) -> Any:
            late, until = self.slow_answers
            if self.now < until:
                self.effects["slow_donor"] += 1
                await asyncio.sleep(late)
            return await answer(sender, fetch)

        session.answer = late_answer
        await super()._live(session, model, everybody)

    def die(self) -> None:
        self.life.dead = True
        self.network.crash(self.peer)
        if self.task is not None:
            self.task.cancel()

    def freeze(self) -> None:
        self.life.gate.clear()
        self.network.pause(self.peer)

    def thaw(self, life: Life) -> None:
        if life is not self.life or life.dead:
            return
        if self.mesh.random.random() < 0.5:
            life.gate.set()                                 # timers first
            self.mesh.later(1e-6, self.network.resume, self.peer)
        else:
            self.network.resume(self.peer)
            life.gate.set()


# ---------------------------------------------------------------- all of them


@dataclass
class Done:
    """A strike that was carried out, and where its effect shows."""

    strike: Strike
    evidence: Callable[[], int]
    before: int


class VirtualMesh:
    """A mesh of peers named by `names`, the first of which founds the run. `joiners` are peers that are not started yet."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        script: Script | None = None,
        network: Network | None = None,
        run: RunConfig | None = None,
        seed: int = 0,
        timing: Timing = TIMING,
        limits: ExchangeLimits = LIMITS,
        sequence_seconds: float = SEQUENCE_SECONDS,
        layout: Layout = LAYOUT,
    ) -> None:
        self.script = script or Script([])
        self.network = network or Network(seed, latency_seconds=0.02)
        self.random = random.Random(seed)
        self.run = run or long_run()
        self.founding = Founding(digest("toy"), b"nonce", 0, digest_bytes(b""), f"id-{names[0]}")
        self.done: list[Done] = []
        self.timers: list[asyncio.TimerHandle] = []
        self.mended_at = 0.0
        self.peers = {
            name: VirtualPeer(self.network, folder, name, self.run, self.founding, sequence_seconds, mesh=self)
            for name in names
        }
        for peer in self:
            peer.timing, peer.limits, peer.layout = timing, limits, layout
        self.ids = [peer.peer for peer in self.peers.values()]
        self.timing = timing

    def __getitem__(self, name: str) -> VirtualPeer:
        return self.peers[name]

    def __iter__(self) -> Iterator[VirtualPeer]:
        return iter(self.peers.values())

    def site_of(self, peer: str) -> str:
        return peer.removeprefix("id-")

    async def __aenter__(self) -> VirtualMesh:
        self.loop = asyncio.get_running_loop()
        for peer in self:
            peer.clock = self.loop.time
        return self

    async def __aexit__(self, *_: object) -> None:
        for timer in self.timers:
            timer.cancel()
        for peer in self:
            if peer.up:
                peer.die()
        await asyncio.gather(*(peer.task for peer in self if peer.task is not None), return_exceptions=True)
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def start(self, *names: str) -> None:
        """Start these, or all that are not up."""
        for peer in self:
            if (not names or peer.name in names) and not peer.up:
                peer.begin()

    def later(self, seconds: float, action: Callable[..., Any], *args: Any) -> None:
        self.timers.append(self.loop.call_later(seconds, action, *args))

    def return_of(self, peer: VirtualPeer) -> None:
        if peer.up or peer.back_at is None:
            return
        if peer.task is not None and not peer.task.done():
            self.later(0.01, self.return_of, peer)
            return
        peer.begin()

    # ---------------------------------------------------------------- how far it is

    @property
    def now(self) -> float:
        return self.loop.time()

    @property
    def leader(self) -> VirtualPeer | None:
        leaders = [peer for peer in self if peer.up and peer.leads]
        return max(leaders, key=lambda peer: peer.replica.term, default=None)

    @property
    def round(self) -> int:
        """The newest round that anybody has committed."""
        return max((peer.round for peer in self), default=0)

    @property
    def least(self) -> int:
        """The round that all who are up have committed."""
        return min((peer.round for peer in self if peer.up), default=0)

    async def until(self, condition: Callable[[], Any], limit_seconds: float = 600.0, what: str = "") -> Any:
        """The condition's first true value. It is looked at every 50 ms of virtual time. Raises AssertionError at the limit."""
        end = self.now + limit_seconds
        while not (found := condition()):
            self.raise_bugs()
            if self.now >= end:
                raise AssertionError(f"not within {limit_seconds:g} s: {what or 'the condition'}. {self.says()}")
            await asyncio.sleep(0.05)
        return found

    async def rounds(self, more: int, limit_seconds: float = 600.0) -> None:
        """Until everybody who is up has committed so many rounds more than anybody has now."""
        wanted = self.round + more
        await self.until(lambda: self.least >= wanted, limit_seconds, f"round {wanted} at all")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def says(self) -> str:
        def one(peer: VirtualPeer) -> str:
            if not peer.up:
                return f"{peer.name}: down {peer.outcomes[-1:]}"
            r = peer.replica
            paused = "" if peer.life.gate.is_set() else " paused"
            return f"{peer.name}: round {r.round} term {r.term.number} {r.phase}{paused} {r.waiting_for}"

        return f"at {self.now:.1f}: " + "; ".join(map(one, self))

    def commits(self) -> dict[int, set[str]]:
        """The digests that anybody recorded for each round."""
        found: dict[int, set[str]] = {}
        for peer in self:
            for note in peer.commits():
                found.setdefault(note["round"], set()).add(note["digest"].hex())
        return found

    # ---------------------------------------------------------------- faults

    def moment(self, peer: VirtualPeer, moment: Moment) -> None:
        for strike in self.script.due(moment):
            self.inflict(peer, strike)

    def strike(self, peer: VirtualPeer | None, fault: Fault, other: str = "") -> bool:
        """A fault at this moment, wherever `peer` is. Its effect counts like that of a row of the script."""
        if peer is None or not injecting():
            return False
        moment = Moment(peer.name, ("leader" if peer.leads else "member",), peer.round, "now", other=other)
        self.script.rows = [*self.script.rows, (None, fault)]  # type: ignore[list-item]
        strike = Strike(len(self.script.rows) - 1, fault, moment)
        self.script.struck.append(strike)
        with contextlib.suppress(Killed):
            self.inflict(peer, strike)
        return True

    def inflict(self, peer: VirtualPeer, strike: Strike) -> None:
        fault, network, me = strike.fault, self.network, peer.peer
        named = fault.toward or ((strike.moment.other,) if strike.moment.other and fault.kind in ("reset", "bad_bytes") else ())
        others = [self[name].peer for name in named] or [other for other in self.ids if other != me]
        effect = {
            "cut": "cut", "one_way": "cut", "slow": "sent", "loss": "lost", "reset": "reset", "half_open": "silenced",
            "bad_bytes": "damaged", "helper_killed": "unplugged", "pause": "held",
        }.get(fault.kind)  # fmt: skip
        evidence: Callable[[], int] = lambda: network.effect(effect, me) if effect else peer.effects[fault.kind]  # noqa: E731
        if fault.kind == "slow_donor":
            donor = self[strike.moment.other] if strike.moment.other else peer
            evidence = lambda: donor.effects["slow_donor"]  # noqa: E731
        if fault.kind == "kill":
            life = peer.life
            evidence = lambda: int(life.dead)  # noqa: E731
        self.done.append(Done(strike, evidence, evidence()))
        match fault.kind:
            case "kill":
                peer.die()
                if fault.seconds:
                    peer.back_at = self.now + fault.seconds
                    self.later(fault.seconds, self.return_of, peer)
                raise Killed
            case "pause":
                peer.freeze()
                self.later(fault.seconds, peer.thaw, peer.life)
            case "cut" | "one_way":
                for other in others:
                    network.cut(me, other, one_way=fault.kind == "one_way")
                self.later(fault.seconds, self._mend, me, others)
            case "half_open":
                for other in others:
                    network.silence(me, other)
                self.later(fault.seconds, self._mend, me, others)
            case "slow":
                self._links(fault.seconds, me, others, bytes_per_second=fault.amount)
            case "loss":
                self._links(fault.seconds, me, others, loss=fault.amount)
            case "reset":
                for other in others:
                    network.reset(me, other, fault.amount)
            case "full_disk":
                peer.disk_full_until = self.now + fault.seconds
            case "clock_jump":
                peer.clock_offset += fault.amount
            case "bad_bytes":
                for other in others:
                    network.corrupt(me, other, int(fault.amount) or 1)
            case "nan":
                peer.model.engine.not_finite = True
            case "slow_donor":
                donor.slow_answers = (fault.amount, self.now + fault.seconds)
            case "helper_killed":
                network.unplug(me)
                self.later(fault.seconds, network.plug, me)

    def _mend(self, me: str, others: list[str]) -> None:
        for other in others:
            self.network.heal(me, other)

    def _links(self, seconds: float, me: str, others: list[str], **changes: Any) -> None:
        before = {name: getattr(self.network.defaults, name) for name in changes}
        for other in others:
            self.network.set_link(me, other, **changes)
        self.later(seconds, lambda: [self.network.set_link(me, other, **before) for other in others])

    def mend_all(self) -> None:
        """Nothing is wrong any more: whoever is down comes back, whoever is paused goes on."""
        self.mended_at = self.now
        self.network.heal()
        for a in self.ids:
            self.network.plug(a)
            for b in self.ids:
                if a != b:
                    self.network.set_link(a, b, one_way=True, **vars(self.network.defaults))
        for peer in self:
            peer.disk_full_until, peer.slow_answers, peer.slowness = 0.0, (0.0, 0.0), 1.0
            if peer.up:
                peer.thaw(peer.life)
            elif peer.lives and not peer.left:
                peer.back_at = self.now
                self.return_of(peer)

    def count(self) -> Counter[str]:
        """How many faults of each kind have had an effect so far."""
        for done in self.done:
            if done.evidence() > done.before:
                self.script.happened(done.strike)
        return self.script.counts

    def prove(self) -> None:
        """NotFired unless every fault that was asked for has had its effect."""
        self.count()
        self.script.prove()

    # ---------------------------------------------------------------- the verdict

    def raise_bugs(self) -> None:
        for peer in self:
            for bug in peer.bugs:
                raise bug

    def violations(self) -> list[str]:
        """What the independent checker finds in all histories, and whether a peer ended otherwise than it may."""
        reading = Reading()
        for peer in self:
            add_lines(reading, peer.name, peer.lines, self.run.model.sequence_length)
        found = [str(violation) for violation in check_readings(reading).violations]
        for peer in self:
            found += [f"{peer.name} ended with {code}: {reason}" for code, reason in peer.outcomes if code not in (0, 75)]
            found += [f"{peer.name} met a bug: {bug!r}" for bug in peer.bugs]
        found += [f"round {round}: {len(digests)} digests" for round, digests in self.commits().items() if len(digests) > 1]
        return found

    def check(self) -> None:
        self.raise_bugs()
        assert self.violations() == []


def long_run(rounds: int = 100_000, topology: str = "gather", min_peers: int = 2, **planner: Any) -> RunConfig:
    """A run that a test ends, not its configuration."""
    run = toy_run(topology=topology, **planner)
    settings = run.run.model_copy(update={"rounds": rounds, "min_peers": min_peers})
    save = run.save.model_copy(update={"snapshot_every_rounds": 10})
    return run.model_copy(update={"run": settings, "save": save})
