"""Sixteen peers on one machine, in-memory engines, real sockets: twenty rounds, one digest each."""

from __future__ import annotations

from pathlib import Path

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.process.sites import LIGHT, Sites


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.case("C051")
def test_sixteen_peers_commit_twenty_rounds(tmp_path: Path) -> None:
    names = [f"p{i:02}" for i in range(16)]
    mesh = Sites(tmp_path, names, rounds=20, inner_steps=1, command=LIGHT)
    mesh.environment |= {"LIGHT_PARAMETERS": "65536", "LIGHT_TRAIN_SECONDS": "0.5"}
    try:
        mesh.start()
        assert mesh.exit_codes(limit_seconds=800) == [0] * 16
    finally:
        mesh.stop()
    assert len(mesh.digests()) == 20
    assert all(len(site.commits()[20]["view"]) == 16 for site in mesh)
    assert verify([str(mesh.folder / "runs" / "tiny")]) == 0
