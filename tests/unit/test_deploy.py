"""Shipped deployment files: they parse, and name only what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from geomesh_p2p.loading import check_sites, load_run, load_sites, resolve_run
from geomesh_p2p.telemetry.metrics import TIMED_PHASES, Metrics

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PEERS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "geomesh"}


def test_compose_starts_one_peer_for_each_of_its_sites_and_one_founds_the_run() -> None:
    sites = load_sites(ROOT / "deploy/compose")
    assert {site.name for site in sites} == set(PEERS)
    commands = {name: service["command"].split() for name, service in PEERS.items()}
    assert [name for name, command in commands.items() if "--first" in command] == ["h100"]
    run_files = {command[1] for command in commands.values()}
    assert len(run_files) == 1
    run = load_run(ROOT / run_files.pop())
    assert check_sites(run, sites) == []
    assert len(sites) >= run.run.min_peers
    for site in sites:
        command = commands[site.name]
        assert command[command.index("--site") + 1] == f"deploy/compose/{site.name}.toml"
        config = resolve_run(ROOT / command[1], site=site).config
        assert config.net.announce == f"/dns4/{site.name}/tcp/31337"
        assert config.metrics.host == "0.0.0.0"


def test_composed_sites_are_those_of_the_demo() -> None:
    demo = {site.name: site.config for site in load_sites(ROOT / "peers")}
    for site in load_sites(ROOT / "deploy/compose"):
        emulation, original = site.config.emulation, demo[site.name].emulation
        assert emulation is not None
        assert original is not None
        assert emulation.model_copy(update={"time_scale": None}) == original
        assert site.config.site == demo[site.name].site


def test_prometheus_scrapes_every_peer() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    targets = {target for job in config["scrape_configs"] for static in job["static_configs"] for target in static["targets"]}
    ports = {site.name: site.config.metrics["port"] for site in load_sites(ROOT / "deploy/compose")}
    assert targets == {f"{name}:{port}" for name, port in ports.items()}


def test_the_dashboard_asks_only_for_metrics_and_phases_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/geomesh.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    known = {sample.name for metric in Metrics("north", 0.7).registry.collect() for sample in metric.samples}
    known |= {f"geomesh_{name}_bytes_total" for name in ("payload", "overhead")}
    for expression in asked:
        assert set(re.findall(r"geomesh_\w+", expression)) <= known
        assert set(re.findall(r'phase="(\w+)"', expression)) <= set(TIMED_PHASES)
    for wanted in ("geomesh_loss", "geomesh_tokens_per_second", "straggler_idle", "wan_idle"):
        assert any(wanted in expression for expression in asked)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").rglob("*.yml")), ids=lambda path: path.name)
def test_every_yaml_file_parses(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


def test_the_image_builds_from_files_that_the_context_lets_through() -> None:
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        if source != "wheel[s]/":
            assert (ROOT / source).exists()
            assert any(source == entry or source.startswith(entry + "/") for entry in let_through), source
