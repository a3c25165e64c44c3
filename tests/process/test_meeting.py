"""How peers find the run, real ones: the printed line, dead seeds, any peer as a seed, and whom a peer knew before."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.injection.ports import free_port
from tests.injection.proof import fired, inject
from tests.process.sites import LIGHT, Site, Sites, met_anew, until

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
NOBODY = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"


def start(site: Site, *arguments: str, first: bool = False) -> str:
    """Start with these arguments and no seeds but those among them; the address that it gives to others."""
    for other in site.mesh:
        other.address_file.unlink(missing_ok=True)
    site.extra = list(arguments)
    site.start(first=first)
    until(site.address_file.exists, f"{site.name} to listen")
    return site.address_file.read_text().strip()


def kill(site: Site) -> None:
    process = site.process
    assert process is not None
    inject(process.kill)
    deadline = time.monotonic() + 5.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    fired(process.returncode == -signal.SIGKILL, f"{site.name} is killed")


def contributes(site: Site, by: Site) -> None:
    """Wait until `site` contributes to a round that `by` has not committed yet."""
    before, peer = by.round, until(lambda: site.history("start"), f"{site.name} to take part")[0]["peer"]
    until(
        lambda: any(
            note["round"] > before and peer in [c["peer"] for c in note["contributors"]] for note in by.history("commit")
        ),
        f"{site.name} to contribute",
    )


@pytest.mark.fault
@pytest.mark.case("C003")
@pytest.mark.case("C005")
@pytest.mark.case("C021")
@pytest.mark.case("C044")
@pytest.mark.case("C060")
@pytest.mark.case("C124")
def test_any_peer_leads_into_the_run_and_nobody_has_to_stay(tmp_path: Path) -> None:
    mesh = Sites(tmp_path, ["a", "b", "c", "d"], rounds=100_000, command=LIGHT)
    mesh.environment |= {"LIGHT_TRAIN_SECONDS": "0.3", "LIGHT_PARAMETERS": "1000000"}  # enough for a rate to be measured
    a, b, c, d = mesh
    port = free_port()
    try:
        address_of_a = start(a, first=True)
        (printed,) = (line.split("others join with: ")[1] for line in a.log().splitlines() if "others join with: " in line)

        # b is given the line as it was printed, and two seeds that are dead; it listens everywhere and announces one address.
        dead = [f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{NOBODY}" for _ in range(2)]
        listen = ["--net.listen", f"/ip4/0.0.0.0/tcp/{port}", "--net.announce", f"/ip4/127.0.0.2/tcp/{port}"]
        address_of_b = start(b, *printed.split(), *(word for seed in dead for word in ("--bootstrap", seed)), *listen)
        assert address_of_b.startswith(f"/ip4/127.0.0.2/tcp/{port}/p2p/")
        until(lambda: b.round >= 1, "the first round of a and b")
        assert [sum(f"warning: seed {seed}" in line for line in b.log().splitlines()) for seed in dead] == [1, 1]

        # c comes through b, an ordinary peer, at the address that b announces; the first seed is killed; d comes through c.
        address_of_c = start(c, "--bootstrap", address_of_b)
        contributes(c, by=b)
        until(lambda: {address_of_b, address_of_c} <= a.knows(), "a to remember them")
        # It was dialled, as told; but b may have dialled c as well, and that connection be the one that stays.
        ways = (f"b: connected, dialled at /ip4/127.0.0.2/tcp/{port}", "b: connected, comes from ")
        until(lambda: any(way in c.log() for way in ways), "c to tell how b is reached")
        until(lambda: "b: " in c.log() and "Mbit/s measured, over" in c.log(), "c to tell how fast")
        kill(a)
        start(d, "--bootstrap", address_of_c)
        contributes(d, by=c)

        # a, whose only seed was itself, comes back through whom it knew, is killed again, and comes back at another port.
        for again in range(2):
            former, address_of_a = address_of_a, start(a, "--net.listen", f"/ip4/127.0.0.1/tcp/{free_port()}")
            contributes(a, by=c)
            for other in (b, c, d):
                met_anew(other, address_of_a, former)
            if again == 0:
                kill(a)
        mesh.terminate()
        assert mesh.exit_codes() == [0, 0, 0, 0]
        digests = mesh.digests()
        assert len(digests) == max(round for round, _ in digests)
        assert verify([str(mesh.folder / "runs" / "tiny")]) == 0
    finally:
        mesh.stop()


@pytest.mark.case("C051")
def test_one_peer_more_than_allowed_is_told_the_setting(tmp_path: Path) -> None:
    mesh = Sites(tmp_path, ["a", "b", "c"], rounds=100_000, command=LIGHT)
    a, b, c = mesh
    try:
        address = start(a, "--net.most_peers", "1", first=True)
        start(b, "--bootstrap", address)
        until(lambda: b.round >= 1, "a round of a and b")
        start(c, "--bootstrap", address)
        assert c.process is not None
        assert c.process.wait(60) == 5
        (line,) = (line for line in c.log().splitlines() if line.startswith("geomesh: "))
        assert "a has as many peers as it may have (net.most_peers is 1): raise that" in line
        assert all(len(note["view"]) <= 2 for note in a.history("commit"))
    finally:
        mesh.stop()
