"""Twenty thousand frames of every kind and no kind: nothing is raised, memory stays bounded, and a mesh trains meanwhile.
More of them, with other seeds: python -m tests.fuzz."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.fuzz.frames import KINDS
from tests.fuzz.targets import Figures, fuzz_frames, fuzz_live, memory_mib

FRAMES, LIVE = 18_000, 2_000


@pytest.mark.case("C114")
def test_frames_at_reader_replica_and_exchange() -> None:
    figures, before = Figures(seed=7), memory_mib()
    fuzz_frames(7, FRAMES, figures)
    assert figures.frames == FRAMES
    assert set(figures.heard) == {kind.__name__ for kind in KINDS}, "every type came through"
    assert figures.outcomes["FrameError"] > FRAMES / 4
    assert figures.outcomes["VersionMismatch"] > 0
    assert memory_mib() - before < 256


def test_frames_at_a_mesh_that_trains(tmp_path: Path) -> None:
    figures = Figures(seed=7)
    asyncio.run(fuzz_live(tmp_path, 7, LIVE, figures))
    assert figures.live_frames == LIVE
    assert figures.live_refused > 0
    assert figures.rounds >= 3


def test_a_seed_names_a_run() -> None:
    once, again = Figures(seed=3), Figures(seed=3)
    fuzz_frames(3, 1000, once)
    fuzz_frames(3, 1000, again)
    assert dataclasses.asdict(once) == dataclasses.asdict(again)
