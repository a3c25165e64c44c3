"""Methods over real processes and sockets: a mesh of this machine with the setting's devices and links emulated.

Emulated devices are slowed down until this machine can keep up with all of them, and until a round takes LEAST_ROUND_SECONDS
here; links and heartbeats with them: everything takes `time_scale` times as long, and the figures are divided by it again. A
method that needs another server than the product's is not played here. The anchor is validated and saved at the start and at
the end alone: that takes this machine's time, not the emulated devices', and what is wanted here are the latter.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from geomesh_p2p.config import EmulationSection, RunConfig, SiteConfig, SiteSection
from geomesh_p2p.core.emulation import time_scale_for
from geomesh_p2p.errors import ConfigError, TemporaryError
from geomesh_p2p.lab.bench.detail import constants_of, reasons_of, usual_work
from geomesh_p2p.lab.bench.replay import replayed
from geomesh_p2p.lab.bench.results import Account, Curve, Outcome, fastest_site, limit_seconds
from geomesh_p2p.lab.bench.runner import Job, Tell
from geomesh_p2p.lab.bench.settings import Setting
from geomesh_p2p.lab.bench.timeline import STEADY_FROM_ROUND, Part, Stage, idle_shares
from geomesh_p2p.lab.bench.work import fastest_alone

MEETING_SECONDS = 300.0
LEAST_ROUND_SECONDS = 15.0
"""What is not emulated (a message's way through processes, records to disk, plans) takes some 0.05 to 0.1 s of a round."""
SECTIONS = ("run", "model", "dataset", "inner", "outer", "codec", "planner", "net", "save")
FIGURES = (
    "straggler_idle_share", "straggler_idle_share_steady", "straggler_idle_share_fastest", "wan_idle_share",
    "wan_idle_share_steady", "compute_share", "bytes_payload", "bytes_total", "bytes_ratio_to_fp32", "bytes_ratio_to_fp32_ring",
    "emulation_overrun_share",
)  # fmt: skip


def time_scale(run: RunConfig, setting: Setting, folder: Path) -> float:
    """How much slower than written the setting's devices have to be, so that all of them fit on this machine. Measured once for
    `folder`."""
    known = folder / "time_scale.json"
    if known.is_file():
        return float(json.loads(known.read_text()))
    emulations = [_emulation(setting, index, 1.0) for index in range(len(setting.sites))]
    spawn = multiprocessing.get_context("spawn")
    together = (spawn.Barrier(len(emulations)),)
    with ProcessPoolExecutor(len(emulations), spawn, _meet_at, together) as pool:
        rates = list(pool.map(_rate, [run] * len(emulations), emulations))
    scale = time_scale_for(sum(rates), emulations, run.model.sequence_length)
    folder.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps(scale))
    return scale


_meeting: Any = None


def _meet_at(barrier: Any) -> None:
    global _meeting
    _meeting = barrier


def _rate(run: RunConfig, emulation: EmulationSection) -> float:
    """Tokens a second while all others do the same: none loads or compiles meanwhile."""
    from geomesh_p2p.engine.engine import TorchEngine

    engine = TorchEngine(run, SiteConfig(site=SiteSection(name="rate"), emulation=emulation))
    engine.measure_rate(0.0)
    _meeting.wait(MEETING_SECONDS)
    return engine.measure_rate()


def _emulation(setting: Setting, index: int, scale: float) -> EmulationSection:
    place = setting.sites[index]
    return EmulationSection(
        device=place.device,
        fixed_seconds=place.fixed_seconds,
        sequence_seconds=place.sequence_seconds,
        max_batch=place.max_batch,
        time_scale=scale,
    )


def play(job: Job, folder: Path, least_scale: float, tell: Tell) -> Outcome:
    """One method with one seed as a mesh of processes, slowed down by `least_scale` at least. Raises ConfigError for a method
    that cannot be, TemporaryError if the mesh does not reach its end."""
    if job.method.kind != "rounds" or job.method.frozen:
        raise ConfigError(f"{job.method.name} has no real processes: leave it out, or use --engine virtual")
    if job.world.setting.changes:
        raise ConfigError(f"setting {job.world.setting.name} changes on the way: only --engine virtual plays that")
    played = job.stages()
    scale = max(least_scale, LEAST_ROUND_SECONDS / _steady_seconds(played))
    mine = folder / "real" / f"{job.method.name}-{job.seed}"
    mine.mkdir(parents=True, exist_ok=True)
    report_file = mine / "runs" / "bench" / "report.json"
    if not report_file.is_file():
        _write_sites(job, mine / "sites", scale)
        run_file = mine / "run.toml"
        fields = _fields(job, mine, len(played), scale)
        run_file.write_text("".join(_section(name, fields[name]) for name in SECTIONS), encoding="utf-8")
        tell(f"{job.method.name}, seed {job.seed}: {len(played)} rounds over real processes, time scale {scale:.3g}")
        command = [sys.executable, "-m", "geomesh_p2p.cli", "mesh", str(run_file), "--sites", str(mine / "sites")]
        with (mine / "mesh.log").open("ab") as log:
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if code != 0 or not report_file.is_file():
            raise TemporaryError(f"{job.method.name}: its mesh ended with {code}: see {mine / 'mesh.log'}, and start again")
    return _outcome(job, json.loads(report_file.read_text(encoding="utf-8")), scale, replayed(job, report_file.parent, scale))


def _fields(job: Job, folder: Path, rounds: int, scale: float) -> dict[str, Any]:
    """Of the run file: nothing but training and exchanges between its start and its end, and all periods `scale` times as
    long."""
    fields = job.run.model_dump()
    fields["run"] |= {"id": "bench", "folder": str(folder / "runs"), "rounds": rounds, "fresh": False,
                      "min_peers": len(job.world.setting.sites), "validate_every_rounds": rounds}  # fmt: skip
    fields["save"]["snapshot_every_rounds"] = rounds
    for name in ("heartbeat_seconds", "heartbeat_limit_seconds"):
        fields["net"][name] *= max(1.0, scale)
    return fields


def _write_sites(job: Job, folder: Path, scale: float) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    setting, rates = job.world.setting, job.world.setting.rates * job.world.rate_scale
    paths = []
    for i, place in enumerate(setting.sites):
        links = {
            other.name: {"rtt_ms": 1000 * float(setting.rtts[i, j]) * scale, "mbps": float(rates[i, j]) * 8 / 1e6 / scale}
            for j, other in enumerate(setting.sites)
            if i != j
        }
        text = _section("site", {"name": place.name, "region": place.region})
        text += _section("device", {"name": "cpu", "threads": 1})
        text += _section("emulation", _emulation(setting, i, scale).model_dump())
        text += "".join(_section(f"links.{name}", link) for name, link in links.items())
        paths.append(folder / f"{place.name}.toml")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def _section(name: str, fields: Mapping[str, Any]) -> str:
    """A table of a TOML file; keys without a value are left out. Lists, numbers, booleans and strings look as in JSON."""
    lines, tables = [f"[{name}]"], ""
    for key, value in fields.items():
        if isinstance(value, dict):
            tables += _section(f"{name}.{key}", value) if value else ""
        elif value is not None:
            lines.append(f"{key} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    return "\n".join(lines) + "\n\n" + tables


@dataclass(frozen=True)
class _Reported:
    """A round as the mesh's report tells it."""

    line: Mapping[str, Any]
    begins: float
    scale: float

    def stage(self, tokens: int) -> Stage:
        seconds = self.line["seconds"] / self.scale
        return Stage(self.line["round"], self.begins, self.begins + seconds, self._parts(seconds, tokens), tokens)

    def _parts(self, seconds: float, tokens: int) -> tuple[Part, ...]:
        """By site, from when each was done; what comes after the last is the exchange. Without that: all sites as one."""
        done = {site: pair[1] / self.scale for site, pair in (self.line.get("finish_seconds") or {}).items()}
        if not done:
            straggler, wan = (self.line[f"{what}_idle_share"] or 0.0 for what in ("straggler", "wan"))
            compute = seconds * (1 - straggler - wan)
            return (Part("all", 0, tokens, compute, seconds * straggler, seconds * wan, 0.0, 0.0, 0.0),)
        last = max(done.values())
        exchange = max(0.0, seconds - last)
        return tuple(Part(site, 0, 0, end, last - end, exchange, 0.0, 0.0, 0.0) for site, end in sorted(done.items()))


def _account(
    virtual: Sequence[Stage], again: Sequence[Stage], run: RunConfig, report: Mapping[str, Any], scale: float
) -> Account:
    """In the setting's time, as the figures are."""
    rounds = tuple(
        {
            "round": line["round"],
            "term": line["term"],
            "members": line["members"],
            "topology": line["topology"],
            "planned_seconds": _divided(line["planned_seconds"], scale),
            "seconds": line["seconds"] / scale,
            "tokens": line["tokens"],
            "straggler_idle_share": line["straggler_idle_share"],
            "wan_idle_share": line["wan_idle_share"],
            "digest": line["digest"],
            "val_ppl": line["val_ppl"],
            "changed": False,
        }
        for line in report["rounds"]
    )
    peers = tuple(
        {key: _divided(value, scale) if key.endswith("_seconds") else value for key, value in peer.items()}
        | usual_work(peer["site"], again)
        for peer in report["peers"]
    )
    return Account(report["digest"], rounds, peers, reasons_of(virtual), constants_of(run))


def _divided(seconds: float | None, scale: float) -> float | None:
    return None if seconds is None else seconds / scale


def _outcome(job: Job, report: Mapping[str, Any], scale: float, again: Sequence[Stage] = ()) -> Outcome:
    """`again` are the rounds of the plans that the mesh made, in virtual time."""
    stages, clock = list[Stage](), 0.0
    for line in report["rounds"]:
        stages.append(_Reported(line, clock, scale).stage(line["tokens"]))
        clock = stages[-1].ends
    first, rounds = report["val_ppl_first"], report["rounds"]
    seen = [(0.0, 0, 0, first), *_validated(stages, [line["val_ppl"] for line in rounds])]
    curve = Curve(*(tuple(column) for column in zip(*seen, strict=True)))
    tokens = int(report["tokens"])
    figures: dict[str, float | int | None] = {
        "rounds_committed": report["rounds_committed"],
        "rounds_discarded": report["rounds_discarded"],
        "tokens": tokens,
        "tokens_per_round": report["tokens_per_round"],
        "wall_seconds": clock,
        "tokens_per_second": tokens / clock,
        "final_ppl": curve.val_ppl[-1],
        "val_ppl_first": first,
        "val_ppl_last": curve.val_ppl[-1],
        **{name: report[name] for name in FIGURES},
        "limit_seconds": limit_seconds(job.world.setting, job.run, tokens),
        "fastest_alone_seconds": fastest_alone(job.world.setting, tokens / job.run.model.sequence_length)[1],
        "emulation_time_scale": scale,
    }
    figures["round_seconds_steady"] = _steady_seconds(stages)
    virtual = job.stages()
    figures |= _beside("virtual", job, virtual) | (_beside("replayed", job, again) if again else {})
    account = _account(virtual, again, job.run, report, scale)
    return Outcome(job.method.name, job.seed, "real", curve, tuple(stages), figures, "", account=account)


def _beside(what: str, job: Job, stages: Sequence[Stage]) -> dict[str, float | int | None]:
    idle = idle_shares(stages, fastest_site(job.world.setting))
    return {
        f"{what}_round_seconds_steady": _steady_seconds(stages),
        f"{what}_straggler_idle_share_steady": idle.straggler_steady,
        f"{what}_wan_idle_share_steady": idle.wan_steady,
    }


def _steady_seconds(stages: Sequence[Stage]) -> float:
    """Median length of a round, from the first steady one to the last but one (the last may be shorter)."""
    known = [stage.ends - stage.begins for stage in stages if stage.number >= STEADY_FROM_ROUND][:-1]
    return median(known or [stage.ends - stage.begins for stage in stages])


def _validated(stages: Sequence[Stage], perplexities: Sequence[float | None]) -> list[tuple[float, int, int, float]]:
    found, tokens = [], 0
    for stage, perplexity in zip(stages, perplexities, strict=True):
        tokens += stage.tokens
        if perplexity is not None:
            found.append((stage.ends, tokens, stage.number, perplexity))
    return found
