"""Tokens credited are tokens trained: of a member that is closed, of one that joins in mid-round, of one ten times slower."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.injection.proof import fired, inject
from tests.mesh.calm import CalmPeer, calm_mesh, until
from tests.mesh.toy import SIZE, toy_run

SEQUENCE = 16


def credited(peer: CalmPeer, site: str) -> dict[int, tuple[int, int]]:
    """By round: (tokens, sequences in the ranges) credited to `site`."""
    return {
        note["round"]: (item["tokens"], sum(len(r) for r in item["ranges"]))
        for note in peer.commits()
        for item in note["contributors"]
        if item["site"] == site
    }


def planned(peer: CalmPeer, site: str) -> dict[int, int]:
    """By round: sequences that the newest plan accepted by `peer` gave to `site`."""
    accepted = [fields for kind, fields in peer.notes if kind == "accept" and site in fields["ranges"]]
    return {fields["round"]: sum(len(r) for r in fields["ranges"][site]) for fields in accepted}


async def stop(peers: list[CalmPeer]) -> None:
    for peer in peers:
        await peer.kill()


@pytest.mark.case("C029")
@pytest.mark.fault
def test_a_member_that_is_late_past_the_grace_is_credited_with_what_it_trained(tmp_path: Path) -> None:
    async def main() -> None:
        run = toy_run(mode="planned", round_tokens=1920, min_steps=4)
        run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 1000})})
        peers = calm_mesh(tmp_path, ["a", "b", "c"], run, Network(latency_seconds=0.02), 1.0, SIZE)
        late = peers[2]
        for peer in peers:
            peer.start([p.peer for p in peers])
        await until(lambda: len(peers[0].commits()) >= 3)
        inject(lambda: setattr(late, "pause_seconds", 2.0))  # each sequence now takes three times as long
        await until(lambda: any(kind == "contribute" for kind, _ in late.notes) and len(peers[0].commits()) >= 8)
        given, got = planned(peers[0], "c"), credited(peers[0], "c")
        short = [round for round in got if got[round][1] < given[round]]
        fired(late.closed and short, "a member was closed in mid-window")
        assert all(tokens == SEQUENCE * sequences for tokens, sequences in got.values())
        for round in short:
            assert got[round][1] == late.trained[round], "what it trained, and not what it was given"
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C029")
@pytest.mark.case("C072")
def test_who_joins_in_mid_round_begins_with_the_next_plan_and_is_credited_with_its_own_window(tmp_path: Path) -> None:
    async def main() -> None:
        run = toy_run()
        run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 1000})})
        peers = calm_mesh(tmp_path, ["a", "b", "late"], run, Network(latency_seconds=0.02), 1.0, SIZE)
        for peer in peers[:2]:
            peer.start([p.peer for p in peers])
        await until(lambda: len(peers[0].commits()) >= 2)
        at = peers[0].session.replica.round  # type: ignore[union-attr]
        await until(lambda: peers[0].session.replica.phase == "training")  # type: ignore[union-attr]
        await asyncio.sleep(0.3 * 8)  # a window is eight sequences of one second
        peers[2].start([p.peer for p in peers])
        await until(lambda: credited(peers[0], "late"))
        got, given = credited(peers[0], "late"), planned(peers[0], "late")
        first = min(got)
        assert first > at + 1, "not to the round that was under way"
        assert got[first] == (SEQUENCE * given[first], given[first])
        assert peers[2].trained[first] == given[first]
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C072")
def test_a_member_that_trains_nothing_neither_dilutes_nor_blocks(tmp_path: Path) -> None:
    """One peer is ten times faster than another, and a third never gets a step done: it abstains, and keeps its vote."""

    async def main() -> None:
        run = toy_run(mode="planned", round_tokens=1920, min_steps=2)
        run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 1000})})
        peers = calm_mesh(tmp_path, ["fast", "none", "slow"], run, Network(latency_seconds=0.02), 1.0, SIZE)
        peers[0].seconds_per_sequence = 0.1
        peers[1].trains_nothing = True
        for peer in peers:
            peer.start([p.peer for p in peers])
        await until(lambda: len(peers[0].commits()) >= 6)
        fast, none, slow = (credited(peers[0], peer.name) for peer in peers)
        assert not none
        assert set(fast) == set(slow) == set(range(1, len(fast) + 1))
        assert all(fast[round][0] > 5 * slow[round][0] for round in list(fast)[2:])
        for note in peers[0].commits():
            assert sum(item["tokens"] for item in note["contributors"]) == fast[note["round"]][0] + slow[note["round"]][0]
        await stop(peers)

    run_virtual(main())
