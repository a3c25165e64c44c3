"""The algorithm without a mesh: every peer's rounds one after the other in this thread, with the real engine and codec.

What the protocol would decide is given: who takes part, and with how many steps. Everything else is the product's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core.canonical import digest, digest_bytes
from geomesh_p2p.core.log import RoundLog
from geomesh_p2p.core.outer import OuterState
from geomesh_p2p.core.ports import FoldUpdate, LocalRound, TrainRound
from geomesh_p2p.core.types import Assignment, Founding, Plan, Range, Term, Update
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.train import LocalModel, fold, inner_round

LENGTH = 16


def run_config(path: str, **sections: dict[str, Any]) -> RunConfig:
    run: dict[str, dict[str, Any]] = {
        "run": {"id": "local", "seed": 4},
        "model": {
            "hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 2, "sequence_length": LENGTH
        },
        "dataset": {"source": "jsonl", "paths": (path,), "validation_sequences": 6},
        "inner": {"learning_rate": 3e-3, "total_tokens": 10_000},
    }  # fmt: skip
    for name, values in sections.items():
        run[name] = run.get(name, {}) | values
    return RunConfig.model_validate(run)


def engine_of(run: RunConfig, name: str = "here", **more: Any) -> TorchEngine:
    site = SiteConfig.model_validate({"site": {"name": name}, "device": {"name": "cpu", "threads": 1, "max_batch": 4}})
    return TorchEngine(run, site, **more)


class NeverCloses:
    """The mesh as inner_round sees it."""

    def __init__(self, should_close: Callable[[Plan], bool] = lambda _plan: False) -> None:
        self.should_close = should_close


@dataclass
class LocalRun:
    run: RunConfig
    names: Sequence[str]
    models: dict[str, LocalModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            self.add(name)
        first = self.models[self.names[0]]
        founding = Founding(digest("local"), b"nonce", 0, digest_bytes(first.state.anchor), f"id-{self.names[0]}")
        self.log = RoundLog.founded(founding)

    def add(self, name: str, engine: TorchEngine | None = None) -> LocalModel:
        """A peer with the anchor and momentum of the others, if there are any."""
        engine = engine or engine_of(self.run, name)
        others = next(iter(self.models.values()), None)
        state = OuterState.founded(engine.weights().copy())
        if others is not None:
            state = OuterState(others.state.anchor.copy(), others.state.momentum.copy())
        model = LocalModel(
            f"id-{name}", name, engine, engine.layout, state, self.run.codec, self.run.outer,
            max_skipped_steps=self.run.inner.max_skipped_steps,
        )  # fmt: skip
        self.models[name] = model
        return model

    def plan(self, steps: dict[str, int], batch: int) -> Plan:
        members, taken = [], list[Range]()
        for name in sorted(steps):
            ranges = self.log.next_ranges(steps[name] * batch, taken)
            taken += ranges
            members.append(Assignment(f"id-{name}", name, batch, steps[name], batch, ranges, 1.0, 1.0))
        tokens = sum(steps.values()) * batch * self.run.model.sequence_length
        return Plan(
            self.log.run, self.log.round + 1, Term(1, "id"), 1, self.log.digest, tuple(members), "gather", (),
            self.log.tokens, tokens, 1.0, 1.0, 1.0, True,
        )  # fmt: skip

    def round(
        self, steps: dict[str, int], batch: int = 4, lost: Sequence[str] = (), mesh: Any = None
    ) -> dict[str, LocalRound]:
        """One round: all of `steps` train, those `lost` are not heard of again, the rest is committed and folded by all."""
        plan = self.plan(steps, batch)
        locals_: dict[str, LocalRound] = {}
        for member in plan.members:
            if member.site not in lost:
                work = TrainRound(plan, member, validate=True)
                locals_[member.site] = inner_round(mesh or NeverCloses(), self.models[member.site], work)
        there = [locals_[m.site] for m in plan.members if m.site in locals_ and locals_[m.site].payload is not None]
        body = b"".join(local.payload.tobytes() for local in there)
        contributors = tuple(local.contribution for local in there)
        update = Update(
            plan.round, plan.base, "gather", (), contributors, ("id",), digest_bytes(body), len(body)
        )  # fmt: skip
        self.log.append(update)
        for name, model in self.models.items():
            own = locals_[name].payload if name in locals_ else None
            fold(model, FoldUpdate(update, body, own))
        return locals_

    @property
    def anchors(self) -> set[bytes]:
        return {m.state.anchor.tobytes() + m.state.momentum.tobytes() for m in self.models.values()}

    def anchor(self) -> np.ndarray:
        return next(iter(self.models.values())).state.anchor


def write_text(folder: Path, documents: int = 200) -> str:
    words = ("the", "mesh", "trains", "one", "model", "over", "many", "sites", "and", "every", "replica", "is", "equal")
    path = folder / "text.jsonl"
    lines = [" ".join([f"doc{i}", *(words[(i * k) % len(words)] for k in range(1, 10))]) for i in range(documents)]
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return str(path)
