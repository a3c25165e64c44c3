"""What a method came to: perplexity over time, idle shares, bytes; then medians over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core import choice as choices
from geomesh_p2p.lab.bench import detail
from geomesh_p2p.lab.bench.clock import World
from geomesh_p2p.lab.bench.methods import METHODS
from geomesh_p2p.lab.bench.quality import against
from geomesh_p2p.lab.bench.settings import Setting
from geomesh_p2p.lab.bench.timeline import Stage, idle_shares
from geomesh_p2p.lab.bench.trajectory import Point, Trajectory
from geomesh_p2p.lab.bench.work import fastest_alone, little_work

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
class Account:
    """What a method with one seed tells beside its figures: see detail.py. `digest` is of the last anchor."""

    digest: str | None = None
    rounds: tuple[dict[str, Any], ...] = ()
    peers: tuple[dict[str, Any], ...] = ()
    reasons: tuple[str, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)


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
    account: Account = field(default_factory=Account)


def fastest_site(setting: Setting) -> str:
    return max(setting.sites, key=lambda site: site.best_rate).name


def limit_seconds(setting: Setting, run: RunConfig, tokens: int) -> float:
    """The least time for `tokens`: every device at its best rate, and at the best speed that the setting's changes give it at
    any time, without a pause; no byte moved."""
    rate = sum(site.best_rate * setting.best_speed(site.name) for site in setting.sites)
    return tokens / run.model.sequence_length / rate


def outcome(
    method: str, seed: int, world: World, run: RunConfig, parameters: int, stages: Sequence[Stage], trained: Trajectory
) -> Outcome:
    curve = _curve(stages, trained.points)
    idle = idle_shares(stages, fastest_site(world.setting))
    tokens, seconds = sum(stage.tokens for stage in stages), stages[-1].ends
    sent = sum(part.sent_bytes for stage in stages for part in stage.parts)
    same, ring = detail.fp32_bytes(stages, parameters)
    figures: dict[str, float | int | None] = {
        "rounds_committed": len(stages),
        "rounds_discarded": None,
        "tokens": tokens,
        "tokens_per_round": tokens / len(stages),
        "wall_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "final_ppl": curve.val_ppl[-1],
        "val_ppl_first": curve.val_ppl[0],
        "val_ppl_last": curve.val_ppl[-1],
        "straggler_idle_share": idle.straggler,
        "straggler_idle_share_steady": idle.straggler_steady,
        "straggler_idle_share_fastest": idle.straggler_fastest,
        "straggler_idle_share_settled": detail.straggler_share_settled(stages),
        "wan_idle_share": idle.wan,
        "wan_idle_share_steady": idle.wan_steady,
        "compute_share": idle.compute,
        "emulation_overrun_share": None,
        "emulation_time_scale": None,
        "bytes_payload": sent,
        "bytes_total": None,
        "bytes_ratio_to_fp32": sent / same if same else None,
        "bytes_ratio_to_fp32_ring": sent / ring if ring else None,
        "limit_seconds": limit_seconds(world.setting, run, tokens),
        "fastest_alone_seconds": fastest_alone(world.setting, tokens / run.model.sequence_length)[1],
    }
    account = Account(
        trained.digest,
        detail.rounds_of(stages, dict(zip(curve.rounds, curve.val_ppl, strict=True))),
        detail.peers_of(stages, world.setting.names),
        detail.reasons_of(stages),
        detail.constants_of(run),
    )
    return Outcome(method, seed, "virtual", curve, tuple(stages), figures, trained.key, account=account)


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
    setting: Setting, seeds: Sequence[int], targets: Mapping[int, float], outcomes: Sequence[Outcome], about: Mapping[str, Any]
) -> dict[str, Any]:
    """report.json: of every figure the median over seeds, `_min` and `_max` beside it. `rounds`, `plan` and `gantt` are of
    the first seed. `targets` are perplexities by seed: each seed holds out other text, which may be easier or harder."""
    methods: dict[str, Any] = {}
    shown = detail.gantt_seconds({one.method: one.stages for one in reversed(outcomes)})
    for name in dict.fromkeys(one.method for one in outcomes):
        mine = [one for one in outcomes if one.method == name]
        per_seed = [{**one.figures, **_to_target(one, targets[one.seed])} for one in mine]
        known = METHODS.get(name.partition("[")[0])
        about_it = known.about if known else ""
        table: dict[str, Any] = {"engine": mine[0].engine, "about": about_it, "seeds": [one.seed for one in mine]}
        for figure in per_seed[0]:
            table |= _spread(figure, [one[figure] for one in per_seed])
        table["time_to_target_seconds_by_seed"] = [one["time_to_target_seconds"] for one in per_seed]
        table["sites_without_work"] = _without_work(mine)
        table["sites_with_little_work"] = little_work(
            setting, [one.account.peers for one in mine], [int(one.figures["rounds_committed"] or 0) for one in mine]
        )
        table["constants"] = mine[0].account.constants
        table["final_ppl_by_seed"] = [one.curve.val_ppl[-1] for one in mine]
        table["curves"] = [asdict(one.curve) for one in mine]
        table["rounds"] = list(mine[0].account.rounds)
        table["peers"] = detail.over_seeds([one.account.peers for one in mine])
        table["plan"] = list(mine[0].account.reasons)
        table["gantt"] = detail.gantt(mine[0].stages, shown)
        table["trajectories"] = [one.key for one in mine]
        table["digests"] = [one.account.digest for one in mine]
        table |= _choice(mine, [one for one in outcomes if one.method == REFERENCE])
        methods[name] = table
    return {
        **detail.setting_facts(setting),
        "fastest_site": fastest_site(setting),
        "fastest_alone_site": fastest_alone(setting, 1)[0],
        "seeds": list(seeds),
        "target_ppl": median(targets.values()),
        "target_ppl_by_seed": [targets[seed] for seed in seeds],
        "gantt_seconds": shown,
        **about,
        "methods": methods,
    }


def _choice(mine: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, Any]:
    """Continuation choice; against the reference, if that has the same seeds."""
    answers = [one.choice for one in mine if one.choice is not None]
    known = answers if len(answers) == len(mine) else []
    theirs = [one.choice for one in reference if one.choice is not None]
    paired = [one.seed for one in mine] == [one.seed for one in reference] and len(theirs) == len(known) > 0
    return {
        **_spread("continuation_accuracy", [one.accuracy for one in known]),
        **_spread("continuation_stderr", [one.stderr for one in known]),
        "continuation_against_diloco": against(answers, theirs) if paired else None,
    }


def _without_work(mine: Sequence[Outcome]) -> list[str]:
    """Sites that trained nothing, with some seed at least. Idle shares are of those that take part."""
    return sorted({peer["site"] for one in mine for peer in one.account.peers if 0 in (peer.get("tokens"), peer.get("rounds"))})


def _to_target(one: Outcome, target: float) -> dict[str, float | int | None]:
    place, curve = one.curve.reached(target), one.curve
    names = ("time_to_target_seconds", "rounds_to_target", "tokens_to_target", "limit_to_target_seconds")
    if place is None:
        return dict.fromkeys(names)
    tokens, limit, whole = curve.tokens[place], one.figures["limit_seconds"], one.figures["tokens"]
    least = None if limit is None or not whole else limit * tokens / whole
    return dict(zip(names, (curve.seconds[place], curve.rounds[place], tokens, least), strict=True))


def _spread(name: str, values: Sequence[float | int | None]) -> dict[str, float | int | None]:
    """Where it is missing (a target that was not reached), or not finite, it is above all others: there is no largest, and no
    median unless most seeds have it."""
    known = sorted(value for value in values if value is not None and math.isfinite(value))
    if 2 * len(known) <= len(values):
        return {name: None, f"{name}_min": known[0] if known else None, f"{name}_max": None}
    middle = median([*known, *[float("inf")] * (len(values) - len(known))])
    return {name: middle, f"{name}_min": known[0], f"{name}_max": known[-1] if len(known) == len(values) else None}
