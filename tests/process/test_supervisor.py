"""A peer killed without a word, as the kernel does when memory is short: `geomesh mesh` says so, and the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.injection.process import gone
from tests.injection.proof import fired, inject, injecting
from tests.injection.proxy import family
from tests.process.sites import LIGHT, ROOT, Sites, until

MESH = """
import sys
from pathlib import Path
from geomesh_p2p.lab.mesh import Limits, run_mesh
from geomesh_p2p.loading import load_run, load_sites
run_file, sites = Path(sys.argv[1]), Path(sys.argv[2])
sys.exit(run_mesh(run_file, load_run(run_file), load_sites(sites), {}, "console", Limits(), sys.argv[3:]))
"""


@pytest.mark.fault
@pytest.mark.case("C098")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_supervisor_says_who_was_killed_and_why_that_may_be(tmp_path: Path) -> None:
    mesh = Sites(tmp_path, ["a", "b", "c"], rounds=60, command=LIGHT)
    sites = tmp_path / "sites"
    sites.mkdir()
    for name in "abc":
        (tmp_path / f"{name}.toml").rename(sites / f"{name}.toml")
    environment = {**mesh.environment, "LIGHT_TRAIN_SECONDS": "0.2", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", MESH, str(mesh.run_file), str(sites), *LIGHT]
    said_file = tmp_path / "said"
    with said_file.open("w") as said:
        supervisor = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=said, stderr=said)
    try:
        until(lambda: all(site.round >= 3 for site in mesh), "three rounds of all")
        pid = next(p for p in family(supervisor.pid) if f"{sites}/b.toml" in command_of(p))
        inject(lambda: os.kill(pid, signal.SIGKILL))
        fired(injecting() and until(lambda: gone(pid), "its end"), "kill -9 of b")
        reached = mesh["a"].round
        until(lambda: mesh["a"].round >= reached + 5 and mesh["c"].round >= reached + 5, "the others to go on")
        until(lambda: "b ended by signal 9" in said_file.read_text(), "the supervisor to say so")
        line = next(line for line in said_file.read_text().splitlines() if "b ended by signal 9" in line)
        assert "memory" in line
        assert supervisor.poll() is None
    finally:
        supervisor.terminate()
        try:
            supervisor.wait(60)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
