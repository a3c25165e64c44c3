"""What an exchange says of itself while it goes on, in virtual time."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.codec import payload_bytes
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from geomesh_p2p.telemetry.metrics import Metrics
from geomesh_p2p.telemetry.sinks import ConsoleReporter
from tests.mesh.calm import calm_mesh, until, virtual
from tests.mesh.exchanges import Mesh, plan_for
from tests.mesh.test_comings import round_of, stop
from tests.mesh.toy import toy_run

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


@pytest.mark.case("C121")
@virtual
async def test_peers_say_how_far_their_exchange_is_while_it_goes_on(tmp_path: Path) -> None:
    """Whole peers whose exchanges take 20 s: what each observes of them is in its metrics, and on its screen."""
    run = toy_run(topology="gather")
    network, expected = Network(latency_seconds=0.05, bytes_per_second=10_000.0), 2 * payload_bytes(LAYOUT, run.codec)
    limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES)
    peers = calm_mesh(tmp_path, list("abc"), run, network, 0.25, LAYOUT.parameters, limits=limits)
    for peer in peers:
        peer.start([one.peer for one in peers])
    await until(lambda: all(round_of(peer) >= 1 for peer in peers))
    await stop(peers)
    for peer in peers:
        said = [e for e in peer.events if isinstance(e, obs.ExchangeProgress) and e.round == 1]
        shares = [each.share for each in said]
        assert shares == sorted(shares)
        under_way = [each for each in said if 0 < each.share < 1 and each.remaining_seconds is not None]
        assert len(under_way) >= 5, shares
        assert {each.expected_bytes for each in under_way} == {expected}, "the others' contributions"
        metrics, console = Metrics(peer.name, 0.7), ConsoleReporter(peer.name)
        last = peer.events.index(under_way[-1])
        for event in peer.events[: last + 1]:
            metrics(event)
            console(event)
        for name, number in (
            ("share", under_way[-1].received_bytes / expected),
            ("received_bytes", under_way[-1].received_bytes),
            ("sent_bytes", under_way[-1].sent_bytes),
            ("remaining_seconds", under_way[-1].remaining_seconds),
        ):
            assert metrics.registry.get_sample_value(f"geomesh_exchange_{name}", {"site": peer.name}) == number
        assert re.search(r"exchange, \d+%, \d.* in, \d.* out, \d+ s left", str(console.status)), str(console.status)
