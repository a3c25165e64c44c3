"""A restart at round 20 of 40 with the residual that was saved changes nothing, and one without it next to nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.log import LogState, RoundLog
from geomesh_p2p.core.outer import OuterState
from geomesh_p2p.core.ports import FoldUpdate, TrainRound
from geomesh_p2p.core.types import NO_TERM, Assignment, Founding, Plan, Range, Update
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.resume import resume
from geomesh_p2p.train import LocalModel, fold, inner_round

WORDS = ["the", "mesh", "trains", "one", "model", "over", "many", "sites", "and", "every", "replica", "equal"]
ROUNDS, RESTART, BATCH, STEPS = 40, 20, 4, 4
FOUNDING = Founding(b"f" * 32, b"n", 0, b"w" * 32, "a")


@dataclass
class Made:
    run: RunConfig
    log: RoundLog
    models: list[LocalModel]
    norms: list[float]


def engine_of(run: RunConfig, site: str) -> TorchEngine:
    where = SiteConfig.model_validate({"site": {"name": site}, "device": {"name": "cpu", "threads": 1}})
    return TorchEngine(run, where)


def begin(folder: Path) -> Made:
    rng = random.Random(1)
    text = folder / "corpus.jsonl"
    text.write_text("".join(f'{{"text": "{" ".join(rng.choices(WORDS, k=12))}"}}\n' for _ in range(300)))
    run = RunConfig.model_validate(
        {
            "run": {"id": "test", "seed": 4},
            "model": {
                "hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 2, "sequence_length": 16
            },
            "dataset": {"source": "jsonl", "paths": (str(text),), "validation_sequences": 20},
            "inner": {"learning_rate": 3e-3, "total_tokens": ROUNDS * 2 * BATCH * STEPS * 16},
            "codec": {"residual": True},
        }
    )  # fmt: skip
    models = []
    for site in ("a", "b"):
        engine = engine_of(run, site)
        state = OuterState.founded(engine.weights().copy())
        models.append(LocalModel(site, site, engine, engine.layout, state, run.codec, run.outer))
    return Made(run, RoundLog.founded(FOUNDING), models, [])


def play(made: Made, until: int) -> None:
    size = BATCH * STEPS
    while made.log.round < until:
        round, start = made.log.round + 1, 2 * size * made.log.round
        mine = tuple(
            Assignment(site, site, BATCH, STEPS, BATCH, (Range(start + i * size, start + (i + 1) * size),), 1.0, 1.0)
            for i, site in enumerate("ab")
        )
        tokens = (start * 16, 2 * size * 16)
        plan = Plan(b"", round, NO_TERM, 1, made.log.digest, mine, "gather", (), *tokens, 1.0, 1.0, 1.0, False)
        mesh: Any = SimpleNamespace(should_close=lambda plan: False)
        local = [inner_round(mesh, model, TrainRound(plan, plan.of(model.peer), False)) for model in made.models]  # type: ignore[arg-type]
        body = b"".join(one.payload.tobytes() for one in local)
        contributors = tuple(one.contribution for one in local)
        update = Update(round, made.log.digest, "gather", (), contributors, ("a", "b"), digest_bytes(body), len(body))
        made.log.append(update)
        for model, one in zip(made.models, local, strict=True):
            fold(model, FoldUpdate(update, body, one.payload))
        made.norms.append(local[1].residual_norm or 0.0)


def restart(made: Made, folder: Path, keep_residual: bool) -> tuple[str, ...]:
    """The second peer is saved, ends, and begins again from its folder. Returns what it says."""
    model = made.models[1]
    state = LogState(FOUNDING.run, made.log.round, made.log.digest, ("a", "b"), made.log.credited, made.log.tokens)
    with DiskStore(folder) as store:
        snapshots = Snapshots(folder)
        residual = model.residual if keep_residual else None
        snapshots.write(state, model.state.anchor, model.state.momentum, residual, model.engine.save_inner)
        engine = engine_of(made.run, "b")
        found = resume(store, snapshots, engine, FOUNDING, (engine.layout, made.run.codec, made.run.outer))
    made.models[1] = LocalModel(
        "b", "b", engine, engine.layout, found.state, made.run.codec, made.run.outer, found.residual, found.log.round
    )
    return found.warnings


def loss(made: Made) -> float:
    model = made.models[0]
    model.engine.set_weights(model.state.anchor)
    nats, tokens = model.engine.validate(0, 1)
    return nats / tokens


@pytest.mark.case("C066")
def test_a_restart_with_and_without_the_residual(tmp_path: Path) -> None:
    losses, norms = {}, {}
    for how in ("no restart", "restored", "lost"):
        folder = tmp_path / how
        folder.mkdir()
        made = begin(folder)
        first = loss(made)
        play(made, RESTART)
        if how != "no restart":
            said = restart(made, folder / "b", how == "restored")
            assert len(said) == (how == "lost")
            assert all("what this peer's contributions left unsaid is lost" in line for line in said)
        play(made, ROUNDS)
        assert np.array_equal(made.models[0].state.anchor, made.models[1].state.anchor)
        losses[how], norms[how] = loss(made), made.norms
    print(f"loss {first:.4f} -> {losses}; norms around the restart {[n[18:23] for n in norms.values()]}")
    assert losses["no restart"] < 0.8 * first
    assert losses["restored"] == losses["no restart"], "bit for bit"
    assert norms["restored"] == norms["no restart"]
    assert norms["lost"][RESTART] == 0.0
    assert abs(losses["lost"] / losses["no restart"] - 1) < 0.02
