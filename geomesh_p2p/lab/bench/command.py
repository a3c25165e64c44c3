"""`geomesh bench`: from run file and setting to a table on stdout and FOLDER/report.json, .md and .html."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from geomesh_p2p.config import RunConfig
from geomesh_p2p.errors import ConfigError, GeoMeshError, of_os_error
from geomesh_p2p.lab.bench import real
from geomesh_p2p.lab.bench.methods import DEFAULT_METHODS, GROUPS, TUNED_LENGTHS, method_of, with_default_outer
from geomesh_p2p.lab.bench.quality import check_items
from geomesh_p2p.lab.bench.report.figures import TUNED, finite, listed, measured, number, of_seeds, reached
from geomesh_p2p.lab.bench.report.pages import write
from geomesh_p2p.lab.bench.results import REFERENCE, Outcome, summary
from geomesh_p2p.lab.bench.runner import Failed, jobs, play_all, varied
from geomesh_p2p.lab.bench.settings import load_setting
from geomesh_p2p.lab.bench.stopping import to_stderr

TARGET_ABOVE = 1.1
WORST = "the worst of the methods' lowest perplexities (as a rule their final ones) with the same seed, which all of them reach"


@dataclass(frozen=True)
class Request:
    """What is asked for on the command line."""

    setting: str = "paper"
    methods: Sequence[str] = DEFAULT_METHODS
    seeds: Sequence[int] = (1,)
    tokens: int = 5_000_000
    vary: Sequence[str] = ()
    engine: Literal["virtual", "real"] = "virtual"
    """virtual: real gradients, simulated clock; real: a mesh of processes on this machine, devices and links emulated."""
    out: Path = Path("runs/bench")
    store: Path | None = None
    """Where what is trained is kept, for several settings or comparisons; None: below `out`."""
    choice: int = 0
    """So many items of continuation choice for every anchor; 0: none."""
    processes: int = 0
    """0: as many as there are cores."""


def bench(base: RunConfig, request: Request) -> dict[str, Any]:
    """Runs what is missing, writes its report (report/pages.py) and returns it. A report beside failed trainings names them in
    `failed`. Raises ConfigError, Interrupted, TrainingsFailed."""
    request = replace(request, seeds=tuple(dict.fromkeys(request.seeds)))
    setting = load_setting(request.setting)
    names = [part for name in request.methods for part in GROUPS.get(name, (name,))]
    methods = varied([method_of(name) for name in dict.fromkeys(names)], request.vary, request.engine == "real")
    reference = setting.reference_round_sequences * base.model.sequence_length
    if request.tokens < reference:
        raise ConfigError(f"--tokens {request.tokens}: less than one round of the setting, {reference} tokens")
    if not request.seeds:
        raise ConfigError("--seeds is empty: give at least one number")
    queue = jobs(base, setting, methods, request.seeds, request.tokens, request.choice)
    store = request.store or request.out / "trajectories"
    _check_folder("--out", request.out)
    _check_folder("--store", store)
    for note in setting.notes():
        to_stderr(f"note: {note}")
    failed: list[Failed] = []
    if request.engine == "real":
        scale = real.time_scale(base, setting, request.out / "real")
        outcomes = [real.play(job, request.out, scale, to_stderr) for job in queue]
    else:
        if request.choice:
            check_items((job.run for job in queue), request.choice)
        outcomes, failed = play_all(queue, store, request.processes or os.cpu_count() or 1, to_stderr)
        outcomes = _to_report(outcomes, failed)
    chosen = {seed: _target(base.run.target_ppl, [one for one in outcomes if one.seed == seed]) for seed in request.seeds}
    targets = {seed: target for seed, (target, _) in chosen.items()}
    about = {
        "run_id": base.run.id,
        "parameters": queue[0].volume().parameters,
        **({"failed": [asdict(one) for one in failed]} if failed else {}),
        "target_rule": _target_rule({seed: rule for seed, (_, rule) in chosen.items()}),
        "budget_tokens": request.tokens,
        "reference_round_tokens": reference,
        "rate_scale": queue[0].world.rate_scale,
        "reference_wan_idle_share": queue[0].world.reference_wan_idle_share,
        "outer_defaults": with_default_outer(base, methods),
        "stands_for_parameters": queue[0].volume().parameters / queue[0].world.rate_scale,
    }
    report: dict[str, Any] = finite(summary(setting, request.seeds, targets, outcomes, about))
    if set(TUNED_LENGTHS) <= set(report["methods"]):
        report["methods"][TUNED] = _best(report["methods"])
    write(request.out, report)
    to_stderr(f"report in {request.out / 'report.html'}, report.md and report.json")
    return report


def _check_folder(flag: str, folder: Path) -> None:
    """Raises ConfigError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if of_os_error(error) is None or error.errno == errno.ENOSPC:
            raise
        raise ConfigError(f"{flag} {folder}: {error.strerror}: give a folder that can be written to") from None


def _to_report(outcomes: Sequence[Outcome], failed: Sequence[Failed]) -> list[Outcome]:
    """Those of methods of which no training failed: medians are compared over the same seeds. Raises what failed first if
    nothing can be compared."""
    if not failed:
        return list(outcomes)
    names = dict.fromkeys(one.method for one in failed)
    left = [one for one in outcomes if one.method not in names]
    text = f"{len(failed)} of {len(outcomes) + len(failed)} trainings failed, of {listed(list(names))}"
    those = "that" if len(names) == 1 else "them"
    if not left or REFERENCE in names:
        raise TrainingsFailed(f"{text}: no report; the same command without {those} reports the rest", failed[0].exit_code)
    to_stderr(f"{text}: the report is without {those}")
    return left


class TrainingsFailed(GeoMeshError):
    """`exit_code` is that of the first failure."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _target(given: float | None, outcomes: Sequence[Outcome]) -> tuple[float, str]:
    """Of one seed, and by which rule. Without run.target_ppl a little above what the reference ends with; without it, or where
    that is no number, what every method reaches. Where nothing was ever a number, neither is this, and nobody reaches it."""
    if given:
        return given, "run.target_ppl"
    finals = [one.curve.val_ppl[-1] for one in outcomes if one.method == REFERENCE]
    if finals and math.isfinite(finals[0]):
        return TARGET_ABOVE * finals[0], f"{TARGET_ABOVE:g} times {REFERENCE}'s final perplexity with the same seed"
    known = [[ppl for ppl in one.curve.val_ppl if math.isfinite(ppl)] for one in outcomes]
    return max((min(curve) for curve in known if curve), default=math.nan), WORST


def _target_rule(rules: Mapping[int, str]) -> str:
    """Of all seeds; which have which, if that is not the same."""
    seeds: dict[str, list[int]] = {}
    for seed, rule in rules.items():
        seeds.setdefault(rule, []).append(seed)
    return " or ".join(f"{rule} ({of_seeds(of)})" if len(seeds) > 1 else rule for rule, of in seeds.items())


def _best(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Of the lengths tried the one that is soonest at the target."""
    def seconds(name: str) -> float:
        found = methods[name]["time_to_target_seconds"]
        return float("inf") if found is None else float(found)

    best = min(TUNED_LENGTHS, key=seconds)
    return {**methods[best], "is": best}


# ---------------------------------------------------------------- the table

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("time_to_target_seconds", "to target s", "{:.1f}"),
    ("", "against diloco", "{:.1%}"),
    ("wall_seconds", "all s", "{:.1f}"),
    ("final_ppl", "final ppl", "{:.3f}"),
    ("rounds_committed", "rounds", "{:.0f}"),
    ("straggler_idle_share_fastest", "straggler, fastest", "{:.2%}"),
    ("straggler_idle_share", "straggler, all", "{:.2%}"),
    ("wan_idle_share", "WAN", "{:.2%}"),
    ("bytes_payload", "MB sent", "{:.1f}"),
)


def table(report: Mapping[str, Any]) -> str:
    """All methods side by side: medians over seeds."""
    reference = report["methods"].get("diloco", {}).get("time_to_target_seconds")
    rows = [("method", *(head for _, head, _ in COLUMNS))]
    for name, figures in report["methods"].items():
        cells = [name]
        for key, _, form in COLUMNS:
            value = figures.get(key or "time_to_target_seconds")
            if not key:
                value = value / reference - 1 if measured(value) and measured(reference) and reference else None
            if key == "bytes_payload" and measured(value):
                value /= 1e6
            cells.append(form.format(value) if measured(value) else "-")
            if key == "time_to_target_seconds" and reached(figures).some:
                cells[-1] += f" ({reached(figures)} seeds)"
        rows.append(tuple(cells))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    pads = [str.ljust, *[str.rjust] * len(COLUMNS)]
    lines = ["  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) for row in rows]
    seeds = ", ".join(str(seed) for seed in report["seeds"])
    head = (
        f"setting {report['setting']}, {number(report['parameters'], ',')} parameters, "
        f"{number(report['budget_tokens'], ',')} tokens, seeds {seeds}; "
        f"target perplexity {number(report['target_ppl'], '.3f')}; "
        f"{' and '.join(sorted({figures['engine'] for figures in report['methods'].values()}))} time"
    )
    return "\n".join([head, "", *lines])
