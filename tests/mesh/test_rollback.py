"""A run that goes back to an earlier round: a round of its own in the log, the same for whoever is there, away, new or hit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p.core.log import Credited
from geomesh_p2p.core.types import Range, Rollback
from geomesh_p2p.engine.snapshots import Snapshots
from geomesh_p2p.swarm.going_back import GoingBack
from tests.injection.proof import fired, inject
from tests.mesh.calm import CalmPeer, until, virtual
from tests.mesh.test_comings import equal_states, kill, mesh_of, round_of, run_of, stop


def leader_of(peers: list[CalmPeer]) -> CalmPeer:
    return next(peer for peer in peers if peer.session is not None and peer.session.replica.is_leader)


async def order(peers: list[CalmPeer], to_round: int) -> tuple[bool, str]:
    """As an operator does."""
    session = leader_of(peers).session
    assert session is not None
    return await session.roll_back(to_round)


async def roll_back(peers: list[CalmPeer], to_round: int) -> int:
    """Returns the round that went back, once `peers` have committed it and one more."""
    leader = leader_of(peers)
    begun = round_of(leader)
    assert await order(peers, to_round) == (True, f"the run goes back to round {to_round} after the round going on")
    await until(lambda: all(to_round in rollbacks(peer, begun).values() for peer in peers))
    round = next(round for round, to in rollbacks(leader, begun).items() if to == to_round)
    await until(lambda: all(round_of(peer) > round for peer in peers))
    return round


def since(peer: CalmPeer, round: int) -> list[dict[str, Any]]:
    return [note for note in peer.commits() if note["round"] > round]


def rollbacks(peer: CalmPeer, round: int) -> dict[int, int]:
    """Since `round`, those that went back, and where to."""
    return {note["round"]: note["rollback"].to_round for note in since(peer, round) if "rollback" in note}


def contributors(peer: CalmPeer, round: int) -> list[str]:
    return [c["site"] for note in peer.commits() if note["round"] == round for c in note["contributors"]]


async def begun(folder: Path, names: str, after_round: int, **settings: int) -> tuple[list[CalmPeer], list[str]]:
    peers, everybody = mesh_of(folder, names, run_of(**settings))
    for peer in peers:
        peer.start(everybody)
    await until(lambda: all(round_of(peer) >= after_round for peer in peers))
    return peers, everybody


@pytest.mark.case("C030")
@virtual
async def test_every_peer_has_the_earlier_state_again_and_the_run_goes_on(tmp_path: Path) -> None:
    peers, _ = await begun(tmp_path, "abc", 7, every=4)
    went = await roll_back(peers, 5)
    assert {peer.states[went] for peer in peers} == {peers[0].states[5]}
    assert peers[0].states[went - 1] != peers[0].states[went]
    await until(lambda: all(round_of(peer) >= went + 6 for peer in peers))
    assert equal_states(peers) >= went + 5
    assert contributors(peers[0], went) == []
    assert contributors(peers[0], went + 2) == ["a", "b", "c"]
    trained = Credited()
    for note in peers[0].commits():
        for c in note["contributors"]:
            for r in c["ranges"]:
                trained.add(Range(*r) if not isinstance(r, Range) else r)  # raises if a range is credited twice
    await stop(peers)


@virtual
async def test_many_rounds_may_pass_while_the_voters_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps what it has said that it can go back to, however fast the rounds are."""
    peers, _ = await begun(tmp_path, "abc", 6, every=2, keep_updates=1)
    ask, there = GoingBack._ask, round_of(peers[0])

    async def slowly(self: GoingBack, peer: str, to_round: int) -> str:
        words = await ask(self, peer, to_round)
        await until(lambda: round_of(peers[0]) >= there + 8)
        return words

    monkeypatch.setattr(GoingBack, "_ask", slowly)
    went = await roll_back(peers, there - 1)
    assert went > there + 8
    assert {peer.states[went] for peer in peers} == {peers[0].states[there - 1]}
    await until(lambda: all(round_of(peer) >= went + 4 for peer in peers))
    assert equal_states(peers) >= went + 3
    await stop(peers)


async def test_nobody_is_told_of_a_past_that_is_being_deleted() -> None:
    kept = {4}

    class Past:
        def rollback(self, to_round: int) -> Rollback:
            if to_round not in kept:
                raise LookupError("gone")
            return Rollback(to_round, 0)

    state = SimpleNamespace(checking=False)
    going = GoingBack(None, Past(), SimpleNamespace(round=9, s=state), lambda event: None, lambda: 0.0)  # type: ignore[arg-type]
    with going.may_delete() as may:
        assert may
        asked = asyncio.create_task(going.answer(4))
        await asyncio.wait({asked}, timeout=0.2)
        kept.clear()
    assert not (await asked).found
    kept.add(4)
    assert (await going.answer(4)).found
    with going.may_delete() as may:
        assert not may, "it has been promised"


@virtual
async def test_a_rollback_can_itself_be_undone(tmp_path: Path) -> None:
    peers, _ = await begun(tmp_path, "abc", 6, every=2)
    there = round_of(peers[0])
    went = await roll_back(peers, 4)
    again = await roll_back(peers, there)
    assert peers[0].states[went] == peers[0].states[4]
    assert {peer.states[again] for peer in peers} == {peers[0].states[there]}
    await until(lambda: all(round_of(peer) >= again + 3 for peer in peers))
    equal_states(peers)
    await stop(peers)


@virtual
async def test_the_tokens_of_what_is_undone_do_not_count(tmp_path: Path) -> None:
    peers, _ = await begun(tmp_path, "abc", 6)
    tokens = {note["round"]: sum(c["tokens"] for c in note["contributors"]) for note in peers[0].commits()}
    went = await roll_back(peers, 4)
    for peer in peers:
        assert peer.session is not None
        later = sum(sum(c["tokens"] for c in note["contributors"]) for note in since(peer, went))
        assert peer.session.replica.log.tokens == sum(tokens[round] for round in range(1, 5)) + later
    await stop(peers)


@pytest.mark.fault
@pytest.mark.parametrize("keep_updates", [50, 1], ids=["by the updates", "by a snapshot"])
@virtual
async def test_a_peer_that_was_away_goes_back_too(tmp_path: Path, keep_updates: int) -> None:
    peers, everybody = await begun(tmp_path, "abcd", 6, every=2, keep_updates=keep_updates)
    away = peers[3]
    await kill(away)
    await until(lambda: round_of(peers[0]) >= 9)
    went = await roll_back(peers[:3], 8)
    await until(lambda: all(round_of(peer) >= went + 5 for peer in peers[:3]))
    away.start(everybody)
    await until(lambda: "d" in contributors(peers[0], round_of(peers[0])))
    assert equal_states(peers)
    await stop(peers)


@pytest.mark.parametrize("keep_updates", [50, 1], ids=["by the updates", "by a snapshot"])
@virtual
async def test_a_newcomer_comes_in_after_a_rollback(tmp_path: Path, keep_updates: int) -> None:
    peers, everybody = mesh_of(tmp_path, "abcn", run_of(every=3, keep_updates=keep_updates))
    for peer in peers[:3]:
        peer.start(everybody)
    await until(lambda: round_of(peers[0]) >= 8)
    went = await roll_back(peers[:3], 6)
    peers[3].start(everybody)
    await until(lambda: "n" in contributors(peers[0], round_of(peers[0])))
    assert round_of(peers[0]) > went
    assert equal_states(peers)
    await stop(peers)


@pytest.mark.fault
@virtual
async def test_all_stopped_right_after_it_and_started_again_stand_at_the_earlier_state(tmp_path: Path) -> None:
    peers, everybody = await begun(tmp_path, "abc", 7, every=4)
    went = await roll_back(peers, 5)
    for peer in peers:
        await kill(peer)
    for snapshots in (Snapshots(peer.folder / peer.name) for peer in peers):
        snapshots.drop(went)  # as if they had been killed before it was saved
    at = min(round_of(peer) for peer in peers)
    for peer in peers:
        peer.start(everybody)
    await until(lambda: all(round_of(peer) >= at + 3 for peer in peers))
    assert equal_states(peers, at)
    await stop(peers)


@pytest.mark.fault
@virtual
async def test_a_peer_that_lost_the_earlier_state_takes_it_from_the_others(tmp_path: Path) -> None:
    """Its old snapshots and updates are gone; it trains nothing before it has a sound one."""
    peers, _ = await begun(tmp_path, "abcd", 9, every=4)
    poor = next(peer for peer in peers if peer.session is not None and not peer.session.replica.is_leader)
    snapshots = Snapshots(poor.folder / poor.name)

    def lose() -> None:
        for round in snapshots.rounds():
            snapshots.drop(round)
        poor.store.prune(8)

    inject(lose)
    fired(snapshots.rounds() == [] and 7 not in poor.store.rounds(), "snapshots and updates are gone")
    went = await roll_back(peers, 6)
    await until(lambda: poor.name in contributors(peers[0], round_of(peers[0])))
    assert any(getattr(event, "reason", "") == "anchor_lost" for event in poor.events)
    rounds = [note["round"] for note in peers[0].commits() if note["round"] > went]
    assert poor.name not in contributors(peers[0], rounds[0])
    await until(lambda: round_of(poor) >= rounds[-1] + 3)
    assert equal_states(peers, went)
    await stop(peers)


@pytest.mark.parametrize(("now", "to_round"), [(54, 40), (9, 4)], ids=["from the beginning on", "from a snapshot on"])
@virtual
async def test_what_leads_back_is_kept_until_it_has_been_used(tmp_path: Path, now: int, to_round: int) -> None:
    """Though a snapshot of the round going on, which is committed first, would replace it by the limits."""
    every, keep_updates = (5, 50) if now == 54 else (4, 1)
    peers, _ = await begun(tmp_path, "abc", now, every=every, keep_updates=keep_updates)
    assert round_of(leader_of(peers)) == now
    went = await roll_back(peers, to_round)
    assert went >= now + 2, "the round that saves a snapshot came before"
    assert {peer.states[went] for peer in peers} == {peers[0].states[to_round]}
    await until(lambda: all(round_of(peer) >= went + 3 * every for peer in peers))
    equal_states(peers, went)
    for peer in peers:
        assert len(Snapshots(peer.folder / peer.name).rounds()) <= 3, "what was kept for it is gone"
    await stop(peers)


@virtual
async def test_what_few_can_make_is_refused_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    """b and c came in by a later snapshot: the run would stand until they had the state, and nothing would vouch for it."""
    run = run_of(every=4, keep_updates=1, min_peers=1)
    run = run.model_copy(update={"save": run.save.model_copy(update={"keep_snapshots": 4})})
    peers, everybody = mesh_of(tmp_path, "abc", run)
    peers[0].start(everybody)
    await until(lambda: round_of(peers[0]) >= 16)
    for peer in peers[1:]:
        peer.start(everybody)
    await until(lambda: len(peers[0].commits()[-1]["view"]) == 3)
    oldest = min(Snapshots(tmp_path / "a").rounds())
    done, words = await order(peers, oldest)
    assert not done
    assert words.startswith(f"too few of the voters can make that state (b: nothing that is kept leads to round {oldest}; ")
    assert "; c: nothing" in words
    at = round_of(peers[0])
    await until(lambda: all(round_of(peer) >= at + 3 for peer in peers))
    await stop(peers)


@virtual
async def test_two_orders_are_both_carried_out(tmp_path: Path) -> None:
    peers, _ = await begun(tmp_path, "abc", 8)
    at = round_of(peers[0])
    assert (await order(peers, 5))[0]
    replica = leader_of(peers).session.replica  # type: ignore[union-attr]
    await until(lambda: replica.held is not None and replica.held.update.rollback is not None, look_seconds=0.001)
    assert (await order(peers, 6))[0]
    await until(lambda: list(rollbacks(peers[1], at).values()) == [5, 6])
    at = round_of(peers[0])
    await until(lambda: all(round_of(peer) >= at + 3 for peer in peers))
    assert equal_states(peers)
    await stop(peers)


@virtual
async def test_an_order_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    peers, _ = await begun(tmp_path, "abc", 6)
    leader = leader_of(peers)
    assert leader.session is not None
    leader.session.stop_run()
    await until(lambda: leader.session.replica.s.stop_after is not None)  # type: ignore[union-attr]
    done, words = await order(peers, 4)
    assert not done
    assert "the run ends with round" in words
    await stop(peers)


@virtual
async def test_a_rollback_is_undone_by_the_snapshot_before_it(tmp_path: Path) -> None:
    """Of which no contribution says anything: the round after it had none."""
    peers, _ = await begun(tmp_path, "abc", 11, every=4, keep_updates=1)
    assert round_of(leader_of(peers)) == 11
    went = await roll_back(peers, 9)
    assert went == 13
    again = await roll_back(peers, 12)
    assert {peer.states[again] for peer in peers} == {peers[0].states[12]}
    await stop(peers)


@pytest.mark.fault
@virtual
async def test_a_leader_lost_in_the_middle_leaves_one_history(tmp_path: Path) -> None:
    """Held by a quorum it is committed by the successor; not held it never was. Either way all agree and go on."""
    peers, _ = await begun(tmp_path, "abc", 6)
    leader = leader_of(peers)
    assert leader.session is not None
    replica = leader.session.replica
    assert (await order(peers, 4))[0]
    await until(lambda: replica.held is not None and replica.held.update.rollback is not None, look_seconds=0.001)
    round = replica.round + 1
    await kill(leader)
    others = [peer for peer in peers if peer is not leader]
    await until(lambda: all(round_of(peer) >= round + 4 for peer in others))
    assert [rollbacks(peer, 0) for peer in others] == [{round: 4}, {round: 4}], "both had been told to hold it"
    assert equal_states(others)
    await stop(peers)


@virtual
async def test_all_who_are_well_take_part_in_the_round_after_it_and_nobody_refuses(tmp_path: Path) -> None:
    peers, _ = await begun(tmp_path, "abcd", 6)
    went = await roll_back(peers, 4)
    assert contributors(peers[0], went + 1) == ["a", "b", "c", "d"]
    assert not [fields for peer in peers for kind, fields in peer.notes if kind in ("discard", "refuse")]
    await stop(peers)
