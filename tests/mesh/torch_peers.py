"""Whole peers over the memory transport with the real engine, on a model small enough for a step to take milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from geomesh_p2p.config import InnerSection, RunConfig, SiteConfig
from geomesh_p2p.core.canonical import digest, digest_bytes
from geomesh_p2p.core.types import BatchTime, Founding, Timing
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.inner import learning_rate
from geomesh_p2p.engine.snapshots import Snapshots
from geomesh_p2p.swarm.memory import Network
from tests.mesh.toy import ToyPeer

LENGTH = 16
WORDS = ("the", "mesh", "trains", "one", "model", "over", "many", "sites", "and", "every", "replica", "is", "equal")


def write_text(folder: Path, name: str = "text", documents: int = 120) -> str:
    """A jsonl file of short documents, no two alike."""
    path = folder / f"{name}.jsonl"
    lines = [" ".join([f"{name}-{i}", *(WORDS[(i * k) % len(WORDS)] for k in range(1, 10))]) for i in range(documents)]
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return str(path)


def torch_run(paths: tuple[str, ...], **sections: dict[str, Any]) -> RunConfig:
    run: dict[str, dict[str, Any]] = {
        "run": {"id": "torch", "seed": 4, "rounds": 5, "min_peers": 2},
        "model": {
            "hidden_size": 16, "intermediate_size": 24, "layers": 1, "heads": 2, "kv_heads": 2, "sequence_length": LENGTH
        },
        "dataset": {"source": "jsonl", "paths": paths, "validation_sequences": 6},
        "inner": {"learning_rate": 3e-3, "total_tokens": 10_000},
        "planner": {"mode": "uniform", "batch": 2, "inner_steps": 4},
        "save": {"snapshot_every_rounds": 2},
    }  # fmt: skip
    for name, values in sections.items():
        run[name] = run.get(name, {}) | values
    return RunConfig.model_validate(run)


def torch_site(name: str) -> SiteConfig:
    return SiteConfig.model_validate({"site": {"name": name}, "device": {"name": "cpu", "threads": 1}})


def paced_site(name: str) -> SiteConfig:
    """Each step takes its time, which is long against what it computes: else whoever is held up by a busy machine for half of
    a round's steps is taken for too slow and left out by the planner."""
    pace = {"device": "paced", "fixed_seconds": 0.02, "sequence_seconds": 0.01, "max_batch": 8, "time_scale": 1.0}
    return SiteConfig.model_validate(torch_site(name).model_dump() | {"emulation": pace})


PATIENT = Timing(
    heartbeat_seconds=0.2, heartbeat_limit_seconds=2.5, election_seconds=0.8, lease_seconds=2.7, settle_seconds=0.3,
    retry_seconds=0.3,
)  # fmt: skip
"""Several engines share the interpreter."""


@dataclass
class TorchPeer(ToyPeer):
    """`prepare` may change an engine before it is used."""

    timing: Timing = PATIENT
    site: SiteConfig | None = None
    prepare: Callable[[TorchEngine], None] = field(default=lambda _engine: None)

    def make_engine(self) -> TorchEngine:
        engine = TorchEngine(self.run, self.site or torch_site(self.name), report=self.events.append)
        snapshot = Snapshots(self.folder / self.name, 2).newest()
        if snapshot is not None and snapshot.inner is not None:
            engine.load_inner(str(snapshot.inner))
        if engine.site.emulation is None:
            # measuring is not what these tests are about
            curve = tuple(BatchTime(batch, 0.004 * batch) for batch in (1, 2, 4, 8))
            engine.measure = lambda: curve  # type: ignore[method-assign]
        self.prepare(engine)
        self.layout = engine.layout
        self.engine = engine
        return engine


def plain_training(engine: TorchEngine, settings: InnerSection, steps: int, batch: int) -> list[float]:
    """The loop that anybody would write by hand, over the first positions of the stream; the loss of each step."""
    module = engine.model.module
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)
    losses: list[float] = []
    for step in range(steps):
        ids = torch.from_numpy(engine.corpus.batch(range(step * batch, (step + 1) * batch)))
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(module(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, (step + 1) * batch * LENGTH)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def torch_mesh(folder: Path, names: list[str], run: RunConfig, network: Network) -> list[TorchPeer]:
    """Where the planner's choices depend on how fast they are, they are paced."""
    founding = Founding(digest("torch"), b"nonce", 0, digest_bytes(b""), f"id-{names[0]}")
    site = paced_site if run.planner.mode == "planned" else torch_site
    return [TorchPeer(network, folder, name, run, founding, site=site(name)) for name in names]
