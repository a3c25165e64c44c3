"""A peer measures its step times once, and again only for a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.core.types import BatchTime
from geomesh_p2p.engine.profiles import read_profile, step_times

CURVE = (BatchTime(1, 0.5), BatchTime(4, 1.0))
SLOWER = (BatchTime(1, 0.7), BatchTime(4, 1.4))
DEPENDS = {"device": "a GPU", "threads": "4", "torch": "2.5", "model.layers": "8", "inner.optimizer": '"adamw"'}


@dataclass
class Measured:
    """An engine, as far as measuring goes."""

    curve: tuple[BatchTime, ...] = CURVE
    speed_depends_on: dict[str, str] = field(default_factory=lambda: dict(DEPENDS))
    wrong: str = ""
    device_label: str = "a GPU"
    parameters: int = 1000
    times_measured: int = 0

    def measure(self) -> tuple[BatchTime, ...]:
        self.times_measured += 1
        return self.curve

    def disagreement(self, curve: tuple[BatchTime, ...]) -> str:
        assert curve == CURVE
        return self.wrong


def start(engine: Any, path: Path, length: int = 128) -> tuple[tuple[BatchTime, ...], list[str]]:
    said: list[str] = []
    return step_times(engine, length, path, said.append), said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The profile of an earlier life."""
    kept = tmp_path / "profile.json"
    curve, said = start(Measured(), kept)
    assert curve == CURVE
    assert said == ["measuring step times on a GPU (device.profile, made by `geomesh profile`, saves that)"]
    return kept


def test_what_was_measured_is_used_again(path: Path) -> None:
    engine = Measured(SLOWER)
    assert start(engine, path) == (
        CURVE,
        [f"step times measured before on a GPU are used again ({path}; remove it to measure anew)"],
    )
    assert engine.times_measured == 0
    assert read_profile(path, 1000, 128) == CURVE, "a site file may name it too"


def other(**changes: str) -> Callable[[Path], Measured]:
    return lambda path: Measured(SLOWER, {**DEPENDS, **changes})


def torn(path: Path) -> Measured:
    path.write_text(path.read_text()[:40])
    return Measured(SLOWER)


def of_an_older_geomesh(path: Path) -> Measured:
    path.write_text("[[1, 0.5], [4, 1.0]]")
    return Measured(SLOWER)


def not_ascending(path: Path) -> Measured:
    path.write_text(json.dumps({**json.loads(path.read_text()), "curve": [[4, 1.0], [1, 0.5]]}))
    return Measured(SLOWER)


def of_an_emulated_device(path: Path) -> Measured:
    emulated = Measured(speed_depends_on={})
    start(emulated, path)
    assert emulated.times_measured == 1
    return Measured(SLOWER)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other(device="another GPU"), "those in profile.json no longer hold: device was a GPU, is another GPU"),
        (other(threads="2"), "no longer hold: threads was 4, is 2"),
        (other(torch="2.6"), "no longer hold: torch was 2.5, is 2.6"),
        (other(**{"model.layers": "9"}), "no longer hold: model.layers was 8, is 9"),
        (other(**{"inner.optimizer": '"muon"'}), 'no longer hold: inner.optimizer was "adamw", is "muon"'),
        (other(memory="80"), "no longer hold: memory was not there, is 80"),
        (other(a="1", b="2", c="3", d="4"), "c was not there, is 3 and 1 more"),
        (lambda path: Measured(SLOWER, wrong="a step no longer fits"), "(a step no longer fits; "),
        (torn, "profile.json cannot be used"),
        (of_an_older_geomesh, "profile.json cannot be used"),
        (not_ascending, "profile.json cannot be used"),
        (of_an_emulated_device, "those in profile.json were not measured"),
    ],
)
def test_each_reason_to_measure_anew_is_said(path: Path, change: Callable[[Path], Measured], why: str) -> None:
    engine = change(path)
    curve, (line,) = start(engine, path)
    assert curve == SLOWER
    assert line.startswith("measuring step times on a GPU (")
    assert why in line
    assert engine.times_measured == 1
    assert read_profile(path, 1000, 128) == SLOWER, "and kept for the next time"


def test_another_length_or_number_of_parameters_is_another_profile(path: Path) -> None:
    assert start(Measured(SLOWER), path, length=256)[0] == SLOWER
    assert start(Measured(CURVE, parameters=2000), path, length=256)[0] == CURVE


def test_an_emulated_device_measures_nothing_and_says_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        assert start(Measured(speed_depends_on={}), tmp_path / "profile.json") == (CURVE, [])
