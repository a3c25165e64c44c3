"""A peer whose uplink has a limit takes part in exchanges that are planned with it, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.core import observations as obs
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.mesh.calm import CalmPeer, calm_mesh, until
from tests.mesh.test_comings import round_of, stop
from tests.mesh.toy import toy_run

SIZE = 800_000
CAP = 20_000.0  # bytes a second; a contribution has 100,000 bytes


class LimitedPeer(CalmPeer):
    """The network passes its bulk at the rate that it says is its limit."""

    def make_transport(self) -> Any:
        transport = super().make_transport()
        if self.name == "b":
            self.network.set_uplink(self.peer, CAP)
            transport.links.upload_bytes_per_second = CAP
        return transport


@pytest.mark.parametrize("topology", ["gather", "reduce"])
def test_exchanges_take_as_long_as_planned_from_the_first_one_on(topology: str, tmp_path: Path) -> None:
    """Nothing has measured a link before the first one: what is known of its length is the limit."""

    async def main() -> None:
        run = toy_run(mode="planned", topology=topology, round_tokens=2048)
        run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 8, "min_peers": 4})})
        network, limits = Network(latency_seconds=0.02), ExchangeLimits(chunk_bytes=4096)
        made = calm_mesh(tmp_path, list("abcd"), run, network, 0.25, SIZE)
        peers = [LimitedPeer(network, tmp_path, p.name, run, p.founding, 0.25, layout=p.layout, limits=limits) for p in made]
        everybody = [peer.peer for peer in peers]
        for peer in peers:
            peer.start(everybody)
        await until(lambda: all(round_of(peer) >= 6 for peer in peers))
        await stop(peers)
        events = peers[0].events
        plans = {event.plan.round: event.plan for event in events if isinstance(event, obs.PlanAdopted)}
        took = {event.round: event.times.wan_idle for event in events if isinstance(event, obs.RoundCommitted)}
        assert not [event for event in events if isinstance(event, obs.RoundDiscarded)]
        assert {plan.attempt for plan in plans.values()} == {1}
        limit = 3 * 100_000 / CAP if topology == "gather" else 100_000 / CAP
        assert all(plan.exchange_seconds >= 0.9 * limit for plan in plans.values())
        for round in range(1, 7):
            assert took[round] == pytest.approx(plans[round].exchange_seconds, rel=0.2), f"round {round}"

    run_virtual(main())
