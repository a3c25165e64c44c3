"""One changed value in one peer's shared state: found, named, made anew from what the log agrees with; the others go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.anchors import ANCHOR_PARTS, part_of
from geomesh_p2p.core.ports import SaveState
from geomesh_p2p.swarm.memory import Network
from tests.injection.proof import fired, inject
from tests.mesh.calm import CalmPeer, calm_mesh, until, virtual
from tests.mesh.test_session import anchors
from tests.mesh.toy import SIZE, toy_run


def long_run(snapshot_every: int, min_peers: int = 2) -> RunConfig:
    run = toy_run()
    save = run.save.model_copy(update={"snapshot_every_rounds": snapshot_every})
    section = run.run.model_copy(update={"rounds": 100_000, "min_peers": min_peers})
    return run.model_copy(update={"run": section, "save": save})


async def flip(peer: CalmPeer, shared: str, index: int, bit: int = 12) -> int:
    """Flip one bit of `peer`'s anchor or momentum, between two pieces of its work, and prove it by reading it back. Returns the
    round after which it was flipped."""
    done: list[tuple[bool, int]] = []

    def now(anchor: Any, momentum: Any, residual: Any, save_inner: Any) -> None:
        bits = {"anchor": anchor, "momentum": momentum}[shared].view(np.uint32)
        before = int(bits[index])

        def fault() -> None:
            bits[index] ^= np.uint32(1 << bit)

        inject(fault)
        done.append((int(bits[index]) != before, peer.model.round))

    assert peer.session is not None
    peer.session.bench.put(SaveState(0, now))
    await until(lambda: bool(done))
    fired(done[0][0], "a bit of the shared state was flipped")
    return done[0][1]


def warned(peer: CalmPeer, reason: str) -> list[str]:
    return [event.text for event in peer.events if isinstance(event, obs.Warned) and event.reason == reason]


def noted(peer: CalmPeer, kind: str) -> list[dict[str, Any]]:
    return [fields for name, fields in peer.notes if name == kind]


async def started(folder: Path, names: list[str], run: RunConfig, after_round: int) -> list[CalmPeer]:
    peers = calm_mesh(folder, names, run, Network())
    for peer in peers:
        peer.start([p.peer for p in peers])
    await until(lambda: all(peer.model.round >= after_round for peer in peers))
    return peers


async def stopped(peers: list[CalmPeer]) -> None:
    """They end one after the other's last commit, and those at one round must be equal."""
    for peer in peers:
        assert peer.session is not None
        peer.session.leave("the test is over")
    await asyncio.gather(*(peer.task for peer in peers if peer.task))
    for peer in peers:
        peer.store.close()


def equal_after(peers: list[CalmPeer], round: int) -> bool:
    """Whether the parts that all have hashed since `round` are equal, over a whole rotation."""
    hashes = [{n["round"]: n["hash"] for n in noted(peer, "anchor") if n["round"] > round} for peer in peers]
    common = set.intersection(*(set(one) for one in hashes))
    assert all(len({one[r] for one in hashes}) == 1 for r in common)
    return len(common) >= ANCHOR_PARTS


@pytest.mark.case("C070")
@pytest.mark.fault
@pytest.mark.parametrize("shared", ["anchor", "momentum"])
@virtual
async def test_a_flipped_bit_is_found_named_and_repaired_while_the_others_go_on(tmp_path: Path, shared: str) -> None:
    peers = await started(tmp_path, ["a", "b", "c", "d"], long_run(1000), 3)
    odd = peers[2]
    index = SIZE // 3
    at = await flip(odd, shared, index)
    if shared == "momentum":
        at += 1  # the next update brings it into the anchor
    base = next(round for round in range(at, at + ANCHOR_PARTS) if part_of(round, SIZE)[1] <= index < part_of(round, SIZE)[2])
    await until(lambda: bool(noted(odd, "checked")) and max(peers[0].digests()) > base)
    update = next(note for note in peers[0].commits() if note["round"] == base + 1)
    if odd.peer in [c["peer"] for c in update["contributors"]]:  # else it found out by itself, from what the others said
        found = noted(peers[0], "mismatch")
        assert [(fields["round"], fields["odd"]) for fields in found] == [(base, (odd.peer,))]
        warned = [e.text for e in peers[0].events if isinstance(e, obs.Warned) and e.reason == "digest_mismatch"]
        assert warned[0].startswith(f"c: another part {base % ANCHOR_PARTS} of the anchor")
    assert noted(odd, "checked")[0]["outcome"] == "repaired"
    repaired = noted(odd, "checked")[0]["round"]
    await until(lambda: equal_after(peers, repaired))
    assert any(odd.peer in [c["peer"] for c in note["contributors"]] for note in peers[0].commits() if note["round"] > repaired)
    assert not any(noted(peer, "checked") for peer in peers if peer is not odd)
    assert len({peer.digests().get(repaired) for peer in peers}) == 1
    await stopped(peers)


@pytest.mark.case("C070")
@pytest.mark.fault
@virtual
async def test_of_two_that_differ_each_checks_itself_and_the_wrong_one_is_repaired(tmp_path: Path) -> None:
    peers = await started(tmp_path, ["a", "b"], long_run(3), 5)
    await flip(peers[1], "anchor", 7)
    await until(lambda: all(noted(peer, "checked") for peer in peers))
    assert [noted(peer, "checked")[0]["outcome"] for peer in peers] == ["sound", "repaired"]
    assert noted(peers[0], "mismatch")[0]["tied"]
    repaired = noted(peers[1], "checked")[0]["round"]
    await until(lambda: equal_after(peers, repaired))
    await stopped(peers)


@pytest.mark.case("C070")
@pytest.mark.fault
@virtual
async def test_who_has_nothing_sound_on_disk_gets_a_snapshot_of_another(tmp_path: Path) -> None:
    peers = calm_mesh(tmp_path, ["a", "b", "c"], long_run(3), Network())
    odd = peers[2]
    odd.run = long_run(1000)  # no snapshot of its own, and its initial weights are no longer to be had
    for peer in peers:
        peer.start([p.peer for p in peers])
    assert odd.session is not None
    odd.session.around.past._initial = lambda: np.ones(SIZE, np.float32)  # type: ignore[attr-defined]
    await until(lambda: all(peer.model.round >= 7 for peer in peers))
    await flip(odd, "anchor", 7)
    await until(lambda: bool(noted(odd, "checked")))
    assert noted(odd, "checked")[0]["outcome"] == "repaired"
    assert [event.reason for event in odd.events if isinstance(event, obs.Warned)][-2:] == ["anchor_lost", "anchor_repaired"]
    assert odd.session.around.snapshots.rounds()
    repaired = noted(odd, "checked")[0]["round"]
    await until(lambda: equal_after(peers, repaired))
    await stopped(peers)


@pytest.mark.case("C070")
@pytest.mark.fault
@virtual
async def test_an_anchor_that_is_known_to_be_wrong_is_never_saved_and_its_peer_leaves_in_good_order(tmp_path: Path) -> None:
    """Nobody has a sound snapshot, so it stays wrong; neither the next snapshot's round nor the peer's end saves it."""
    peers = calm_mesh(tmp_path, ["a", "b", "c", "d"], long_run(1000, 3), Network())
    for peer in peers:
        peer.start([p.peer for p in peers])
    odd = peers[2]
    assert odd.session is not None
    odd.session.around.past._initial = lambda: np.ones(SIZE, np.float32)  # type: ignore[attr-defined]
    await until(lambda: all(peer.model.round >= 3 for peer in peers))
    await flip(odd, "anchor", 7)
    await until(lambda: warned(odd, "anchor_lost"))
    save = odd.session.planning.save.model_copy(update={"snapshot_every_rounds": 2})
    odd.session.planning = replace(odd.session.planning, save=save)
    at = odd.model.round
    await until(lambda: odd.model.round >= at + 4)
    odd.session.leave("signal SIGTERM")
    assert odd.task is not None
    await odd.task
    assert odd.session.outcome is not None
    assert odd.session.outcome[0] == 0
    assert odd.session.around.snapshots.rounds() == []
    assert len(warned(odd, "not_saved")) >= 3, "two rounds of snapshots, and the end"
    odd.store.close()
    await stopped([peer for peer in peers if peer is not odd])


@pytest.mark.case("C070")
@pytest.mark.fault
@virtual
async def test_a_snapshot_that_was_due_while_an_anchor_was_wrong_is_made_once_it_is_right(tmp_path: Path) -> None:
    """The snapshot is due with the very commit by which the fault is found."""
    peers = await started(tmp_path, ["a", "b", "c", "d"], long_run(1, 3), 3)
    odd = peers[2]
    assert odd.session is not None
    await flip(odd, "anchor", 7)
    await until(lambda: bool(noted(odd, "checked")))
    assert noted(odd, "checked")[0]["outcome"] == "repaired"
    repaired = noted(odd, "checked")[0]["round"]
    await until(lambda: max(odd.session.around.snapshots.rounds(), default=0) > repaired)
    await stopped(peers)
    for round in odd.session.around.snapshots.rounds():
        others = [peer for peer in peers if peer.session and round in peer.session.around.snapshots.rounds()]
        assert len({peer.session.around.snapshots.manifest(round).content for peer in others if peer.session}) == 1


@virtual
async def test_equal_runs_say_equal_states(tmp_path: Path) -> None:
    """Of other peer ids too: what is compared depends on configuration, seed and site names alone."""
    said = []
    for folder in ("one", "two"):
        peers = calm_mesh(tmp_path / folder, ["a", "b"], toy_run(), Network())
        for peer in peers:
            peer.start([p.peer for p in peers])
        await asyncio.gather(*(peer.task for peer in peers if peer.task))
        said.append([[(c["site"], c["anchor_part"], c["state"]) for c in n["contributors"]] for n in peers[0].commits()])
        assert len(anchors(peers)) == 1
    assert said[0] == said[1]
    assert [bool(round[0][2]) for round in said[0]] == [True, False, True, False, True], "after rounds 0, 2 and 4"
    assert all(part for round in said[0] for _, part, _ in round)
