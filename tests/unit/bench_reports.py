"""Reports of a benchmark with real timelines and given perplexities: nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geomesh_p2p.lab.bench.methods import METHODS
from geomesh_p2p.lab.bench.results import Outcome, outcome, summary
from geomesh_p2p.lab.bench.runner import jobs
from geomesh_p2p.lab.bench.settings import Setting
from geomesh_p2p.lab.bench.trajectory import Point, Trajectory
from tests.unit.benching import SEQUENCE_LENGTH, run_config, setting

BUDGET = 12 * 16 * SEQUENCE_LENGTH
DIGEST = "d" * 64


def outcomes(
    folder: Path, ends_at: Mapping[str, float], seeds: Sequence[int], where: Setting, budget: int = BUDGET
) -> list[Outcome]:
    """`ends_at`: the last perplexity of each method; a seed is worse than the one before it by a thousandth."""
    queue = jobs(run_config(folder), where, [METHODS[name] for name in ends_at], seeds, budget)
    found = []
    for job in queue:
        stages, tokens = list(job.stages()), 0
        whole = sum(stage.tokens for stage in stages)
        points = [Point(0, 0, 100.0, None)]
        for stage in stages:
            tokens += stage.tokens
            last = ends_at[job.method.name] * (1 + job.seed / 1000)
            points.append(Point(stage.number, tokens, last * (100 / last) ** (1 - tokens / whole), 1.0))
        trained = Trajectory("key", tuple(points), DIGEST, folder)
        parameters = job.volume().parameters
        found.append(outcome(job.method.name, job.seed, job.world, job.run, parameters, stages, trained))
    return found


def report(
    folder: Path,
    ends_at: Mapping[str, float],
    seeds: Sequence[int] = (1, 2, 3),
    where: Setting | None = None,
    target: float = 12.0,
    budget: int = BUDGET,
) -> dict[str, Any]:
    where = where or setting()
    about = {"run_id": "bench", "parameters": 1000, "budget_tokens": budget, "reference_round_tokens": 16 * SEQUENCE_LENGTH,
             "rate_scale": 0.5, "stands_for_parameters": 2000.0}  # fmt: skip
    return summary(where, seeds, dict.fromkeys(seeds, target), outcomes(folder, ends_at, seeds, where, budget), about)
