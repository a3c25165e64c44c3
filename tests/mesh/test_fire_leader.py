"""Leaders that die, sleep and flap, whole peers in virtual time: the others go on, nothing is committed twice or lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from tests.injection.proof import fired
from tests.injection.script import At, Fault, Phase, Script
from tests.injection.virtual import TIMING, VirtualMesh, long_run, run_mesh
from tests.mesh.recovery import DEATHS, LEADER_ONLY, kill_and_go_on

TOPOLOGIES = ("gather", "reduce")
pytestmark = pytest.mark.fault


@pytest.mark.case("C040")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("death", DEATHS)
def test_a_leader_killed_anywhere_in_a_round(tmp_path: Path, death: str, topology: str) -> None:
    """A new leader goes on with the round within the heartbeat limit, an election and the round's own time."""
    recovery = run_mesh(kill_and_go_on(tmp_path, death, "leader", topology))
    assert recovery.seconds <= TIMING.heartbeat_limit_seconds + TIMING.election_seconds + 3.0
    assert recovery.discarded <= 1


@pytest.mark.case("C045")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("death", [death for death in DEATHS if death not in LEADER_ONLY])
def test_a_member_killed_anywhere_in_a_round(tmp_path: Path, death: str, topology: str) -> None:
    """Between plan and exchange, too: the round is planned anew without it once it has been silent for the limit."""
    recovery = run_mesh(kill_and_go_on(tmp_path, death, "member", topology))
    assert recovery.seconds <= TIMING.heartbeat_limit_seconds + 2.0
    assert recovery.discarded <= 1


@pytest.mark.case("C041")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("phase", "step"), [("before_plan", None), ("after_plan", None), ("exchange", 1), ("before_commit", None), ("in_commit", 1)]
)
def test_a_paused_leader_wakes_up_with_an_old_term(tmp_path: Path, phase: Phase, step: int | None, topology: str) -> None:
    async def main() -> None:
        script = Script([(At("leader", phase, 5, step), Fault("pause", seconds=3 * TIMING.lease_seconds))])
        async with VirtualMesh(tmp_path, "abcd", script, run=long_run(topology=topology)) as mesh:
            mesh.start()
            await mesh.until(lambda: script.struck or mesh.least > 5, what="the pause")
            fired(script.struck, "the pause")
            old = mesh[script.struck[0].moment.site]
            term = old.replica.term
            others = [peer for peer in mesh if peer is not old]
            await mesh.until(lambda: all(peer.replica.term > term for peer in others), 30.0, "a new leader while it sleeps")
            await mesh.until(old.life.gate.is_set, 30.0, "its waking up")
            awake = mesh.round
            assert awake > 5, "the others went on without it"
            await mesh.until(lambda: not old.leads and old.replica.term > term, 5.0, "its stepping down")
            await mesh.until(lambda: old.peer in others[0].commits()[-1]["view"], 60.0, "its taking part again")
            assert mesh.round <= awake + 3
            mesh.prove()
            accepts = [(n["round"], n["term"], n["attempt"]) for n in noted(mesh, "accept") if n["peer"] == others[0].name]
            assert len(accepts) == len(set(accepts)), "one plan at most for a round, term and attempt"
            plans = {(n["round"], n["term"], n["attempt"], n["plan"]) for n in noted(mesh, "accept")}
            assert len(plans) == len({plan[:3] for plan in plans}), "the same one at all peers"
            late = [n for n in noted(mesh, "accept") if n["term"] == term and n["at"] > awake_at(old)]
            assert not late, "no plan of its old term is accepted"
            mesh.check()

    run_mesh(main())


def noted(mesh: VirtualMesh, kind: str) -> list[dict]:
    return [{**fields, "peer": peer.name} for peer in mesh for what, fields in peer.notes if what == kind]


def awake_at(peer) -> float:
    """When a peer that was paused first noted something again."""
    times = [fields["at"] for _, fields in peer.notes]
    gaps = [(later - earlier, later) for earlier, later in pairwise(times)]
    return max(gaps)[1]


@pytest.mark.case("C043")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_whoever_leads_is_restarted_every_few_seconds(tmp_path: Path, topology: str) -> None:
    async def main() -> None:
        async with VirtualMesh(tmp_path, "abcd", run=long_run(topology=topology)) as mesh:
            mesh.start()
            await mesh.rounds(3)
            before, kills, terms = mesh.round, 0, []
            for _ in range(36):
                leader = mesh.leader
                if leader is not None:
                    terms.append(leader.replica.term)
                kills += mesh.strike(leader, Fault("kill", seconds=1.0))
                await asyncio.sleep(5.0)
            fired(kills > 10, "restarts of leaders")
            mesh.prove()
            assert terms == sorted(set(terms)), "each reign has a higher term"
            assert mesh.round >= before + 10, "slower, but it goes on"
            await mesh.rounds(3)
            mesh.check()

    run_mesh(main())


@pytest.mark.case("C038")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("phase", ["training", "exchange", "before_commit"])
def test_all_peers_are_killed_and_come_back(tmp_path: Path, phase: Phase, topology: str) -> None:
    async def main() -> None:
        script = Script([(At("anyone", phase, 6), Fault("kill"))])
        async with VirtualMesh(tmp_path, "abcd", script, run=long_run(topology=topology)) as mesh:
            mesh.start()
            await mesh.until(lambda: script.struck or mesh.least > 6, what="the first kill")
            fired(script.struck, "the kills")
            for peer in mesh:
                if peer.up:
                    mesh.later(0.1, mesh.strike, peer, Fault("kill"))
            await mesh.until(lambda: not any(peer.up for peer in mesh), 1.0, "all being gone")
            digests = mesh.commits()
            await asyncio.sleep(5.0)
            assert mesh.count()["kill"] == 4
            mesh.start()
            await mesh.rounds(3, 60.0)
            assert all(mesh.commits()[round] == digests[round] for round in digests)
            assert mesh.round >= max(digests) + 3
            mesh.check()

    run_mesh(main())
