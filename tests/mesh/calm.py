"""Whole toy peers in virtual time without any script: their inner steps take the loop's time, everything else none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.canonical import digest, digest_bytes
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.ports import AdoptState, FoldUpdate, MakeAnew, Mesh, SaveState, TrainRound, ValidateAll
from geomesh_p2p.core.types import Founding, Timing
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.train import LocalModel, adopt, fold, hash_part, inner_round, make_anew, validate_anchor
from tests.mesh.toy import ToyEngine, ToyPeer


@dataclass
class CalmPeer(ToyPeer):
    """To be used in a VirtualClockLoop."""

    def make_engine(self) -> ToyEngine:
        return ToyEngine(self.seconds_per_sequence, lambda seconds: None, self.layout.parameters)

    async def algorithm(self, mesh: Mesh, model: LocalModel) -> None:
        """train.py, but that the inner steps are awaited first."""
        while (work := await mesh.next_work()) is not None:
            match work:
                case TrainRound():
                    for _ in range(work.mine.sequences):
                        if mesh.should_close(work.plan):
                            break
                        await asyncio.sleep(self.seconds_per_sequence)
                    mesh.contribute(work.plan, inner_round(mesh, model, work))
                case FoldUpdate():
                    spent = fold(model, work)
                    mesh.folded(work.update, *hash_part(model), spent)
                case AdoptState():
                    adopt(model, work)
                case SaveState():
                    state = (model.state.anchor, model.state.momentum, model.residual, model.engine.save_inner)
                    await asyncio.to_thread(work.write, *state)
                case ValidateAll():
                    mesh.validated(work.round, *validate_anchor(model, 0, 1))
                case MakeAnew():
                    mesh.made_anew(model.round, await asyncio.to_thread(make_anew, model, work))


def calm_mesh(
    folder: Path, names: list[str], run: RunConfig, network: Network, seconds_per_sequence: float, size: int, **settings: Any
) -> list[ToyPeer]:
    """`settings` are further fields of ToyPeer."""
    founding = Founding(digest("toy"), b"nonce", 0, digest_bytes(np.zeros(size, np.float32)), f"id-{names[0]}")
    clock: Callable[[], float] = asyncio.get_running_loop().time
    shared = {"timing": Timing(), "clock": clock, "layout": Layout((Tensor("w", size, 1),)), **settings}
    return [CalmPeer(network, folder, name, run, founding, seconds_per_sequence, **shared) for name in names]


async def until(condition: Callable[[], Any], limit_seconds: float = 600.0) -> None:
    async with asyncio.timeout(limit_seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.05)
