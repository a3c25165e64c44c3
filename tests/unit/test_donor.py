"""A donor gives to few at a time, in small slices, and little while its own exchange is under way."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from geomesh_p2p.core.canonical import unpack
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.messages import Busy, Fetch, Fetched
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.swarm.donor import Donor, DonorLimits, DonorView
from geomesh_p2p.swarm.virtual_time import run_virtual

SIZE = 1_000_000
RATE = 400_000.0


def donor(folder: Path, exchanging: list[bool], limits: DonorLimits | None = None) -> Donor:
    snapshots = Snapshots(folder)
    snapshots.write(LogState(b"r" * 32, 5, b"5" * 32, ("a",), (), 0), np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32))
    view = DonorView(lambda: bool(exchanging), lambda: ("b", "c"), lambda: RATE)
    return Donor(DiskStore(folder), snapshots, view, limits, asyncio.get_running_loop().time)


def snapshot(offset: int = 0, length: int = 2**20) -> Fetch:
    return Fetch("snapshot", 5, b"", offset, length)


def busy(answer: Fetched) -> Busy:
    assert not answer.found
    return unpack(Busy, answer.header)


@pytest.mark.case("C025")
def test_a_third_client_is_sent_elsewhere_until_one_is_done(tmp_path: Path) -> None:
    async def main() -> None:
        giver = donor(tmp_path, [])
        assert (await giver.answer("x", snapshot())).found
        assert (await giver.answer("y", snapshot())).found
        assert busy(await giver.answer("b", snapshot())) == Busy(3.0, ("c",))
        assert giver.turned_away == 1
        assert (await giver.answer("b", Fetch("manifest", 0, b"", 0, 2**20))).found, "what is small is given to all"
        await asyncio.sleep(4.0)
        assert (await giver.answer("x", snapshot(2**20))).found
        assert busy(await giver.answer("b", snapshot())).seconds > 0
        await asyncio.sleep(2.0)
        assert (await giver.answer("b", snapshot())).found, "y has asked for nothing for a while"

    run_virtual(main())


async def give_for(giver: Donor, seconds: float) -> int:
    """Bytes that a client gets that asks again as soon as it may."""
    loop = asyncio.get_running_loop()
    until, got = loop.time() + seconds, 0
    while loop.time() < until:
        answer = await giver.answer("x", snapshot())
        if answer.found:
            got += len(answer.data)
        else:
            await asyncio.sleep(busy(answer).seconds)
    return got


@pytest.mark.case("C022")
def test_clients_get_a_small_share_of_the_link_during_an_exchange(tmp_path: Path) -> None:
    async def main() -> None:
        exchanging: list[bool] = []
        giver = donor(tmp_path, exchanging)
        assert 0.7 * RATE <= await give_for(giver, 40.0) / 40.0 <= 0.9 * RATE
        exchanging.append(True)
        given = await give_for(giver, 40.0) / 40.0
        assert 0.05 * RATE <= given <= 0.13 * RATE, "a little, so that it goes on"

    run_virtual(main())


def test_a_wait_ends_with_the_exchange(tmp_path: Path) -> None:
    async def main() -> None:
        exchanging = [True]
        giver = donor(tmp_path, exchanging)
        assert (await giver.answer("x", snapshot())).found
        waiting = asyncio.ensure_future(giver.answer("x", snapshot()))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        exchanging.clear()
        begun = asyncio.get_running_loop().time()
        assert (await waiting).found
        assert asyncio.get_running_loop().time() - begun <= 0.5

    run_virtual(main())


def test_a_slice_takes_a_quarter_of_a_second_of_the_link(tmp_path: Path) -> None:
    async def main() -> None:
        answer = await donor(tmp_path, []).answer("x", snapshot())
        assert len(answer.data) == RATE / 4
        assert answer.total > 8 * SIZE

    run_virtual(main())


def test_what_is_not_there_is_nobody_s_fault(tmp_path: Path) -> None:
    async def main() -> None:
        giver = donor(tmp_path, [])
        for what in ("update", "header", "held", "nonsense"):
            assert (await giver.answer("x", Fetch(what, 7, b"", 0, 10))) == Fetched(False, b"", 0, 0, b"", 0)
        assert not (await giver.answer("x", Fetch("snapshot", 4, b"", 0, 10))).found
        assert not (await giver.answer("x", Fetch("manifest", 4, b"", 0, 10))).found, "none up to round 4"

    run_virtual(main())


def test_what_is_given_is_counted_by_kind(tmp_path: Path) -> None:
    async def main() -> None:
        giver, given = donor(tmp_path, []), Counter[str]()
        giver._on_given = lambda what, size: given.update({what: size})
        piece = await giver.answer("x", snapshot(length=50_000))
        manifest = await giver.answer("x", Fetch("manifest", 0, b"", 0, 2**20))
        assert not (await giver.answer("x", Fetch("update", 9, b"", 0, 2**20))).found
        assert not (await giver.answer("x", Fetch("snapshot", 4, b"", 0, 2**20))).found
        assert given == {"snapshot": len(piece.data), "manifest": len(manifest.data)}
        assert len(piece.data) == 50_000

    run_virtual(main())
