"""What virtual time says of the plans that a mesh of processes made: the same rounds, so that only their course is compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geomesh_p2p.core.types import Assignment, Plan, Range, Term
from geomesh_p2p.jsonlines import read_lines
from geomesh_p2p.lab.bench.runner import Job
from geomesh_p2p.lab.bench.timeline import Stage, retold


def replayed(job: Job, folder: Path, scale: float) -> Sequence[Stage]:
    """The rounds whose plans are in the sites' metrics.jsonl below `folder`, written at a time scale of `scale`."""
    found: dict[int, Plan] = {}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        for line in read_lines(path):
            if '"plan"' in line and (said := json.loads(line)).get("kind") == "plan":
                plan = _plan(said["plan"], scale)
                known = found.get(plan.round)
                if known is None or (known.term, known.attempt) < (plan.term, plan.attempt):
                    found[plan.round] = plan
    return list(retold((plan for _, plan in sorted(found.items())), job.run, job.volume(), job.world))


def _plan(fields: Mapping[str, Any], scale: float) -> Plan:
    members = tuple(
        Assignment(
            **{key: one[key] for key in ("peer", "site", "batch", "inner_steps", "last_batch", "lr_scale")},
            ranges=_ranges(one["ranges"]),
            ahead=_ranges(one["ahead"]),
            finish_seconds=one["finish_seconds"] / scale,
        )
        for one in fields["members"]
    )
    return Plan(
        run=b"",
        base=b"",
        term=Term(*fields["term"]),
        members=members,
        shares=_ranges(fields["shares"]),
        **{key: fields[key] for key in ("round", "attempt", "topology", "committed_tokens", "planned_tokens", "may_close")},
        **{key: fields[key] / scale for key in ("train_seconds", "exchange_seconds", "grace_seconds")},
    )


def _ranges(pairs: Any) -> tuple[Range, ...]:
    return tuple(Range(*pair) for pair in pairs)
