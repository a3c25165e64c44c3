"""A peer with a small uplink (net.upload_mbps): its bytes go into the exchange, and nobody asks it for more."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.types import Timing
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import Network
from tests.mesh.calm import CalmPeer, calm_mesh, until, virtual
from tests.mesh.test_comings import round_of, stop
from tests.mesh.toy import toy_run

PARAMETERS, CHUNK_BYTES = 4_000_000, 131_072


class LimitedPeer(CalmPeer):
    """b may send `limit` bytes a second, all others what they like."""

    limit = 0.0

    def make_transport(self) -> Any:
        transport = super().make_transport()
        if self.name == "b":
            self.network.set_uplink(self.peer, self.limit)
            transport.links.upload_bytes_per_second = self.limit
        return transport


@pytest.mark.parametrize("limit", [125_000.0, 12_500.0], ids=["1 Mbit/s", "0.1 Mbit/s"])
@virtual
async def test_who_ends_its_exchange_after_the_commit_fetches_nothing(limit: float, tmp_path: Path) -> None:
    """The others commit when a quorum has all: whoever is last has as long again as was planned, though it is behind then."""
    run = toy_run(mode="planned", topology="gather", round_tokens=2048)
    run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 8, "min_peers": 4})})
    network, limits = Network(latency_seconds=0.02), ExchangeLimits(chunk_bytes=CHUNK_BYTES)
    made = calm_mesh(tmp_path, list("abcd"), run, network, 0.25, PARAMETERS)
    peers = [
        LimitedPeer(network, tmp_path, one.name, run, one.founding, 0.25, layout=one.layout, limits=limits, timing=Timing())
        for one in made
    ]
    for peer in peers:
        peer.limit = limit
        peer.start([one.peer for one in peers])
    await until(lambda: all(round_of(peer) >= 3 for peer in peers), 60_000, 0.5)
    await stop(peers)
    assert not [event for peer in peers for event in peer.events if isinstance(event, (obs.Given, obs.CaughtUpTo))]
    planned = {e.plan.round: e.plan.exchange_seconds for e in peers[0].events if isinstance(e, obs.PlanAdopted)}
    took = {e.round: e.times.wan_idle for e in peers[0].events if isinstance(e, obs.RoundCommitted)}
    assert all(took[round] <= 1.1 * planned[round] for round in took)


@virtual
async def test_who_has_gone_on_still_sends_what_is_left_to_the_last(tmp_path: Path) -> None:
    """A quorum commits and begins the next round; over the slowest way, c to d, a part of the mean is still to come."""
    run = toy_run(topology="reduce", batch=4, inner_steps=64)
    fields = run.run.model_copy(update={"rounds": 20, "min_peers": 4})
    run = run.model_copy(update={"run": fields, "codec": run.codec.model_copy(update={"payload": "fp32"})})
    network, limits = Network(latency_seconds=0.02), ExchangeLimits(chunk_bytes=CHUNK_BYTES)
    peers = calm_mesh(tmp_path, list("abcd"), run, network, 0.25, PARAMETERS // 2, limits=limits, timing=Timing())
    for a, b in combinations(peers, 2):
        network.set_link(a.peer, b.peer, bytes_per_second=100_000.0)
    network.set_link(peers[2].peer, peers[3].peer, one_way=True, bytes_per_second=50_000.0)
    for peer in peers:
        peer.start([one.peer for one in peers])

    def rounds_that_c_ended_before_d() -> list[int]:
        """None as long as links are not measured: c may be as late as d is then."""
        c, d = ({e.round: e.times.wan_idle for e in peer.events if isinstance(e, obs.RoundCommitted)} for peer in peers[2:])
        return [round for round in c.keys() & d.keys() if d[round] > 1.3 * c[round]]

    await until(lambda: len(rounds_that_c_ended_before_d()) >= 2, 60_000, 0.5)
    await stop(peers)
    assert not [event for peer in peers for event in peer.events if isinstance(event, (obs.Given, obs.CaughtUpTo))]
