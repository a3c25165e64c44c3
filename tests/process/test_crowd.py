"""A crowd of joiners on real peers: all get in by snapshots that the log vouches for, and nobody's memory grows with them.

How much slower the running peers are meanwhile is measured in virtual time (tests/mesh/test_crowds.py), where a link is a link
and nine peers do not share two cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.process.sites import LIGHT, Site, Sites, complaints, until

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

PARAMETERS = int(os.environ.get("CROWD_PARAMETERS", "10000000"))
MODEL_BYTES = 4 * PARAMETERS
"""Large enough for what Python itself takes more or less to be a small share of it."""


def peak_bytes(site: Site) -> int:
    assert site.process is not None
    status = Path(f"/proc/{site.process.pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def forget_peak(site: Site) -> None:
    """From now on `peak_bytes` is of what follows."""
    assert site.process is not None
    Path(f"/proc/{site.process.pid}/clear_refs").write_text("5")


def seconds_of(site: Site, first: int, last: int) -> list[float]:
    at = {note["round"]: note["time"] for note in site.history("commit")}
    return [at[round] - at[round - 1] for round in range(first + 1, last + 1) if round in at and round - 1 in at]


@pytest.mark.case("C025")
@pytest.mark.case("C099")
def test_six_joiners_at_once_get_in(tmp_path: Path) -> None:
    names = ["a", "b", "c", *(f"new{i}" for i in range(6))]
    mesh = Sites(tmp_path, names, rounds=10_000, command=LIGHT)
    mesh.environment |= {"LIGHT_PARAMETERS": str(PARAMETERS), "LIGHT_TRAIN_SECONDS": "1.0"}
    for site in mesh:
        site.extra = ["--save.keep_updates", "6", "--save.snapshot_every_rounds", "3"]
    running, joiners = mesh.sites[:3], mesh.sites[3:]
    try:
        running[0].start(first=True)
        until(lambda: running[0].address_file.exists(), "the founder's address")
        for site in running[1:]:
            site.start()
        mesh.advance(10, running)
        began = running[0].round
        for site in joiners:
            site.start(seeds=[running[0].address_file.read_text().strip()])
        joined = {site.name for site in joiners}

        def taking_part() -> set[str]:
            return {c["site"] for c in running[0].history("commit")[-1]["contributors"]}

        until(lambda: joined <= taking_part(), "all to take part", 240.0)
        ended = running[0].round
        assert all(site.history("adopt") for site in joiners), "by a snapshot: the first updates are gone"
        assert not any(site.history("mismatch") for site in mesh)
        before, during = median(seconds_of(running[0], 3, began)), median(seconds_of(running[0], began, ended))
        peaks = {site.name: peak_bytes(site) for site in mesh}
        for site in running:
            forget_peak(site)
        mesh.advance(5, mesh.sites)
        later = {site.name: peak_bytes(site) for site in running}  # nine members, a save, and nobody joins
        donors = max((peaks[name] - later[name]) / MODEL_BYTES for name in later)
        joining = max((peaks[name] - median(later.values())) / MODEL_BYTES for name in joined)
        print(f"rounds {before:.2f} s, with the crowd {during:.2f} s; {ended - began} rounds until all took part;")
        print(f"peaks beside the {median(later.values()) / MODEL_BYTES:.1f} models of a peer among nine in which nobody joins:")
        print(f"donors {donors:+.2f} models, joiners {joining:+.2f} models")
        assert donors < 1.5, "a donor that held what it gives would take 2 models more"
        assert joining < 2.5
        mesh.terminate()
        assert mesh.exit_codes() == [0] * 9
        assert verify([tmp_path / "runs"], print) == 0
        assert not complaints(mesh)
    finally:
        mesh.stop()
