"""What report.json tells beside the figures: the setting, and for each method its rounds, its sites and its first minutes.

Keys are those of a mesh's report where they mean the same (lab/report.py). What virtual time does not have, as a peer's id or
the term of a round, is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.reasons import explain
from geomesh_p2p.core.types import Assignment
from geomesh_p2p.lab.bench.settings import Array, Setting
from geomesh_p2p.lab.bench.timeline import Part, Round, Stage
from geomesh_p2p.lab.report import FP32_BYTES

GANTT_ROUNDS = 3        # of the reference; the other methods are shown for as long
MOST_GANTT_ROUNDS = 60  # of one method
SETTLED_ROUND = 2       # after a change of the setting: the round in which it happens is round 0

Figures = dict[str, Any]


def setting_facts(setting: Setting) -> Figures:
    """Rates in Mbit/s of one direction, as they are written in the setting, round trips in ms; null from a site to itself."""
    return {
        "setting": setting.name,
        "setting_about": setting.about,
        "sources": list(setting.sources),
        "sites": [site.model_dump() for site in setting.sites],
        "links": {
            "mbps": _matrix(setting.rates * 8 / 1e6),
            "rtt_ms": _matrix(setting.rtts * 1000),
            "jitter_share": setting.links.jitter_share,
        },
        "changes": [change.model_dump() for change in setting.changes],
        "reference_wan_idle_share": setting.reference_wan_idle_share,
    }


def _matrix(values: Array) -> list[list[float | None]]:
    size = len(values)
    return [[float(values[i, j]) if i != j and math.isfinite(values[i, j]) else None for j in range(size)] for i in range(size)]


# ---------------------------------------------------------------- one method with one seed


def rounds_of(stages: Sequence[Stage], ppl_after: Mapping[int, float]) -> tuple[Figures, ...]:
    return tuple(_round(stage, ppl_after.get(stage.number)) for stage in stages)


def _round(stage: Stage, val_ppl: float | None) -> Figures:
    plan = stage.plan if isinstance(stage, Round) and not _together(stage) else None
    whole = sum(part.seconds for part in stage.parts)
    return {
        "round": stage.number,
        "term": None,
        "members": [part.site for part in stage.parts],
        "topology": plan.topology if plan else None,
        "planned_seconds": plan.round_seconds if plan else None,
        "seconds": stage.ends - stage.begins,
        "tokens": stage.tokens,
        "straggler_idle_share": sum(part.straggler_idle for part in stage.parts) / whole if whole else None,
        "wan_idle_share": sum(part.wan_idle for part in stage.parts) / whole if whole else None,
        "digest": None,
        "val_ppl": val_ppl,
        "changed": isinstance(stage, Round) and stage.changed,
    }


def _together(stage: Round) -> bool:
    """One worker trains for all sites, as where gradients are averaged after every step."""
    return len(stage.plan.members) == 1 and len(stage.parts) > 1


def peers_of(stages: Sequence[Stage], sites: Sequence[str]) -> tuple[Figures, ...]:
    return tuple(_peer(site, stages) for site in sites)


def _peer(site: str, stages: Sequence[Stage]) -> Figures:
    parts = [part for stage in stages for part in stage.parts if part.site == site and part.seconds > 0]
    work, sent = _work(site, stages), [part.deltas for part in parts if part.deltas is not None]
    seconds = {name: sum(getattr(part, name) for part in parts) for name in ("compute", "straggler_idle", "wan_idle", "codec")}
    whole = sum(seconds.values())
    return {
        "site": site,
        "peer_id": None,
        "rounds": len(parts),
        "digest": None,
        "times_sent": sum(sent) if sent else None,
        "batch": work[-1][0].batch if work else None,
        "inner_steps": work[-1][0].inner_steps if work else None,
        **usual_work(site, stages),
        "tokens": sum(part.tokens for part in parts),
        "compute_seconds": seconds["compute"],
        "data_wait_seconds": None,
        "straggler_idle_seconds": seconds["straggler_idle"],
        "wan_idle_seconds": seconds["wan_idle"],
        "codec_seconds": seconds["codec"],
        "control_seconds": None,
        "straggler_idle_share": seconds["straggler_idle"] / whole if whole else None,
        "wan_idle_share": seconds["wan_idle"] / whole if whole else None,
        "bytes_sent": sum(part.sent_bytes for part in parts),
        "bytes_received": None,
        "restarts": None,
    }


def usual_work(site: str, stages: Sequence[Stage]) -> Figures:
    """What a site did in the round that is its median by sequences: the last one is often shorter."""
    done = sorted(((member.batch, steps) for member, steps in _work(site, stages)), key=math.prod)
    batch, steps = done[len(done) // 2] if done else (None, None)
    return {"usual_batch": batch, "usual_steps": steps}


def _work(site: str, stages: Sequence[Stage]) -> list[tuple[Assignment, int]]:
    """What was planned for a site, and the steps that it did, round by round."""
    rounds = [stage for stage in stages if isinstance(stage, Round)]
    return [(member, one.steps(site)) for one in rounds for member in one.plan.members if member.site == site]


def reasons_of(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Why the plan of a round in the middle of the run is as it is. Empty if nothing was planned."""
    plans = [stage.plan for stage in stages if isinstance(stage, Round) and not _together(stage)]
    if not plans:
        return ()
    return tuple(line for line in explain(plans[len(plans) // 2])[1:] if not line.startswith(("  positions ", "  ahead ")))


def constants_of(run: RunConfig) -> Figures:
    """With which outer optimizer and on which way a method exchanges."""
    return {
        "outer_learning_rate": run.outer.learning_rate,
        "outer_momentum": run.outer.momentum,
        "outer_nesterov": run.outer.nesterov,
        "payload": run.codec.payload,
        "topology": run.planner.topology,
        "overlap": run.planner.overlap,
    }


def fp32_bytes(stages: Sequence[Stage], parameters: int) -> tuple[float | None, float | None]:
    """What fp32 would have sent in the same topology, and in a ring all-reduce. N members of which one sends (N-1)·4P in a
    gather, 2(N-1)/N·4P in a reduce or a ring. None for a method without rounds."""
    rounds = [stage for stage in stages if isinstance(stage, Round)]
    if not rounds:
        return None, None
    same = ring = 0.0
    for one in rounds:
        size = sum(1 for part in one.parts if part.steps)
        exchanges = one.plan.members[0].inner_steps if _together(one) else 1
        once = 2 * (size - 1) * FP32_BYTES * parameters
        ring += exchanges * once
        # Where all steps are one worker's, its plan is a gather of one; what is sent is a reduce.
        same += exchanges * (once * size / 2 if one.plan.topology == "gather" and not _together(one) else once)
    return same, ring


def straggler_share_settled(stages: Sequence[Stage]) -> float | None:
    """Of the rounds during a change of the setting, from round SETTLED_ROUND of it on. None without a change so long."""
    parts, since = list[Part](), 0
    for stage in stages:
        since = since + 1 if isinstance(stage, Round) and stage.changed else 0
        if since > SETTLED_ROUND:
            parts += stage.parts
    whole = sum(part.seconds for part in parts)
    return sum(part.straggler_idle for part in parts) / whole if whole else None


# ---------------------------------------------------------------- over methods and seeds


def gantt_seconds(played: Mapping[str, Sequence[Stage]]) -> float:
    """What the charts of all methods show: the first rounds of the reference, or of the method in the middle."""
    ends = {name: stages[min(GANTT_ROUNDS, len(stages)) - 1].ends for name, stages in played.items()}
    return ends["diloco"] if "diloco" in ends else sorted(ends.values())[len(ends) // 2]


def gantt(stages: Sequence[Stage], seconds: float) -> list[Figures]:
    return [_bars(stage) for stage in stages[:MOST_GANTT_ROUNDS] if stage.begins < seconds]


def _bars(stage: Stage) -> Figures:
    return {
        "round": stage.number,
        "begins": stage.begins,
        "ends": stage.ends,
        "sites": {
            part.site: {"compute": part.compute, "straggler_idle": part.straggler_idle, "wan_idle": part.wan_idle}
            for part in stage.parts
        },
    }


def over_seeds(seen: Sequence[Sequence[Figures]]) -> list[Figures]:
    """The peers of each seed, as one list with the median of every number."""
    if not seen or not all(len(peers) == len(seen[0]) for peers in seen):
        return [dict(peer) for peer in seen[0]] if seen else []
    return [{key: _middle([peer[key] for peer in same]) for key in same[0]} for same in zip(*seen, strict=True)]


def _middle(values: Sequence[Any]) -> Any:
    if all(isinstance(value, int | float) for value in values):
        return median(values)
    return values[0] if all(value == values[0] for value in values) else None
