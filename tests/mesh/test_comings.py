"""Who comes, goes, dies and comes back, in virtual time: the same state everywhere, nothing lost, nobody else harmed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.log import merged
from geomesh_p2p.core.observations import PhaseChanged
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.injection.proof import fired, inject
from tests.mesh.calm import CalmPeer, calm_mesh, until
from tests.mesh.toy import SIZE, toy_run


def run_of(min_peers: int = 2, keep_updates: int = 50, every: int = 2) -> RunConfig:
    run = toy_run()
    section = run.run.model_copy(update={"rounds": 100_000, "min_peers": min_peers})
    save = run.save.model_copy(update={"keep_updates": keep_updates, "snapshot_every_rounds": every})
    return run.model_copy(update={"run": section, "save": save})


def mesh_of(folder: Path, names: str, run: RunConfig | None = None) -> tuple[list[CalmPeer], list[str]]:
    peers = calm_mesh(folder, list(names), run or run_of(), Network(latency_seconds=0.02), 0.5, SIZE)
    return peers, [peer.peer for peer in peers]


def round_of(peer: CalmPeer) -> int:
    return max(peer.digests(), default=0)


def now() -> float:
    return asyncio.get_running_loop().time()


def waits_for(peer: CalmPeer, source: str) -> list[list[float]]:
    """When each request of `peer` to `source` from now on began, and when it was over, if it is."""
    waits, request = list[list[float]](), peer.transport.request

    async def watched(to: str, fetch: Any, timeout_seconds: float) -> Any:
        times = [now()]
        if to == source:
            waits.append(times)
        try:
            return await request(to, fetch, timeout_seconds)
        finally:
            times.append(now())

    peer.transport.request = watched
    return waits


async def kill(peer: CalmPeer) -> None:
    """As kill -9 does: nothing is said or saved. Not at all if faults are switched off."""
    fault = inject(peer.kill)
    if fault is not None:
        await fault
    fired(peer.task is not None and peer.task.done(), f"{peer.name} was killed")


async def stop(peers: list[CalmPeer]) -> None:
    for peer in peers:
        if peer.task is not None and not peer.task.done():
            await peer.kill()


def equal_states(peers: list[CalmPeer], first: int = 1) -> int:
    """How many rounds from `first` on several peers have a state of; all of them must be equal."""
    compared = 0
    for round in range(first, max(round_of(peer) for peer in peers) + 1):
        states = [peer.states[round] for peer in peers if round in peer.states]
        assert len(set(states)) <= 1, f"round {round}"
        compared += len(states) > 1
    return compared


@pytest.mark.case("C026")
@pytest.mark.fault
@pytest.mark.parametrize("gives", [True, False])
def test_a_donor_that_dies_costs_a_joiner_seconds(tmp_path: Path, gives: bool) -> None:
    """While it gives, or as soon as the joiner knows it. That a peer is gone is known after the heartbeat limit, 5 s; answers
    have no deadline to speak of here, so that nothing else ends the wait for one."""

    async def main() -> None:
        network, size = Network(latency_seconds=0.02), 500_000
        peers = calm_mesh(tmp_path, list("abcn"), run_of(keep_updates=1), network, 0.5, size)
        everybody, donor, joiner = [peer.peer for peer in peers], peers[2], peers[3]
        for peer in peers[:3]:
            network.set_link(peer.peer, joiner.peer, one_way=True, bytes_per_second=100_000.0)
            peer.start(everybody)
        await until(lambda: round_of(peers[0]) >= 7)
        joiner.start(everybody)
        begun = now()
        assert joiner.session is not None
        joiner.session._fetcher.slice_timeout_seconds = 10_000.0
        waits = waits_for(joiner, donor.peer)
        assert donor.session is not None
        given, known = donor.session.donor.given, joiner.session.replica.s.peers
        gives_now = lambda: sum(given.values()) > 0 and any(len(times) == 1 for times in waits)  # noqa: E731
        await until(gives_now if gives else lambda: donor.peer in known)
        await kill(donor)
        killed = now()
        await until(lambda: any(kind == "adopt" for kind, _ in joiner.notes))
        alone = 8 * size / 200_000.0  # from the two that are left, if they have nothing else to send
        silent = killed + joiner.timing.heartbeat_limit_seconds
        assert now() - begun <= 2 * alone + 5.0
        assert waits, "it was asked"
        assert all(len(times) == 2 for times in waits), "nobody waits for it any more"
        assert all(end <= max(start, silent) + 1.0 for start, end in waits), "nor did so once it was silent"
        await until(lambda: any(item["site"] == "n" for note in peers[0].commits() for item in note["contributors"]))
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C028")
def test_a_joiner_has_every_shared_value_of_its_donor_before_and_after_the_first_joint_round(tmp_path: Path) -> None:
    async def main() -> None:
        peers, everybody = mesh_of(tmp_path, "abn", run_of(keep_updates=1))
        joiner = peers[2]
        for peer in peers[:2]:
            peer.start(everybody)
        await until(lambda: round_of(peers[0]) >= 7)
        joiner.start(everybody)
        await until(lambda: any(item["site"] == "n" for note in peers[0].commits() for item in note["contributors"]))
        await until(lambda: round_of(joiner) == round_of(peers[0]))
        adopted = next(fields["round"] for kind, fields in joiner.notes if kind == "adopt")
        assert adopted >= 4
        joint = min(note["round"] for note in peers[0].commits() if "n" in [item["site"] for item in note["contributors"]])
        for round in (adopted, joint - 1, joint):
            assert joiner.states[round] == peers[0].states[round]
        theirs, mine = (peer.session.replica.log.state for peer in (peers[0], joiner) if peer.session is not None)
        assert mine == theirs, "round, digest, voters, credited ranges and tokens, which the schedule follows"
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C030")
@pytest.mark.fault
def test_a_peer_that_comes_back_with_an_old_state_takes_the_others_(tmp_path: Path) -> None:
    async def main() -> None:
        peers, everybody = mesh_of(tmp_path, "abc")
        for peer in peers:
            peer.start(everybody)
        await until(lambda: round_of(peers[2]) >= 5)
        await kill(peers[2])
        await until(lambda: round_of(peers[0]) >= 20)
        peers[2].start(everybody)
        await until(lambda: any(item["site"] == "c" for note in peers[0].commits()[20:] for item in note["contributors"]))
        theirs = peers[0].digests()
        assert all(theirs[round] == digest for round, digest in peers[2].digests().items() if round in theirs)
        assert set(range(1, 21)) <= set(peers[2].digests())
        assert equal_states(peers) >= 15
        await stop(peers)

    run_virtual(main())


@pytest.mark.long
@pytest.mark.case("C032")
@pytest.mark.fault
def test_twenty_kills_and_returns_of_one_leave_the_others_going(tmp_path: Path) -> None:
    async def main() -> None:
        peers, everybody = mesh_of(tmp_path, "abc")
        for peer in peers:
            peer.start(everybody)
        await until(lambda: round_of(peers[0]) >= 2)
        survivors, random = [peers[0].task, peers[2].task], Random(1)
        for _ in range(20):
            await asyncio.sleep(random.uniform(0.1, 8.0))
            await kill(peers[1])
            before = round_of(peers[0])
            await asyncio.sleep(random.uniform(0.1, 8.0))
            peers[1].start(everybody)
            await until(lambda before=before: min(round_of(peers[0]), round_of(peers[2])) > before)  # type: ignore[misc]
        assert [peers[0].task, peers[2].task] == survivors
        assert not any(task is None or task.done() for task in survivors)
        last = round_of(peers[0])
        await until(lambda: any(item["site"] == "b" for note in peers[0].commits()[last:] for item in note["contributors"]))
        assert equal_states(peers) > 20
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C033")
@pytest.mark.fault
def test_a_member_that_dies_before_the_first_round_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        peers, everybody = mesh_of(tmp_path, "abc")
        for peer in peers[:2]:
            peer.start(everybody)
        a = peers[0].session
        assert a is not None
        await until(lambda: peers[1].peer in a.replica.s.peers)
        assert round_of(peers[0]) == 0
        await kill(peers[1])
        begun = asyncio.get_running_loop().time()
        peers[2].start(everybody)
        await until(lambda: round_of(peers[0]) >= 1)
        assert asyncio.get_running_loop().time() - begun <= peers[0].timing.heartbeat_limit_seconds + 10.0
        said = [event.waiting_for for event in peers[0].events if isinstance(event, PhaseChanged)]
        assert "the contributions of a, b, c" in said, "until then it says for whom it waits"
        assert [item["site"] for item in peers[0].commits()[0]["contributors"]] == ["a", "c"]
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C038")
@pytest.mark.fault
def test_after_the_death_of_all_the_run_goes_on_from_the_last_committed_round(tmp_path: Path) -> None:
    async def main() -> None:
        peers, everybody = mesh_of(tmp_path, "abc")
        for peer in peers:
            peer.start(everybody)
        await until(lambda: round_of(peers[0]) >= 6)
        await asyncio.sleep(2.0)
        for peer in peers:
            await kill(peer)
        last = max(round_of(peer) for peer in peers)
        digest = next(peer.digests()[last] for peer in peers if last in peer.digests())
        for peer in peers:
            peer.start(everybody)
        await until(lambda: min(round_of(peer) for peer in peers) >= last + 3)
        assert all(peer.digests()[last] == digest for peer in peers)
        assert equal_states(peers) >= last
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C039")
@pytest.mark.fault
def test_the_ranges_of_a_killed_member_are_handed_out_again_once(tmp_path: Path) -> None:
    async def main() -> None:
        peers, everybody = mesh_of(tmp_path, "abc")
        for peer in peers:
            peer.start(everybody)
        assert peers[1].session is not None
        doomed = peers[1].session.replica
        await until(lambda: round_of(peers[0]) >= 3 and doomed.phase == "training")
        await asyncio.sleep(0.6)
        lost = [fields["ranges"]["b"] for kind, fields in peers[0].notes if kind == "accept"][-1]
        await kill(peers[1])
        await until(lambda: round_of(peers[0]) >= 12)
        ranges = [r for note in peers[0].commits() for item in note["contributors"] for r in item["ranges"]]
        assert sum(len(r) for r in ranges) == sum(len(r) for r in merged(ranges)), "nothing twice"
        assert merged(ranges) == (Range(0, max(r.stop for r in ranges)),), "nothing left out"
        others = [item for note in peers[0].commits() for item in note["contributors"] if item["site"] != "b"]
        again = [r for item in others for r in item["ranges"]]
        assert all(any(one.start <= r.start and r.stop <= one.stop for one in merged(again)) for r in lost)
        await stop(peers)

    run_virtual(main())


@pytest.mark.case("C071")
def test_the_shared_state_is_equal_in_mid_window_and_at_the_boundary_while_local_weights_differ(tmp_path: Path) -> None:
    """What is shared are the anchor and the outer momentum; a peer's weights in mid-window are its own."""

    async def main() -> None:
        peers, everybody = mesh_of(tmp_path, "abc")
        for peer in peers:
            peer.start(everybody)
        for round in (3, 4):
            await until(lambda round=round: min(peer.model.round for peer in peers) == round)  # type: ignore[misc]
            at_boundary = {digest_bytes(peer.model.state.anchor, peer.model.state.momentum) for peer in peers}
            await asyncio.sleep(1.5)
            for peer in peers:  # each has gone its own way by now
                peer.model.engine.set_weights(peer.model.state.anchor + np.float32(len(peer.name) + ord(peer.name)))
            in_mid_window: list[Any] = [digest_bytes(peer.model.state.anchor, peer.model.state.momentum) for peer in peers]
            assert {peer.model.round for peer in peers} == {round}
            assert len(at_boundary) == len({*in_mid_window}) == 1
            assert len({digest_bytes(peer.model.engine.weights()) for peer in peers}) == 3
        for note in peers[0].commits():
            (part,) = {one["anchor_part"] for one in note["contributors"]}
            assert part, "each round compares a part"
        assert [note["round"] for note in peers[0].commits() if len(note["contributors"]) == 3][-1] >= 4
        assert not [note for peer in peers for note in peer.notes if note[0] == "mismatch"], "other weights are no mismatch"
        await stop(peers)

    run_virtual(main())


def test_a_joiner_that_is_stopped_while_it_catches_up_comes_back_with_the_state_of_its_round(tmp_path: Path) -> None:
    """What it fetched is folded already, though its replica knows nothing of it yet: its last snapshot must say so."""

    async def main() -> None:
        run = run_of(keep_updates=500, every=1000)
        peers, everybody = mesh_of(tmp_path, "abcn", run)
        latecomer = peers[3]
        for peer in peers[:3]:
            peer.start(everybody)
        await until(lambda: round_of(peers[0]) >= 30)
        latecomer.start(everybody)
        assert latecomer.session is not None
        replica = latecomer.session.replica
        await until(lambda: len(latecomer.store.rounds()) >= 5)
        assert replica.s.catching_up
        assert replica.round == 0
        latecomer.session.leave("asked to")
        assert latecomer.task is not None
        await asyncio.wait_for(latecomer.task, 100.0)
        latecomer.store.close()
        model = latecomer.make_session()[1]
        assert model.round >= 5
        assert digest_bytes(model.state.anchor, model.state.momentum) == peers[0].states[model.round]
        latecomer.store.close()
        await stop(peers[:3])

    run_virtual(main())
