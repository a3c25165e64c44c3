"""Docker for tests, also where no image can be pulled: an engine, a base image of the name in the Dockerfile, a CPU wheel.

Everything is done only if it is missing, and as root. The base image is made of Debian's packages: Debian 12 has Python 3.11.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.process.sites import until

ROOT = Path(__file__).parents[2]
BASE = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1]
TORCH = "torch==2.13.0"
ENGINE_SECONDS = 60.0


def run(*command: str, **options: Any) -> str:
    """Its output; an AssertionError with all that it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def engine() -> None:
    """A Docker engine that answers, and Compose."""
    if not (shutil.which("dockerd") and shutil.which("docker-compose") and shutil.which("debootstrap")):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", env=quiet)
        run("apt-get", "install", "-y", "-qq", "docker.io", "docker-compose", "debootstrap", env=quiet)
    if answers():
        return
    with (Path(tempfile.gettempdir()) / "geomesh-dockerd.log").open("ab") as log:
        subprocess.Popen(["dockerd"], stdout=log, stderr=log, start_new_session=True)
    until(answers, f"dockerd to answer: {log.name}", ENGINE_SECONDS)


def answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def base_image() -> None:
    """The image that the Dockerfile starts from: pulled, or made here."""
    if subprocess.run(["docker", "image", "inspect", BASE], capture_output=True).returncode == 0:
        return
    if subprocess.run(["docker", "pull", "-q", BASE], capture_output=True).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root))
        (root / "usr/bin/python").symlink_to("python3")
        for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            mark.unlink()
        # pip inside trusts what pip outside does. Links that are there lead to absolute places: copies would go through them.
        shutil.rmtree(root / "etc/ssl/certs", ignore_errors=True)
        shutil.copytree("/etc/ssl/certs", root / "etc/ssl/certs", ignore_dangling_symlinks=True)
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            run("docker", "import", "-c", 'CMD ["python3"]', "-", BASE, stdin=tar.stdout)


def cpu_wheel() -> None:
    """A CPU build of torch in wheels/, which images prefer: the usual one is several gigabytes of CUDA."""
    wheels = ROOT / "wheels"
    if not list(wheels.glob("torch-*.whl")):
        wheels.mkdir(exist_ok=True)
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(wheels), TORCH)


class Compose:
    """The shipped docker-compose.yml under a project name of its own; peers alone, as the other images may not be there."""

    peers = ("h100", "a100", "l40s", "rtx6000ada")

    def __init__(self, project: str, **environment: str) -> None:
        classic = {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}  # the other builder is a package of its own
        self._project, self._environment = project, {**os.environ, **classic, **environment}

    def build(self) -> None:
        """The image `geomesh`, whatever is missing for it here."""
        engine()
        base_image()
        cpu_wheel()
        self("build", "h100")

    def __call__(self, *arguments: str) -> str:
        command = ["docker-compose", "-p", self._project, "-f", str(ROOT / "docker-compose.yml"), *arguments]
        return run(*command, env=self._environment, cwd=ROOT)

    def container(self, site: str) -> str:
        return self("ps", "-q", site).strip()

    def state(self, site: str) -> dict[str, Any]:
        return dict(json.loads(run("docker", "inspect", "-f", "{{json .State}}", self.container(site))))

    def address(self, site: str) -> str:
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return run("docker", "inspect", "-f", form, self.container(site)).strip()

    def logs(self, sites: Sequence[str] = peers) -> str:
        return self("logs", "--no-color", "--tail", "40", *sites)

    def history(self, site: str) -> list[dict[str, Any]]:
        """Its notes so far, read from its volume, whether it runs or not."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "history.jsonl"
            source = f"{self.container(site)}:/app/runs/quickstart/{site}/history.jsonl"
            if subprocess.run(["docker", "cp", source, str(target)], capture_output=True).returncode != 0:
                return []
            return [json.loads(line) for line in target.read_text().splitlines() if line.endswith("}")]

    def commits(self, site: str) -> dict[int, str]:
        """Digest by round."""
        return {note["round"]: note["digest"] for note in self.history(site) if note["kind"] == "commit"}
