"""What a mesh of real processes reports, in the setting's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.lab.bench.methods import METHODS
from geomesh_p2p.lab.bench.real import _outcome
from geomesh_p2p.lab.bench.report.pages import HTML, MARKDOWN, pages
from geomesh_p2p.lab.bench.results import Outcome, summary
from geomesh_p2p.lab.bench.runner import jobs
from tests.unit.bench_reports import BUDGET
from tests.unit.benching import run_config, setting

SCALE = 4.0
OTHER_SHARES = (
    "straggler_idle_share_steady", "straggler_idle_share_fastest", "wan_idle_share_steady", "compute_share",
    "emulation_overrun_share",
)  # fmt: skip
SHARES = {"straggler_idle_share": 0.1, "wan_idle_share": 0.2}


def reported(**changes: Any) -> dict[str, Any]:
    """Three rounds of 40 s at a time scale of 4: `far` is done after 32 s, `near` after 16."""
    line = {
        "term": 1, "members": ["far", "near"], "topology": "reduce", "planned_seconds": 38.0, "seconds": 40.0, "tokens": 256,
        "finish_seconds": {"far": [32.0, 32.0], "near": [16.0, 16.0]}, "digest": "ab", **SHARES,
    }  # fmt: skip
    peers = [
        {
            "site": site, "peer_id": f"id of {site}", "rounds": 3, "batch": 4, "inner_steps": 2, "tokens": 384,
            "bytes_sent": 1000, "compute_seconds": seconds, "straggler_idle_seconds": 96 - seconds, "wan_idle_seconds": 24.0,
            "control_seconds": None,
        }
        for site, seconds in (("far", 96.0), ("near", 48.0))
    ]  # fmt: skip
    return {
        "val_ppl_first": 90.0, "rounds_committed": 3, "rounds_discarded": 1, "tokens": 768, "tokens_per_round": 256.0,
        "digest": "ab", "bytes_payload": 2000, "bytes_total": 2200, "bytes_ratio_to_fp32": 0.03,
        "bytes_ratio_to_fp32_ring": 0.04, **SHARES, **dict.fromkeys(OTHER_SHARES, 0.1), "peers": peers,
        "rounds": [{"round": number, "val_ppl": 20.0 if number == 3 else None, **line} for number in (1, 2, 3)], **changes,
    }  # fmt: skip


def came_to(folder: Path, **changes: Any) -> Outcome:
    (job,) = jobs(run_config(folder), setting(), [METHODS["geomesh"]], [1], BUDGET)
    return _outcome(job, reported(**changes), SCALE)


def test_seconds_are_divided_by_the_time_scale_and_all_else_is_as_reported(tmp_path: Path) -> None:
    found = came_to(tmp_path)
    assert found.figures["wall_seconds"] == 30.0
    assert found.figures["rounds_discarded"] == 1
    assert found.figures["bytes_total"] == 2200
    assert found.figures["bytes_ratio_to_fp32_ring"] == 0.04
    assert found.figures["emulation_time_scale"] == SCALE
    assert [one["seconds"] for one in found.account.rounds] == [10.0] * 3
    assert found.account.rounds[0]["planned_seconds"] == 9.5
    far, near = found.account.peers
    assert (far["compute_seconds"], near["compute_seconds"], near["control_seconds"]) == (24.0, 12.0, None)
    assert near["bytes_sent"] == 1000


def test_its_rounds_are_shown_site_by_site(tmp_path: Path) -> None:
    (first, *_) = came_to(tmp_path).stages
    assert {part.site: (part.compute, part.straggler_idle, part.wan_idle) for part in first.parts} == {
        "far": (8.0, 0.0, 2.0),
        "near": (4.0, 4.0, 2.0),
    }
    rounds = [{**line, "finish_seconds": {}} for line in reported()["rounds"]]
    (unknown, *_) = came_to(tmp_path, rounds=rounds).stages
    assert [part.site for part in unknown.parts] == ["all"]
    assert unknown.parts[0].seconds == pytest.approx(10.0)


def test_its_report_says_which_engine_it_was_and_stands_beside_virtual_time(tmp_path: Path) -> None:
    found = summary(setting(), [1], 25.0, [came_to(tmp_path)], {"budget_tokens": BUDGET})
    text = pages(found)
    assert "Real processes against virtual time" in text[MARKDOWN]
    assert "geomesh: real processes on one machine" in text[MARKDOWN]
    assert "exchange, commit, next plan" in text[MARKDOWN]
    assert "time scale 4." in text[MARKDOWN]
    assert "overrun above 1%), so the idle figures are not valid: geomesh" in text[HTML]
