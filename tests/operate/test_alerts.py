"""Each alert of deploy/prometheus/alerts.yml is caused once, by series made for it, in Prometheus's own tester of rules."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
MINUTES = 90

#: A run in which all is well, by series, one value a minute.
WELL = {
    'up{job="geomesh",instance="a:9464"}': f"1x{MINUTES}",
    'geomesh_members{site="a"}': f"4x{MINUTES}",
    'geomesh_members{site="b"}': f"4x{MINUTES}",
    'geomesh_is_leader{site="a"}': f"1x{MINUTES}",
    'geomesh_is_leader{site="b"}': f"0x{MINUTES}",
    'geomesh_round{site="a"}': f"0+1x{MINUTES}",
    'geomesh_round_goal{site="a"}': f"1000x{MINUTES}",
    'geomesh_round_seconds{site="a"}': f"60x{MINUTES}",
    'geomesh_round_age_seconds{site="a"}': f"30x{MINUTES}",
    'geomesh_digest_mismatches_total{site="a"}': f"0x{MINUTES}",
    'geomesh_seconds_total{site="a",phase="compute"}': f"0+54x{MINUTES}",
    'geomesh_seconds_total{site="a",phase="straggler_idle"}': f"0+1x{MINUTES}",
    'geomesh_seconds_total{site="a",phase="wan_idle"}': f"0+5x{MINUTES}",
    'geomesh_checkpoint_round{site="a"}': f"0+1x{MINUTES}",
    'geomesh_rounds_committed_total{site="a"}': f"0+1x{MINUTES}",
    'geomesh_checkpoint_bytes{site="a"}': f"1000000000x{MINUTES}",
    'geomesh_abstentions_total{site="a"}': f"0x{MINUTES}",
    'geomesh_disk_free_bytes{site="a"}': f"100000000000x{MINUTES}",
    'geomesh_disk_full_seconds{site="a"}': " ".join(["Inf"] * MINUTES),
}

#: What goes wrong after half an hour, by alert.
CAUSES = {
    "GeoMeshPeerDown": {'up{job="geomesh",instance="a:9464"}': "1x30 0x60"},
    "GeoMeshTrainingAlone": {'geomesh_members{site="b"}': "4x30 1x60"},
    "GeoMeshNoLeader": {'geomesh_is_leader{site="a"}': "1x30 0x60"},
    "GeoMeshNoCommit": {'geomesh_round{site="a"}': "0+1x30 30x60", 'geomesh_round_age_seconds{site="a"}': "30x30 30+60x60"},
    "GeoMeshDigestMismatch": {'geomesh_digest_mismatches_total{site="a"}': "0x84 1x10"},
    "GeoMeshPeerLost": {'geomesh_members{site="a"}': "4x60 3x30", 'geomesh_members{site="b"}': "4x60 3x30"},
    "GeoMeshStragglerIdle": {'geomesh_seconds_total{site="a",phase="straggler_idle"}': "0+1x30 31+10x60"},
    "GeoMeshWanIdle": {'geomesh_seconds_total{site="a",phase="wan_idle"}': "0+5x30 155+40x60"},
    "GeoMeshSnapshotOld": {'geomesh_checkpoint_round{site="a"}': "0+1x30 30x60"},
    "GeoMeshAbstentions": {'geomesh_abstentions_total{site="a"}': "0x75 0+1x15"},
    "GeoMeshDiskLow": {'geomesh_disk_free_bytes{site="a"}': "100000000000x30 2500000000x60"},
}
FULL_IN_A_DAY = {'geomesh_disk_full_seconds{site="a"}': f"_x30 80000x{MINUTES}"}


def firing(folder: Path, series: dict[str, str], expected: dict[str, int]) -> str:
    """What promtool has to say against so many firing instances of each alert in the last minute; "" if nothing."""
    checks = [
        {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)', "eval_time": f"{MINUTES - 1}m",
         "exp_samples": [{"labels": "{}", "value": count}]}
        for name, count in expected.items()
    ]  # fmt: skip
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": checks,
    }
    path = folder / "case.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_none_fires_while_all_is_well(tmp_path: Path) -> None:
    assert firing(tmp_path, WELL, dict.fromkeys(ALERTS, 0)) == ""


@pytest.mark.parametrize("alert", ALERTS)
def test_each_fires_when_its_cause_is_there_and_no_other(alert: str, tmp_path: Path) -> None:
    assert firing(tmp_path, WELL | CAUSES[alert], {**dict.fromkeys(ALERTS, 0), alert: 1}) == ""


def test_a_disk_that_will_be_full_within_a_day_is_told_before_it_is(tmp_path: Path) -> None:
    assert firing(tmp_path, WELL | FULL_IN_A_DAY, {"GeoMeshDiskLow": 1}) == ""


def test_a_disk_that_fills_up_to_the_limits_of_what_is_kept_and_no_further_is_no_alarm(tmp_path: Path) -> None:
    filling = {'geomesh_disk_free_bytes{site="a"}': f"100000000000-100000000x{MINUTES}"}
    assert firing(tmp_path, WELL | filling, {"GeoMeshDiskLow": 0}) == ""


def test_a_peer_that_has_just_started_need_not_have_saved(tmp_path: Path) -> None:
    started = {
        'geomesh_round{site="a"}': f"1000+1x{MINUTES}",
        'geomesh_round_goal{site="a"}': f"9000x{MINUTES}",
        'geomesh_checkpoint_round{site="a"}': f"0x{MINUTES}",
        'geomesh_rounds_committed_total{site="a"}': "0+1x70 0+1x20",
    }
    assert firing(tmp_path, WELL | started, {"GeoMeshSnapshotOld": 0}) == ""
    for_long = {**started, 'geomesh_rounds_committed_total{site="a"}': f"0+1x{MINUTES}"}
    assert firing(tmp_path, WELL | for_long, {"GeoMeshSnapshotOld": 1}) == ""


def test_the_end_of_a_run_is_no_alarm(tmp_path: Path) -> None:
    ended = WELL | CAUSES["GeoMeshNoCommit"] | {'geomesh_round_goal{site="a"}': f"30x{MINUTES}"}
    assert firing(tmp_path, ended, {"GeoMeshNoCommit": 0}) == ""


def test_the_configuration_passes_prometheus_own_check() -> None:
    config = str(RULES.with_name("prometheus.yml"))
    done = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rule files found" in done.stdout


def test_each_names_its_section_of_the_guide() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"].endswith(f"docs/operations.md#{name.lower()}")
        assert f"### {name}\n" in guide
