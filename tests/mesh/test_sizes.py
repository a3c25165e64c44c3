"""No size of a model is too large for a message: whatever the state, what travels is cut into chunks of one size."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.exchange import ExchangeCodec, ExchangeLimits
from geomesh_p2p.swarm.memory import Network, run_virtual
from tests.mesh import exchanges
from tests.mesh.exchanges import Mesh, plan_for

CHUNK_BYTES = 131_072
STATES = {"4.1 MB": 4_100_000, "513 MB": 513_000_000, "2.1 GB": 2_100_000_000}


def layout_of(state_bytes: int, tensors: int) -> Layout:
    """Weights in fp32 that take so many bytes."""
    each = state_bytes // 4 // tensors
    return Layout(tuple(Tensor(f"t{index}", each) for index in range(tensors)))


@pytest.mark.case("C053")
@pytest.mark.parametrize("tensors", [1, 2000])
@pytest.mark.parametrize("state", ["4.1 MB", "513 MB", pytest.param("2.1 GB", marks=pytest.mark.long)])
def test_an_exchange_sends_chunks_of_one_size_and_holds_what_it_receives(
    state: str, tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(STATES[state], tensors)
    payload_bytes = ExchangeCodec(layout, CodecSection()).payload_bytes
    largest = frames = 0
    encode = wire.encode_bytes

    def measured(*arguments: Any) -> bytes:
        nonlocal largest, frames
        packed = encode(*arguments)
        largest, frames = max(largest, len(packed)), frames + 1
        return packed

    def payload(_layout: Layout, _settings: CodecSection, seed: int) -> np.ndarray:
        made = np.zeros(payload_bytes, np.uint8)  # all magnitudes 0
        made[-8:] = seed
        return made

    monkeypatch.setattr(wire, "encode_bytes", measured)
    monkeypatch.setattr(exchanges, "payload_of", payload)

    async def main() -> None:
        network = Network(latency_seconds=0.02, bytes_per_second=1e9)
        limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES)
        async with Mesh(plan_for(2, "gather", layout, exchange_seconds=10.0), network, layout=layout, limits=limits) as mesh:
            tracemalloc.start()
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            for index in range(2):
                (assembly,) = mesh.heard[index].all_assembled
                assert assembly.body_bytes == 2 * payload_bytes
            assert mesh.heard[0].all_assembled[0].body_digest == mesh.heard[1].all_assembled[0].body_digest
        # both peers in one process: each holds the other's contribution, and a few chunks are on their way
        assert peak < 3 * payload_bytes + 32 * 2**20

    run_virtual(main())
    assert largest <= CHUNK_BYTES + 1024
    assert frames >= 2 * payload_bytes // CHUNK_BYTES
