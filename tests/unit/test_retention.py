"""What stays on disk by count and by bytes, and how long the disk then lasts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomesh_p2p.config import RunConfig, SaveSection
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.retention import DiskForecast, DiskSample, above_limit, fullest, retained
from geomesh_p2p.engine import footprint
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.files import write_synced
from geomesh_p2p.swarm.retaining import Retaining
from tests.injection.proof import fired, inject

SIZE = 1000
GB = 10**9
HOUR = 3600.0


# ---------------------------------------------------------------- the decision

sizes = st.dictionaries(st.integers(1, 60), st.integers(1, 500), max_size=20)


@given(sizes, sizes, st.integers(1, 6000), st.sets(st.integers(1, 60)))
def test_the_oldest_go_first_and_what_a_restart_needs_never(
    snapshots: dict[int, int], updates: dict[int, int], limit: int, read: set[int]
) -> None:
    left = retained(snapshots, updates, limit, read)
    stay = [round for round in sorted(snapshots) if round not in left.going]
    log = [round for round in updates if round >= left.first_update]
    assert left.size_bytes == sum(snapshots[round] for round in stay) + sum(updates[round] for round in log)
    assert list(left.going) == sorted(snapshots)[: len(left.going)], "the oldest"
    assert len(stay) >= min(2, len(snapshots))
    assert not read & set(left.going)
    assert set(log) >= {round for round in updates if not stay or round > stay[0]}
    if left.size_bytes > limit:
        assert not stay or set(log) == {round for round in updates if round > stay[0]}, "nothing more could go"
        assert len(stay) <= 2 or stay[0] in read
    elif left.size_bytes < limit and (left.going or len(log) < len(updates)):
        first = max([round for round in updates if round < left.first_update], default=0)
        last_gone = updates[first] if first and (not left.going or first > left.going[-1]) else snapshots[left.going[-1]]
        assert left.size_bytes + last_gone > limit, "no more than needed"


def test_without_a_limit_all_stay() -> None:
    assert retained({5: 100, 10: 100, 15: 100}, {4: 10, 5: 10}, None).going == ()
    assert retained({5: 100, 10: 100, 15: 100}, {4: 10, 5: 10}, None).first_update == 4


def test_updates_before_the_oldest_snapshot_go_before_it_and_those_after_it_with_it() -> None:
    snapshots, updates = {10: 100, 15: 100, 20: 100}, dict.fromkeys(range(6, 21), 10)
    assert retained(snapshots, updates, 430).first_update == 8, "450 bytes: two updates"
    without = retained(snapshots, updates, 310)
    assert (without.going, without.first_update, without.size_bytes) == ((10,), 11, 300)
    least = retained(snapshots, updates, 1)
    assert (least.going, least.first_update, least.size_bytes) == ((10,), 16, 250)


def test_the_most_that_is_kept_follows_from_the_counts_or_the_limit() -> None:
    save = SaveSection(snapshot_every_rounds=5, keep_snapshots=4, keep_updates=100)
    assert fullest(save, 1000, 10).size_bytes == 5 * 1000 + 120 * 10
    limited = save.model_copy(update={"keep_bytes": 3000})
    assert fullest(limited, 1000, 10).size_bytes == 3000 + 1000 + 5 * 10, "one is written before others go"
    assert fullest(limited, 1000, 10).least_bytes == 2 * 1000 + 5 * 10
    assert fullest(save.model_copy(update={"keep_bytes": 1}), 1000, 10).size_bytes == 2050 + 1050
    assert fullest(save.model_copy(update={"keep_bytes": GB}), 1000, 10) == fullest(save, 1000, 10)


# ---------------------------------------------------------------- on disk


def state(round: int) -> LogState:
    return LogState(b"r" * 32, round, bytes([round]) * 32, ("a",), (), round)


def save_snapshot(snapshots: Snapshots, round: int) -> None:
    snapshots.write(state(round), np.ones(SIZE, np.float32), np.ones(SIZE, np.float32))


class Folder:
    """A peer's folder, in which a snapshot is saved every five rounds and each update takes 1000 bytes."""

    def __init__(self, path: Path, **save: Any) -> None:
        self.path, self.said = path, list[Any]()
        section = SaveSection(snapshot_every_rounds=5, **save)
        self.store = DiskStore(path)
        self.snapshots = Snapshots(path, section.keep_snapshots, section.keep_bytes)
        self.retaining = Retaining(self.store, self.snapshots, section, self.said.append)
        self.round = 0

    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round += 1
            write_synced(self.path / "log" / f"{self.round:08d}.update", [bytes(1000)])
            if self.round % 5 == 0:
                save_snapshot(self.snapshots, self.round)
                self.retaining.saved(self.round)

    @property
    def bytes(self) -> int:
        return sum(sum(of.values()) for of in (self.snapshots.sizes(), self.store.sizes()))

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.said if isinstance(event, obs.Warned)]


def one_snapshot(tmp_path: Path) -> int:
    folder = Folder(tmp_path / "measured")
    folder.go_on(5)
    return folder.snapshots.sizes()[5]


def test_a_folder_stays_within_its_limit_and_keeps_the_newest(tmp_path: Path) -> None:
    limit = 3 * one_snapshot(tmp_path) + 20_000
    folder = Folder(tmp_path / "peer", keep_snapshots=10, keep_updates=1000, keep_bytes=limit)
    for _ in range(12):
        folder.go_on(5)
        assert folder.bytes <= limit
        assert limit - folder.bytes < max(folder.snapshots.sizes().values()) or folder.round < 30, "no more goes than must"
        assert folder.store.rounds().start <= folder.snapshots.rounds()[0] + 1
        assert folder.store.rounds().stop == folder.round + 1
    assert folder.snapshots.rounds() == [50, 55, 60]
    assert folder.warnings == []
    kept = [event for event in folder.said if isinstance(event, obs.Kept)][-1]
    assert kept.snapshot_bytes + kept.update_bytes == folder.bytes


def test_what_must_stay_is_told_once_with_figures_if_it_is_above_the_limit(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "peer", keep_snapshots=10, keep_bytes=20_000)
    folder.go_on(40)
    assert folder.snapshots.rounds() == [35, 40]
    assert folder.store.rounds() == range(36, 41)
    (warning,) = folder.warnings
    for word in ("save.keep_bytes is 0 MB", "the last 2 snapshots", f"{folder.bytes / 1e6:,.0f} MB", "raise it"):
        assert word in warning


def test_it_is_not_told_again_when_sizes_change_or_a_joiner_holds_one_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "peer", keep_snapshots=4, keep_bytes=20_000)
    folder.go_on(10)
    folder.snapshots.read_chunk(5, 0, 100)
    folder.go_on(5)
    assert len(folder.snapshots.rounds()) == 3
    folder.snapshots._read_at.clear()  # as if long ago
    folder.go_on(5)
    assert len(folder.snapshots.rounds()) == 2
    assert len(folder.warnings) == 1


def test_fewer_updates_are_advised_only_where_that_could_help() -> None:
    save = SaveSection(snapshot_every_rounds=10)
    assert "snapshot_every_rounds" in above_limit(25 * 10**6, fullest(save, 10**7, 10**6))[1], "two snapshots alone would do"
    assert "snapshot_every_rounds" in above_limit(10**7, fullest(save, 10**7, 10**7))[1], "the updates are the larger share"
    assert above_limit(10**7, fullest(save, 10**7, 10**6))[1] == "raise it (2 snapshots alone take 20 MB)"


def test_a_snapshot_that_a_joiner_reads_stays_with_the_updates_after_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "peer", keep_snapshots=4, keep_bytes=20_000)
    folder.go_on(10)
    folder.snapshots.read_chunk(5, 0, 100)
    folder.go_on(5)
    assert folder.snapshots.rounds() == [5, 10, 15]
    assert folder.store.rounds() == range(6, 16)


@pytest.mark.fault
def test_what_cannot_be_deleted_is_told_and_goes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "peer", keep_updates=2)
    refused = []
    unlink = Path.unlink

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        refused.append(path.name)
        raise OSError(5, "Input/output error", os.fspath(path))

    inject(lambda: monkeypatch.setattr(Path, "unlink", refuse))
    folder.go_on(15)
    fired(refused, "a deletion failed")
    assert any("could not be deleted" in text for text in folder.warnings)
    assert folder.snapshots.rounds() == [10, 15], "snapshots are saved all the same"
    monkeypatch.setattr(Path, "unlink", unlink)
    folder.go_on(5)
    assert folder.store.rounds() == range(16, 21)


# ---------------------------------------------------------------- forecast


def forecast(free: Any, kept: Any, fullest_bytes: int = 0, hours: float = 4.0) -> float:
    """After some hours in which `free` and `kept` (bytes) went as these functions of the seconds."""
    made, at = DiskForecast(), 0.0
    while at <= hours * HOUR:
        made.add(DiskSample(at, free(at), int(kept(at)), fullest_bytes))
        at += 100.0
    return made.full_in_seconds()


def test_nothing_is_foretold_from_minutes() -> None:
    assert math.isnan(DiskForecast().full_in_seconds())
    assert math.isnan(forecast(lambda at: GB - at * 1e5, lambda at: 0, hours=0.4))


def test_a_disk_whose_snapshots_have_reached_their_limit_does_not_fill() -> None:
    assert forecast(lambda at: 5.3 * GB, lambda at: GB, GB) == math.inf
    assert forecast(lambda at: 5.3 * GB - at % 700, lambda at: GB + at % 700, GB) == math.inf, "coming and going"


def test_snapshots_on_their_way_to_their_limit_fill_no_disk_that_holds_it() -> None:
    rate = 1e5
    assert forecast(lambda at: 10 * GB - rate * at, lambda at: rate * at, 9 * GB) == math.inf
    short = forecast(lambda at: 10 * GB - rate * at, lambda at: rate * at, 11 * GB)
    assert short == pytest.approx(10 * GB / rate - 4 * HOUR, rel=0.01)


def test_what_grows_without_end_fills_what_snapshots_leave() -> None:
    lasts = forecast(lambda at: 10 * GB - 1000.0 * at, lambda at: 2 * GB, 2 * GB)
    assert lasts == pytest.approx(10 * GB / 1000.0 - 4 * HOUR, rel=0.01)
    rate = 1e5
    lasts = forecast(lambda at: 10 * GB - (rate + 1000.0) * at, lambda at: rate * at, 3 * GB)
    assert lasts == pytest.approx(7 * GB / 1000.0 - 4 * HOUR, rel=0.01), "3 GB are the snapshots'"


def test_space_that_is_won_back_is_no_growth() -> None:
    assert forecast(lambda at: GB + 1000.0 * at, lambda at: 0) == math.inf


# ---------------------------------------------------------------- before a run


def run_of(**save: Any) -> RunConfig:
    return RunConfig.model_validate({"run": {"id": "x", "rounds": 100_000}, "save": save})


def test_doctor_reckons_with_the_limit_and_says_if_it_cannot_be_held() -> None:
    parameters = 10**6
    one, *rest = footprint.disk_parts(run_of(keep_snapshots=20, keep_bytes=80 * 10**6), parameters, 8)
    assert "save.keep_bytes" in rest[0].what
    assert one.size_bytes + rest[0].size_bytes == (80 + 16 + 5) * 10**6, "one is written before others go"
    assert rest[-1].size_bytes == footprint.notes_bytes(100_000, 8)
    assert footprint.keep_bytes_fault(run_of(keep_bytes=80 * 10**6), parameters, 8) is None
    assert "32 MB" in " ".join(footprint.keep_bytes_fault(run_of(keep_bytes=32 * 10**6), parameters, 8) or ())
    assert footprint.keep_bytes_fault(run_of(), parameters, 8) is None
