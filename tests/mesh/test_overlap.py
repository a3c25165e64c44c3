"""Whole peers in virtual time that begin the next round while an update is on its way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.core.log import covers
from geomesh_p2p.core.observations import RoundCommitted
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm.memory import Network
from tests.injection.proof import fired
from tests.injection.script import Fault
from tests.injection.virtual import VirtualMesh, VirtualPeer, long_run, run_mesh
from tests.mesh.fire import play

SLOW = {"latency_seconds": 0.3, "bytes_per_second": 4000.0}   # an exchange takes as long as several steps


def overlapped(overlap: str = "delayed", names: str = "abc", **planner: Any) -> Any:
    return long_run(mode="planned", round_tokens=16 * 16 * len(names), min_steps=4, overlap=overlap, **planner)


def shares(peers: list[VirtualPeer], first_round: int) -> dict[str, float]:
    """Of the wall time of rounds, all peers together."""
    rounds = [e for peer in peers for e in peer.events if isinstance(e, RoundCommitted) and e.round >= first_round]
    wall = sum(e.times.wall for e in rounds)
    return {what: sum(getattr(e.times, what) for e in rounds) / wall for what in ("straggler_idle", "wan_idle")}


def positions(peer: VirtualPeer, last_round: int = 2**60) -> list[Range]:
    """Credited up to a round, ascending."""
    commits = [note for note in peer.commits() if note["round"] <= last_round]
    return sorted(r if isinstance(r, Range) else Range(*r) for n in commits for c in n["contributors"] for r in c["ranges"])


@pytest.mark.parametrize(("topology", "rate"), [("gather", 4000.0), ("reduce", 6000.0)])  # a reduce of two bits sends 1.5 times
def test_who_waits_for_an_update_trains_on(tmp_path: Path, topology: str, rate: float) -> None:
    """Over the same slow links: hardly any idle time is left, rounds are shorter, and all have the same model."""
    found, length = {}, {}

    async def rounds_of(overlap: str) -> None:
        network = Network(0, **{**SLOW, "bytes_per_second": rate})
        run = overlapped(overlap, topology=topology)
        async with VirtualMesh(tmp_path / overlap, "abc", network=network, run=run) as mesh:
            mesh.start()
            await mesh.until(lambda: mesh.least >= 6)
            begun = mesh.now
            await mesh.until(lambda: mesh.least >= 16)
            length[overlap] = (mesh.now - begun) / 10
            found[overlap] = shares(list(mesh), 6)
            for peer in mesh:
                times = [e.times for e in peer.events if isinstance(e, RoundCommitted)]
                assert all(
                    t.wall == pytest.approx(t.compute + t.data_wait + t.straggler_idle + t.wan_idle + t.codec + t.control)
                    for t in times
                )
                assert all(min(t.straggler_idle, t.wan_idle) >= 0 for t in times)
                assert (peer.model.engine.ahead > 10) == (overlap == "delayed")
            mesh.check()
            at = {peer.name: peer.digests()[16] for peer in mesh}
            assert len(set(at.values())) == 1
            credited = positions(mesh["a"])
            assert all(a.stop <= b.start for a, b in pairwise(credited))

    for overlap in ("none", "delayed"):
        run_mesh(rounds_of(overlap))
    assert found["none"]["wan_idle"] > 0.2
    assert found["delayed"]["wan_idle"] < 0.1 * found["none"]["wan_idle"]
    assert found["delayed"]["straggler_idle"] < 0.05
    assert length["delayed"] < 0.85 * length["none"]


@pytest.mark.fault
@pytest.mark.parametrize("who", ["leader", "member"])
def test_a_peer_that_is_killed_loses_what_it_trained_ahead_and_others_train_it(tmp_path: Path, who: str) -> None:
    async def main() -> None:
        network = Network(0, **SLOW)
        async with VirtualMesh(tmp_path, "abcd", network=network, run=overlapped(names="abcd")) as mesh:
            mesh.start()
            await mesh.until(lambda: mesh.least >= 5)
            victim = next(p for p in mesh if p.leads == (who == "leader"))
            # While it trains ahead.
            await mesh.until(lambda: victim.model.ahead is not None and victim.model.ahead.steps > 0)
            killed = mesh.round
            mesh.strike(victim, Fault("kill", 20.0, 0.0))
            fired(victim.life.dead, "kill")
            await mesh.until(lambda: mesh.round >= killed + 4)
            await mesh.until(lambda: victim.up and victim.round >= mesh.round - 1)
            back = mesh.round
            await mesh.until(lambda: mesh.least >= back + 6)
            there = [note for note in mesh["a"].commits() if note["round"] > back + 3]
            assert victim.name in {c["site"] for note in there for c in note["contributors"]}
            mesh.check()
            witness = mesh["b"] if victim.name == "a" else mesh["a"]
            before = positions(witness, back)
            assert covers(positions(witness), [Range(0, before[-1].stop)]), "what was reserved for it is handed out again"

    run_mesh(main())


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(8))
def test_random_faults_of_whole_peers_that_train_ahead(seed: int) -> None:
    found, counts = play(seed, overlap=True)
    fired(counts["faults"] >= 3, "three faults that had an effect")
    assert found == []
    assert counts["steps ahead"] > 0
