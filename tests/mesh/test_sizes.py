"""No size of a model is too large for a message: whatever the state, what travels is cut into chunks of one size."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.types import Range
from geomesh_p2p.engine.snapshots import CHUNK_BYTES as SNAPSHOT_CHUNK_BYTES
from geomesh_p2p.engine.snapshots import Manifest
from geomesh_p2p.errors import DataError
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.donor import Donor, DonorView
from geomesh_p2p.swarm.exchange import ExchangeCodec, ExchangeLimits
from geomesh_p2p.swarm.fetching import Fetcher
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
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


ZEROS = bytes(SNAPSHOT_CHUNK_BYTES)


class Shelf:
    """Snapshots that are never made: each chunk is nothing but zeros, whatever the size of the state."""

    def __init__(self, state_bytes: int) -> None:
        whole = Manifest(LogState(b"r" * 32, 5, b"d" * 32, ("peer",), (), 0), state_bytes // 8, ())
        chunks = -(-whole.size_bytes // SNAPSHOT_CHUNK_BYTES)
        hashes = [digest_bytes(ZEROS)] * (chunks - 1)
        last = whole.size_bytes - (chunks - 1) * SNAPSHOT_CHUNK_BYTES
        self.made = Manifest(whole.state, whole.parameters, (*hashes, digest_bytes(ZEROS[:last])))
        self.reads: list[int] = []

    def rounds(self) -> list[int]:
        return [5]

    def manifest(self, _round: int) -> Manifest:
        return self.made

    def read_chunk(self, _round: int, offset: int, length: int) -> bytes:
        self.reads.append(length)
        return ZEROS[: min(length, self.made.size_bytes - offset)]


class Floor:
    """Takes a snapshot's chunks and puts them nowhere."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.taken, size = manifest, 0, manifest.size_bytes
        starts = range(0, size, SNAPSHOT_CHUNK_BYTES)
        self._missing = {start: Range(start, min(start + SNAPSHOT_CHUNK_BYTES, size)) for start in starts}

    def missing(self) -> list[Range]:
        return list(self._missing.values())

    def write(self, offset: int, data: bytes) -> None:
        if digest_bytes(data) != self.manifest.chunks[offset // SNAPSHOT_CHUNK_BYTES]:
            raise DataError("not what the manifest says")
        del self._missing[offset]
        self.taken += len(data)


@pytest.mark.case("C053")
@pytest.mark.parametrize("state", ["4.1 MB", "513 MB", pytest.param("2.1 GB", marks=pytest.mark.long), "200 GB"])
async def test_a_join_fetches_slices_of_one_size_and_keeps_none_of_them(state: str) -> None:
    """The largest is described and not fetched: even its list of hashes goes in slices."""
    shelf = Shelf({**STATES, "200 GB": 200 * 10**9}[state])
    quick = DonorView(rate=lambda: 1e15)
    donor = Donor(SimpleNamespace(rounds=lambda: range(0)), shelf, quick)  # type: ignore[arg-type]
    largest = frames = 0

    class Direct:
        async def request(self, _to: str, fetch: Fetch, _timeout_seconds: float) -> Fetched:
            nonlocal largest, frames
            answer = await donor.answer("joiner", fetch)
            buffers = wire.encode(answer, b"r" * 32, 1)  # raises if it is larger than its kind may be
            largest, frames = max(largest, sum(map(len, buffers))), frames + 1
            return answer

    fetcher = Fetcher(Direct())  # type: ignore[arg-type]
    tracemalloc.start()
    ((packed, owner),) = await fetcher.manifests(["donor"])
    assert Manifest.unpack(packed) == shelf.made
    if state in STATES:
        floor = Floor(shelf.made)
        assert await fetcher.snapshot(5, floor, [owner])  # type: ignore[arg-type]
        assert floor.taken == shelf.made.size_bytes
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest <= SNAPSHOT_CHUNK_BYTES + 1024
    assert peak < 16 * 2**20 + 20 * len(packed)
