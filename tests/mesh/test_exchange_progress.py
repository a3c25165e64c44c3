"""What an exchange says of itself while it goes on, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.mesh.exchanges import Mesh, plan_for

LAYOUT = Layout((Tensor("matrix", 800_000),))  # 100 kB of signs
CHUNK_BYTES = 1024


@pytest.mark.case("C121")
@pytest.mark.parametrize(("topology", "rate"), [("gather", 1_700.0), ("reduce", 1_800.0)])
def test_the_time_left_is_right_within_30_percent_after_the_first_quarter(topology: str, rate: float) -> None:
    """An exchange of about a minute over capped links: percent, bytes both ways, and an estimate of the rest."""

    async def main() -> None:
        network = Network(latency_seconds=0.05, bytes_per_second=rate)
        plan = plan_for(3, topology, LAYOUT, exchange_seconds=60.0)
        async with Mesh(plan, network, layout=LAYOUT, limits=ExchangeLimits(chunk_bytes=CHUNK_BYTES)) as mesh:
            clock = asyncio.get_running_loop().time
            begun = clock()
            mesh.start()
            mesh.finish_all()
            said = []
            while not mesh.heard[0].all_assembled:
                await asyncio.sleep(1.0)
                said.append((clock(), mesh.exchanges[0].progress()))
            ended = clock()
            assert 45.0 < ended - begun < 90.0
            shares = [p.done_bytes / p.total_bytes for _, p in said]
            assert shares == sorted(shares)
            assert shares[-1] == 1.0
            sent = [p.sent_bytes for _, p in said]
            assert sent == sorted(sent)
            assert 0 < sent[0] <= sent[-1]
            checked = 0
            for at, progress in said:
                if at - begun >= (ended - begun) / 4 and ended - at > 2.0:
                    assert progress.remaining_seconds == pytest.approx(ended - at, rel=0.3, abs=2.0)
                    checked += 1
            assert checked > 20

    run_virtual(main())
