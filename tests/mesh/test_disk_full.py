"""A peer whose disk is full: what it may fail to save, and what it may not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p.core import observations as seen
from geomesh_p2p.core.messages import HeldReport
from geomesh_p2p.engine import files
from geomesh_p2p.engine.files import RESERVE_BYTES
from geomesh_p2p.swarm.memory import MemoryTransport, Network
from tests.injection.proof import fired, inject
from tests.mesh.calm import CalmPeer, calm_mesh, until, virtual
from tests.mesh.toy import toy_run


class Disks:
    """Disks that are full beyond so many bytes, by the folder of the peer they belong to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: dict[Path, int] = {}
        self.asked = 0
        real = files.shutil.disk_usage
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: self._of(Path(path)) or real(path))

    def _of(self, path: Path) -> Any:
        for folder, free in self.free.items():
            if folder in (path, *path.parents):
                self.asked += 1
                return SimpleNamespace(free=free)
        return None


def running(folder: Path) -> list[CalmPeer]:
    run = toy_run()
    run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 100_000})})
    peers = calm_mesh(folder, ["a", "b", "c"], run, Network())
    for peer in peers:
        peer.start([p.peer for p in peers])
    return peers


def of(peer: CalmPeer, kind: type[Any]) -> list[Any]:
    return [event for event in peer.events if isinstance(event, kind)]


async def leave(peers: list[CalmPeer]) -> None:
    for peer in peers:
        assert peer.session is not None
        peer.session.leave("the test is over")
    async with asyncio.timeout(60.0):
        await asyncio.gather(*(peer.task for peer in peers if peer.task))


@pytest.mark.fault
@pytest.mark.case("C090")
@virtual
async def test_a_snapshot_without_room_is_reported_and_cleaned_training_goes_on_and_the_next_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the small records that rounds need, none for a snapshot."""
    disks, peers = Disks(monkeypatch), running(tmp_path)
    victim = peers[2]
    await until(lambda: len(of(victim, seen.Saved)) >= 1)
    inject(lambda: disks.free.update({victim.folder / "c": RESERVE_BYTES + 10_000}))
    reached = max(victim.digests())
    await until(lambda: max(victim.digests()) >= reached + 6)
    fired(disks.asked, "the disk said that it is full")
    failed = [e.text for e in of(victim, seen.Warned) if e.reason == "save_failed"]
    assert failed
    assert all("not saved" in text and "MB are needed" in text and "free some space" in text for text in failed)
    assert not list((victim.folder / "c").glob("snapshot-*partial"))
    contributed = [note["round"] for note in peers[0].commits() if "c" in [c["site"] for c in note["contributors"]]]
    assert contributed[-1] > reached, "it goes on training"
    saved = len(of(victim, seen.Saved))
    disks.free.clear()
    await until(lambda: len(of(victim, seen.Saved)) > saved)
    await leave(peers)


@pytest.mark.fault
@pytest.mark.case("C090")
@virtual
async def test_a_promise_that_cannot_be_saved_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor room for a held record: the peer says so and ends with 75, before it reports anything; the others go on."""
    reported: list[int] = []
    send = MemoryTransport.send

    def tapped(transport: MemoryTransport, to: str, message: Any) -> None:
        if transport.peer == "id-c" and isinstance(message, HeldReport):
            reported.append(message.round)
        send(transport, to, message)

    monkeypatch.setattr(MemoryTransport, "send", tapped)
    disks, peers = Disks(monkeypatch), running(tmp_path)
    victim = peers[2]
    await until(lambda: len(victim.digests()) >= 3)
    inject(lambda: disks.free.update({victim.folder / "c": 1000}))
    reached = max(peers[0].digests())
    await until(lambda: max(peers[0].digests()) >= reached + 4)
    fired(disks.asked, "the disk said that it is full")
    assert victim.session is not None
    await until(lambda: victim.session is not None and victim.session.outcome is not None)
    code, reason = victim.session.outcome or (0, "")
    assert code == 75
    assert "free some space" in reason
    accepted = max(note["round"] for kind, note in victim.notes if kind == "accept")
    assert accepted > max(victim.digests()), "it was at work on a round"
    assert max(reported) < accepted, "of which it reported nothing"
    await leave(peers[:2])
