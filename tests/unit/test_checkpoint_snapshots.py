"""Snapshots: written aside, checked chunk by chunk, fallen back from, handed on to joiners."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from crashes import Crash, failing_at_every_step
from safetensors.numpy import load_file

from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.types import Range
from geomesh_p2p.engine import files
from geomesh_p2p.engine import snapshots as snapshots_module
from geomesh_p2p.engine.checkpoint import DiskStore
from geomesh_p2p.engine.files import DiskFullError
from geomesh_p2p.engine.snapshots import CHUNK_BYTES, Manifest, Snapshot, Snapshots
from geomesh_p2p.errors import DataError

SIZE = 200_003  # anchor and momentum make two chunks, the second one short


def vector(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def state(round: int) -> LogState:
    return LogState(b"r" * 32, round, bytes([round]) * 32, ("a", "b"), (Range(0, 5), Range(7, 9)), 1000 * round)


def save_inner(path: str) -> None:
    Path(path).write_bytes(b"inner state " * 100)


def write(snapshots: Snapshots, round: int, size: int = SIZE) -> Manifest:
    anchor, momentum, residual = vector(round, size), vector(-round % 97, size), vector(round + 50, size)
    manifest = snapshots.write(state(round), anchor, momentum, residual, save_inner)
    snapshots.delete_older(round)
    return manifest


def sound(snapshot: Snapshot | None, round: int, size: int = SIZE) -> bool:
    assert snapshot is not None
    return (
        snapshot.manifest.state == state(round)
        and snapshot.anchor.tobytes() == vector(round, size).tobytes()
        and snapshot.momentum.tobytes() == vector(-round % 97, size).tobytes()
    )


def snapshot_names(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith("snapshot")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", [1, 1000, 131_061, 131_062, 131_072, SIZE])
def test_what_was_written_comes_back(tmp_path: Path, size: int) -> None:
    manifest = write(Snapshots(tmp_path), 3, size)
    assert manifest.size_bytes == (tmp_path / "snapshot-3" / "shared.safetensors").stat().st_size
    assert len(manifest.chunks) == -(-manifest.size_bytes // CHUNK_BYTES)
    snapshot = Snapshots(tmp_path).newest()
    assert sound(snapshot, 3, size)
    assert snapshot.manifest == manifest
    assert snapshot.residual.tobytes() == vector(53, size).tobytes()
    assert snapshot.inner.read_bytes() == b"inner state " * 100
    assert snapshot.problems == ()
    np.add(snapshot.anchor, snapshot.momentum, out=snapshot.anchor)  # folding goes on in these arrays


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    write(Snapshots(tmp_path), 3)
    shared = load_file(tmp_path / "snapshot-3" / "shared.safetensors")
    assert np.array_equal(shared["anchor"], vector(3))
    assert np.array_equal(shared["momentum"], vector(-3 % 97))
    assert np.array_equal(load_file(tmp_path / "snapshot-3" / "residual.safetensors")["residual"], vector(53))


def test_without_residual_and_inner_state_there_are_none(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.write(state(2), vector(2), vector(4))
    snapshot = snapshots.newest()
    assert snapshot.residual is None
    assert snapshot.inner is None
    assert snapshot.problems == ()


def test_every_peer_makes_the_same_manifest_of_the_same_round(tmp_path: Path) -> None:
    one = write(Snapshots(tmp_path / "a"), 3)
    other = Snapshots(tmp_path / "b").write(state(3), vector(3), vector(-3 % 97))
    assert one.digest == other.digest
    assert Manifest.unpack(one.pack()) == one
    assert write(Snapshots(tmp_path / "c"), 4).digest != one.digest


@pytest.mark.case("C092")
def test_the_newest_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    assert snapshots.newest() is None
    for round in (5, 10, 15, 20):
        write(snapshots, round, 1000)
    assert names(tmp_path) == ["snapshot-15", "snapshot-20"]
    assert snapshots.rounds() == [15, 20]


def test_one_that_a_joiner_reads_stays_until_it_has_been_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, now = Snapshots(tmp_path, keep=2), [1000.0]
    monkeypatch.setattr("geomesh_p2p.engine.snapshots.time.monotonic", lambda: now[0])
    for round in (5, 10):
        write(snapshots, round, 1000)
    for round in (15, 20, 25):
        snapshots.read_chunk(5, 0, 100)
        snapshots.read_chunk(round - 5, 0, 100)
        write(snapshots, round, 1000)
    assert snapshots.rounds() == [5, 20, 25], "one, however many are read"
    now[0] += 100.0
    write(snapshots, 30, 1000)
    assert snapshots.rounds() == [25, 30]


@pytest.mark.case("C092")
def test_nothing_is_deleted_until_the_new_one_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    for round in (5, 10):
        write(snapshots, round, 1000)
    real = os.write

    def spoiling(descriptor: int, data: memoryview) -> int:
        return real(descriptor, bytes(data[:-1]) + bytes([data[-1] ^ 1]) if len(data) > 5000 else data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", spoiling)
        with pytest.raises(OSError, match=r"snapshot-15.*shared\.safetensors"):
            write(snapshots, 15, 1000)
    assert names(tmp_path) == ["snapshot-10", "snapshot-5"]
    assert sound(snapshots.newest(), 10, 1000)


# ---------------------------------------------------------------- damage


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        at = len(data) * 3 // 4
        flipped = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        path.write_bytes({"cut": data[:-100], "empty": b"", "flipped": flipped}[how])


@pytest.mark.case("C091")
@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "missing"])
@pytest.mark.parametrize("name", ["shared.safetensors", "meta.json"])
def test_a_damaged_snapshot_is_named_and_the_one_before_is_used(tmp_path: Path, name: str, how: str) -> None:
    snapshots = Snapshots(tmp_path)
    write(snapshots, 5)
    write(snapshots, 10)
    spoil(tmp_path / "snapshot-10" / name, how)
    snapshot = snapshots.newest()
    assert sound(snapshot, 5)
    assert len(snapshot.problems) == 1
    assert str(tmp_path / "snapshot-10" / name) in snapshot.problems[0]
    where = {"cut": "missing or cut short", "empty": "missing or cut short", "missing": "missing or cut short"}
    if name == "shared.safetensors":
        assert where.get(how, "damaged in its mebibyte 1") in snapshot.problems[0], "the second: they are counted from 0"
    spoil(tmp_path / "snapshot-5" / name, how)
    with pytest.raises(DataError, match="no snapshot can be read") as raised:
        snapshots.newest()
    for round in (5, 10):
        assert str(tmp_path / f"snapshot-{round}" / name) in str(raised.value)


def test_a_byte_flipped_anywhere_in_the_description_is_found(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    write(snapshots, 5, 100)
    path = tmp_path / "snapshot-5" / "meta.json"
    data = path.read_bytes()
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if bytes([data[at]]).isspace():  # between the values, it means nothing
            continue
        with pytest.raises(DataError, match=str(path)):
            snapshots.verify(5)


@pytest.mark.case("C091")
@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "missing"])
@pytest.mark.parametrize("name", ["residual.safetensors", "inner.pt"])
def test_a_damaged_private_file_is_named_and_done_without(tmp_path: Path, name: str, how: str) -> None:
    snapshots = Snapshots(tmp_path)
    write(snapshots, 5)
    spoil(tmp_path / "snapshot-5" / name, how)
    snapshot = snapshots.newest()
    assert sound(snapshot, 5)
    assert str(tmp_path / "snapshot-5" / name) in snapshot.problems[0]
    assert (snapshot.residual is None) == (name == "residual.safetensors")
    assert (snapshot.inner is None) == (name == "inner.pt")


# ---------------------------------------------------------------- crashes and errors, at every step


@pytest.mark.case("C089")
def test_every_file_is_on_disk_and_read_back_before_the_snapshot_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename, verify = os.fsync, os.rename, snapshots_module._verify

    def note_fsync(descriptor: int) -> None:
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix()))
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        done.append(("rename", target.relative_to(tmp_path).as_posix()))
        rename(source, target)

    def note_verify(folder: Path) -> None:
        done.append(("read", folder.relative_to(tmp_path).as_posix()))
        verify(folder)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(snapshots_module, "_verify", note_verify)
    part = (Range(3, 7), vector(1, 4))
    Snapshots(tmp_path).write(state(3), vector(1, 1000), vector(2, 1000), vector(3, 1000), save_inner, part)
    named = done.index(("rename", "snapshot-3"))
    files = {path.name for path in (tmp_path / "snapshot-3").iterdir()}
    assert files == {"shared.safetensors", "residual.safetensors", "part.safetensors", "inner.pt", "meta.json"}
    before = {("fsync", f"snapshot-3.partial/{name}") for name in files} | {("fsync", "snapshot-3.partial")}
    assert set(done[:named]) == before | {("read", "snapshot-3.partial")}
    assert done[named + 1 :] == [("fsync", ".")], "and the new name itself"


@pytest.mark.case("C089")
@pytest.mark.parametrize("round", [20, 15])
def test_after_a_crash_at_any_step_a_sound_snapshot_is_there(tmp_path: Path, round: int) -> None:
    """Round 20 is new, round 15 replaces the newest one."""
    base = Snapshots(tmp_path / "base")
    for before in (10, 15):
        write(base, before, 1000)
    fresh = count()

    def prepare() -> Snapshots:
        return Snapshots(shutil.copytree(tmp_path / "base", tmp_path / str(next(fresh))))

    for snapshots in failing_at_every_step(prepare, lambda s: write(s, round, 1000), Crash):
        DiskStore(snapshots.folder).close()
        again = Snapshots(snapshots.folder)
        newest = again.newest()
        assert newest.manifest.round in (15, round)
        assert sound(newest, newest.manifest.round, 1000)
        assert newest.problems == ()
        assert all(name.removeprefix("snapshot-").isdigit() for name in snapshot_names(again.folder))
        write(again, round, 1000)
        assert sound(again.newest(), round, 1000)


@pytest.mark.case("C090")
@pytest.mark.parametrize("round", [20, 15])
def test_an_error_at_any_step_leaves_the_old_ones_and_no_rubbish(tmp_path: Path, round: int) -> None:
    base = Snapshots(tmp_path / "base")
    for before in (10, 15):
        write(base, before, 1000)
    fresh = count()

    def prepare() -> Snapshots:
        return Snapshots(shutil.copytree(tmp_path / "base", tmp_path / str(next(fresh))))

    for snapshots in failing_at_every_step(prepare, lambda s: write(s, round, 1000), lambda: OSError(28, "No space left")):
        newest = snapshots.newest()
        assert newest.manifest.round in (15, round)
        assert sound(newest, newest.manifest.round, 1000)
        assert all(name.removeprefix("snapshot-").isdigit() for name in names(snapshots.folder))
        write(snapshots, round, 1000)
        assert names(snapshots.folder) == (["snapshot-10", "snapshot-15"] if round == 15 else ["snapshot-15", "snapshot-20"])


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(tmp_path)
    manifest = write(Snapshots(tmp_path / "donor"), 5)
    shutil.rmtree(tmp_path / "donor")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=17_000_000))
    for attempt in (lambda: write(snapshots, 5), lambda: snapshots.receive(manifest)):
        with pytest.raises(DiskFullError, match="are needed"):
            attempt()
    assert names(tmp_path) == []


# ---------------------------------------------------------------- from peer to peer


def test_a_joiner_receives_in_any_order_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    donor, joiner = Snapshots(tmp_path / "donor"), Snapshots(tmp_path / "joiner")
    manifest = write(donor, 5)
    receiver = joiner.receive(Manifest.unpack(manifest.pack()))
    wanted = receiver.missing()
    assert [(r.start, r.stop) for r in wanted] == [(0, CHUNK_BYTES), (CHUNK_BYTES, manifest.size_bytes)]
    with pytest.raises(ValueError, match="2 chunks"):
        receiver.finish()
    receiver.write(wanted[1].start, donor.read_chunk(5, wanted[1].start, len(wanted[1])))
    receiver.close()
    DiskStore(tmp_path / "joiner").close()
    joiner = Snapshots(tmp_path / "joiner")
    assert joiner.newest() is None
    receiver = joiner.receive(manifest)
    assert receiver.missing() == wanted[:1]
    receiver.write(0, donor.read_chunk(5, 0, CHUNK_BYTES))
    receiver.finish()
    snapshot = joiner.newest()
    assert sound(snapshot, 5)
    assert snapshot.manifest.digest == manifest.digest
    assert snapshot.residual is snapshot.inner is None
    assert snapshot_names(tmp_path / "joiner") == ["snapshot-5"]
    anchor, momentum = joiner.read_state(5)
    assert anchor.tobytes() == vector(5).tobytes()
    assert momentum.tobytes() == vector(-5 % 97).tobytes()


def test_bytes_that_do_not_fit_the_manifest_are_refused(tmp_path: Path) -> None:
    donor, joiner = Snapshots(tmp_path / "donor"), Snapshots(tmp_path / "joiner")
    receiver = joiner.receive(write(donor, 5))
    chunk = donor.read_chunk(5, 0, CHUNK_BYTES)
    for offset, data in (
        (0, chunk[:-1]),
        (0, chunk[:-1] + bytes([chunk[-1] ^ 1])),
        (8, chunk),
        (CHUNK_BYTES, chunk),
        (7 * CHUNK_BYTES, chunk),
        (-CHUNK_BYTES, chunk),
    ):
        with pytest.raises(DataError, match="do not fit"):
            receiver.write(offset, data)
    assert len(receiver.missing()) == 2


def test_of_what_was_begun_the_newest_is_kept_beside_a_newer_one(tmp_path: Path) -> None:
    donor, joiner = Snapshots(tmp_path / "donor"), Snapshots(tmp_path / "joiner")
    joiner.receive(write(donor, 5)).close()
    joiner.receive(write(donor, 10)).close()
    assert names(tmp_path / "joiner") == ["snapshot-10.received", "snapshot-5.received"]
    joiner.receive(write(donor, 15)).close()
    assert names(tmp_path / "joiner") == ["snapshot-10.received", "snapshot-15.received"]
    assert joiner.receiving() == [10, 15]
    joiner.forget_received()
    assert names(tmp_path / "joiner") == []


def test_a_snapshot_that_is_gone_is_a_lookup_error(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    with pytest.raises(LookupError):
        snapshots.read_chunk(5, 0, 10)
    with pytest.raises(LookupError):
        snapshots.manifest(5)
    with pytest.raises(LookupError):
        snapshots.read_state(5)


def test_a_snapshot_written_again_is_described_as_it_now_is(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    write(snapshots, 5, 1000)
    assert snapshots.manifest(5).parameters == 1000
    os.utime(tmp_path / "snapshot-5" / "meta.json", ns=(1, 1))  # clocks of file systems are coarse
    write(snapshots, 5, 2000)
    assert snapshots.manifest(5).parameters == 2000
    assert snapshots.described(snapshots.manifest(5).pack()) == snapshots.manifest(5)


def test_reading_a_folder_in_use_changes_nothing_in_it(tmp_path: Path) -> None:
    write(Snapshots(tmp_path), 5, 1000)
    (tmp_path / "snapshot-10.partial").mkdir()
    assert sound(Snapshots(tmp_path).newest(), 5, 1000)
    assert names(tmp_path) == ["snapshot-10.partial", "snapshot-5"]


def test_a_manifest_whose_sizes_disagree_is_refused(tmp_path: Path) -> None:
    manifest = write(Snapshots(tmp_path), 5, 1000)
    for wrong in (replace(manifest, parameters=0), replace(manifest, parameters=10**9), replace(manifest, chunks=())):
        with pytest.raises(ValueError, match="manifest"):
            Manifest.unpack(wrong.pack())
    with pytest.raises(ValueError, match="Manifest"):
        Manifest.unpack(b"\x93\x01\x02\x03")
