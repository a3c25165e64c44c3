"""Real peers over slow links that begin the next round while an update is on its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.process.sites import LIGHT, Site, Sites, complaints

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

ROUNDS, WARM_UP = 10, 3
LINKS = "\n[links.default]\nmbps = 1.0\nrtt_ms = 60\n"


def times(site: Site) -> list[dict[str, float]]:
    lines = (json.loads(line) for line in (site.folder / "metrics.jsonl").read_text().splitlines())
    return [line["times"] for line in lines if line["kind"] == "round" and WARM_UP < line["round"] < ROUNDS]


def shares(folder: Path, overlap: str) -> dict[str, float]:
    """Of the wall time between the first rounds and the last one, which none follows; all sites together."""
    mesh = Sites(folder, ["a", "b", "c"], rounds=ROUNDS, command=LIGHT)
    mesh.environment |= {"LIGHT_PARAMETERS": "1000000", "LIGHT_SEQUENCE_SECONDS": "0.1"}
    for site in mesh:
        file = folder / f"{site.name}.toml"
        file.write_text(file.read_text() + LINKS)
        planner: dict[str, Any] = {"mode": "planned", "round_tokens": 3 * 32 * 30, "overlap": overlap}
        site.extra = [word for key, value in planner.items() for word in (f"--planner.{key}", str(value))]
        site.extra += ["--run.min_peers", "3"]
    try:
        mesh.start()
        assert mesh.exit_codes() == [0, 0, 0]
    finally:
        mesh.stop()
    assert complaints(mesh) == []
    digests = mesh.digests()
    assert len(digests) == ROUNDS, "one digest a round on all peers"
    assert verify([str(folder / "runs" / "tiny")]) == 0
    found = [one for site in mesh for one in times(site)]
    for one in found:
        assert sum(value for what, value in one.items() if what != "wall") == pytest.approx(one["wall"])
        assert min(one["straggler_idle"], one["wan_idle"]) >= 0
    wall = sum(one["wall"] for one in found)
    return {what: sum(one[what] for one in found) / wall for what in found[0]}


def test_over_slow_links_hardly_any_idle_time_is_left(tmp_path: Path) -> None:
    found = {}
    for overlap in ("none", "delayed"):
        (tmp_path / overlap).mkdir()
        found[overlap] = shares(tmp_path / overlap, overlap)
    assert found["none"]["wan_idle"] > 0.1, found
    assert found["delayed"]["wan_idle"] < 0.2 * found["none"]["wan_idle"], found
    assert found["delayed"]["compute"] > found["none"]["compute"], found
