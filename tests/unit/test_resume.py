"""What a restarted peer knows of itself, from a folder that is sound or not."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_checkpoint import DURABLE, FOUNDING, body_of, filled, held_of, pieces, update_of

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core import codec
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.log import LogState, RoundLog
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.types import Contribution, Range, Update
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.files import DiskFullError
from geomesh_p2p.engine.forking import fork
from geomesh_p2p.engine.resume import Rebuilder, resume, retire_identity_without_state
from geomesh_p2p.engine.snapshots import described
from geomesh_p2p.errors import DataError
from tests.injection.proof import fired, inject

SETTINGS = (Layout((Tensor("w", 8, 1),)), CodecSection(), OuterSection())


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def weights() -> Any:
    return SimpleNamespace(weights=lambda: np.zeros(8, np.float32), set_weights=lambda anchor: None)


def snapshot(folder: Path, round: int, run: bytes = FOUNDING.run) -> Snapshots:
    snapshots = Snapshots(folder)
    state = LogState(run, round, b"d" * 32, ("peer-a", "peer-b"), (Range(0, 4),), 100)
    snapshots.write(state, np.ones(8, np.float32), np.zeros(8, np.float32))
    return snapshots


def test_a_damaged_newest_update_is_set_aside_but_not_forgotten(tmp_path: Path) -> None:
    """At the restart after that too, as the peer has not caught up yet."""
    with filled(tmp_path) as store:
        snapshots = snapshot(tmp_path, 2)
        store.append(update_of(3), pieces(body_of(3)))
        spoil(tmp_path / "log" / "00000003.update")
        found = resume(store, snapshots, weights(), FOUNDING, SETTINGS)
        assert (found.log.round, found.newest_ever) == (2, 3)
        assert "00000003.damaged" in found.warnings[0]
    with DiskStore(tmp_path) as store:
        assert resume(store, snapshots, weights(), FOUNDING, SETTINGS).newest_ever == 3


@pytest.mark.case("C091")
def test_a_damaged_newest_snapshot_is_said_and_not_forgotten(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        snapshot(tmp_path, 2)
        snapshots = snapshot(tmp_path, 7)
        spoil(snapshots.path(7) / "shared.safetensors")
        found = resume(store, snapshots, weights(), FOUNDING, SETTINGS)
        assert (found.log.round, found.newest_ever) == (2, 7)
        (said,) = found.warnings
        assert f"{snapshots.path(7) / 'shared.safetensors'} is damaged in its mebibyte 0" in said


def test_a_snapshot_of_another_run_is_refused(tmp_path: Path) -> None:
    with filled(tmp_path) as store, pytest.raises(DataError, match="snapshot-2 is of another run"):
        resume(store, snapshot(tmp_path, 2, b"x" * 32), weights(), FOUNDING, SETTINGS)


@pytest.mark.parametrize("name", ["held.record", "state.record"])
def test_a_damaged_promise_costs_the_identity(tmp_path: Path, name: str) -> None:
    """The peer must not go on as if it had promised nothing, and need not be helped by hand."""
    filled(tmp_path).close()
    (tmp_path / "identity.key").write_bytes(b"key")
    with DiskStore(tmp_path) as store:
        assert retire_identity_without_state(store, tmp_path) == ""
    spoil(tmp_path / name)
    with DiskStore(tmp_path) as store:
        assert name in retire_identity_without_state(store, tmp_path)
        assert not (tmp_path / "identity.key").exists()
        assert len(list(tmp_path.glob("identity.key.retired-*"))) == 1
        assert store.load_durable() != DURABLE
        assert store.load_held() == ((held_of(3), body_of(3)) if name == "state.record" else None)
        (tmp_path / "identity.key").write_bytes(b"new key")
        assert retire_identity_without_state(store, tmp_path) == ""
        assert (tmp_path / "identity.key").read_bytes() == b"new key"


# ---------------------------------------------------------------- a state made anew


def run_on_disk(folder: Path, rounds: int = 6, every: int = 2, wrong_from: int = 99) -> tuple[DiskStore, Snapshots, Any]:
    """A log of `rounds` updates whose contributors name the sound state after each second round; this peer's snapshots hold
    another value from round `wrong_from` on."""
    layout, section, outer = SETTINGS
    store, snapshots = DiskStore(folder), Snapshots(folder, keep=3)
    sound = OuterState.founded(np.zeros(8, np.float32))
    log, said = RoundLog.founded(REBUILT), b""
    for round in range(1, rounds + 1):
        payload = codec.encode(layout, np.full(8, round, np.float32), np.zeros(8, np.float32), section)
        assert isinstance(payload, np.ndarray)
        ranges = (Range(round, round + 1),)
        one = Contribution("p", "p", round, log.digest, 1, ranges, digest_bytes(payload), payload.size, state=said)
        update = Update(round, log.digest, "gather", (), (one,), ("p",), digest_bytes(payload), payload.size)
        log.append(update)
        store.append(update, [payload.tobytes()])
        apply_update(sound, layout, section, outer, update, payload)
        said = b""
        if round % every == 0:
            said = described(log.state, sound.anchor, sound.momentum).content
            mine = sound.anchor + np.float32(round >= wrong_from)
            snapshots.write(log.state, mine, sound.momentum)
    return store, snapshots, sound


REBUILT = replace(FOUNDING, weights=digest_bytes(np.zeros(8, np.float32)))


def rebuilder(store: DiskStore, snapshots: Snapshots, initial: float = 0.0) -> Rebuilder:
    return Rebuilder(store, snapshots, lambda: np.full(8, initial, np.float32), REBUILT, SETTINGS)


@pytest.mark.case("C070")
@pytest.mark.parametrize("wrong_from", [99, 4, 2])
def test_a_state_is_made_anew_from_the_newest_snapshot_that_the_log_agrees_with(tmp_path: Path, wrong_from: int) -> None:
    store, snapshots, sound = run_on_disk(tmp_path, wrong_from=wrong_from)
    made = rebuilder(store, snapshots)(6)
    assert made is not None
    assert np.array_equal(made[0], sound.anchor)
    assert np.array_equal(made[1], sound.momentum)
    assert all(rebuilder(store, snapshots).vouched(round) for round in (2, 4)), "those that held something else are replaced"
    assert np.array_equal(snapshots.read_state(6)[0], sound.anchor)


@pytest.mark.case("C070")
@pytest.mark.case("C090")
@pytest.mark.fault
def test_a_wrong_snapshot_that_cannot_be_replaced_on_a_full_disk_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on with the state made anew, and no later start begins from the wrong one."""
    store, snapshots, sound = run_on_disk(tmp_path, wrong_from=4)
    asked = list[Path]()

    def full(folder: Path, size_bytes: int) -> None:
        asked.append(folder)
        raise DiskFullError(errno.ENOSPC, "full")

    inject(lambda: monkeypatch.setattr("geomesh_p2p.engine.snapshots.require_space", full))
    made = rebuilder(store, snapshots)(6)
    fired(asked, "there was no room")
    assert made is not None
    assert np.array_equal(made[0], sound.anchor)
    assert snapshots.rounds() == [2]


def test_a_snapshot_that_no_update_speaks_of_is_not_trusted(tmp_path: Path) -> None:
    store, snapshots, _ = run_on_disk(tmp_path)
    assert not rebuilder(store, snapshots).vouched(6), "nothing follows it yet"
    assert rebuilder(store, snapshots).vouched(4)


def test_nothing_sound_on_disk_is_said(tmp_path: Path) -> None:
    store, snapshots, _ = run_on_disk(tmp_path, wrong_from=0)
    assert rebuilder(store, snapshots, initial=1.0)(6) is None
    store.prune(3)
    assert rebuilder(store, snapshots)(6) is None


def close_pruned(store: DiskStore) -> None:
    """Without its first updates, as the folder of a run that has gone on for long."""
    store.prune(3)
    store.save_founding(REBUILT)
    store.close()


def fork_of(folder: Path, round: int) -> Path | None:
    engine: Any = SimpleNamespace(initial_weights=lambda: np.zeros(8, np.float32))
    return fork(folder, round, (REBUILT.fingerprint, "a"), engine, SETTINGS)


def test_no_round_is_named_for_a_fork_that_the_log_contradicts(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    store, _, _ = run_on_disk(folder, wrong_from=0)
    close_pruned(store)
    with pytest.raises(DataError, match=r"--fork-from 1: the update of round 1 is not on disk \(last round: 6\)$"):
        fork_of(folder, 1)


@pytest.mark.parametrize("missed", [1, 3])
def test_a_round_that_is_said_to_work_for_a_fork_does(missed: int, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    store, snapshots, _ = run_on_disk(folder)
    snapshots.drop(2)
    close_pruned(store)
    with pytest.raises(DataError, match=rf"--fork-from {missed}: .*: the oldest later one that works is round 4$"):
        fork_of(folder, missed)
    aside = fork_of(folder, 4)
    assert aside is not None
    assert Snapshots(folder).rounds() == [4]


@pytest.mark.case("C070")
def test_nobody_resumes_from_a_snapshot_that_the_log_contradicts(tmp_path: Path) -> None:
    """The last one, of which no update speaks yet, is judged by the others once this peer is back."""
    store, snapshots, sound = run_on_disk(tmp_path, wrong_from=4)
    snapshots.drop(6)
    found = resume(store, snapshots, weights(), REBUILT, SETTINGS)
    assert snapshots.rounds() == [2]
    assert (found.log.round, found.newest_ever) == (6, 6)
    assert np.array_equal(found.state.anchor, sound.anchor)
    assert "snapshot-4 holds another state" in found.warnings[0]


@pytest.mark.case("C070")
def test_of_snapshots_that_are_all_contradicted_none_is_left_and_the_peer_knows_that_it_lacks_rounds(tmp_path: Path) -> None:
    store, snapshots, _ = run_on_disk(tmp_path, wrong_from=0)
    snapshots.drop(6)
    store.prune(3)
    assert rebuilder(store, snapshots)(6) is None
    assert snapshots.rounds() == [], "it is exported by nobody either"
    found = resume(store, snapshots, weights(), REBUILT, SETTINGS)
    assert (found.log.round, found.newest_ever) == (0, 6)


# ---------------------------------------------------------------- what was left unsaid

KEEPS = (SETTINGS[0], CodecSection(residual=True), SETTINGS[2])


def with_residuals(folder: Path, values: int = 8, stop: int = 7) -> Snapshots:
    snapshots, vector = Snapshots(folder), np.arange(values, dtype=np.float32)
    state = LogState(FOUNDING.run, 2, b"d" * 32, ("peer-a",), (), 100)
    part = (Range(3, stop), np.arange(stop - 3, dtype=np.float32) / 2)
    snapshots.write(state, np.ones(8, np.float32), np.zeros(8, np.float32), vector, None, part)
    return snapshots


@pytest.mark.case("C066")
def test_residuals_come_back_with_the_snapshot_of_the_last_round(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        found = resume(store, with_residuals(tmp_path), weights(), FOUNDING, KEEPS)
    assert found.warnings == ()
    assert found.residual is not None
    assert list(found.residual) == list(range(8))
    assert found.part_residual is not None
    assert (found.part_residual[0], list(found.part_residual[1])) == (Range(3, 7), [0.0, 0.5, 1.0, 1.5])


@pytest.mark.case("C066")
@pytest.mark.parametrize("why", ["other tensors", "other tensors of a part", "damaged", "later rounds"])
def test_a_residual_that_cannot_be_used_is_said_and_dropped(tmp_path: Path, why: str) -> None:
    with DiskStore(tmp_path) as store:
        snapshots = with_residuals(tmp_path, 9 if why == "other tensors" else 8, 9 if why == "other tensors of a part" else 7)
        if why == "damaged":
            spoil(tmp_path / "snapshot-2" / "residual.safetensors")
        if why == "later rounds":
            payload = codec.encode(SETTINGS[0], np.ones(8, np.float32), np.zeros(8, np.float32), SETTINGS[1])
            assert isinstance(payload, np.ndarray)
            one = Contribution("p", "p", 3, b"d" * 32, 1, (Range(5, 6),), digest_bytes(payload), payload.size)
            update = Update(3, b"d" * 32, "gather", (), (one,), ("peer-a",), digest_bytes(payload), payload.size)
            store.append(update, [payload.tobytes()])
        found = resume(store, snapshots, weights(), FOUNDING, KEEPS)
    assert (found.residual, found.part_residual) == (None, None)
    assert "unsaid is lost" in found.warnings[-1]
    assert len(found.warnings) == 1 + (why == "damaged")


def test_a_run_that_keeps_no_residuals_says_nothing_of_them(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        assert resume(store, with_residuals(tmp_path), weights(), FOUNDING, SETTINGS).warnings == ()
