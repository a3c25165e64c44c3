"""The shipped dashboards and alerts over a real Prometheus that scrapes a real mesh: every query has data."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operate.prometheus import Prometheus
from tests.process.sites import LIGHT, Site, Sites, until

ROOT = Path(__file__).parents[2]
DASHBOARD_FILES = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in DASHBOARD_FILES}
ASKED = {
    f"{name}: {panel['title']}: {target['refId']}": target["expr"]
    for name, board in DASHBOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", ())
}
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
NEEDS_A_GPU = "geomesh_gpu_"
WINDOW = "15s"

pytestmark = [pytest.mark.timeout(600)]


def metrics_port(site: Site) -> str:
    return re.findall(r"metrics on http://127\.0\.0\.1:(\d+)/", site.log())[-1]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """Three peers that train, and one that joined them later."""
    mesh = Sites(tmp_path_factory.mktemp("mesh"), ["a", "b", "c"], rounds=100_000, command=LIGHT)
    mesh.environment |= {"LIGHT_TRAIN_SECONDS": "0.3", "LIGHT_PARAMETERS": "1000000"}  # enough to measure rates by
    try:
        mesh.start()
        mesh.together()
        mesh.add("d").start()
        mesh.together()
        yield mesh
    finally:
        mesh.stop()


@pytest.fixture(scope="module")
def prometheus(mesh: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = [f"127.0.0.1:{metrics_port(site)}" for site in mesh]
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets) as prometheus:
        mesh.advance(12)
        yield prometheus


def test_every_peer_is_up(mesh: Sites, prometheus: Prometheus) -> None:
    def up() -> dict[str, str]:
        return {sample["metric"]["instance"]: sample["value"][1] for sample in prometheus.query("up")}

    wanted = {f"127.0.0.1:{metrics_port(site)}": "1" for site in mesh}
    until(lambda: up() == wanted, f"{wanted}: {up()}", 60.0)


def filled_in(expression: str, site: str) -> str:
    assert set(re.findall(r"\$\w+", expression)) <= {"$site", "$window"}
    return expression.replace("$window", WINDOW).replace("$site", site)


@pytest.mark.parametrize("where", ASKED)
def test_every_query_of_every_panel_has_data(where: str, prometheus: Prometheus) -> None:
    site = "a" if where.startswith("geomesh-peer") else "a|b|c|d"
    expression = filled_in(ASKED[where], site)
    if NEEDS_A_GPU in expression:
        prometheus.query(expression)  # only whether it is one
        return

    def has_data() -> bool:
        """A share of nothing is NaN, until the window has a round in it."""
        return any(math.isfinite(float(value)) for one in prometheus.series(expression, 20) for _, value in one["values"])

    until(has_data, f"data for {expression}", 60.0)


def test_every_alert_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    rules = until(lambda: [r for r in prometheus.rules() if r["health"] != "unknown"], "the rules", 60.0)
    assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in rules} == {
        rule["name"]: ("ok", "") for rule in prometheus.rules()
    }
    assert len(rules) >= 10


def test_an_alert_whose_cause_is_there_is_pending(mesh: Sites, prometheus: Prometheus) -> None:
    def state(alert: str) -> Any:
        return next(rule["state"] for rule in prometheus.rules() if rule["name"] == alert)

    assert state("GeoMeshPeerDown") == "inactive"
    site = mesh["d"]
    site.kill()
    until(lambda: state("GeoMeshPeerDown") == "pending", "the alert", 60.0)
    site.start()


def test_every_metric_that_is_named_anywhere_is_on_a_live_page(mesh: Sites) -> None:
    """Documents, alerts and dashboards: those of GPUs aside, which this host need not have."""
    page = mesh["a"].metrics()
    served = set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))
    assert len(served) > 50
    for path in (*DOCUMENTS, ALERTS, *DASHBOARD_FILES):
        named = set(re.findall(r"\bgeomesh_(?!p2p\b)\w+", path.read_text()))
        assert {name for name in named if not name.startswith(NEEDS_A_GPU)} <= served, path.name


def test_the_preview_draws_every_panel_of_the_run(prometheus: Prometheus, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    script, address = str(ROOT / "deploy/grafana/preview.py"), f"http://127.0.0.1:{prometheus.port}"
    command = [sys.executable, script, "--prometheus", address, "--minutes", "1", "--window", WINDOW, "--out", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
