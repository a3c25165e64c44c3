"""Whole toy peers in virtual time without any script: their inner steps take the loop's time, everything else none."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.canonical import Digest, digest, digest_bytes
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.ports import (
    AdoptState,
    FoldUpdate,
    InnerResult,
    LocalRound,
    MakeAnew,
    Mesh,
    RollBack,
    SaveState,
    TrainRound,
    ValidateAll,
)
from geomesh_p2p.core.types import Founding, Timing
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.rounds import NO_WORK
from geomesh_p2p.swarm.virtual_time import run_virtual
from geomesh_p2p.train import LocalModel, adopt, fold, hash_part, inner_round, make_anew, roll_back, validate_anchor
from tests.mesh.toy import SIZE, ToyEngine, ToyPeer


@dataclass
class CalmPeer(ToyPeer):
    """To be used in a VirtualClockLoop. `pause_seconds` are added to each sequence; `closed` counts windows cut short,
    `trained` tells how many sequences were trained for each round, `states` the hash of (anchor, momentum) after each."""

    seconds_per_sequence: float = 0.25
    timing: Timing = field(default_factory=Timing)
    clock: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)
    pause_seconds: float = 0.0
    trains_nothing: bool = False
    closed: int = 0
    states: dict[int, Digest] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)

    def make_engine(self) -> ToyEngine:
        return ToyEngine(self.seconds_per_sequence, lambda seconds: None, self.layout.parameters)

    async def algorithm(self, mesh: Mesh, model: LocalModel) -> None:
        """train.py, but that the inner steps are awaited first."""
        while (work := await mesh.next_work()) is not None:
            match work:
                case TrainRound():
                    mesh.contribute(work.plan, await self._inner_round(mesh, model, work))
                case FoldUpdate():
                    spent = fold(model, work)
                    if not model.lost:
                        self.states[model.round] = digest_bytes(model.state.anchor, model.state.momentum)
                        mesh.folded(work.update, *hash_part(model), spent)
                case RollBack():
                    outcome = await asyncio.to_thread(roll_back, model, work)
                    if not model.lost:
                        self.states[model.round] = digest_bytes(model.state.anchor, model.state.momentum)
                        mesh.folded(work.update, *hash_part(model), 0.0)
                    mesh.made_anew(model.round, outcome)
                case AdoptState():
                    adopt(model, work)
                    self.states[model.round] = digest_bytes(model.state.anchor, model.state.momentum)
                case SaveState() if model.lost:
                    pass
                case SaveState():
                    state = (model.state.anchor, model.state.momentum, model.residual, model.engine.save_inner)
                    await asyncio.to_thread(work.write, *state)
                case ValidateAll():
                    mesh.validated(work.round, *validate_anchor(model, 0, 1))
                case MakeAnew():
                    mesh.made_anew(model.round, await asyncio.to_thread(make_anew, model, work))

    async def _inner_round(self, mesh: Mesh, model: LocalModel, work: TrainRound) -> LocalRound:
        """Step by step, as long as nobody closes it; what was waited for is then trained, at once."""
        mine, steps = work.mine, 0
        while steps < mine.inner_steps and not self.trains_nothing:
            batch = mine.last_batch if steps == mine.inner_steps - 1 else mine.batch
            await asyncio.sleep(batch * (self.seconds_per_sequence + self.pause_seconds))
            steps += 1
            if mesh.should_close(work.plan) and steps < mine.inner_steps:
                self.closed += 1
                break
        self.trained[work.plan.round] = mine.sequences if steps == mine.inner_steps else steps * mine.batch
        asked = iter(range(1, steps + 1))
        stepwise: Any = SimpleNamespace(should_close=lambda plan: next(asked) >= steps)
        if not steps and not isinstance(model.engine, _Idle):
            model.engine = _Idle(model.engine)
        return inner_round(stepwise, model, work)


class _Idle:
    """An engine that is closed before its first step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(self, *_: Any) -> InnerResult:
        return NO_WORK


def calm_mesh(
    folder: Path,
    names: list[str],
    run: RunConfig,
    network: Network,
    seconds_per_sequence: float = 0.25,
    size: int = SIZE,
    **settings: Any,
) -> list[CalmPeer]:
    """`settings` are further fields of ToyPeer."""
    founding = Founding(digest("toy"), b"nonce", 0, digest_bytes(np.zeros(size, np.float32)), f"id-{names[0]}")
    shared = {"layout": Layout((Tensor("w", size, 1),)), **settings}
    return [CalmPeer(network, folder, name, run, founding, seconds_per_sequence, **shared) for name in names]


async def until(condition: Callable[[], Any], limit_seconds: float = 600.0, look_seconds: float = 0.05) -> None:
    async with asyncio.timeout(limit_seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(look_seconds)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test in virtual time: how busy the machine is makes no difference to it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run
