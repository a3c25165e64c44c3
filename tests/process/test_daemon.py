"""The libp2p daemon of a running peer is killed: the peer starts it again, and the run goes on with one digest."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.injection.proof import fired, inject
from tests.process.sites import LIGHT, Site, Sites, until

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Sites]:
    sites = Sites(tmp_path, ["a", "b", "c"], rounds=100_000, command=LIGHT)
    sites.environment["LIGHT_TRAIN_SECONDS"] = "0.5"
    for site in sites:  # an exchange takes about as long as the inner steps
        with (tmp_path / f"{site.name}.toml").open("a") as file:
            file.write("[links.default]\nrtt_ms = 40\nmbps = 0.1\n")
    yield sites
    sites.stop()


def phase(site: Site) -> str:
    """What the peer says that it is doing."""
    notes = [json.loads(line) for line in (site.folder / "metrics.jsonl").read_text().splitlines() if '"phase"' in line]
    return str(next((note["phase"] for note in reversed(notes) if note["kind"] == "phase"), ""))


def daemon_of(site: Site) -> psutil.Process | None:
    assert site.process is not None
    children = psutil.Process(site.process.pid).children()
    return next((child for child in children if child.name() == "p2pd"), None)


def kill_daemon(site: Site) -> int:
    """kill -9; returns when the process is gone."""
    daemon = daemon_of(site)
    assert daemon is not None
    inject(lambda: os.kill(daemon.pid, signal.SIGKILL))
    gone, _ = psutil.wait_procs([daemon], timeout=3.0)
    fired(gone, f"the daemon of {site.name} is killed")
    return daemon.pid


@pytest.mark.fault
@pytest.mark.case("C014")
@pytest.mark.case("C048")
def test_daemons_killed_in_inner_steps_and_in_exchanges(mesh: Sites) -> None:
    mesh.start()
    until(lambda: all(site.round >= 2 for site in mesh), "two rounds of all three")
    for victim, during in zip([*mesh, mesh["a"]], ["training", "exchange"] * 2, strict=True):
        until(lambda v=victim, p=during: phase(v) == p, f"{victim.name} in phase {during}")
        killed, before = kill_daemon(victim), victim.round
        until(lambda v=victim, k=killed: (d := daemon_of(v)) is not None and d.pid != k, "a new daemon")
        until(lambda b=before: all(site.round >= b + 2 for site in mesh), "all three to go on")
    peers = {site.history("start")[0]["peer"] for site in mesh}
    until(lambda: {c["peer"] for c in mesh.sites[0].history("commit")[-1]["contributors"]} == peers, "a round of all three")
    assert [site.log().count("the libp2p daemon ended with -9") for site in mesh] == [2, 1, 1]
    mesh.terminate()
    assert mesh.exit_codes() == [0, 0, 0]
    digests = mesh.digests()
    assert len(digests) == max(round for round, _ in digests)
    assert verify([str(mesh.folder / "runs" / "tiny")]) == 0


@pytest.mark.fault
@pytest.mark.case("C014")
def test_a_daemon_that_is_killed_for_ever_ends_its_peer_with_one_plain_line(mesh: Sites) -> None:
    mesh.sites[0].start(first=True)
    until(lambda: mesh.sites[0].history("term"), "the founder to lead")
    founder, killed = mesh.sites[0], 0
    process = founder.process
    assert process is not None
    for _ in range(5):
        until(lambda k=killed: (d := daemon_of(founder)) is not None and d.pid != k, "a new daemon")
        killed = kill_daemon(founder)
    assert process.wait(60) == 75
    (line,) = (line for line in founder.log().splitlines() if line.startswith("geomesh: "))
    assert "the libp2p daemon" in line
    assert "too often" in line
    assert "start this peer again" in line
    assert "Traceback" not in founder.log()
