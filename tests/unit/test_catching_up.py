"""Catching up by a snapshot: one that the log vouches for, that costs the least, from whoever is there and tells the truth."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.events import CatchUp
from geomesh_p2p.core.log import LogState, RoundLog
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import NO_TERM, Contribution, Held, Range, Update
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.snapshots import CHUNK_BYTES, described
from geomesh_p2p.swarm.catching_up import CatchingUp
from geomesh_p2p.swarm.donor import Donor
from geomesh_p2p.swarm.fetching import Fetcher
from tests.injection.proof import fired, inject

SIZE = 300_000
RUN = b"r" * 32
BODY = b"body"


def vectors(round: int) -> tuple[Any, Any]:
    return np.full(SIZE, round, np.float32), np.full(SIZE, -round, np.float32)


class Run:
    """Twelve rounds of voters a and b, who had one state after each; `states[r]` is where the log stood."""

    def __init__(self, unsaid: tuple[int, ...] = ()) -> None:
        log = RoundLog(LogState(RUN, 0, b"0" * 32, ("a", "b"), (), 0))
        self.updates: list[Update] = []
        self.states = [log.state]
        for round in range(1, 13):
            base = log.state
            said = b"" if round - 1 in unsaid or round == 1 else described(base, *vectors(round - 1)).content
            pair = (
                Contribution(p, p, round, log.digest, 1, (Range(2 * round + i, 2 * round + i + 1),), b"p" * 32, 4, state=said)
                for i, p in enumerate("ab")
            )
            update = Update(round, log.digest, "gather", (), tuple(pair), ("a", "b"), digest_bytes(BODY), len(BODY))
            log.append(update)
            self.updates.append(update)
            self.states.append(log.state)


class Donors:
    """Peers that answer from their folders. `down` do not; `hollow` have descriptions of snapshots only; `liars` send other
    bytes. Each has the log up to round `at` (from `first` on) and snapshots of the rounds given, of which `wrong` have other
    values in them."""

    def __init__(
        self, folder: Path, rounds: dict[str, tuple[int, ...]], at: int = 9, first: int = 1, wrong: str = ""
    ) -> None:
        self.run = Run()
        self.donors: dict[str, Donor] = {}
        self.down, self.hollow, self.liars = set[str](), set[str](), set[str]()
        self.asked: Counter[tuple[str, str]] = Counter()
        self.named: list[tuple[str, str]] = []
        self.offsets: list[int] = []
        self.at = at
        for name, kept in rounds.items():
            store, snapshots = DiskStore(folder / name), Snapshots(folder / name, keep=9)
            for update in self.run.updates[first - 1 : at]:
                store.append(update, [BODY])
            for round in kept:
                anchor, momentum = vectors(round)
                snapshots.write(self.run.states[round], anchor + (name in wrong), momentum)
            self.donors[name] = Donor(store, snapshots)

    async def request(self, to: str, fetch: Fetch, timeout_seconds: float) -> Fetched:
        self.asked[(to, fetch.what)] += 1
        if to in self.down or (to in self.hollow and fetch.what == "snapshot"):
            raise Unreachable(to)
        if fetch.what == "snapshot":
            self.offsets.append(fetch.offset)
        found = await self.donors[to].answer("me", fetch)
        if to in self.liars and fetch.what == "snapshot" and found.found:
            return replace(found, data=b"\x01" + found.data[1:])
        return found

    def given(self, names: str) -> int:
        """Bytes of snapshots that these have given."""
        return sum(sum(self.donors[name].given.values()) for name in names)

    def fault(self, peer: str, what: str) -> None:
        self.named.append((peer, what))


async def adopted(tmp_path: Path, donors: Donors, at: int = 0, sources: str = "ab", wanted: int = 0) -> int | None:
    """The round of the snapshot that was taken; all updates after it are then there too."""
    mine, work = Snapshots(tmp_path / "me"), list[Any]()
    with DiskStore(tmp_path / "me") as store:
        fetcher = Fetcher(SimpleNamespace(request=donors.request), 1.0, fault=donors.fault)  # type: ignore[arg-type]
        catching_up = CatchingUp(fetcher, store, mine, lambda *_: None, lambda _, adopt: work.append(adopt))
        target = wanted or donors.at
        want = CatchUp(target, donors.run.states[target].digest, tuple(sources))
        found, updates = await catching_up.run(donors.run.states[at], want)
    if found is None:
        return None
    assert found == donors.run.states[found.round]
    assert work[0].load()[0][0] == found.round
    assert [update.round for update in updates] == list(range(found.round + 1, target + 1))
    return found.round


async def test_a_source_without_a_newer_snapshot_does_not_hide_one_that_has_it(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": (3,), "b": (8,)}, first=4)
    assert await adopted(tmp_path, donors, 2) == 8


async def test_an_older_snapshot_is_taken_if_the_newest_cannot_be_got(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": (6,), "b": (8,), "c": (4,)}, first=5)
    donors.hollow.add("b")
    donors.down.add("c")
    assert await adopted(tmp_path, donors, 2, "abc") == 6


async def test_nobody_with_a_newer_snapshot_is_nobody(tmp_path: Path) -> None:
    assert await adopted(tmp_path, Donors(tmp_path, {"a": (3,), "b": (4,)}, first=6), 4) is None


# ---------------------------------------------------------------- the log vouches for it


@pytest.mark.case("C070")
@pytest.mark.fault
async def test_a_donor_whose_snapshot_the_log_contradicts_is_named_and_left_out(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": (8,), "b": (8,), "c": (8,)}, first=4, wrong=inject(lambda: "c") or "")
    assert await adopted(tmp_path, donors, 2, "cab") == 8
    fired(donors.named, "a donor offered another state than the log says")
    assert donors.named == [("c", "offers another snapshot of round 8 than the log says")]
    assert not donors.asked[("c", "snapshot")]


async def test_a_lying_donor_alone_is_not_believed(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"c": (8,)}, first=4, wrong="c")
    assert await adopted(tmp_path, donors, 2, "c") is None
    assert donors.named


async def test_the_newest_snapshot_of_which_the_log_says_nothing_yet_needs_a_quorum(tmp_path: Path) -> None:
    one = Donors(tmp_path / "one", {"a": (6,), "b": (6, 9)}, first=4)
    assert await adopted(tmp_path / "one", one, 2) == 6, "the one before: b alone is no quorum of a and b"
    both = Donors(tmp_path / "both", {"a": (6, 9), "b": (6, 9)}, first=4)
    assert await adopted(tmp_path / "both", both, 2) == 9
    differ = Donors(tmp_path / "differ", {"a": (6, 9), "b": (6, 9)}, first=4, wrong="b")
    assert await adopted(tmp_path / "differ", differ, 2, "ba") == 9, "that of a, which with the lowest id is half of two"
    assert ("b", "offers another snapshot of round 6 than the log says") in differ.named


async def test_a_snapshot_that_leads_elsewhere_is_not_taken(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": (8,)}, first=4)
    other = Run(unsaid=(3,))
    want = CatchUp(9, other.states[9].digest, ("a",))
    fetcher = Fetcher(SimpleNamespace(request=donors.request), 1.0, fault=donors.fault)  # type: ignore[arg-type]
    catching_up = CatchingUp(fetcher, DiskStore(tmp_path / "me"), Snapshots(tmp_path / "me"), lambda *_: None, lambda *_: None)
    assert await catching_up.run(donors.run.states[2], want) == (None, [])
    assert donors.named == [("a", "offers a snapshot of round 8 that does not lead to round 9")]


# ---------------------------------------------------------------- several donors, some of them bad


@pytest.mark.fault
async def test_bytes_that_do_not_fit_are_named_and_others_do_the_rest(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": (8,), "b": (8,)}, first=4)
    inject(lambda: donors.liars.add("b"))
    assert await adopted(tmp_path, donors, 2) == 8
    fired(donors.named, "a donor sent other bytes")
    assert [peer for peer, _ in donors.named] == ["b"]
    assert donors.given("b") <= CHUNK_BYTES, "it was asked for no second piece"


@pytest.mark.case("C026")
@pytest.mark.fault
async def test_a_dead_donor_is_left_as_soon_as_it_is_not_heard_any_more(tmp_path: Path) -> None:
    """Long before the deadline of its answer."""
    donors = Donors(tmp_path, {"a": (8,), "b": (8,)}, first=4)
    dead, left, asked_later = set[str](), list[float](), list[str]()

    async def request(to: str, fetch: Fetch, timeout_seconds: float) -> Fetched:
        if to in dead:
            asked_later.append(fetch.what)
        if to == "b" and fetch.what == "snapshot" and inject(lambda: dead.add("b") or True):  # type: ignore[func-returns-value]
            begun = asyncio.get_running_loop().time()
            try:
                await asyncio.sleep(1000.0)
            finally:
                left.append(asyncio.get_running_loop().time() - begun)
        return await donors.request(to, fetch, timeout_seconds)

    mine, work = Snapshots(tmp_path / "me"), list[Any]()
    alive = lambda peer: peer not in dead  # noqa: E731
    fetcher = Fetcher(SimpleNamespace(request=request), 1000.0, alive)  # type: ignore[arg-type]
    catching_up = CatchingUp(fetcher, DiskStore(tmp_path / "me"), mine, lambda *_: None, lambda _, adopt: work.append(adopt))
    want = CatchUp(9, donors.run.states[9].digest, ("b", "a"))
    async with asyncio.timeout(100.0):
        found, updates = await catching_up.run(donors.run.states[2], want)
    fired(left, "a donor died while it gave")
    assert found is not None
    assert [update.round for update in updates] == [9]
    assert len(left) == 1, "it was left in the middle of its answer"
    assert asked_later == [], "and not asked again: the other has it all"


@pytest.mark.fault
@pytest.mark.parametrize(("what", "wrong"), [("update", "round"), ("update", "body"), ("header", "round"), ("held", "body")])
async def test_a_source_that_answers_with_something_else_hides_no_other(tmp_path: Path, what: str, wrong: str) -> None:
    donors, lies = Donors(tmp_path, {"a": (), "b": ()}), list[str]()

    async def request(to: str, fetch: Fetch, timeout_seconds: float) -> Fetched:
        lie = to == "a" and inject(lambda: True) is not None
        answer = await donors.request(to, replace(fetch, round=3) if lie and wrong == "round" else fetch, timeout_seconds)
        if lie and answer.found:
            lies.append(fetch.what)
            answer = replace(answer, data=b"liar") if wrong == "body" else answer
        return answer

    fetcher, update = Fetcher(SimpleNamespace(request=request), 1.0), donors.run.updates[4]  # type: ignore[arg-type]
    match what:
        case "update":
            assert await fetcher.update(5, "ab") == (update, BODY)
        case "header":
            assert await fetcher.header(5, "ab") == update
        case "held":
            assert await fetcher.held(Held(NO_TERM, 0, b"", update), "ab") == BODY
    fired(lies, "a source answered with something else")


# ---------------------------------------------------------------- received in part


async def partly(tmp_path: Path, donors: Donors, round: int, pieces: int) -> None:
    """Receive some pieces of the snapshot of `round`, as before a restart."""
    source = donors.donors["a"].snapshots
    manifest = source.manifest(round)
    receiver = Snapshots(tmp_path / "me").receive(manifest)
    for piece in receiver.missing()[:pieces]:
        receiver.write(piece.start, source.read_chunk(round, piece.start, len(piece)))
    receiver.close()


async def test_a_snapshot_received_in_part_is_completed_though_there_is_a_newer_one(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": (5, 8), "b": (5, 8)}, first=4)
    await partly(tmp_path, donors, 5, 2)
    assert await adopted(tmp_path, donors, 2) == 5
    assert 0 < donors.given("ab") <= 2 * CHUNK_BYTES, "one piece, perhaps asked of both"
    assert not Snapshots(tmp_path / "me").receiving()


@pytest.mark.parametrize("gone", ["updates", "snapshot"])
async def test_what_leads_nowhere_any_more_is_not_completed(tmp_path: Path, gone: str) -> None:
    donors = Donors(tmp_path, {"a": (5, 8), "b": (8,)}, first=7 if gone == "updates" else 4)
    await partly(tmp_path, donors, 5, 2)
    if gone == "snapshot":
        donors.donors["a"].snapshots._discard(donors.donors["a"].snapshots.path(5))  # type: ignore[attr-defined]
    assert await adopted(tmp_path, donors, 2) == 8
    assert not Snapshots(tmp_path / "me").receiving(), "nothing is left behind"


async def test_what_was_received_survives_when_all_donors_go(tmp_path: Path) -> None:
    donors = Donors(tmp_path, {"a": (8,), "b": (8,)}, first=4)
    await partly(tmp_path, donors, 8, 1)
    donors.hollow |= {"a", "b"}
    assert await adopted(tmp_path, donors, 2) is None
    donors.hollow.clear()
    assert await adopted(tmp_path, donors, 2) == 8
    assert donors.given("ab") > CHUNK_BYTES
    assert min(donors.offsets) == CHUNK_BYTES, "nothing of the first piece"
