"""What a method came to: perplexity over time, idle shares, bytes; then medians over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core import choice as choices
from geomesh_p2p.lab.bench.clock import World
from geomesh_p2p.lab.bench.quality import against
from geomesh_p2p.lab.bench.settings import Setting
from geomesh_p2p.lab.bench.timeline import Round, Stage, idle_shares
from geomesh_p2p.lab.bench.trajectory import Point, Trajectory

FP32_BYTES = 4
GANTT_ROUNDS = 6
REFERENCE = "diloco"



@dataclass(frozen=True)
class Curve:
    """Validation perplexity of the anchor, by seconds and by tokens."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    val_ppl: tuple[float, ...]

    def reached(self, target: float) -> int | None:
        """The first place at which the perplexity is at or below `target`."""
        return next((k for k, ppl in enumerate(self.val_ppl) if ppl <= target), None)


@dataclass(frozen=True)
class Outcome:
    """One method with one seed."""

    method: str
    seed: int
    engine: str
    curve: Curve
    stages: tuple[Stage, ...]
    figures: dict[str, float | int | None]
    key: str
    choice: choices.Outcome | None = None


def fastest_site(setting: Setting) -> str:
    def rate(k: int) -> float:
        site = setting.sites[k]
        return site.max_batch / (site.fixed_seconds + site.max_batch * site.sequence_seconds)

    return setting.names[max(range(len(setting.sites)), key=rate)]


def limit_seconds(setting: Setting, run: RunConfig, tokens: int) -> float:
    """The least time for `tokens`: every device at its best rate without a pause, no byte moved."""
    rate = sum(site.max_batch / (site.fixed_seconds + site.max_batch * site.sequence_seconds) for site in setting.sites)
    return tokens / run.model.sequence_length / rate


def outcome(
    method: str, seed: int, world: World, run: RunConfig, parameters: int, stages: Sequence[Stage], trained: Trajectory
) -> Outcome:
    curve = _curve(stages, trained.points)
    idle = idle_shares(stages, fastest_site(world.setting))
    tokens, seconds = sum(stage.tokens for stage in stages), stages[-1].ends
    sent = sum(part.sent_bytes for stage in stages for part in stage.parts)
    size = len(world.setting.sites)
    exchanges = sum(one.plan.members[0].inner_steps if _every_step(one) else 1 for one in stages if isinstance(one, Round))
    ring = exchanges * 2 * (size - 1) * FP32_BYTES * parameters
    figures: dict[str, float | int | None] = {
        "rounds_committed": len(stages),
        "tokens": tokens,
        "wall_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "final_ppl": curve.val_ppl[-1],
        "val_ppl_first": curve.val_ppl[0],
        "straggler_idle_share": idle.straggler,
        "straggler_idle_share_steady": idle.straggler_steady,
        "straggler_idle_share_fastest": idle.straggler_fastest,
        "wan_idle_share": idle.wan,
        "wan_idle_share_steady": idle.wan_steady,
        "compute_share": idle.compute,
        "bytes_payload": sent,
        "bytes_ratio_to_fp32_ring": ring / sent if sent and ring else None,
        "limit_seconds": limit_seconds(world.setting, run, tokens),
    }
    return Outcome(method, seed, "virtual", curve, tuple(stages), figures, trained.key)


def _every_step(one: Round) -> bool:
    return len(one.plan.members) == 1 and len(one.parts) > 1


def _curve(stages: Sequence[Stage], points: Sequence[Point]) -> Curve:
    ends = {0: 0.0, **{stage.number: stage.ends for stage in stages}}
    seen = [point for point in points if point.val_ppl is not None]
    return Curve(
        tuple(ends[point.rounds] for point in seen),
        tuple(point.tokens for point in seen),
        tuple(point.rounds for point in seen),
        tuple(float(point.val_ppl or 0.0) for point in seen),
    )


# ---------------------------------------------------------------- over seeds


def summary(
    setting: Setting, seeds: Sequence[int], target_ppl: float, outcomes: Sequence[Outcome], about: Mapping[str, Any]
) -> dict[str, Any]:
    """report.json: of every figure the median over seeds, `_min` and `_max` beside it."""
    methods: dict[str, Any] = {}
    for name in dict.fromkeys(one.method for one in outcomes):
        mine = [one for one in outcomes if one.method == name]
        per_seed = [{**one.figures, **_to_target(one.curve, target_ppl)} for one in mine]
        table: dict[str, Any] = {"engine": mine[0].engine, "seeds": [one.seed for one in mine]}
        for figure in per_seed[0]:
            table |= _spread(figure, [one[figure] for one in per_seed])
        table["curves"] = [asdict(one.curve) for one in mine]
        table["gantt"] = [_gantt(stage) for stage in mine[0].stages[:GANTT_ROUNDS]]
        table["trajectories"] = [one.key for one in mine]
        table |= _choice(mine, [one for one in outcomes if one.method == REFERENCE])
        methods[name] = table
    return {
        "setting": setting.name,
        "setting_about": setting.about,
        "sources": list(setting.sources),
        "sites": [site.model_dump() for site in setting.sites],
        "seeds": list(seeds),
        "target_ppl": target_ppl,
        **about,
        "methods": methods,
    }


def _choice(mine: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, Any]:
    """Continuation choice; against the reference, if that has the same seeds."""
    answers = [one.choice for one in mine if one.choice is not None]
    if len(answers) < len(mine):
        return {"continuation_accuracy": None, "continuation_stderr": None, "continuation_against_diloco": None}
    theirs = [one.choice for one in reference if one.choice is not None]
    paired = [one.seed for one in mine] == [one.seed for one in reference] and len(theirs) == len(answers)
    return {
        "continuation_accuracy": median(answer.accuracy for answer in answers),
        "continuation_stderr": median(answer.stderr for answer in answers),
        "continuation_against_diloco": against(answers, theirs) if paired else None,
    }


def _to_target(curve: Curve, target: float) -> dict[str, float | int | None]:
    place = curve.reached(target)
    found = (None, None, None) if place is None else (curve.seconds[place], curve.rounds[place], curve.tokens[place])
    return dict(zip(("time_to_target_seconds", "rounds_to_target", "tokens_to_target"), found, strict=True))


def _spread(name: str, values: Sequence[float | int | None]) -> dict[str, float | int | None]:
    """Missing (a target that was not reached) if it is for most seeds."""
    known = sorted(value for value in values if value is not None)
    if 2 * len(known) <= len(values):
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    # Those that did not reach it are above all others.
    middle = median([*known, *[float("inf")] * (len(values) - len(known))])
    return {name: middle, f"{name}_min": known[0], f"{name}_max": known[-1] if len(known) == len(values) else None}


def _gantt(stage: Stage) -> dict[str, Any]:
    return {
        "round": stage.number,
        "begins": stage.begins,
        "ends": stage.ends,
        "sites": {
            part.site: {"compute": part.compute, "straggler_idle": part.straggler_idle, "wan_idle": part.wan_idle}
            for part in stage.parts
        },
    }
