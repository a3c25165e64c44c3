"""The driver of the soak: what it takes for the work of its own faults, and what for a finding."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.injection.process import Faults
from tests.injection.script import At, Fault
from tests.soak.faulty import Driver


class DeadSite:
    """One that has ended with SIGKILL, as seen by a driver that did not look in between."""

    name = "a"
    alive = False
    round = 7

    def __init__(self) -> None:
        self.process: Any = SimpleNamespace(poll=lambda: -signal.SIGKILL)
        self.notes: list[str] = []

    def start(self) -> None:
        self.process = SimpleNamespace(poll=lambda: None)

    def history(self, kind: str) -> list[str]:
        return self.notes

    def log(self) -> str:
        return "its last line"


class Mesh(list[DeadSite]):
    def __init__(self, folder: Path) -> None:
        super().__init__([DeadSite()])
        self.folder, self.environment = folder, dict[str, str]()

    def __getitem__(self, name: Any) -> Any:
        return next(site for site in self if site.name == name)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    mesh: Any = Mesh(tmp_path)
    driver = Driver(mesh, SimpleNamespace(), Faults(mesh), seed=1)  # type: ignore[arg-type]
    driver.arm("kill", At("a", "training"), Fault("kill"))
    return driver


def test_a_kill_that_was_claimed_since_the_last_look_is_no_finding(driver: Driver) -> None:
    assert driver.armed is not None
    row = driver.armed[0]
    row.rename(row.with_suffix(".taken"))
    row.with_suffix(".claim").write_text(json.dumps({"site": "a", "round": 8, "time": time.time(), "pid": 1}))
    driver.watch_processes()
    assert driver.outcome.wrong == []
    assert driver.outcome.struck == {8}


def test_an_exit_that_nobody_asked_for_is_one(driver: Driver) -> None:
    driver.watch_processes()
    assert driver.outcome.wrong == ["a ended with -9: ['its last line']"]
    assert driver.outcome.struck == set()


def test_a_site_is_in_trouble_until_it_has_begun_again(driver: Driver) -> None:
    site: Any = driver.mesh["a"]
    driver.busy["a"] = "leave"
    driver.back(site)
    for _ in range(3):
        _, look = driver.timers.pop()
        look()
        assert "a" in driver.busy
    site.notes.append("start")
    driver.timers.pop()[1]()
    assert driver.busy == {}
