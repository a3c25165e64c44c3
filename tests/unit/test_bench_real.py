"""What a mesh of real processes reports, in the setting's time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.core.observations import PlanAdopted
from geomesh_p2p.core.types import Term
from geomesh_p2p.lab.bench.methods import METHODS
from geomesh_p2p.lab.bench.real import SECTIONS, _fields, _outcome, _section
from geomesh_p2p.lab.bench.replay import replayed
from geomesh_p2p.lab.bench.report.pages import HTML, MARKDOWN, pages
from geomesh_p2p.lab.bench.results import Outcome, summary
from geomesh_p2p.lab.bench.runner import jobs
from geomesh_p2p.lab.bench.timeline import Round, Stage
from geomesh_p2p.loading import load_run
from geomesh_p2p.telemetry.sinks import MetricsFile
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


def came_to(folder: Path, again: Sequence[Stage] = (), method: str = "geomesh", **changes: Any) -> Outcome:
    (job,) = jobs(run_config(folder), setting(), [METHODS[method]], [1], BUDGET)
    return _outcome(job, reported(**changes), SCALE, again)


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


def test_the_run_file_keeps_all_but_training_and_exchanges_out_of_the_rounds(tmp_path: Path) -> None:
    (job,) = jobs(run_config(tmp_path), setting(), [METHODS["geomesh"]], [1], BUDGET)
    fields = _fields(job, tmp_path, 12, SCALE)
    assert fields["run"]["validate_every_rounds"] == fields["save"]["snapshot_every_rounds"] == fields["run"]["rounds"] == 12
    assert fields["net"]["heartbeat_seconds"] == SCALE * job.run.net.heartbeat_seconds, "no larger share of the slower links"
    text = "".join(_section(name, fields[name]) for name in SECTIONS)
    (tmp_path / "run.toml").write_text(text)
    assert load_run(tmp_path / "run.toml").net.heartbeat_limit_seconds == SCALE * job.run.net.heartbeat_limit_seconds


@pytest.mark.parametrize("method", ["geomesh", "geomesh-delayed", "diloco"])
def test_the_plans_that_a_mesh_made_are_told_again_in_virtual_time(method: str, tmp_path: Path) -> None:
    (job,) = jobs(run_config(tmp_path), setting(), [METHODS[method]], [1], BUDGET)
    rounds = [stage for stage in job.stages() if isinstance(stage, Round)]
    times = ("train_seconds", "exchange_seconds", "grace_seconds")
    (tmp_path / "near").mkdir()
    with closing(MetricsFile(tmp_path / "near" / "metrics.jsonl", "near")) as file:
        for one in rounds:
            slower = replace(
                one.plan,
                term=Term(3, f"id of {one.plan.term.candidate}"),
                members=tuple(
                    replace(m, peer=f"id of {m.site}", finish_seconds=SCALE * m.finish_seconds) for m in one.plan.members
                ),
                **{name: SCALE * getattr(one.plan, name) for name in times},
            )
            file(PlanAdopted(replace(slower, members=slower.members[:1])))  # an attempt that came to nothing
            file(PlanAdopted(replace(slower, attempt=2)))
    again = replayed(job, tmp_path, SCALE)
    assert [(one.number, one.tokens) for one in again] == [(one.number, one.tokens) for one in rounds]
    for one, told in zip(rounds, again, strict=True):
        assert (told.begins, told.ends) == pytest.approx((one.begins, one.ends))
        assert [part.ahead_steps for part in told.parts] == [part.ahead_steps for part in one.parts]
    outcome = came_to(tmp_path, again, method)
    for peer in outcome.account.peers:
        usual = (peer["usual_batch"], peer["usual_steps"])
        assert usual in [(m.batch, one.steps(m.site)) for one in rounds for m in one.plan.members if m.site == peer["site"]]
    figures = outcome.figures
    for name in ("round_seconds", "straggler_idle_share", "wan_idle_share"):
        assert figures[f"replayed_{name}_steady"] == pytest.approx(figures[f"virtual_{name}_steady"])


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
    found = summary(setting(), [1], {1: 25.0}, [came_to(tmp_path)], {"budget_tokens": BUDGET})
    text = pages(found)
    assert "Real processes against virtual time" in text[MARKDOWN]
    assert "geomesh: real processes on one machine" in text[MARKDOWN]
    assert "exchange, commit, next plan" in text[MARKDOWN]
    assert "time scale 4." in text[MARKDOWN]
    assert "overrun above 1%), so the idle figures are not valid: geomesh" in text[HTML]
