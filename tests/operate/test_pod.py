"""A peer in a container of its own: by the guide's `docker run`, and as the Kubernetes manifest describes it, here by Docker.

The pod's container has what the manifest gives it: user, read-only root, no capabilities, its mounts and variables.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operate.docker import ROOT, Compose, run
from tests.process.sites import until

pytestmark = [pytest.mark.timeout(1500)]
OBJECTS = {part["kind"]: part for part in yaml.safe_load_all((ROOT / "deploy/kubernetes.yml").read_text())}
POD = OBJECTS["StatefulSet"]["spec"]["template"]["spec"]
(PEER,) = POD["containers"]
NAME, POD_NAME = "geomesh-test-run", "geomesh-test-pod"
SMALL = {"run.rounds": "100000", "run.min_peers": "2", "planner.round_tokens": "4096", "planner.max_steps": "4"}
FLAGS = [word for key, value in SMALL.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """In which containers dial each other by name; nothing is left of what was in it."""
    Compose("geomesh-test").build()
    run("docker", "network", "create", NAME)
    try:
        yield NAME
    finally:
        subprocess.run(["docker", "rm", "-f", NAME, POD_NAME], capture_output=True)
        subprocess.run(["docker", "volume", "rm", NAME, POD_NAME], capture_output=True)
        run("docker", "network", "rm", NAME)


def files(folder: Path, site: str) -> Path:
    """The manifest's run and site file, for a host without a GPU and a site of this name."""
    folder.mkdir()
    for name, text in OBJECTS["ConfigMap"]["data"].items():
        (folder / name).write_text(text.replace('name = "cuda"', 'name = "cpu"').replace("frankfurt-1", site))
    folder.chmod(0o755)
    return folder


def by_the_guide(folder: Path) -> list[str]:
    """Its `docker run`, as the founder, without a GPU and without a port of this host."""
    (text,) = re.findall(r"^docker run .*?(?<!\\)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE | re.DOTALL)
    text = re.sub(r"--gpus all|--publish \S+", "", text).replace("$PWD", str(folder))
    text = text.replace("--name geomesh", f"--name {NAME} --network {NAME} --env GEOMESH_NET__ANNOUNCE=/dns4/{NAME}/tcp/31337")
    text = text.replace("--volume geomesh:", f"--volume {NAME}:").replace("--bootstrap ADDRESS", "--first")
    return [*shlex.split(text.replace("\\\n", " ")), *FLAGS]


def as_the_pod(folder: Path, address: str) -> list[str]:
    security, own = POD["securityContext"], PEER["securityContext"]
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    env = {entry["name"]: entry["value"] for entry in PEER["env"]} | {
        "GEOMESH_NET__ANNOUNCE": f"/dns4/{POD_NAME}/tcp/31337"
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in PEER["volumeMounts"]}
    return [
        *("docker", "run", "--detach", "--name", POD_NAME, "--network", NAME, "--init"),
        *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--user", f"{security['runAsUser']}:{security['runAsGroup']}"),
        *(word for name, value in env.items() for word in ("--env", f"{name}={value}")),
        *("--volume", f"{POD_NAME}:{mounts['runs']}", "--volume", f"{folder}:{mounts['config']}:ro", "--tmpfs", mounts["tmp"]),
        *("geomesh", *PEER["args"][:-1], address, *FLAGS),
    ]


def committed(name: str, site: str) -> list[dict[str, Any]]:
    path = f"/app/runs/quickstart/{site}/history.jsonl"
    done = subprocess.run(["docker", "exec", name, "cat", path], capture_output=True, text=True)
    notes = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]
    return [note for note in notes if note["kind"] == "commit"]


def log(name: str) -> str:
    done = subprocess.run(["docker", "logs", name], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_both_train_together_and_end_with_0_when_they_are_stopped(network: str, tmp_path: Path) -> None:
    run(*by_the_guide(files(tmp_path / "first", "first")))
    found = until(lambda: re.findall(r"--bootstrap (\S+?)(?:\s|\")", log(NAME)), f"its address\n{log(NAME)}", 300.0)
    run(*as_the_pod(files(tmp_path / "second", "second"), found[0]))
    both = {"first", "second"}

    def together() -> bool:
        return any({one["site"] for one in note["contributors"]} == both for note in committed(POD_NAME, "second"))

    until(together, f"a round of both\n{log(NAME)}\n{log(POD_NAME)}", 300.0)
    digests = [{note["round"]: note["digest"] for note in committed(*who)} for who in ((NAME, "first"), (POD_NAME, "second"))]
    assert all(digests[0][round] == digest for round, digest in digests[1].items() if round in digests[0])
    run("docker", "stop", "--time", str(POD["terminationGracePeriodSeconds"]), POD_NAME)
    run("docker", "stop", NAME)
    for name in (POD_NAME, NAME):
        state = json.loads(run("docker", "inspect", "-f", "{{json .State}}", name))
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False), log(name)
        assert "left: signal SIGTERM" in log(name)
