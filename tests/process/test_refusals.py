"""What a real run refuses: each refusal is one line with the cause, a code, and a folder as it was before."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.sites import Sites, until

pytestmark = pytest.mark.timeout(180)
GEOMESH = (sys.executable, "-m", "geomesh_p2p.cli")
OTHER_RATE = ("--inner.learning_rate", "0.5")


class Run(Sites):
    """A founder that waits for a second trainer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ["a", "b"], rounds=100_000)

    @property
    def address(self) -> str:
        return self.sites[0].address_file.read_text().strip()

    def words(self, site: str, *more: str) -> list[str]:
        return [*GEOMESH, "peer", str(self.run_file), "--site", str(self.folder / f"{site}.toml"), *more]

    def ended(self, words: list[str]) -> tuple[int, str]:
        """(exit code, the only line on stderr that is no log line) of a command."""
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=90)
        said = [line for line in done.stderr.splitlines() if line.startswith("geomesh: ")]
        assert len(said) == 1, done.stderr
        assert done.stderr.splitlines()[-1] == said[0]
        return done.returncode, said[0]

    def join(self, site: str, *more: str) -> tuple[int, str]:
        return self.ended(self.words(site, "--bootstrap", self.address, *more))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    sites = Run(tmp_path_factory.mktemp("run"))
    try:
        sites.sites[0].start(first=True)
        until(lambda: sites.sites[0].history("term"), "the founder to lead")
        yield sites
    finally:
        sites.stop()


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.case("C018")
def test_other_settings_are_refused_by_name(run: Run) -> None:
    code, said = run.join("b", *OTHER_RATE, "--run.folder", "other")
    assert code == 5
    assert "inner.learning_rate is 0.5, not 0.001" in said
    assert contents(run.folder / "other") == set(), "that the settings differ has nothing to do with who it is"


@pytest.mark.case("C027")
def test_other_initial_weights_are_refused_before_the_first_step(run: Run) -> None:
    """Round 0 is the founder's weights: their hash is part of what every peer must have in common."""
    code, said = run.join("b", "--run.seed", "2", "--run.folder", "seeded")
    assert code == 5
    assert "seed is 2, not 0" in said
    assert "weights is " in said
    assert contents(run.folder / "seeded") == set()


def test_a_seed_of_another_run_is_refused(run: Run) -> None:
    code, said = run.join("b", "--run.id", "another")
    assert code == 5
    assert "run.id is another, not tiny" in said


def test_the_founders_name_is_taken(run: Run) -> None:
    code, said = run.join("a", "--run.folder", "twin")
    assert code == 5
    assert "site.name 'a' is taken" in said


@pytest.mark.case("C001")
@pytest.mark.parametrize(
    ("silent", "reach_seconds", "why"),
    [
        (False, 1, "connection refused"),
        pytest.param(True, 10, "no answer within 6 s, though connections are taken", marks=pytest.mark.long),
    ],
)
def test_a_seed_that_does_not_answer(run: Run, silent: bool, reach_seconds: int, why: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if silent:
            other.listen()  # whoever connects hears nothing
        seed = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}/p2p/{run.address.rsplit('/', 1)[1]}"
        reach = ("--net.reach_seconds", str(reach_seconds))
        code, said = run.ended(run.words("b", "--bootstrap", seed, *reach, "--run.folder", "alone"))
    assert code == 3
    assert f"{seed}: {why}" in said
    assert not (run.folder / "alone").exists()


@pytest.mark.case("C094")
@pytest.mark.parametrize("fresh", [(), ("--run.fresh",)])
def test_a_folder_in_use_is_left_alone(run: Run, fresh: tuple[str, ...]) -> None:
    founder = run.sites[0]
    before = contents(founder.folder)
    code, said = run.ended(run.words("a", "--first", *fresh))
    assert code == 75
    assert founder.process is not None
    assert f"in use by process {founder.process.pid}" in said
    assert contents(founder.folder) >= before


@pytest.mark.case("C019")
def test_a_port_in_use_is_named_with_its_owner(run: Run) -> None:
    port = run.address.split("/")[4]
    code, said = run.ended(run.words("b", "--first", "--net.listen", f"/ip4/127.0.0.1/tcp/{port}", "--run.folder", "ports"))
    assert (code, f"port {port}" in said, "by process" in said, "(p2pd)" in said) == (75, True, True, True), said
    assert not (run.folder / "ports").exists()


def test_a_founder_alone_stops_in_silence_and_stays_in_its_own_run(run: Run) -> None:
    """Stopped as a terminal does it, which sends Ctrl-C to the daemon as well. Started again, it is neither taken into another
    run nor given other settings, and its folder stays as it is."""
    words = run.words("b", "--run.folder", "own")
    folder = run.folder / "own" / "tiny" / "b"
    with subprocess.Popen(
        [*words, "--first"], cwd=run.folder, env=run.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as peer:
        assert peer.stderr is not None
        log = [next(peer.stderr)]
        while "leader of term 1" not in log[-1]:
            log.append(next(peer.stderr))
        os.killpg(peer.pid, signal.SIGINT)
        log += peer.stderr
    assert peer.returncode == 130, log
    assert not [line for line in log if "warn" in line or "error" in line.lower() or "Traceback" in line]
    config = (folder / "config.json").read_text()
    assert json.loads(config)["settings"]["inner.learning_rate"] == "0.001"

    code, said = run.ended([*words, *OTHER_RATE])
    assert (code, "inner.learning_rate is 0.001, not 0.5" in said) == (5, True), said
    assert (folder / "config.json").read_text() == config

    code, said = run.ended([*words, "--bootstrap", run.address])
    assert (code, "another run has this name" in said) == (5, True), said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_run_is_joined(run: Run, number: signal.Signals) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{run.address.rsplit('/', 1)[1]}"
    words = run.words("b", "--bootstrap", nobody, "--net.reach_seconds", "600", "--run.folder", "early")
    with subprocess.Popen(words, cwd=run.folder, env=run.environment, stderr=subprocess.PIPE, text=True) as peer:
        assert peer.stderr is not None
        log = [next(peer.stderr)]
        while "metrics on" not in log[-1]:
            log.append(next(peer.stderr))
        peer.send_signal(number)
        rest = peer.stderr.read()
    assert peer.returncode == 128 + number
    assert rest.count("\n") == 1, rest
    assert f"stopped before the run was joined: signal {number.name}" in rest
    assert not [line for line in [*log, rest] if "others join with" in line or "this run is open" in line], "it is not in it"
    assert not (run.folder / "early").exists()


def test_refused_once_it_joins_with_the_right_settings_and_nobody_takes_its_name(run: Run) -> None:
    founder, b = run.sites
    assert run.join("b", *OTHER_RATE)[0] == 5
    b.start()
    until(lambda: b.round >= 1, "a round of both")
    code, said = run.join("b", "--run.folder", "second")
    assert (code, "site.name 'b' is taken" in said) == (5, True), said
    run.terminate()
    assert run.exit_codes() == [0, 0]
    assert "rror" not in founder.log() + b.log()
