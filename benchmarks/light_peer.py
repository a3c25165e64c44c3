"""A peer whose engine is a vector in memory instead of a model: for load tests of everything else.

    LIGHT_PARAMETERS=8000000 LIGHT_TRAIN_SECONDS=20 python benchmarks/light_peer.py peer RUN.toml --site SITE.toml ...

Sockets, protocol, disk, planner and codec are the real ones; only training is not: it waits, then moves the weights by a
pattern that depends on the positions trained. With LIGHT_SEQUENCE_SECONDS each sequence takes that long instead, as planned.
The arguments are those of `geomesh`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from geomesh_p2p.cli import run
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.layout import Layout, layout_of
from geomesh_p2p.core.log import first_positions, later_positions
from geomesh_p2p.core.ports import InnerResult, Vector
from geomesh_p2p.core.types import Assignment, BatchTime, Plan

PATTERN = 65_536


class LightEngine:
    """Implements ports.LocalEngine. `train_seconds` is what the inner steps of a round take together; or each sequence takes
    `sequence_seconds`, and training may end after any step."""

    def __init__(
        self, parameters: int, sequence_length: int, train_seconds: float, sequence_seconds: float | None = None
    ) -> None:
        self.parameters, self.sequence_seconds = parameters, sequence_seconds
        self.train_seconds = train_seconds
        self.sequence_length = sequence_length
        self.time_scale: float | None = 1.0
        self._weights = np.zeros(parameters, np.float32)

    @property
    def layout(self) -> Layout:
        return layout_of([("vector", (self.parameters,), False)], "tensor")

    @property
    def weights_digest(self) -> Digest:
        return digest_bytes(self._weights)

    device_label = "none"

    @property
    def settings(self) -> dict[str, str]:
        return {"engine": "light", "parameters": str(self.parameters)}

    def weights(self) -> Vector:
        return self._weights

    def initial_weights(self) -> Vector:
        return np.zeros(self.parameters, np.float32)

    def set_weights(self, anchor: Vector) -> None:
        self._weights[:] = anchor

    def measure(self) -> tuple[BatchTime, ...]:
        if self.sequence_seconds is not None:
            return tuple(BatchTime(batch, batch * self.sequence_seconds) for batch in (1, 2))
        return (BatchTime(1, max(self.train_seconds, 1e-3)),)

    speed_depends_on: dict[str, str] = {}  # nothing is measured

    def disagreement(self, curve: tuple[BatchTime, ...]) -> str:
        return ""

    def measure_rate(self, seconds: float) -> float:
        return self.sequence_length / max(self.train_seconds, 1e-3)

    def train(self, assignment: Assignment, plan: Plan, should_close: Callable[[], bool], started: float) -> InnerResult:
        if self.sequence_seconds is not None:
            return self._train_stepwise(assignment, should_close, started, self.sequence_seconds)
        begun, until = time.monotonic(), started + self.train_seconds
        while (left := until - time.monotonic()) > 0 and not should_close():
            time.sleep(min(left, 0.1))
        pattern = np.random.default_rng(assignment.ranges[0].start).normal(0, 1e-3, PATTERN).astype(np.float32)
        for start in range(0, self.parameters, PATTERN):
            part = self._weights[start : start + PATTERN]
            part += pattern[: part.size]
        seconds = time.monotonic() - begun
        steps = tuple([seconds / assignment.inner_steps] * assignment.inner_steps)
        tokens = assignment.sequences * self.sequence_length
        return InnerResult(tokens, assignment.ranges, len(steps), 1.0, seconds, 0.0, steps, 0, 0.0, 1e-3)

    def _train_stepwise(
        self, mine: Assignment, should_close: Callable[[], bool], started: float, sequence_seconds: float
    ) -> InnerResult:
        begun, until, done, steps = time.monotonic(), started, 0, list[float]()
        for step in range(mine.inner_steps):
            if should_close():
                break
            batch = mine.last_batch if step == mine.inner_steps - 1 else mine.batch
            position = first_positions(later_positions(mine.ranges, done), 1)[0].start
            self._weights[:PATTERN] += np.random.default_rng(position).normal(0, 1e-3, self._weights[:PATTERN].size)
            done, until = done + batch, until + batch * sequence_seconds
            time.sleep(max(0.0, until - time.monotonic()))
            steps.append(batch * sequence_seconds)
        ranges, seconds = first_positions(mine.ranges, done), time.monotonic() - begun
        return InnerResult(done * self.sequence_length, ranges, len(steps), 1.0, seconds, 0.0, tuple(steps), 0, 0.0, 1e-3)

    def validate(self, share: int, of: int, should_close: object = None) -> tuple[float, int]:
        return 1.0, 1

    def save_inner(self, path: str) -> None:
        Path(path).write_text(json.dumps({"engine": "light"}))

    def load_inner(self, path: str) -> None:
        json.loads(Path(path).read_text())

    def forget_inner(self) -> None:
        pass


if __name__ == "__main__":
    parameters = int(os.environ.get("LIGHT_PARAMETERS", "100000"))
    train_seconds = float(os.environ.get("LIGHT_TRAIN_SECONDS", "0.1"))
    each = os.environ.get("LIGHT_SEQUENCE_SECONDS")
    sequence_seconds = None if each is None else float(each)
    run(
        make_engine=lambda run, site, report: LightEngine(
            parameters, run.model.sequence_length, train_seconds, sequence_seconds
        )
    )
