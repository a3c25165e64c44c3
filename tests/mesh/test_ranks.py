"""Several devices at one site: they share its batches, and are one peer outside."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from geomesh_p2p.config import InnerSection, ModelSection, SiteConfig
from geomesh_p2p.engine import device as devices
from geomesh_p2p.engine import model as models
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.inner import InnerLoop
from geomesh_p2p.engine.ranks import Ranks
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.swarm.memory import Network
from tests.mesh.torch_peers import TorchPeer, torch_mesh, torch_run, write_text

SMALL = ModelSection(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=2, sequence_length=12)


def ids(seed: int, batch: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 40, (batch, 13))


@pytest.mark.case("C125")
@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("freeze", [(), ("*mlp*",)])
def test_ranks_take_the_step_that_one_device_takes(batch: int, ranks: int, freeze: tuple[str, ...]) -> None:
    section = SMALL.model_copy(update={"freeze": freeze})
    alone = InnerLoop(models.build(section, 40, seed=3), InnerSection())
    model = models.build(section, 40, seed=3)
    together = InnerLoop(model, InnerSection(), ranks=Ranks(model, [torch.device("cpu")] * (ranks - 1)))
    for step in range(4):
        loss, taken = together.step(ids(step, batch), 1e-3)
        assert (loss, taken) == (pytest.approx(alone.step(ids(step, batch), 1e-3)[0], rel=1e-4), True)
    torch.testing.assert_close(model.flat, alone.model.flat, rtol=2e-3, atol=2e-5)
    assert model.layout == alone.model.layout


class TwoRanks(TorchPeer):
    def make_engine(self) -> TorchEngine:
        site = {"site": {"name": self.name}, "device": {"name": "cpu", "threads": 1, "ranks": 2}}
        self.site = SiteConfig.model_validate(site)
        return super().make_engine()


@pytest.mark.case("C125")
async def test_a_site_of_two_ranks_sends_what_a_site_of_one_sends(tmp_path: Path) -> None:
    run = torch_run((write_text(tmp_path),), run={"rounds": 4})
    _, b = torch_mesh(tmp_path, ["a", "b"], run, Network())
    a = TwoRanks(b.network, tmp_path, "a", run, b.founding)
    for peer in (a, b):
        peer.start([a.peer, b.peer])
    async with asyncio.timeout(100.0):
        await asyncio.gather(*(peer.task for peer in (a, b) if peer.task))
    assert len(a.engine.loop.ranks.replicas) == 1
    assert len(b.engine.loop.ranks.replicas) == 0
    assert a.digests() == b.digests()
    assert set(a.digests()) == {1, 2, 3, 4}
    sent = [sum(t.payload_sent for t in peer.transport.traffic().values()) for peer in (a, b)]
    assert sent[0] == sent[1] > 0
    assert {c["site"] for note in a.commits() for c in note["contributors"]} == {"a", "b"}, "one peer, one vote, one name"


def test_more_ranks_than_devices_are_refused() -> None:
    assert devices.other_ranks(torch.device("cpu"), 3) == [torch.device("cpu")] * 2
    with pytest.raises(ConfigError, match=r"device\.ranks is 99 from cuda:0 on"):
        devices.other_ranks(torch.device("cuda", 0), 99)
