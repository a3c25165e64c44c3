"""`geomesh peer --fork-from`: a run whose quorum is lost for good goes on as a new one, from a state of the old."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from geomesh_p2p.core.log import Credited
from geomesh_p2p.core.types import Range
from tests.injection.proof import fired, inject
from tests.process.sites import GEOMESH, LIGHT, Site, Sites, until


def kill(site: Site) -> None:
    process = site.process
    assert process is not None
    inject(site.kill)
    fired(process.poll() == -9, f"{site.name} was killed")


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_who_is_left_goes_on_alone_and_takes_others_in(tmp_path: Path) -> None:
    mesh = Sites(tmp_path, ["a", "b", "c"], rounds=100_000, command=LIGHT)
    mesh.environment |= {"LIGHT_TRAIN_SECONDS": "0.2"}
    try:
        mesh.start()
        mesh.together()
        mesh.advance(3)
        a, b, c = mesh
        for site in mesh:
            kill(site)
        last, old = a.round, {note["round"]: note for note in a.history("commit")}
        for gone in (b, c):
            gone.address_file.unlink()
        mesh.sites = [a]

        a.extra = ["--fork-from", str(last - 1)]
        a.start()
        joiner = mesh.add("d")
        until(lambda: "others join with" in a.log().partition("a new run goes on from round")[2], "a to be there again")
        a.begin_anew()
        joiner.start()
        until(lambda: min(a.round, joiner.round) >= last + 3, "both to train")
        asides = list(a.folder.parent.glob("a.2*"))
        assert len(asides) == 1
        assert (asides[0] / "history.jsonl").exists()

        adopted = a.history("adopt")[0]
        assert (adopted["round"], adopted["digest"]) == (last - 1, old[last - 1]["digest"])
        first = a.history("commit")[0]
        assert (first["round"], first["base"]) == (last, old[last - 1]["digest"])
        assert first["run"] != old[last]["run"]
        trained = Credited()
        for note in (*(note for round, note in old.items() if round < last), *a.history("commit")):
            for one in note["contributors"]:
                for start, stop in one["ranges"]:
                    trained.add(Range(start, stop))  # raises if what the state had been trained on is trained again

        # Who was lost may come back, but not with what it had.
        b.start(seeds=[a.address_file.read_text().strip()])
        assert b.process is not None
        assert b.process.wait(120) == 5
        assert "--run.fresh" in b.log().splitlines()[-1]

        # The same command once more goes on, and forks nothing.
        kill(a)
        reached = joiner.round
        a.start()
        until(lambda: min(a.round, joiner.round) >= reached + 3, "both to go on")
        assert list(a.folder.parent.glob("a.2*")) == asides
        folders = [str(site.folder) for site in mesh]
        verify = subprocess.run([*GEOMESH, "history", "verify", *folders], capture_output=True, text=True, timeout=120)
        assert verify.returncode == 0, verify.stdout
    finally:
        mesh.sites = [a, b, c, *mesh.sites[1:]]
        mesh.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("round", "code", "said"), [("99", 4, "the update of round"), ("3", 2, "holds no run")])
def test_what_cannot_be_forked_is_said_and_left_as_it_was(tmp_path: Path, round: str, code: int, said: str) -> None:
    mesh = Sites(tmp_path, ["a"], rounds=3, command=LIGHT)
    mesh.run_file.write_text(mesh.run_file.read_text().replace("min_peers = 2", "min_peers = 1"))
    a = mesh["a"]
    try:
        if code == 4:
            a.start(first=True)
            assert mesh.exit_codes() == [0]
        before = sorted(path.name for path in a.folder.glob("*")) if a.folder.exists() else []
        a.extra = ["--fork-from", round]
        a.start()
        assert mesh.exit_codes() == [code]
        assert said in a.log().splitlines()[-1]
        assert [path.name for path in sorted(a.folder.glob("*"))] == before
        assert [path.name for path in a.folder.parent.glob("*")] in ([], ["a"])
    finally:
        mesh.stop()
