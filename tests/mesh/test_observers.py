"""An observer follows the log and counts nowhere: not in a plan, a view, a vote or a mean."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from geomesh_p2p.core.observations import PlanAdopted
from geomesh_p2p.swarm.memory import Network
from tests.mesh.calm import calm_mesh, virtual
from tests.mesh.toy import toy_run


@pytest.mark.case("C037")
@pytest.mark.parametrize("topology", ["gather", "reduce"])
@virtual
async def test_an_observer_has_the_state_of_the_trainers_and_counts_nowhere(tmp_path: Path, topology: str) -> None:
    peers = calm_mesh(tmp_path, ["a", "b", "watcher"], toy_run(topology=topology), Network())
    a, b, watcher = peers
    watcher.trains = False
    for peer in peers:
        peer.start([p.peer for p in peers])
    await asyncio.gather(*(peer.task for peer in peers if peer.task))

    trainers = {a.peer, b.peer}
    for peer in peers:
        assert set(peer.digests()) == {1, 2, 3, 4, 5}
        assert all(set(note["view"]) == trainers for note in peer.commits()[1:])
        assert all({c["peer"] for c in note["contributors"]} == trainers for note in peer.commits())
    assert not [event for event in watcher.events if isinstance(event, PlanAdopted)]
    assert not [kind for kind, _ in watcher.notes if kind in ("vote", "leader", "accept", "contribute", "held")]
    assert watcher.model.state.anchor.any()
    assert watcher.model.state.anchor.tobytes() == a.model.state.anchor.tobytes()
    assert watcher.digests() == a.digests()
