"""A peer under systemd, in a container of its own, on Kubernetes: the shipped files are valid and fit the product."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from geomesh_p2p import cli, errors
from geomesh_p2p.config import NetSection
from geomesh_p2p.loading import SiteFile, load_run, load_site, resolve_run

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
GUIDE = (ROOT / "docs/operations.md").read_text()
OBJECTS = {part["kind"]: part for part in yaml.safe_load_all((ROOT / "deploy/kubernetes.yml").read_text())}
POD = OBJECTS["StatefulSet"]["spec"]["template"]["spec"]
(PEER,) = POD["containers"]
UNIT = (ROOT / "deploy/geomesh.service").read_text()
USER = int(re.findall(r"useradd --uid (\d+)", DOCKERFILE)[0])
LEAVING_SECONDS = 3 * NetSection().leave_seconds
NEED_A_PERSON = (errors.ConfigError, errors.DataError, errors.DivergedError, errors.RefusedError)


def arguments(words: list[str]) -> Any:
    """What the product's own command line makes of them; nothing may be left over."""
    words, overrides = cli.split_overrides(words)
    parsed, unknown = cli._parser().parse_known_args(words)
    assert (unknown, overrides) == ([], {})
    return parsed


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("kind", OBJECTS)
def test_the_manifest_is_one_that_kubernetes_knows(kind: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], version, strict=True)


def test_the_schema_check_finds_what_is_wrong() -> None:
    wrong = {**OBJECTS["StatefulSet"], "spec": {**OBJECTS["StatefulSet"]["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The ConfigMap, as a pod sees it."""
    for name, text in OBJECTS["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_its_run_and_site_file_are_the_products(mounted: Path) -> None:
    assert load_run(mounted / "run.toml") == load_run(ROOT / "configs/quickstart.toml")
    site = SiteFile(mounted / "site.toml", load_site(mounted / "site.toml"))
    env = {entry["name"]: entry["value"] for entry in PEER["env"]}
    resolved = resolve_run(mounted / "run.toml", env=env, site=site)
    config, ports = resolved.config, {port["name"]: port["containerPort"] for port in PEER["ports"]}
    assert resolved.origins["net.announce"] == "GEOMESH_NET__ANNOUNCE"
    assert (config.net.listen, config.metrics.port) == (f"/ip4/0.0.0.0/tcp/{ports['libp2p']}", ports["metrics"])
    assert config.metrics.host == "0.0.0.0", "the probes come from outside of the pod"
    assert all(part["metadata"]["name"] == f"geomesh-{site.name}" for part in OBJECTS.values())
    (outside,) = OBJECTS["Service"]["spec"]["ports"]
    assert config.net.announce.endswith(f"/tcp/{outside['nodePort']}")
    assert (outside["port"], outside["targetPort"]) == (ports["libp2p"], "libp2p")
    gpus = PEER["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert gpus == (site.config.device.name == "cuda") * site.config.device.ranks


def test_its_container_runs_a_peer_of_them(
    mounted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in PEER["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])
    mounts = {mount["name"]: mount["mountPath"] for mount in PEER["volumeMounts"]}
    parsed = arguments(PEER["args"])
    assert (parsed.run, parsed.site) == (f"{mounts['config']}/run.toml", f"{mounts['config']}/site.toml")
    here = [word.replace(mounts["config"], str(mounted)) for word in PEER["args"]]
    assert cli.main(here) == 2, "the address is still to be filled in"
    assert "ADDRESS" in capsys.readouterr().err
    assert arguments([*PEER["args"][:-2], "--first"]).first
    (secret,) = re.findall(r'join_secret_file = "([^"]+)"', OBJECTS["ConfigMap"]["data"]["site.toml"])
    assert secret.startswith(mounts["secret"] + "/")


def test_its_volumes_are_where_the_image_writes() -> None:
    workdir = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)[-1]
    mounts = {mount["name"]: mount["mountPath"] for mount in PEER["volumeMounts"]}
    assert mounts["runs"] == f"{workdir}/{load_run(ROOT / 'configs/quickstart.toml').run.folder}"
    assert {"name": "HOME", "value": mounts["runs"]} in PEER["env"], "the root is read-only, and so is the user's home"
    assert mounts["tmp"] == "/tmp"
    volumes = {volume["name"] for volume in POD["volumes"]}
    claims = {claim["metadata"]["name"] for claim in OBJECTS["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert set(mounts) == volumes | claims
    assert claims == {"runs"}


def test_it_is_found_stopped_and_selected_as_it_must_be() -> None:
    labels = OBJECTS["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == OBJECTS["StatefulSet"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["StatefulSet"]["spec"]["serviceName"] == OBJECTS["Service"]["metadata"]["name"]
    assert OBJECTS["StatefulSet"]["spec"]["replicas"] == 1
    assert POD["terminationGracePeriodSeconds"] >= LEAVING_SECONDS
    annotations = OBJECTS["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    ports = {port["name"]: str(port["containerPort"]) for port in PEER["ports"]}
    assert annotations["prometheus.io/port"] == ports["metrics"]
    assert annotations["prometheus.io/path"] == "/metrics"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert PEER[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert "readOnlyRootFilesystem" in PEER["securityContext"]
    assert POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"] == USER


# ---------------------------------------------------------------- systemd


def settings(section: str) -> dict[str, str]:
    """Of the unit; each key may be there once."""
    (text,) = re.findall(rf"^\[{section}\]\n(.*?)(?=^\[|\Z)", UNIT, re.MULTILINE | re.DOTALL)
    pairs = re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_the_unit_starts_again_what_mends_itself_and_leaves_the_rest_to_a_person() -> None:
    service = settings("Service")
    assert service["Restart"] == "on-failure", "after a crash, a kill and every code but 0"
    left = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert left == {error.exit_code for error in NEED_A_PERSON}
    assert not left & {errors.UnreachableError.exit_code, errors.TemporaryError.exit_code}
    assert {int(code) for code in service["SuccessExitStatus"].split()} == {130, 143}
    assert float(service["RestartSec"]) >= 10
    assert settings("Unit")["StartLimitIntervalSec"] == "0", "no number of failed starts is the last one"


def test_the_unit_gives_a_peer_the_time_to_leave() -> None:
    service = settings("Service")
    assert float(service["TimeoutStopSec"]) >= LEAVING_SECONDS
    assert service["KillMode"] == "mixed", "the daemon is the peer's to end"
    assert "KillSignal" not in service


def test_the_unit_keeps_from_a_peer_nothing_that_it_needs() -> None:
    service = settings("Service")
    assert not {"PrivateDevices", "ProtectClock", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateNetwork"} & set(service)
    assert {"AF_INET", "AF_INET6", "AF_UNIX"} <= set(service["RestrictAddressFamilies"].split())
    assert service["ReadWritePaths"] == service["WorkingDirectory"]
    assert service["Environment"] == "XDG_CACHE_HOME=/var/cache"
    assert "geomesh" in service["CacheDirectory"].split()
    words = shlex.split(service["ExecStart"])
    assert words[0].startswith(service["WorkingDirectory"])
    assert arguments(words[1:]).bootstrap == ["ADDRESS"]


def test_the_unit_is_one_that_systemd_knows(tmp_path: Path) -> None:
    """By systemd itself, where it is installed."""
    unit = tmp_path / "geomesh.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/sh", UNIT, flags=re.MULTILINE))
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- docker run


def test_the_guides_docker_run_fits_the_image() -> None:
    (command,) = re.findall(r"^docker run .*?(?<!\\)$", GUIDE, re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    place = words.index("peer")
    assert words[place - 1] == "geomesh", "the image"
    before, after = words[:place], words[place:]
    parsed = arguments(after)
    mounts = dict(volume.split(":")[:2] for volume in (before[i + 1] for i, word in enumerate(before) if word == "--volume"))
    assert {parsed.run, parsed.site} <= set(mounts.values())
    assert "/app/runs" in mounts.values()
    assert "--init" in before
    assert float(before[before.index("--stop-timeout") + 1]) >= LEAVING_SECONDS
    exposed = re.findall(r"^EXPOSE (\d+) (\d+)$", DOCKERFILE, re.MULTILINE)[0]
    assert {word.split(":")[-1] for i, word in enumerate(before) if before[i - 1] == "--publish"} == set(exposed)
