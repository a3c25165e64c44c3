"""A mesh of stand-in peers: how they are started, calibrated, followed and stopped."""

from __future__ import annotations

import fcntl
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.emulation import EMULATED_SHARE
from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.lab.figures import Credits, PeerRecord, Tally, summarise_round
from geomesh_p2p.lab.mesh import Limits, _Mesh, peer_commands, run_mesh, time_scale
from geomesh_p2p.lab.table import SiteView, round_line, size, table
from geomesh_p2p.loading import SiteFile, load_sites
from tests.injection.proof import fired, inject, injecting

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_peer.py"))
QUICK = Limits(check_seconds=0.02)


class Bench:
    """A run file, site files a, b, c, and what the stand-in peers are to do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, emulated: bool = False) -> None:
        self.folder = folder
        self.run = RunConfig.model_validate({"run": {"id": "toy", "folder": str(folder / "runs"), "rounds": 3}})
        self.run_folder = folder / "runs" / "toy"
        self.seen = folder / "seen"
        self.seen.mkdir()
        self.run_path = folder / "run.toml"
        self.run_path.write_text(f'[run]\nid = "toy"\nfolder = "{folder / "runs"}"\nrounds = 3\n')
        for number, name in enumerate("cab"):
            emulation = f'[emulation]\ndevice = "x"\nfixed_seconds = 0.5\nsequence_seconds = {1 + number}\nmax_batch = 8\n'
            (folder / f"{name}.toml").write_text(f'[site]\nname = "{name}"\n' + (emulation if emulated else ""))
        self.sites: tuple[SiteFile, ...] = load_sites(*(folder / f"{name}.toml" for name in "cab"))
        self._monkeypatch = monkeypatch

    def script(self, **sites: dict[str, Any]) -> None:
        whole = {"folder": str(self.seen), "run": str(self.run_folder), **sites}
        self._monkeypatch.setenv("FAKE_PEER", json.dumps(whole))

    def mesh(self, limits: Limits = QUICK, run: RunConfig | None = None) -> int:
        return run_mesh(self.run_path, run or self.run, self.sites, {"planner.mode": "uniform"}, "json", limits, FAKE)

    def noted(self, name: str) -> dict[str, str]:
        return {path.name.split(".")[0]: path.read_text() for path in sorted(self.seen.glob(f"*.{name}"))}

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_folder / "report.json").read_text())
        return loaded


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch, emulated=True)


# ---------------------------------------------------------------- to the end


def test_all_reach_the_end(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.script()
    assert bench.mesh() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  digest")[0] for line in lines[:-1]] == ["round   1", "round   2", "round   3"]
    assert lines[-1].startswith("3 rounds, 900 tokens: validation perplexity 9.50 -> ")
    assert "2 of 2 contributed" in lines[0]
    assert "straggler idle 16.7%" in lines[0]
    assert bench.report["rounds_committed"] == 3
    assert bench.report["tokens"] == 900
    assert bench.report["emulation_time_scale"] is None
    assert "# Run toy" in (bench.run_folder / "report.md").read_text()
    assert (bench.run_folder / "a" / "peer.log").read_text() == "a is here\n"


def test_one_that_stops_early_without_a_fault_gives_the_worst_code(bench: Bench) -> None:
    bench.script(b={"rounds": 2})
    assert bench.mesh() == 0  # it left as it wanted (code 0): nothing failed
    bench.script(b={"die_after": 2})
    assert bench.mesh() == 7


# ---------------------------------------------------------------- how they are started


def test_the_first_by_name_founds_and_the_others_wait_for_its_address(bench: Bench) -> None:
    bench.script()
    bench.mesh()
    argv = {site: json.loads(text) for site, text in bench.noted("argv").items()}
    address = str(bench.run_folder / "a" / "address")
    assert argv["a"][:4] == ["peer", str(bench.run_path), "--site", str(bench.folder / "a.toml")]
    assert "--first" in argv["a"]
    assert argv["a"][argv["a"].index("--address-file") + 1] == address
    for name in "bc":
        assert argv[name][argv[name].index("--bootstrap") + 1] == f"@{address}"
        assert "--first" not in argv[name]
        assert "--planner.mode=uniform" in argv[name]
        assert "--run.fresh=false" in argv[name]
        assert argv[name][argv[name].index("--log-format") + 1] == "json"


def test_a_resumed_run_is_not_founded_again(bench: Bench) -> None:
    (bench.run_folder / "b").mkdir(parents=True)
    (bench.run_folder / "b" / "founding.record").touch()
    (bench.run_folder / "b" / "address").write_text("old\n")
    commands = peer_commands(bench.run_path, bench.run_folder, bench.sites, {}, "console")
    address = bench.run_folder / "b" / "address"
    assert not any("--first" in command for command in commands.values())
    assert str(address) in commands["b"]
    assert f"@{address}" in commands["a"]
    assert not address.exists()


def test_an_observer_never_founds(bench: Bench) -> None:
    (bench.folder / "a.toml").write_text('[site]\nname = "a"\ntrains = false\n')
    sites = load_sites(*(bench.folder / f"{name}.toml" for name in "abc"))
    commands = peer_commands(bench.run_path, bench.run_folder, sites, {}, "console")
    assert [name for name, command in commands.items() if "--first" in command] == ["b"]


def test_fresh_moves_the_old_run_aside(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.script()
    bench.mesh()
    fresh = bench.run.model_copy(update={"run": bench.run.run.model_copy(update={"fresh": True})})
    assert bench.mesh(run=fresh) == 0
    aside = [path for path in bench.run_folder.parent.iterdir() if path != bench.run_folder]
    assert len(aside) == 1
    assert (aside[0] / "report.json").exists()
    assert str(aside[0]) in capsys.readouterr().err
    assert bench.report["rounds_committed"] == 3


def test_two_meshes_on_one_run_are_refused(bench: Bench) -> None:
    bench.run_folder.mkdir(parents=True)
    with (bench.run_folder / "mesh.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TemporaryError, match="in use by another mesh"):
            bench.mesh()


# ---------------------------------------------------------------- calibration


def test_emulated_peers_get_one_time_scale_from_their_total_speed(emulated: Bench) -> None:
    emulated.script(a={"tokens_per_second": 500}, b={"tokens_per_second": 400}, c={"tokens_per_second": 300})
    assert emulated.mesh() == 0
    length = emulated.run.model.sequence_length
    fastest = 8 * length / (0.5 + 8 * 1)  # c: one second a sequence
    expected = fastest / (0.8 * 1200 / 3)
    told = emulated.noted("time_scale")
    assert {site: float(text) for site, text in told.items()} == pytest.approx(dict.fromkeys("abc", expected))
    assert set(emulated.noted("told").values()) == {'{"calibrate": true}'}
    assert emulated.report["emulation_time_scale"] == pytest.approx(expected)


def test_the_fastest_emulated_peer_gets_its_share(emulated: Bench) -> None:
    rates = {"a": 1000.0, "b": 1000.0, "c": 1000.0}
    scale = time_scale(emulated.sites, 128, rates)
    emulated_rate = 8 * 128 / (scale * (0.5 + 8 * 1))
    assert emulated_rate == pytest.approx(EMULATED_SHARE * 1000)


def test_a_resumed_run_keeps_its_time_scale(emulated: Bench) -> None:
    emulated.script(a={"tokens_per_second": 500}, b={"tokens_per_second": 400}, c={"tokens_per_second": 300})
    emulated.mesh()
    before = emulated.noted("time_scale")
    emulated.script(a={"tokens_per_second": 9}, b={"tokens_per_second": 9}, c={"tokens_per_second": 9})
    assert emulated.mesh() == 0
    assert emulated.noted("time_scale") == before
    assert set(emulated.noted("told").values()) == {'{"calibrate": false}'}


def test_calibration_has_a_deadline(emulated: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """b never gets as far as asking; a and c wait for it, but not for ever."""
    emulated.script(a={"tokens_per_second": 5}, b={"silent_after": 1}, c={"tokens_per_second": 5})
    assert emulated.mesh(Limits(check_seconds=0.02, calibrate_seconds=0.5)) == 75
    assert "a, b, c had not measured its speed" in capsys.readouterr().out


# ---------------------------------------------------------------- faults


def test_a_peer_that_cannot_start_stops_the_others(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.script(a={"rounds": 0, "tokens_per_second": 1}, b={"fail": 4}, c={"rounds": 0, "tokens_per_second": 1})
    assert bench.mesh() == 4
    said = capsys.readouterr().out
    assert "b ended with code 4" in said
    assert "    b: cannot go on" in said


@pytest.mark.case("C098")
@pytest.mark.fault
def test_a_peer_that_the_kernel_ends_is_explained_and_the_others_go_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    inject(lambda: bench.script(b={"killed_after": 1}))
    if not injecting():
        bench.script()
    bench.mesh()
    said = capsys.readouterr().out
    fired([peer["rounds"] for peer in bench.report["peers"]] == [3, 1, 3], "b ended after its first round")
    assert "b ended by signal 9 in round 2: the kernel ends processes so when memory is short" in said


def test_the_others_go_on_when_one_dies(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.script(b={"die_after": 1})
    assert bench.mesh() == 7
    assert "b ended with code 7 in round 2" in capsys.readouterr().out
    assert [peer["rounds"] for peer in bench.report["peers"]] == [3, 1, 3]


@pytest.mark.case("C098")
def test_one_that_is_killed_without_a_word_is_named_with_what_that_may_mean(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.script(b={"killed_after": 1})
    assert bench.mesh() == 128 + signal.SIGKILL
    said = next(line for line in capsys.readouterr().out.splitlines() if "b ended" in line)
    assert "b ended by signal 9 in round 2" in said
    assert "memory" in said


def test_sigterm_stops_every_peer(bench: Bench) -> None:
    stop = {"signal_parent": (2, int(signal.SIGTERM)), "once_silent": ["a", "b"]}
    bench.script(a={"silent_after": 1}, b={"silent_after": 1}, c=stop)
    assert bench.mesh() == 143
    assert set(bench.noted("terminated")) == {"a", "b", "c"}


def test_a_peer_that_does_not_end_is_killed_after_the_grace(bench: Bench) -> None:
    stop = {"signal_parent": (2, int(signal.SIGINT)), "once_silent": ["a"]}
    bench.script(a={"silent_after": 1, "deaf": True}, c=stop)
    assert bench.mesh(Limits(check_seconds=0.02, grace_seconds=0.3)) == 130
    assert "a" in bench.noted("terminated")


def test_one_that_lags_behind_the_others_for_ever_is_stopped(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.script(b={"silent_after": 1})
    assert bench.mesh(Limits(check_seconds=0.02, finish_seconds=0.3)) == 75
    assert "b did not finish within" in capsys.readouterr().out


def test_the_rest_does_not_wait_for_ever_for_a_quorum(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.script(a={"silent_after": 1, "wall": 0.01}, b={"die_after": 1, "wall": 0.01}, c={"silent_after": 1, "wall": 0.01})
    assert bench.mesh(Limits(check_seconds=0.02, stall_seconds=0.3)) == 7
    assert "no round was committed for" in capsys.readouterr().out


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_peers_end_with_a_mesh_that_is_killed(bench: Bench) -> None:
    bench.script(a={"silent_after": 1}, b={"silent_after": 1, "deaf": True}, c={"silent_after": 1})
    code = (
        "import sys; from pathlib import Path; from geomesh_p2p.lab.mesh import run_mesh\n"
        "from geomesh_p2p.loading import load_run, load_sites\n"
        "run, *sites = sys.argv[3:]\n"
        "run_mesh(Path(run), load_run(run), load_sites(*sites), {}, 'json', geomesh=sys.argv[1:3])"
    )
    sites = [str(bench.folder / f"{name}.toml") for name in "abc"]
    mesh = subprocess.Popen([sys.executable, "-c", code, *FAKE, str(bench.run_path), *sites], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: set(bench.noted("silent")) == {"a", "b", "c"})
        pids = [int(text) for text in bench.noted("pid").values()]
    finally:
        mesh.send_signal(signal.SIGKILL)
        mesh.wait()
    wait_until(lambda: not any(running(pid) for pid in pids))
    assert "b" in bench.noted("orphaned")  # deaf to signals, but its control pipe ended


# ---------------------------------------------------------------- what is shown


def test_a_site_that_resumes_shows_its_round_before_it_commits_one() -> None:
    view = SiteView("a")
    view.take({"event": "phase", "phase": "idle", "round": 7})
    assert view.round == 7


def line_of(*said: dict[str, Any]) -> str:
    """What a mesh prints of a round of which these lines were told, one by each site."""
    records = [PeerRecord(f"site-{index}") for index, _ in enumerate(said)]
    for record, line in zip(records, said, strict=True):
        record.take(line)
    return round_line(summarise_round(said[0]["round"], records, Credits(records)), None)


def test_a_round_whose_members_nobody_knows_is_not_said_to_be_of_none() -> None:
    caught_up = {"round": 3, "digest": "ab" * 8, "contributors": ["a", "b"], "members": [], "tokens": 0}
    assert "  2 contributed" in line_of(caught_up)
    members = {"members": ["a", "b", "c"], "inner_steps": 2, "times": {"wall": 1.0}}
    finish = {"planned_finish_seconds": 1.0, "finish_seconds": 1.0}
    assert "  2 of 3 contributed" in line_of(caught_up, {**caught_up, **members, **finish})


def test_the_view_of_a_site_follows_what_it_says() -> None:
    view = SiteView("a")
    view.take({"event": "phase", "phase": "exchange", "waiting_for": "b", "round": 1})
    assert view.state == "exchange (b)"
    view.take({"event": "plan", "plan": {"members": [{"site": "a", "batch": 4, "inner_steps": 9}]}})
    assert (view.batch, view.inner_steps) == (4, 9)
    view.take({"event": "progress", "step": 3, "steps": 9, "tokens_per_second": 120.0, "loss": 2.0})
    assert (view.state, view.step, view.tokens_per_second) == ("training", 3, 120.0)
    times = {"wall": 10.0, "straggler_idle": 1.0, "wan_idle": 2.0}
    done = {"round": 4, "batch": 8, "inner_steps": 9, "loss": 1.5, "times": times, "payload_sent": {"b": 7}}
    view.take({"event": "round", **done})
    assert (view.round, view.batch, view.inner_steps, view.loss) == (4, 8, 9, 1.5)
    tally = view.record.tally
    assert (tally.share("straggler_idle"), tally.share("wan_idle"), tally.bytes_sent) == (0.1, 0.2, 7)
    view.take({"event": "exit", "exit_code": 0, "reason": "done"})
    assert (view.state, view.round) == ("ended (0): done", 4)
    shown = table("t", [view, SiteView("b")])
    assert shown.row_count == 2


def test_a_rounds_line_waits_for_all_who_are_at_work_and_is_then_the_reports(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site that has committed a round, as its phase shows, gives its account of it a little later."""
    bench.run_folder.mkdir(parents=True)
    mesh = _Mesh(bench.run, bench.run_folder, bench.sites, QUICK)

    def tells(site: str, idle: float, number: int = 1) -> None:
        mesh._on_event(mesh.children[site], {"event": "phase", "phase": "idle", "round": number})
        assert not capsys.readouterr().out
        times = {"wall": 2.0, "straggler_idle": idle, "wan_idle": 0.0}
        finish = {"planned_finish_seconds": 1.0, "finish_seconds": 1.0}
        line = {"round": number, "digest": "ab" * 32, "members": ["a", "b", "c"], "inner_steps": 4, "times": times, **finish}
        mesh._on_event(mesh.children[site], {"event": "round", "contributors": ["a", "b", "c"], **line})

    tells("a", 0.0)
    tells("b", 1.0)
    tells("c", 2.0)
    assert "straggler idle 50.0%" in capsys.readouterr().out
    tells("a", 0.0, 2)
    tells("b", 0.0, 2)
    tells("a", 0.0, 3)
    assert "round   2 " in capsys.readouterr().out, "c, which may be lost, holds up no line once the next round is there"


def test_unequal_digests_are_seen_in_the_line_of_a_round() -> None:
    times = {"wall": 1.0, "straggler_idle": 0.0, "wan_idle": 0.0}
    first = {"round": 1, "digest": "aa" * 32, "times": times, "members": ["a", "b"], "contributors": ["a"]}
    said = line_of(first, {"round": 1, "digest": "bb" * 32})
    assert "aaaaaaaaaaaa != bbbbbbbbbbbb" in said
    assert "1 of 2 contributed" in said


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (3e12, "3.0 TB")])
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


def test_the_table_fits_a_narrow_terminal() -> None:
    long = "exchange (a100, h100, l40s, rtx6000ada: 3.2 s left)"
    view = SiteView("rtx6000ada", PeerRecord("rtx6000ada"), long, 123, 16, 200, 107, 1234.5, 2.3456)
    view.record.tally = Tally(100.0, {"straggler_idle": 11.2, "wan_idle": 13.4}, 12_345_678)
    for width in (80, 120):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table("t", [view], width))
        row = console.export_text().splitlines()[-1]
        assert "107/200" in row
        assert row.split()[-2:] == ["12.3", "MB"]
        assert row.startswith("rtx6000ada exchange")
