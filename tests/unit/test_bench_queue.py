"""Trainings side by side in processes: failures, signals, workers and a command that are killed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tqdm import tqdm

from geomesh_p2p.errors import DataError, Interrupted
from geomesh_p2p.lab.bench.queue import AGAIN, Played, Trainings
from geomesh_p2p.lab.bench.stopping import GRACE_SECONDS, Stop, Stopped
from tests.injection.proof import fired, inject, injecting

LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Stub:
    """Leaves a file with its process's number in the store when it begins."""

    label: str
    does: str = "ends"

    def play(self, store: Path, *, stop: Stop) -> str:
        aside = store / f"{self.label}.new"
        aside.write_text(str(os.getpid()))
        aside.rename(store / self.label)
        match self.does:
            case "ends":
                return f"{self.label} is done"
            case "diverges":
                raise DataError("round 1: a100 has nothing to give")
            case "fills the disk":
                raise OSError(errno.ENOSPC, "No space left on device", "state.new")
            case "breaks":
                raise AssertionError("a bug")
            case "hears":
                until((store / "told").exists)
                return "heard"
            case "shows progress":
                for _ in tqdm([1], file=io.StringIO()):
                    pass
                return "shown"
            case "saves":
                until(lambda: stop.asked)
                (store / f"{self.label}.saved").touch()
                raise Stopped
            case _:
                until(lambda: False)
                return ""


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.02)


def runs(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nothing() -> None:
    pass


def played(store: Path, *does: str, processes: int = 2, tell: Callable[[str], Any] = lambda _text: None) -> Played:
    tasks = [Stub(f"{number}", what) for number, what in enumerate(does)]
    return Trainings(tasks, store, processes, lambda *_: None, tell, nothing).play()


def number_in(path: Path) -> int:
    until(path.exists)
    return int(path.read_text())


def test_a_failure_is_told_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        (tmp_path / "told").touch()

    found = played(tmp_path, "hears", "diverges", "fills the disk", "breaks", "ends", tell=tell)
    assert found.found == {0: "heard", 4: "4 is done"}
    assert told[0] == "1: round 1: a100 has nothing to give"
    disk, bug = sorted(told[1:])  # two of a pair of processes end in any order
    assert disk == "2: state.new: No space left on device: free some space and start again"
    assert bug.startswith("3: Traceback")
    assert "a bug" in bug
    assert [(one.index, one.exit_code) for one in found.failures] == [(1, 4), (2, 75), (3, 1)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_what_runs_be_saved_and_begins_nothing_more(number: signal.Signals, tmp_path: Path) -> None:
    def interrupt() -> None:
        until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        os.kill(os.getpid(), number)

    told: list[str] = []
    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as stopped:
        played(tmp_path, "saves", "saves", "ends", "ends", tell=told.append)
    thread.join()
    assert stopped.value.exit_code == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "0.saved", "1", "1.saved"]
    (line,) = told
    assert AGAIN in line
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_what_does_not_end_by_itself(tmp_path: Path) -> None:
    def interrupt() -> None:
        until((tmp_path / "0").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        played(tmp_path, "hangs", processes=1, tell=lambda _text: os.kill(os.getpid(), signal.SIGINT))
    thread.join()
    assert not runs(number_in(tmp_path / "0"))


@pytest.mark.fault
def test_a_worker_that_is_killed_costs_its_training_alone(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill() -> None:
        killed.append(number_in(tmp_path / "0"))
        inject(lambda: os.kill(killed[0], signal.SIGKILL))

    told: list[str] = []
    thread = threading.Thread(target=kill)
    thread.start()
    found = played(tmp_path, "hangs" if injecting() else "ends", "ends", processes=1, tell=told.append)
    thread.join()
    fired(not runs(killed[0]) and found.failures, "a worker was killed")
    assert found.found == {1: "1 is done"}
    assert told == [f"0: its process was ended by SIGKILL, perhaps for lack of memory (then give fewer --processes): {AGAIN}"]
    assert found.failures[0].exit_code == 75
    assert number_in(tmp_path / "1") != killed[0]


def command(store: Path, *does: str) -> subprocess.Popen[bytes]:
    """A command with two workers, in a process group of its own as from a terminal."""
    code = (
        "import sys, pathlib; from tests.unit import test_bench_queue as q; from geomesh_p2p.lab.bench import stopping\n"
        "if __name__ == '__main__':\n"
        "    try: q.played(pathlib.Path(sys.argv[1]), *sys.argv[2:], tell=stopping.to_stderr)\n"
        "    except q.Interrupted as stopped: sys.exit(stopped.exit_code)\n"
    )
    arguments = [sys.executable, "-c", code, str(store), *does]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, start_new_session=True)


def test_ctrl_c_in_a_terminal_stops_in_good_order(tmp_path: Path) -> None:
    process = command(tmp_path, "saves", "saves", "ends")
    workers = [number_in(tmp_path / name) for name in "01"]
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130
    (line,) = stderr.decode().splitlines()
    assert AGAIN in line
    assert not any(map(runs, workers))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "0.saved", "1", "1.saved"]


@pytest.mark.fault
def test_workers_of_a_command_that_is_killed_save_and_end(tmp_path: Path) -> None:
    process = command(tmp_path, "saves", "saves", "ends")
    workers = [number_in(tmp_path / name) for name in "01"]
    try:
        inject(process.kill)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        fired(process.returncode == -signal.SIGKILL, "the command was killed")
        until(lambda: not any(map(runs, workers)))
        assert all((tmp_path / f"{name}.saved").exists() for name in "01")
    finally:
        process.kill()
        process.communicate()


def test_workers_leave_nothing_behind_that_their_end_does_not_clean_up(tmp_path: Path) -> None:
    """torch.compile shows its progress; a bar's lock, if other processes could share it, would outlive its worker."""
    process = command(tmp_path, "shows progress", "shows progress")
    _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0
    assert stderr == b""
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_round_that_ends_soon_is_waited_for() -> None:
    now = 0.0
    stop = Stop(lambda: now)
    stop.check()
    stop.ask()
    stop.check(GRACE_SECONDS)
    with pytest.raises(Stopped):
        stop.check()
    now = GRACE_SECONDS
    stop.ask()
    with pytest.raises(Stopped):
        stop.check(GRACE_SECONDS)
