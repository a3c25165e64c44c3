"""A peer's folder: what was written comes back, whatever happens in between, and damage is found and named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from crashes import Crash, failing_at_every_step

from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.types import Contribution, Founding, Held, Range, Term, Update
from geomesh_p2p.engine import files
from geomesh_p2p.engine.checkpoint import DiskStore
from geomesh_p2p.engine.files import DiskFullError
from geomesh_p2p.errors import DataError, TemporaryError

FOUNDING = Founding(b"f" * 32, b"n" * 16, 3, b"w" * 32, "peer-a")
DURABLE = Durable(Term(3, "peer-a"), True, 2, Term(3, "peer-a"), 1, b"p" * 32)
LATER = replace(DURABLE, term=Term(4, "peer-b"), voted=False)


def body_of(round: int, variant: str = "") -> bytes:
    return f"body of round {round}{variant} ".encode() * 40


def update_of(round: int, variant: str = "") -> Update:
    body = body_of(round, variant)
    one = Contribution("peer-a", "site-a", round, b"b" * 32, 100, (Range(0, 4), Range(9, 12)), b"q" * 32, 40, 1.5, 30)
    return Update(round, b"b" * 32, "reduce", (Range(0, 8), Range(8, 9)), (one,), ("peer-a",), digest_bytes(body), len(body))


def held_of(round: int, variant: str = "", attempt: int = 1) -> Held:
    return Held(Term(3, "peer-a"), attempt, b"p" * 32, update_of(round, variant))


def pieces(body: bytes) -> list[memoryview | bytes]:
    return [memoryview(body)[:7], b"", bytes(body[7:])]


def filled(folder: Path) -> DiskStore:
    """Founded, with rounds 1 and 2 in the log and round 3 held."""
    store = DiskStore(folder)
    store.save_founding(FOUNDING)
    store.save_durable(DURABLE)
    for round in (1, 2):
        store.append(update_of(round), pieces(body_of(round)))
    store.save_held(held_of(3), pieces(body_of(3)))
    return store


# ---------------------------------------------------------------- round trips


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "new" / "site") as store:
        assert store.load_founding() is store.load_durable() is store.load_held() is None
        assert store.rounds() == range(0)
        assert store.read_update(1) is None


def test_what_was_written_is_there_in_the_next_process(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with DiskStore(tmp_path) as store:
        assert store.load_founding() == FOUNDING
        assert store.load_durable() == DURABLE
        assert store.load_held() == (held_of(3), body_of(3))
        assert store.rounds() == range(1, 3)
        assert [store.read_update(round) for round in (1, 2, 3)] == [*((update_of(r), body_of(r)) for r in (1, 2)), None]


def test_a_held_record_becomes_the_logs_entry_by_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path) as store:
        monkeypatch.setattr(files, "write_synced", lambda *_: pytest.fail("the body was written a second time"))
        store.append(update_of(3), pieces(body_of(3)))
        assert store.load_held() is None
    with DiskStore(tmp_path) as store:
        assert store.rounds() == range(1, 4)
        assert store.read_update(3) == (update_of(3), body_of(3))
        assert store.load_held() is None


def test_a_commit_drops_a_held_record_of_its_round_and_keeps_a_newer_one(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        store.append(update_of(3, "other"), pieces(body_of(3, "other")))
        assert store.load_held() is None
        assert store.read_update(3) == (update_of(3, "other"), body_of(3, "other"))
        store.save_held(held_of(5), pieces(body_of(5)))
        store.append(update_of(4), pieces(body_of(4)))
        assert store.load_held() == (held_of(5), body_of(5))


def test_a_held_record_is_replaced_by_the_next(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        store.save_held(held_of(3, "again", 2), pieces(body_of(3, "again")))
        assert store.load_held() == (held_of(3, "again", 2), body_of(3, "again"))
        store.append(update_of(3), pieces(body_of(3)))
        assert store.read_update(3) == (update_of(3), body_of(3))


def test_an_update_without_a_body_is_kept_too(tmp_path: Path) -> None:
    empty = replace(update_of(3), contributors=(), body=digest_bytes(b""), body_bytes=0)
    with filled(tmp_path) as store:
        store.append(empty, [])
        assert store.read_update(3) == (empty, b"")


def test_rounds_after_a_gap_are_those_that_count(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        for round in (8, 9):
            store.append(update_of(round), pieces(body_of(round)))
        assert store.rounds() == range(8, 10)
        store.prune(9)
        assert store.rounds() == range(9, 10)
        assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["00000009.update"]


# ---------------------------------------------------------------- one process a folder


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    code = f"from geomesh_p2p.engine.checkpoint import DiskStore; s = DiskStore({str(tmp_path)!r}); print(1, flush=1); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(TemporaryError, match=f"process {owner.pid}"):
            DiskStore(tmp_path)
        owner.kill()
        owner.wait()
    DiskStore(tmp_path).close()


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer"])
def test_damage_anywhere_is_found_and_the_file_named(tmp_path: Path, damage: str) -> None:
    filled(tmp_path).close()
    reads = {
        "founding.record": lambda store: store.load_founding(),
        "state.record": lambda store: store.load_durable(),
        "held.record": lambda store: store.load_held(),
        "log/00000002.update": lambda store: store.read_update(2),
    }
    for name, read in reads.items():
        path = tmp_path / name
        sound = path.read_bytes()
        spoilt = {
            "flipped": [sound[:at] + bytes([sound[at] ^ 0x10]) + sound[at + 1 :] for at in range(0, len(sound), 7)],
            "cut": [sound[:size] for size in range(1, len(sound), 11)],
            "empty": [b""],
            "longer": [sound + b"\0"],
        }[damage]
        for data in spoilt:
            path.write_bytes(data)
            with DiskStore(tmp_path) as store, pytest.raises(DataError, match=str(path)):
                read(store)
        path.write_bytes(sound)
        with DiskStore(tmp_path) as store:
            assert read(store) is not None


def test_a_damaged_update_can_be_set_aside_and_fetched_again(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / "log" / "00000002.update").write_bytes(b"")
    with DiskStore(tmp_path) as store:
        aside = store.set_aside(2)
        assert aside.exists()
        assert store.rounds() == range(1, 2)
        store.append(update_of(2), pieces(body_of(2)))
        assert store.read_update(2) == (update_of(2), body_of(2))


def test_a_damaged_held_record_does_not_stop_a_commit(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / "held.record").write_bytes(b"rubbish")
    with DiskStore(tmp_path) as store:
        store.append(update_of(3), pieces(body_of(3)))
        assert store.load_held() is None
        assert store.read_update(3) == (update_of(3), body_of(3))


def test_a_file_of_another_kind_under_a_records_name_is_refused(tmp_path: Path) -> None:
    filled(tmp_path).close()
    shutil.copy(tmp_path / "founding.record", tmp_path / "state.record")
    with DiskStore(tmp_path) as store, pytest.raises(DataError, match=r"state\.record"):
        store.load_durable()
    shutil.copy(tmp_path / "log" / "00000001.update", tmp_path / "log" / "00000002.update")
    with DiskStore(tmp_path) as store, pytest.raises(DataError, match=r"00000002\.update"):
        store.read_update(2)


# ---------------------------------------------------------------- crashes and errors, at every step

WORKS = {
    "save_durable": lambda store: store.save_durable(LATER),
    "save_held": lambda store: store.save_held(held_of(3, "again", 2), pieces(body_of(3, "again"))),
    "append held": lambda store: store.append(update_of(3), pieces(body_of(3))),
    "append other": lambda store: store.append(update_of(3, "other"), pieces(body_of(3, "other"))),
    "prune": lambda store: (store.prune(2), store.save_durable(LATER)),
}


def check_old_or_new(store: DiskStore, work: str) -> None:
    assert store.load_founding() == FOUNDING
    assert store.load_durable() in (DURABLE, LATER)
    assert store.read_update(2) == (update_of(2), body_of(2))
    held, third = store.load_held(), store.read_update(3)
    appended = {"append held": update_of(3), "append other": update_of(3, "other")}.get(work)
    if third is not None:
        assert appended is not None
        assert third[0] == appended
        assert held is None
        assert store.rounds() == range(1, 4)
    else:
        assert held is not None, "the held record may go only with its round's commit"
        assert held[0] in (held_of(3), held_of(3, "again", 2))
        assert store.rounds().stop == 3


@pytest.mark.parametrize("work", WORKS)
def test_after_a_crash_at_any_step_the_old_or_the_new_is_there(tmp_path: Path, work: str) -> None:
    filled(tmp_path / "base").close()
    fresh = count()

    def prepare() -> DiskStore:
        store = DiskStore(shutil.copytree(tmp_path / "base", tmp_path / str(next(fresh))))
        store.load_held()
        return store

    for store in failing_at_every_step(prepare, WORKS[work], Crash):
        store.close()
        with DiskStore(store.folder) as again:
            check_old_or_new(again, work)
            WORKS[work](again)
            check_old_or_new(again, work)
            assert not list(store.folder.rglob("*.partial"))


@pytest.mark.parametrize("work", WORKS)
def test_after_an_error_at_any_step_the_same_process_can_try_again(tmp_path: Path, work: str) -> None:
    filled(tmp_path / "base").close()
    fresh = count()

    def prepare() -> DiskStore:
        return DiskStore(shutil.copytree(tmp_path / "base", tmp_path / str(next(fresh))))

    for store in failing_at_every_step(prepare, WORKS[work], lambda: OSError(28, "No space left on device")):
        check_old_or_new(store, work)
        WORKS[work](store)
        check_old_or_new(store, work)
        store.close()


def test_a_file_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (done.append((name, kind(args[0]))), real(*args))[1])

    def kind(what: int | Path) -> str:
        return ("folder" if os.path.isdir(f"/proc/self/fd/{what}") else "file") if isinstance(what, int) else "name"

    files.write_durably(tmp_path / "x", [b"1", b"2"])
    assert done == [("fsync", "file"), ("rename", "name"), ("fsync", "folder")]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path) as store:
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DiskFullError, match="17 MB are needed") as raised:
            store.save_durable(LATER)
        assert isinstance(raised.value, OSError)
        assert raised.value.exit_code == 75
        assert sorted(tmp_path.rglob("*")) == before
        assert store.load_durable() == DURABLE
