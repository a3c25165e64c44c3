"""A toy engine and whole peers over the memory transport: everything real but libp2p and torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.canonical import digest, digest_bytes
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.observations import Warned
from geomesh_p2p.core.ports import InnerResult, Mesh
from geomesh_p2p.core.replica import Replica, Settings
from geomesh_p2p.core.types import NO_TERM, Assignment, BatchTime, Founding, Plan, Profile, Range, Timing
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.resume import Rebuilder, resume
from geomesh_p2p.swarm.budgets import Complaints
from geomesh_p2p.swarm.exchange import ExchangeCodec, ExchangeLimits
from geomesh_p2p.swarm.exchanging import ExchangeSetup
from geomesh_p2p.swarm.membership import Admission, Membership, Self
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.planning import LeadersPlanner
from geomesh_p2p.swarm.session import Planning, Session, Surroundings
from geomesh_p2p.train import LocalModel, train

SIZE = 4096


class ToyEngine:
    """Weights drift by a seeded pattern of the ranges trained; time passes on the loop's clock, not really."""

    def __init__(self, seconds_per_sequence: float, wait: Callable[[float], None], size: int = SIZE) -> None:
        self.values = np.zeros(size, np.float32)
        self.seconds_per_sequence = seconds_per_sequence
        self.wait = wait
        self.parameters = size

    def weights(self) -> Any:
        return self.values

    def set_weights(self, anchor: Any) -> None:
        self.values[:] = anchor

    def initial_weights(self) -> Any:
        return np.zeros(self.parameters, np.float32)

    def measure(self) -> tuple[BatchTime, ...]:
        return tuple(BatchTime(b, b * self.seconds_per_sequence) for b in (1, 2, 4, 8))

    def train(self, assignment: Assignment, plan: Plan, should_close: Callable[[], bool], started: float) -> InnerResult:
        seconds = []
        for step in range(assignment.inner_steps):
            batch = assignment.last_batch if step == assignment.inner_steps - 1 else assignment.batch
            self.wait(batch * self.seconds_per_sequence)
            seconds.append(batch * self.seconds_per_sequence)
            if should_close():
                break
        done = sum(assignment.last_batch if s == assignment.inner_steps - 1 else assignment.batch for s in range(len(seconds)))
        ranges, left = [], done
        for r in assignment.ranges:
            if left > 0:
                ranges.append(Range(r.start, min(r.stop, r.start + left)))
                left -= len(ranges[-1])
        for r in ranges:
            self.values += np.random.default_rng(r.start).normal(0, 0.01, self.parameters).astype(np.float32)
        return InnerResult(done * 16, tuple(ranges), len(seconds), 1.0, sum(seconds), 0.0, tuple(seconds), 0, 0.0, 1e-3)

    def validate(self, share: int, of: int, should_close: Any = None) -> tuple[float, int]:
        return 1.0, 1

    def save_inner(self, path: str) -> None:
        Path(path).write_bytes(b"inner")

    def load_inner(self, path: str) -> None:
        assert Path(path).read_bytes() == b"inner"

    def forget_inner(self) -> None:
        pass


def toy_run(residual: bool = False, **planner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"id": "toy", "rounds": 5, "min_peers": 2},
            "model": {"sequence_length": 16},
            "planner": {"mode": "uniform", "batch": 2, "inner_steps": 4, **planner},
            "save": {"snapshot_every_rounds": 2},
            "codec": {"residual": residual},
        }
    )


TIMING = Timing(
    heartbeat_seconds=0.1,
    heartbeat_limit_seconds=0.8,
    election_seconds=0.4,
    lease_seconds=0.9,
    settle_seconds=0.3,
    retry_seconds=0.2,
)
LAYOUT = Layout((Tensor("w", SIZE, 1),))


@dataclass
class ToyPeer:
    """One whole peer but for libp2p and torch. `start` begins (again) from its folder; `kill` ends it as kill -9 does.

    What a driver of faults wants to stand between is made by the methods named make_...; `clock` is that of the protocol."""

    network: Network
    folder: Path
    name: str
    run: RunConfig
    founding: Founding
    seconds_per_sequence: float = 0.005
    trains: bool = True
    admission: Admission = field(default_factory=Admission)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    session: Session | None = None
    task: asyncio.Task[Any] | None = None
    timing: Timing = TIMING
    limits: ExchangeLimits = field(default_factory=lambda: ExchangeLimits(deadline_seconds=0.5))
    clock: Callable[[], float] = time.monotonic
    layout: Layout = LAYOUT

    @property
    def peer(self) -> str:
        return f"id-{self.name}"

    # ---------------------------------------------------------------- what it is made of

    def make_store(self) -> Any:
        return DiskStore(self.folder / self.name)

    def make_snapshots(self) -> Any:
        return Snapshots(self.folder / self.name, self.run.save.keep_snapshots, self.run.save.keep_bytes)

    def make_engine(self) -> Any:
        return ToyEngine(self.seconds_per_sequence, time.sleep, self.layout.parameters)

    def make_transport(self) -> Any:
        return self.network.transport(self.peer)

    def make_planner(self) -> Callable[..., Plan]:
        return LeadersPlanner(self.run, self.layout).make

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        self.notes.append((kind, fields))

    def make_session(self) -> tuple[Session, LocalModel]:
        """A session and a model from what the folder holds."""
        self.store = self.make_store()
        snapshots, engine, run, timing = self.make_snapshots(), self.make_engine(), self.run, self.timing
        of = (self.layout, run.codec, run.outer)
        resumed = resume(self.store, snapshots, engine, self.founding, of)
        log, state = resumed.log, resumed.state
        self.model = model = LocalModel(self.peer, self.name, engine, *of[:1], state, *of[1:], resumed.residual, log.round)
        held = self.store.load_held()
        self.transport = transport = self.make_transport()
        transport.run = self.founding.run
        me = Self(self.peer, self.name, self.trains, self.founding.fingerprint, {}, self.founding, log.round, log.digest)
        complaints = Complaints(lambda reason, text: self.events.append(Warned(reason, text)))
        membership = Membership(
            me,
            self.admission,
            transport.send,
            timing.heartbeat_limit_seconds,
            lambda peer, reason, text: complaints.say(peer, membership.admitted(peer), reason, text),
        )
        transport.budgets.admitted, transport.budgets.complaints = membership.admitted, complaints
        settings = Settings(
            timing=timing, trains=self.trains, min_peers=run.run.min_peers, final_round=run.run.rounds, seed=1
        )
        durable = self.store.load_durable() or Durable(NO_TERM, False)
        replica = Replica(self.peer, self.name, log, durable, held[0] if held else None, settings, resumed.newest_ever)
        around = Surroundings(
            transport=transport,
            store=self.store,
            snapshots=snapshots,
            membership=membership,
            links=transport.links,
            past=Rebuilder(self.store, snapshots, engine.initial_weights, self.founding, of),
            observe=self.events.append,
            history=self.note,
            clock=self.clock,
        )
        session = Session(
            around,
            replica,
            Planning(self.make_planner(), run.run.validate_every_rounds, run.save),
            ExchangeSetup(ExchangeCodec(self.layout, run.codec), self.limits, 2**22),
            Profile(self.peer, self.name, "toy", engine.measure()),
        )
        return session, model

    def start(self, everybody: list[str]) -> None:
        self.session, model = self.make_session()
        self.task = asyncio.create_task(self._live(self.session, model, everybody))

    async def _live(self, session: Session, model: LocalModel, everybody: list[str]) -> None:
        transport = session.around.transport
        await transport.start(session.receive, session.answer)
        for other in everybody:
            session.around.membership.greet(other, self.clock())
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(session.run())
                both.create_task(self.algorithm(session.bench, model))
        finally:
            await transport.stop()

    async def algorithm(self, mesh: Mesh, model: LocalModel) -> None:
        await train(mesh, model)

    async def kill(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.store.close()

    def commits(self) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.notes if kind == "commit"]

    def digests(self) -> dict[int, str]:
        return {note["round"]: note["digest"].hex() for note in self.commits()}


def toy_mesh(folder: Path, names: list[str], run: RunConfig, network: Network) -> list[ToyPeer]:
    fingerprint = digest("toy")
    founding = Founding(fingerprint, b"nonce", 0, digest_bytes(np.zeros(SIZE, np.float32)), f"id-{names[0]}")
    return [ToyPeer(network, folder, name, run, founding) for name in names]
