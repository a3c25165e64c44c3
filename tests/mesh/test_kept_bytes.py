"""A run whose peers keep their past within a limit of bytes, in virtual time: newcomers still find what they need."""

from __future__ import annotations

from pathlib import Path

from geomesh_p2p.core import observations as obs
from geomesh_p2p.engine.checkpoint import Snapshots
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.mesh.calm import until
from tests.mesh.test_comings import equal_states, mesh_of, round_of, run_of, stop

LIMIT = 120_000  # a snapshot takes about 34 kB, an update 4


def test_a_newcomer_joins_peers_that_keep_little(tmp_path: Path) -> None:
    async def main() -> None:
        run = run_of(keep_updates=1000)
        save = run.save.model_copy(update={"keep_snapshots": 50, "keep_bytes": LIMIT})
        peers, everybody = mesh_of(tmp_path, "abn", run.model_copy(update={"save": save}))
        for peer in peers[:2]:
            peer.start(everybody)
        await until(lambda: round_of(peers[0]) >= 20)
        for peer in peers[:2]:
            kept = [event for event in peer.events if isinstance(event, obs.Kept)]
            assert kept[-1].update_bytes > 0
            assert all(event.snapshot_bytes + event.update_bytes <= LIMIT for event in kept)
            assert Snapshots(tmp_path / peer.name).rounds()[0] > 10
            assert peer.store.rounds().start > 8
        peers[2].start(everybody)
        await until(lambda: any(item["site"] == "n" for note in peers[0].commits() for item in note["contributors"]))
        await until(lambda: round_of(peers[2]) >= 30)
        assert any(kind == "adopt" for kind, _ in peers[2].notes), "by a snapshot: the log no longer begins at round 1"
        await stop(peers)
        assert equal_states(peers) > 20
        assert not [event for peer in peers for event in peer.events if getattr(event, "reason", "") == "over_limit"]

    run_virtual(main())
