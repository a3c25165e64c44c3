"""One peer of another release: both numbers are said, once, and the others go on (C017)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from geomesh_p2p import PROTOCOL_VERSION
from tests.injection.proof import fired, injecting
from tests.process.sites import Sites, until

OTHER_RELEASE = """
import sys
import geomesh_p2p
geomesh_p2p.PROTOCOL_VERSION += {by}
from geomesh_p2p import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.fault
@pytest.mark.long
@pytest.mark.case("C017")
@pytest.mark.timeout(300)
def test_a_peer_of_another_protocol_version_is_told_so_and_the_others_keep_training(tmp_path: Path) -> None:
    mesh = Sites(tmp_path, ["a", "b", "c"], rounds=100_000)
    try:
        for site, first in zip(mesh.sites[:2], (True, False), strict=True):
            site.start(first=first)
            until(site.address_file.exists, "an address")
        until(lambda: mesh.sites[0].round >= 2, "two rounds")
        seeds = [word for site in mesh.sites[:2] for word in ("--bootstrap", site.address_file.read_text().strip())]
        words = ["peer", str(mesh.run_file), "--site", str(tmp_path / "c.toml"), *seeds]
        code = OTHER_RELEASE.format(by=1 if injecting() else 0)
        other = subprocess.Popen(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=mesh.environment, stderr=subprocess.PIPE, text=True
        )
        try:
            said = other.communicate(timeout=90 if injecting() else 25)[1]
        except subprocess.TimeoutExpired:
            other.kill()
            said = other.communicate()[1]
        both = f"protocol version {PROTOCOL_VERSION}", str(PROTOCOL_VERSION + 1)
        fired(both[1] in said and both[0] in said, "a peer of another version")
        assert other.returncode == 5, said
        assert said.splitlines()[-1].startswith("geomesh: the run refuses this peer: ")
        assert "Traceback" not in said
        reached = mesh.sites[0].round
        until(lambda: all(site.round >= reached + 3 for site in mesh.sites[:2]), "three more rounds of the others")
        for site in mesh.sites[:2]:
            lines = [line for line in site.log().splitlines() if f"protocol version {PROTOCOL_VERSION + 1}" in line]
            assert len(lines) <= 1, "said once, however often it tries"
            assert all(f"this peer speaks {PROTOCOL_VERSION}" in line for line in lines)
            assert "Traceback" not in site.log()
        assert any(f"protocol version {PROTOCOL_VERSION + 1}" in site.log() for site in mesh.sites[:2])
        assert {c["site"] for note in mesh.sites[0].commits().values() for c in note["contributors"]} == {"a", "b"}
        mesh.terminate()
        assert mesh.exit_codes()[:2] == [0, 0]
    finally:
        mesh.stop()
