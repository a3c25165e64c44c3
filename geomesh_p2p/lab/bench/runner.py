"""The queue of a benchmark: every method with every seed, each trained once, priced under the setting, reported together.

What is trained is kept; run again, the same command goes on from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.forecast import Volume
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.asynchronous import race, train_race
from geomesh_p2p.lab.bench.clock import World
from geomesh_p2p.lab.bench.methods import Method
from geomesh_p2p.lab.bench.quality import choice
from geomesh_p2p.lab.bench.queue import Trainings
from geomesh_p2p.lab.bench.results import Outcome, outcome
from geomesh_p2p.lab.bench.scaling import world_of
from geomesh_p2p.lab.bench.settings import Setting
from geomesh_p2p.lab.bench.stopping import Stop
from geomesh_p2p.lab.bench.timeline import ALL, Round, Stage, gradient_rounds, rounds
from geomesh_p2p.lab.bench.trajectory import Point, trained
from geomesh_p2p.lab.whatif import layout_from_files, volume_of
from geomesh_p2p.loading import run_problems, value_of

VALIDATE_SHARE = 0.9       # of a reference round's tokens between two validations: after every round, and of as many tokens
GRADIENT_STEPS = 16        # between two validations, at least
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One method with one seed. `run` is the method's configuration."""

    method: Method
    seed: int
    run: RunConfig
    world: World
    budget_tokens: int
    choice_items: int = 0

    @property
    def reference_tokens(self) -> int:
        return self.world.setting.reference_round_sequences * self.run.model.sequence_length

    def volume(self) -> Volume:
        return volume_of(layout_from_files(self.run), self.run)

    def stages(self) -> Sequence[Stage]:
        """The method in virtual time; trains nothing."""
        volume = self.volume()
        match self.method.kind:
            case "rounds":
                return list(rounds(self.method, self.run, volume, self.world, self.budget_tokens))
            case "gradients":
                steps = max(1, -(-self.reference_tokens // (self.run.planner.batch * self.run.model.sequence_length
                                                             * len(self.world.setting.sites))))  # fmt: skip
                return list(gradient_rounds(self.run, volume, self.world, self.budget_tokens, steps))
            case "async":
                return race(self.run, self.world, volume.parameters, self.budget_tokens, self.reference_tokens)[0]

    @property
    def label(self) -> str:
        return f"{self.method.name}, seed {self.seed}"

    def play(self, store: Path, tell: Callable[[Point], None] = lambda _point: None, stop: Stop | None = None) -> Outcome:
        """In virtual time, and trained. Raises Stopped."""
        stop = stop or Stop()
        volume, names = self.volume(), self.world.setting.names
        stages: Sequence[Stage]
        if self.method.kind == "async":
            stages, events = race(self.run, self.world, volume.parameters, self.budget_tokens, self.reference_tokens)
            found = train_race(self.run, names, events, store, tell, stop)
        else:
            stages = self.stages()
            played = [stage for stage in stages if isinstance(stage, Round)]
            workers = [ALL] if self.method.kind == "gradients" else names
            found = trained(self.run, workers, played, store, int(VALIDATE_SHARE * self.reference_tokens), tell, stop)
        came_to = outcome(self.method.name, self.seed, self.world, self.run, volume.parameters, stages, found)
        if not self.choice_items:
            return came_to
        stop.check()
        return replace(came_to, choice=choice(self.run, found, self.choice_items))


def jobs(
    base: RunConfig,
    setting: Setting,
    methods: Sequence[Method],
    seeds: Sequence[int],
    budget_tokens: int,
    choice_items: int = 0,
) -> list[Job]:
    """By seed first, so that a matrix that is stopped has whole comparisons."""
    world = world_of(base, setting, budget_tokens)
    configs = [(method, method.run_config(base, setting, budget_tokens)) for method in methods]
    for method, run in configs:
        _refuse_what_contradicts(method, run)
    return [
        Job(method, seed, _with_seed(run, seed), replace(world, seed=seed), budget_tokens, choice_items)
        for seed in seeds
        for method, run in configs
    ]


def _with_seed(run: RunConfig, seed: int) -> RunConfig:
    return run.model_copy(update={"run": run.run.model_copy(update={"seed": seed})})


OF_ALL = {
    "run": "it is of the whole comparison: see --seeds, --tokens and --run.target_ppl",
    "model": "one model is compared, whose size the links are scaled to: use a run file and --out for each",
    "dataset": "all are trained on the same data: use a run file and --out for each",
    "save": "it changes nothing that is compared",
    "metrics": "it changes nothing that is compared",
}
"""Sections of the run file that cannot be varied, and why."""


def varied(methods: Sequence[Method], variations: Sequence[str], real: bool = False) -> list[Method]:
    """Each method with every combination of `section.key=value,value,...`. Raises ConfigError."""
    axes: dict[str, list[tuple[str, Any]]] = {}
    for text in variations:
        key, _, listed = text.partition("=")
        texts = _split(listed)
        if not all((*key.partition("."), *texts)):
            raise ConfigError(f"--vary {text!r}: give section.key=value,value,...")
        if key in axes:
            raise ConfigError(f"--vary {text}: {key} is given twice: give all its values in one list")
        axes[key] = []
        for one in texts:
            value = value_of(key, one, f"--vary {text}")
            if value not in [known for _, known in axes[key]]:
                axes[key].append((one, value))
        section = key.partition(".")[0]
        if section in OF_ALL:
            raise ConfigError(f"--vary {text}: {key} cannot be varied: {OF_ALL[section]}")
        if section == "net" and not real:
            raise ConfigError(f"--vary {text}: {key} cannot be varied: virtual time has no network: use --engine real")
    return [_with(method, dict(zip(axes, values, strict=True))) for method in methods for values in product(*axes.values())]


def _with(method: Method, values: Mapping[str, tuple[str, Any]]) -> Method:
    """`values` by key, as they are written and as they are. Names say the last part of the key where that says which it is."""
    changes, label, names = dict(method.changes), list[str](), [key.partition(".")[2] for key in values]
    for key, (text, value) in values.items():
        section, _, name = key.partition(".")
        changes[section] = {**changes.get(section, {}), name: value}
        label.append(f"{name if names.count(name) == 1 else key}={text}")
    called = f"{method.name}[{','.join(label)}]" if label else method.name
    return replace(method, name=called, changes=changes, varied=tuple(values))


def _split(listed: str) -> list[str]:
    """At commas outside of brackets."""
    found, depth = [""], 0
    for letter in listed:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [text.strip() for text in found]


def _refuse_what_contradicts(method: Method, run: RunConfig) -> None:
    """What was varied, by the checks of a run file as a whole."""
    for keys, problem in run_problems(run):
        if set(keys) & set(method.varied):
            raise ConfigError(f"--vary: {method.name}: {problem}")


# ---------------------------------------------------------------- the queue


@dataclass(frozen=True)
class Failed:
    """A training that came to nothing; `error` is what was told of it."""

    method: str
    seed: int
    exit_code: int
    error: str


def play_all(queue: Sequence[Job], store: Path, processes: int, tell: Tell) -> tuple[list[Outcome], list[Failed]]:
    """All jobs, `processes` at a time with one thread each, in the order given; trajectories are in `store`. What
    fails is told at once. Raises Interrupted."""
    begun = time.monotonic()

    def came_to(index: int, found: Outcome, done: int) -> None:
        text = f"perplexity {found.figures['final_ppl']:.3f} after {found.figures['wall_seconds']:.0f} virtual seconds"
        tell(f"{queue[index].label}: {text} ({done} of {len(queue)}, {time.monotonic() - begun:.0f} s so far)")

    played = Trainings(queue, store, processes, came_to, tell, _alone).play()
    failed = [Failed(queue[one.index].method.name, queue[one.index].seed, one.exit_code, one.text) for one in played.failures]
    return [played.found[index] for index in sorted(played.found)], failed


def _alone() -> None:
    """One thread a process: two trajectories side by side are faster than one on two cores."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
