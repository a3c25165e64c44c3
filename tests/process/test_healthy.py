"""A healthy run says nothing alarming: the real command with the real engine, one join, one leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.process.sites import Sites, complaints, until


@pytest.mark.timeout(600)
def test_logs_of_a_join_and_a_leave_hold_no_error(tmp_path: Path) -> None:
    mesh = Sites(tmp_path, ["a", "b"], rounds=100_000)
    try:
        mesh.start()
        until(lambda: all(site.round >= 2 for site in mesh), "two rounds of both")
        newcomer = mesh.add("c")
        newcomer.start()
        mesh.together()
        leaver = mesh["b"]
        assert leaver.process is not None
        leaver.process.terminate()
        assert leaver.process.wait(90) == 0
        others = [site for site in mesh if site is not leaver]
        mesh.advance(2, others)
        assert all(leaver.peer not in site.history("commit")[-1]["view"] for site in others)
        until(lambda: all("b has left" in site.log() for site in others), "the others to say that b has left")
        mesh.terminate()
        assert mesh.exit_codes() == [0, 0, 0]
    finally:
        mesh.stop()
    assert complaints(mesh) == []
    assert verify([str(mesh.folder / "runs" / "tiny")]) == 0
