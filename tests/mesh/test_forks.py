"""New runs from old states, in virtual time: what a fork's own beginning is worth before its first ordinary snapshot."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from geomesh_p2p.config import OuterSection
from geomesh_p2p.engine import forking
from geomesh_p2p.engine.checkpoint import DiskStore
from tests.injection.proof import fired, inject
from tests.mesh.calm import CalmPeer, until, virtual
from tests.mesh.test_comings import equal_states, kill, mesh_of, round_of, run_of, stop
from tests.mesh.test_flipped_bits import flip, noted, warned
from tests.mesh.test_rollback import contributors


def fork(peer: CalmPeer, round: int) -> Path | None:
    """As `geomesh peer --fork-from` does at the start of `peer`."""
    folder, of = peer.folder / peer.name, (peer.layout, peer.run.codec, OuterSection())
    with DiskStore(folder) as store:
        if store.load_founding() is None:
            store.save_founding(peer.founding)
    me = (peer.founding.fingerprint, peer.peer)
    aside = forking.fork(folder, round, me, peer.make_engine(), of)
    with DiskStore(folder) as store:
        founding = store.load_founding()
    assert founding is not None
    peer.founding = founding
    peer.notes.clear()
    return aside


async def forked(folder: Path) -> tuple[CalmPeer, CalmPeer, list[str]]:
    """a has founded a new run from the newest state of a run with b, long before its next snapshot; b, with nothing left of the
    old run, can join it."""
    peers, everybody = mesh_of(folder, "ab", run_of(every=20, keep_updates=1, min_peers=1))
    for peer in peers:
        peer.start(everybody)
    await until(lambda: all(round_of(peer) >= 22 for peer in peers))
    for peer in peers:
        await peer.kill()
    a, b = peers
    assert fork(a, a.store.newest_ever()) is not None
    shutil.rmtree(folder / "b")
    b.founding = a.founding
    b.notes.clear()
    for peer in peers:
        peer.start(everybody)
    await until(lambda: "b" in contributors(a, round_of(a)) if round_of(a) else False)
    return a, b, everybody


@virtual
async def test_a_newcomer_has_the_same_state(tmp_path: Path) -> None:
    a, b, _ = await forked(tmp_path)
    assert equal_states([a, b])
    assert a.founding.fork is not None
    assert min(a.digests()) == a.founding.fork.round + 1
    await stop([a, b])


@pytest.mark.fault
@virtual
async def test_a_flipped_bit_is_repaired_and_nobody_is_accused_of_what_the_log_does_not_say(tmp_path: Path) -> None:
    a, b, _ = await forked(tmp_path)
    await flip(b, "anchor", 100, bit=22)
    await until(lambda: bool(noted(b, "checked")))
    at = round_of(a)
    await until(lambda: min(round_of(a), round_of(b)) >= at + 4)
    assert "repaired" in {fields["outcome"] for fields in noted(b, "checked")}
    assert warned(a, "bad_donor") == warned(b, "bad_donor") == []
    await stop([a, b])


@pytest.mark.fault
@virtual
async def test_it_can_be_forked_again_before_its_next_snapshot(tmp_path: Path) -> None:
    a, b, _ = await forked(tmp_path)
    await kill(a)
    await kill(b)
    first, at = a.founding, a.store.newest_ever()
    assert fork(a, at) is not None
    assert a.founding.fork is not None
    assert (a.founding.fork.run, a.founding.fork.round) == (first.run, at)
    a.start([a.peer])
    await until(lambda: round_of(a) >= at + 2)
    await stop([a])


@pytest.mark.fault
@virtual
async def test_a_process_that_ends_between_the_renames_leaves_what_the_same_command_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,), everybody = mesh_of(tmp_path, "a", run_of(min_peers=1))
    a.start(everybody)
    await until(lambda: round_of(a) >= 6)
    await a.kill()
    inject(lambda: monkeypatch.setattr(forking, "finish", lambda folder: None))
    with suppress(AssertionError):  # there is nothing to begin with
        fork(a, 5)
    fired(not (tmp_path / "a" / "founding.record").exists(), "an end between the renames")
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "a")  # made by the look above
    forking.finish(tmp_path / "a")
    with DiskStore(tmp_path / "a") as store:
        founding = store.load_founding()
    assert founding is not None
    assert founding.fork is not None
    assert founding.fork.round == 5
