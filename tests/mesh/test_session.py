"""Whole peers over the memory transport: rounds are committed, all replicas equal, through kills and returns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.observations import RoundCommitted
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import Network
from tests.mesh.calm import CalmPeer, calm_mesh, until, virtual
from tests.mesh.toy import toy_run


def anchors(peers: list[CalmPeer]) -> set[bytes]:
    return {peer.model.state.anchor.tobytes() + peer.model.state.momentum.tobytes() for peer in peers}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("topology", ["gather", "reduce"])
@virtual
async def test_four_peers_commit_the_same_rounds(tmp_path: Path, topology: str, residual: bool) -> None:
    peers = calm_mesh(tmp_path, ["a", "b", "c", "d"], toy_run(residual, topology=topology), Network())
    for peer in peers:
        peer.start([p.peer for p in peers])
    await asyncio.gather(*(peer.task for peer in peers if peer.task))
    assert [peer.session.outcome[0] for peer in peers] == [0] * 4
    assert set(peers[0].digests()) == {1, 2, 3, 4, 5}
    assert len({tuple(sorted(peer.digests().items())) for peer in peers}) == 1
    assert len(anchors(peers)) == 1
    assert peers[0].model.state.anchor.any()
    given_up = [note for peer in peers for note in peer.notes if note[0] == "discard"]
    assert not given_up, [event for peer in peers for event in peer.events if type(event).__name__ == "Warned"]


@virtual
async def test_a_killed_peer_is_left_out_and_comes_back(tmp_path: Path) -> None:
    run = toy_run()
    run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 100_000})})
    peers = calm_mesh(tmp_path, ["a", "b", "c", "d"], run, Network())
    ids = [p.peer for p in peers]
    for peer in peers:
        peer.start(ids)
    victim = peers[2]
    await until(lambda: len(victim.digests()) >= 3)
    reached = max(peers[0].digests())
    await victim.kill()
    await until(lambda: max(peers[0].digests()) >= reached + 4)
    given_up = [fields["plan"] for kind, fields in peers[0].notes if kind == "discard"]
    assert len(given_up) == len(set(given_up)), "one attempt is given up once"
    members = [note["view"] for note in peers[0].commits()]
    assert any(victim.peer not in view for view in members[reached:]), "the kill went unnoticed"
    victim.start(ids)
    back = max(peers[0].digests())
    await until(lambda: any(victim.peer in note["view"] for note in peers[0].commits() if note["round"] > back))
    for peer in peers:
        assert peer.session is not None
        peer.session.leave("the test is over")
    await asyncio.gather(*(peer.task for peer in peers if peer.task))
    assert all(victim.digests()[r] == peers[0].digests()[r] for r in victim.digests())


@virtual
async def test_stopped_and_started_again_goes_on(tmp_path: Path) -> None:
    def with_rounds(rounds: int) -> RunConfig:
        run = toy_run()
        return run.model_copy(update={"run": run.run.model_copy(update={"rounds": rounds})})

    async def play(folder: Path, *stops: int) -> list[CalmPeer]:
        peers: list[CalmPeer] = []
        for rounds in stops:
            peers = calm_mesh(folder, ["a", "b", "c"], with_rounds(rounds), Network())
            for peer in peers:
                peer.start([p.peer for p in peers])
            await asyncio.gather(*(peer.task for peer in peers if peer.task))
            for peer in peers:
                peer.store.close()
        return peers

    whole = await play(tmp_path / "whole", 7)
    parts = await play(tmp_path / "parts", 3, 7)
    assert whole[0].digests()[7] == parts[0].digests()[7]
    assert anchors(whole) == anchors(parts)


@virtual
async def test_a_peer_that_starts_after_the_last_round_ends_by_itself(tmp_path: Path) -> None:
    """All of them, one alone, and one that must still catch up, from the others that have come back for nothing else."""
    peers = calm_mesh(tmp_path, ["a", "b", "c"], toy_run(), Network())
    everybody = [p.peer for p in peers]

    async def play(some: list[CalmPeer]) -> list[tuple[int, str]]:
        for peer in some:
            peer.start(everybody)
        await asyncio.wait_for(asyncio.gather(*(peer.task for peer in some if peer.task)), 60.0)
        for peer in some:
            peer.store.close()
        return [peer.session.outcome for peer in some if peer.session is not None and peer.session.outcome is not None]

    over = (0, "the run has reached round 5")
    assert await play(peers) == [over] * 3
    assert await play(peers) == [over] * 3
    assert await play(peers[1:2]) == [over]
    late = calm_mesh(tmp_path, ["a", "b", "c", "late"], toy_run(), Network())
    everybody.append(late[3].peer)
    assert await play(late) == [over] * 4
    assert len(anchors(late)) == 1
    assert late[3].digests()[5] == peers[0].digests()[5]


@virtual
async def test_who_has_left_is_told_once_however_quick_the_rounds_are(tmp_path: Path) -> None:
    """Rounds that are shorter than every deadline leave no moment without an event."""
    run = toy_run()
    run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 100_000})})
    peers = calm_mesh(tmp_path, ["a", "b", "c"], run, Network(latency_seconds=0.01), 0.02)
    for peer in peers:
        peer.start([p.peer for p in peers])
    await until(lambda: all(len(peer.digests()) >= 3 for peer in peers))
    leaver, others = peers[2], peers[:2]
    assert leaver.session is not None
    leaver.session.leave("asked to")
    await until(lambda: leaver.session.outcome is not None)
    await until(lambda: all(any(kind == "lost" for kind, _ in peer.notes) for peer in others), 30.0)
    for peer in others:
        assert [(n["peer_site"], n["left"]) for kind, n in peer.notes if kind == "lost"] == [("c", True)]
    for peer in peers:
        await peer.kill()


@virtual
async def test_a_leader_that_leaves_is_followed_at_once(tmp_path: Path) -> None:
    """Its last heartbeat says that it leads no more: nobody waits until it counts as lost."""
    run = toy_run()
    run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 100_000})})
    peers = calm_mesh(tmp_path, ["a", "b", "c"], run, Network(latency_seconds=0.01))
    for peer in peers:
        peer.start([p.peer for p in peers])
    await until(lambda: all(len(peer.digests()) >= 3 for peer in peers))
    leader = next(peer for peer in peers if peer.session is not None and peer.session.replica.is_leader)
    others = [peer for peer in peers if peer is not leader]
    leader.session.leave("asked to")  # type: ignore[union-attr]
    await until(lambda: leader.session.outcome is not None)  # type: ignore[union-attr]
    left_at = asyncio.get_running_loop().time()
    await until(lambda: any(peer.session.replica.is_leader for peer in others), 30.0)  # type: ignore[union-attr]
    timing = peers[0].timing
    assert asyncio.get_running_loop().time() - left_at < timing.election_seconds < timing.heartbeat_limit_seconds
    assert leader.session.outcome == (0, "left: asked to")  # type: ignore[union-attr]
    for peer in peers:
        await peer.kill()


@pytest.mark.parametrize(("topology", "seconds"), [("gather", 41.0), ("reduce", 21.0)])
@virtual
async def test_links_far_slower_than_thought_cost_no_attempt(tmp_path: Path, topology: str, seconds: float) -> None:
    """Nothing is known of them before the first exchange, which then takes up to `seconds` instead of a moment, one way being
    twice as slow as the others: all bytes go once, and nobody is lost, fetches what comes anyway, or misses the next round."""
    size, bytes_per_second = 100_000, 20_000.0
    network, run = Network(bytes_per_second=bytes_per_second), toy_run(topology=topology)
    sections = {"codec": run.codec.model_copy(update={"payload": "fp32"}), "run": run.run.model_copy(update={"rounds": 2})}
    run, limits = run.model_copy(update=sections), ExchangeLimits(chunk_bytes=8192)
    peers = calm_mesh(tmp_path, ["a", "b", "c", "d"], run, network, size=size, limits=limits)
    network.set_link(peers[2].peer, peers[3].peer, bytes_per_second=bytes_per_second / 2)
    for peer in peers:
        peer.start([p.peer for p in peers])
    async with asyncio.timeout(2.5 * seconds + 20.0):  # who is left behind waits for ever
        await asyncio.gather(*(peer.task for peer in peers if peer.task))
    assert len(anchors(peers)) == 1
    assert not [kind for peer in peers for kind, _ in peer.notes if kind in ("discard", "lost")]
    for peer in peers:
        rounds = [event for event in peer.events if isinstance(event, RoundCommitted)]
        assert [(r.attempt, len(r.contributors)) for r in rounds] == [(1, 4), (1, 4)]
        each = sum(rounds[1].payload_sent.values())
        assert sum(rounds[0].payload_sent.values()) == each
    assert max(r.times.wan_idle for p in peers for r in p.events if isinstance(r, RoundCommitted) and r.round == 1) < seconds
