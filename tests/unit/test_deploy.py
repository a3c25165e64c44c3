"""Shipped deployment files: they parse, and name only what exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import Counter

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.observations import PHASES, LogStands
from geomesh_p2p.loading import check_sites, load_run, load_sites, resolve_run
from geomesh_p2p.telemetry.gpus import GpuCollector
from geomesh_p2p.telemetry.metrics import TABLE, TIMED_PHASES, Metrics

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COPIED = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)).split()
BOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
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


@pytest.mark.case("C108")
def test_prometheus_scrapes_every_peer() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = {target for job in config["scrape_configs"] for static in job["static_configs"] for target in static["targets"]}
    ports = {site.name: site.config.metrics["port"] for site in load_sites(ROOT / "deploy/compose")}
    assert targets == {f"{name}:{port}" for name, port in ports.items()}
    assert {target.split(":")[0] for target in targets} <= set(COMPOSE["services"]), "names of that network"
    assert not any("localhost" in target or "127." in target for target in targets)


def test_the_overlay_gives_each_site_a_gpu_of_its_own() -> None:
    overlay = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
    assert set(overlay) == set(PEERS)
    devices = [service["deploy"]["resources"]["reservations"]["devices"][0] for service in overlay.values()]
    assert len({tuple(device["device_ids"]) for device in devices}) == len(PEERS)
    assert {(device["driver"], *device["capabilities"]) for device in devices} == {("nvidia", "gpu")}
    emulated = {site.name: site.config for site in load_sites(ROOT / "deploy/compose")}
    for site in load_sites(ROOT / "deploy/compose/gpu"):
        command, without = overlay[site.name]["command"], PEERS[site.name]["command"]
        assert command == without.replace("deploy/compose/", "deploy/compose/gpu/")
        assert site.config.device.name == "cuda"
        assert site.config.emulation is None
        assert (site.config.net, site.config.metrics) == (emulated[site.name].net, emulated[site.name].metrics)


def test_chaos_lives_in_the_network_of_each_site_and_only_if_asked_for() -> None:
    chaos = {name: service for name, service in COMPOSE["services"].items() if "profiles" in service}
    assert {service["network_mode"] for service in chaos.values()} == {f"service:{name}" for name in PEERS}
    assert all(service["profiles"] == ["chaos"] and service["cap_add"] == ["NET_ADMIN"] for service in chaos.values())


def test_peers_may_start_in_any_order_and_stop_one_by_one() -> None:
    assert not any("depends_on" in service for service in PEERS.values())


@pytest.mark.case("C111")
def test_the_stack_asks_for_no_gpu() -> None:
    """A device reservation ends the start of all services on a host without one."""
    for name, service in COMPOSE["services"].items():
        assert not {"deploy", "runtime", "gpus", "devices", "device_cgroup_rules"} & set(service), name
    assert "nvidia" not in json.dumps(COMPOSE["services"])
    for site in load_sites(ROOT / "deploy/compose"):
        assert site.config.device.name == "cpu"


def known_series() -> set[str]:
    """Every name that a peer's metrics may have, with a GPU in its host."""
    metrics = Metrics("north", 0.7)
    metrics(LogStands(0, 0))
    known = {sample.name for metric in metrics.registry.collect() for sample in metric.samples}
    no_gpus = SimpleNamespace(nvmlDeviceGetCount=lambda: 0, NVMLError=OSError)
    gpus = {family.name for family in GpuCollector("north", no_gpus).collect()}
    return known | gpus | {f"geomesh_{name}{'_total' * (kind is Counter)}" for name, (kind, _, _) in TABLE.items()}


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_only_for_metrics_and_phases_that_exist(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert asked
    for expression in asked:
        assert set(re.findall(r"geomesh_\w+", expression)) <= known_series()
        assert set(re.findall(r'seconds_total\{phase="(\w+)"', expression)) <= set(TIMED_PHASES)
        assert set(re.findall(r'geomesh_phase\{phase="(\w+)"', expression)) <= set(PHASES)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows_and_in_what_unit(path: Path) -> None:
    board = json.loads(path.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert board["editable"] is False
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"prometheus"}


def test_dashboards_are_what_their_builder_writes() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "deploy/grafana/build.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_builder_is_that_of_the_grafana_that_compose_starts() -> None:
    pinned = COMPOSE["services"]["grafana"]["image"].partition(":")[2]
    assert version("grafana-foundation-sdk").partition("!")[2].split(".")[:2] == pinned.split(".")[:2]


def test_alerts_ask_only_for_metrics_that_exist() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert set(re.findall(r"geomesh_\w+", rule["expr"])) <= known_series(), rule["alert"]


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").rglob("*.yml")), ids=lambda path: path.name)
def test_every_yaml_file_parses(path: Path) -> None:
    assert list(yaml.safe_load_all(path.read_text()))


def test_the_image_builds_from_files_that_the_context_lets_through() -> None:
    for source in COPIED:
        if not re.search(r"[*?\[]", source):
            assert (ROOT / source).exists()
            assert lets_through(source), source


def test_wheels_are_taken_if_there_are_any_and_the_image_builds_without() -> None:
    # Only a pattern may match nothing; one that ends with a slash never matches anything in the classic builder.
    patterns = [source for source in COPIED if fnmatchcase("wheels", source)]
    assert patterns
    assert "wheels" not in patterns
    assert lets_through("wheels")
    assert "wheels/" in (ROOT / ".gitignore").read_text().splitlines()


def lets_through(path: str) -> bool:
    entries = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(path == entry or path.startswith(entry + "/") for entry in entries)


def test_a_peer_that_is_not_root_may_write_to_every_volume() -> None:
    user = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1]
    made = re.search(rf"install -d -o {user} -g {user} ([^&\n]+)", DOCKERFILE)
    assert made is not None
    mounted = {volume.split(":")[1] for service in PEERS.values() for volume in service["volumes"]}
    assert mounted <= set(shlex.split(made[1]))


def test_health_is_asked_for_where_the_peers_answer() -> None:
    ports = {str(site.config.metrics["port"]) for site in load_sites(ROOT / "deploy/compose")}
    assert set(re.findall(r"http://127.0.0.1:(\d+)/healthz", DOCKERFILE)) == ports


def test_a_stopped_peer_has_the_time_to_leave_and_a_signal_reaches_it() -> None:
    for service in PEERS.values():
        assert service["init"] is True
        assert float(service["stop_grace_period"].removesuffix("s")) >= 2 * NetSection().leave_seconds


def test_what_compose_passes_on_is_a_key_of_the_run() -> None:
    for name, service in PEERS.items():
        run_file = service["command"].split()[1]
        env = {key: value or "60" for key, _, value in (entry.partition("=") for entry in service["environment"])}
        config = resolve_run(ROOT / run_file, env=env).config
        assert (config.run.rounds, config.net.reach_seconds) == (60, 600), name
