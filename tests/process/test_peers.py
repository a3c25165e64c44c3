"""Four real peers: they commit the same rounds, survive kill -9 of any of them, and go on where they stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.process.sites import Sites, until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Sites]:
    sites = Sites(tmp_path, ["a", "b", "c", "d"], rounds=100_000)
    yield sites
    sites.stop()


def test_kill_any_peer_and_it_comes_back(mesh: Sites) -> None:
    """The leader first, then another: the others go on, it returns with its identity and port, all digests are equal."""
    mesh.start()
    until(lambda: all(site.round >= 2 for site in mesh), "two rounds of all four")
    leader = mesh.sites[0].history("commit")[-1]["term"][1]
    victims = sorted(mesh, key=lambda site: site.history("start")[0]["peer"] != leader)[:2]
    for victim in victims:
        others = [site for site in mesh if site is not victim]
        before, address = max(site.round for site in others), victim.address_file.read_text()
        peer = victim.history("start")[0]["peer"]
        victim.kill()
        until(lambda o=others, b=before: all(site.round >= b + 3 for site in o), "the others to go on")
        assert any(peer not in note["view"] for note in others[0].history("commit")), "the kill went unnoticed"
        victim.start()
        until(
            lambda p=peer, o=others, b=before: any(
                note["round"] > b + 3 and p in [c["peer"] for c in note["contributors"]] for note in o[0].history("commit")
            ),
            "the victim to contribute again",
        )
        assert victim.address_file.read_text() == address
    mesh.terminate()
    assert mesh.exit_codes() == [0, 0, 0, 0]
    digests = mesh.digests()
    assert len(digests) == max(round for round, _ in digests)
    assert verify([str(mesh.folder / "runs" / "tiny")]) == 0


def run_in_parts(folder: Path, *rounds: int) -> tuple[dict[int, str], set[bytes]]:
    """Digests by round, and the final snapshots' bytes, of a run that is stopped and started again at these rounds."""
    folder.mkdir()
    for part in rounds:
        mesh = Sites(folder, ["a", "b", "c"], rounds=part, inner_steps=2, sequence_seconds=0.02)
        for site in mesh:
            site.extra = ["--run.min_peers=3"]  # on a busy host one may be late for the first round, which is then another one
        try:
            mesh.start() if part == rounds[0] else [site.start() for site in mesh]
            assert mesh.exit_codes() == [0, 0, 0]
        finally:
            mesh.stop()
    states = {(site.folder / f"snapshot-{rounds[-1]}" / "shared.safetensors").read_bytes() for site in mesh}
    return dict(mesh.digests()), states


@pytest.mark.long
def test_a_run_in_two_parts_equals_one_in_one(tmp_path: Path) -> None:
    whole, whole_state = run_in_parts(tmp_path / "whole", 12)
    parts, parts_state = run_in_parts(tmp_path / "parts", 5, 12)
    assert len(whole_state) == 1
    assert len(whole) == 12
    assert whole == parts
    assert whole_state == parts_state
