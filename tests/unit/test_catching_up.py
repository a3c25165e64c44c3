"""Catching up by a snapshot: the newest that can be got, whoever is asked first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from geomesh_p2p.core.events import CatchUp
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.swarm.catching_up import CatchingUp
from geomesh_p2p.swarm.donor import Donor, Fetcher

SIZE = 300_000
RUN = b"r" * 32


def state(round: int) -> LogState:
    return LogState(RUN, round, bytes([round]) * 32, ("a", "b"), (), 0)


class Donors:
    """Peers that answer from their folders; `down` of them do not, and `hollow` have descriptions of snapshots only."""

    def __init__(self, folder: Path, rounds: dict[str, int]) -> None:
        self.donors, self.down, self.hollow = {}, set[str](), set[str]()
        for name, round in rounds.items():
            snapshots = Snapshots(folder / name)
            snapshots.write(state(round), np.full(SIZE, round, np.float32), np.zeros(SIZE, np.float32))
            self.donors[name] = Donor(DiskStore(folder / name), snapshots)

    async def request(self, to: str, fetch: Fetch, timeout_seconds: float) -> Fetched:
        if to in self.down or (to in self.hollow and fetch.what == "snapshot"):
            raise Unreachable(to)
        return await self.donors[to].answer(fetch)


async def adopted(tmp_path: Path, donors: Donors, at: int, sources: tuple[str, ...]) -> LogState | None:
    mine, work = Snapshots(tmp_path / "me"), list[Any]()
    fetcher = Fetcher(SimpleNamespace(request=donors.request), 1.0)  # type: ignore[arg-type]
    catching_up = CatchingUp(fetcher, DiskStore(tmp_path / "me"), mine, lambda *_: None, work.append)
    found, updates = await catching_up.run(state(at), CatchUp(9, b"9" * 32, sources))
    assert updates == []
    if found is not None:
        assert work[0].load()[0][0] == found.round
    return found


async def test_a_source_without_a_newer_snapshot_does_not_hide_one_that_has_it(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": 3, "b": 8})
    found = await adopted(tmp_path, donors, 4, ("a", "b"))
    assert found is not None
    assert found.round == 8


async def test_an_older_snapshot_is_taken_if_the_newest_cannot_be_got(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": 6, "b": 8, "c": 2})
    donors.hollow.add("b")
    donors.down.add("c")
    found = await adopted(tmp_path, donors, 4, ("a", "b", "c"))
    assert found is not None
    assert found.round == 6


async def test_nobody_with_a_newer_snapshot_is_nobody(tmp_path: Path) -> None:
    assert await adopted(tmp_path, Donors(tmp_path, {"a": 3, "b": 4}), 4, ("a", "b")) is None
