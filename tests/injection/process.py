"""Faults on real peers, by the table of script.py: rows lie in a folder that all peers of a mesh watch (see peer.py).

    faults = Faults(mesh)
    row = faults.arm(At("leader", "in_commit", -5, step=1), Fault("kill"))
    site = faults.victim(row)                        # who did it: known once it has claimed the row
    fired(site.process.wait() == -9, "the kill")     # and that is seen apart from it

Whichever peer first reaches a moment that fits claims the row, so that it is done once, by that process to itself. Faults of
links are the network's (proxy.py): a test does them when a row of kind "mark" is claimed, or whenever it likes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.injection.proof import injecting
from tests.injection.script import At, Fault

if TYPE_CHECKING:
    from tests.process.sites import Site, Sites

ROWS = "GEOMESH_TEST_ROWS"   # the folder of rows
TELL_SIZES = "GEOMESH_TEST_SIZES"   # 1: a peer tells the sizes of its tables
ASKED_FOR = "a crash that was asked for"
OWN_KINDS = ("hold_gil", "crash", "stall", "mark")


@dataclass(frozen=True)
class ProcessFault:
    """What only a process can do: hold its interpreter lock for `seconds`, raise an exception where there should be none,
    block the thread that it is in; or nothing at all, as the test does it ("mark")."""

    kind: str
    seconds: float = 0.0
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in OWN_KINDS:
            raise ValueError(f"fault {self.kind!r}: choose from {', '.join(OWN_KINDS)}")


@dataclass(frozen=True)
class Row:
    path: Path
    at: At
    fault: Fault | ProcessFault

    def claim(self, site: str, round: int, now: float) -> bool:
        """True for the one process that gets it."""
        mine = self.path.with_suffix(f".{site}.{os.getpid()}")
        mine.write_text(json.dumps({"site": site, "round": round, "time": now, "pid": os.getpid()}))
        try:
            os.rename(self.path, self.path.with_suffix(".taken"))
            os.rename(mine, self.path.with_suffix(".claim"))
        except FileNotFoundError:
            mine.unlink()
            return False
        return True


def waiting_rows(folder: Path) -> list[Row]:
    rows = []
    for path in sorted(folder.glob("*.row")):
        try:
            told = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # claimed just now
        kind = ProcessFault if told["fault"]["kind"] in OWN_KINDS else Fault
        rows.append(Row(path, At(**told["at"]), kind(**told["fault"])))
    return rows


class Faults:
    """The rows of a mesh. Its peers must be `STRUCK` ones (sites.py)."""

    def __init__(self, mesh: Sites) -> None:
        self.mesh = mesh
        self.folder = mesh.folder / "rows"
        self.folder.mkdir()
        mesh.environment[ROWS] = str(self.folder)
        self._made = 0

    def arm(self, at: At, fault: Fault | ProcessFault) -> Path:
        """The row's name. Without effect while injections are switched off."""
        path = self.folder / f"{self._made:04}.row"
        self._made += 1
        if injecting():
            told = path.with_suffix(".new")
            told.write_text(json.dumps({"at": asdict(at), "fault": asdict(fault)}))
            os.rename(told, path)
        return path

    def disarm(self, row: Path) -> bool:
        """Whether nobody had claimed it."""
        try:
            row.unlink()
        except FileNotFoundError:
            return False
        return True

    def claim(self, row: Path) -> dict[str, Any] | None:
        """Who reached it, when and in which round; None as long as nobody has."""
        try:
            return dict(json.loads(row.with_suffix(".claim").read_text()))
        except FileNotFoundError:
            return None

    def victim(self, row: Path, until: Callable[..., Any], limit_seconds: float = 150.0) -> Site | None:
        """The site that reached it, waited for; None at once while injections are switched off."""
        if not injecting():
            return None
        claim = until(lambda: self.claim(row), f"a peer to reach {row.name}", limit_seconds)
        return self.mesh[claim["site"]]


# ---------------------------------------------------------------- what is seen of it


def stopped(pid: int) -> bool:
    """Whether the kernel shows the process as stopped (SIGSTOP)."""
    return state(pid) == "T"


def state(pid: int) -> str:
    """The state letter of /proc/PID/stat, "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def gone(pid: int) -> bool:
    return state(pid) in ("", "Z", "X")


def kill(site: Site) -> int:
    """kill -9, and the exit code that the kernel tells."""
    assert site.process is not None
    process = site.process
    site.kill()
    return int(process.returncode)


def pause(site: Site) -> None:
    """SIGSTOP; returns once the kernel shows it as stopped, or gone."""
    assert site.process is not None
    os.kill(site.process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10.0
    while not stopped(site.process.pid) and not gone(site.process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def wake(site: Site) -> None:
    assert site.process is not None
    os.kill(site.process.pid, signal.SIGCONT)
