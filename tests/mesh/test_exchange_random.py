"""Exchanges under random links, losses, cuts, finishing times and crashes; and properties of the pieces they are made of."""

from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm.chunks import Coverage, Incoming, Outgoing, Ranges, StreamKey
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.mesh.exchanges import Mesh, plan_for
from tests.mesh.test_exchange import TOPOLOGIES, expected_body

HEALED_SECONDS = 20.0
SETTLED_SECONDS = 150


async def schedule(seed: int, topology: str) -> tuple[bool, bool]:
    """One random exchange. Returns whether a member crashed, and whether the survivors got the body."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    rate, loss = rng.choice([None, 500.0, 5e4]), rng.choice([0, 0.1])
    network = Network(seed, latency_seconds=rng.uniform(0, 0.3), bytes_per_second=rate, loss=loss)
    network.WINDOW_BYTES = 300  # type: ignore[misc]  # a sender is told of no more than a chunk or two ahead
    abstaining = [index for index in range(count) if rng.random() < 0.15]
    plan = plan_for(count, topology, exchange_seconds=rng.choice([0.1, 2.0]))
    async with Mesh(plan, network, abstaining=abstaining) as mesh:
        finished: set[int] = set()

        def finish(index: int) -> None:
            if index not in mesh.crashed:
                mesh.finish(index)
                finished.add(index)

        loop = asyncio.get_running_loop()
        ends = [rng.uniform(0, 3) for _ in mesh.exchanges]
        for index, exchange in enumerate(mesh.exchanges):
            exchange.start()
            loop.call_later(ends[index], finish, index)
        for _ in range(rng.randint(0, 4)):
            link, one_way = rng.sample(plan.peers, 2), rng.random() < 0.5
            network.play([(rng.uniform(0, 6), lambda n, link=link, one_way=one_way: n.cut(*link, one_way))])
        victim = rng.randrange(count) if count > 2 and rng.random() < 0.5 else None
        if victim is not None:
            network.play([(ends[victim] + rng.choice([0.1, 1.0, 3.0]) * rng.random(), lambda n: mesh.crash(victim))])
        network.play([(HEALED_SECONDS, lambda n: n.heal())])
        for _ in range(SETTLED_SECONDS):  # the replica repeats headers until they are known everywhere
            await asyncio.sleep(1.0)
            for index in finished:
                for other in mesh.survivors:
                    mesh.exchanges[other].member_finished(mesh.contributions[index])
            if all(mesh.heard[index].all_assembled for index in mesh.survivors) and loop.time() > HEALED_SECONDS:
                break
        body = expected_body(mesh) if len(abstaining) < count else b""
        assembled = [index for index in mesh.survivors if mesh.heard[index].all_assembled]
        assert all(mesh.body(index) == body for index in assembled)
        assert all(not mesh.heard[index].all_unequal for index in mesh.survivors)
        if victim is None:
            assert len(assembled) == count
        elif assembled:
            assert assembled == mesh.survivors
        else:
            for index in mesh.survivors:
                if mesh.exchanges[index].waiting():
                    assert {missed.peer for missed in mesh.heard[index].lost_at[-1][1]} == {plan.peers[victim]}
        return victim is not None, bool(assembled)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_random_schedules(topology: str) -> None:
    outcomes = [run_virtual(schedule(seed, topology)) for seed in range(16)]
    # all three ends were seen: nobody crashed, somebody did and was needed, somebody did and was not
    assert set(outcomes) == {(False, True), (True, True), (True, False)}


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=12)


@given(spans, st.integers(0, 60), st.integers(0, 60))
def test_coverage_is_a_set_of_bytes(added: list[list[int]], low: int, high: int) -> None:
    low, high = min(low, high), max(low, high)
    coverage, truth = Coverage(), set[int]()
    for start, stop in added:
        coverage.add(start, stop)
        truth |= set(range(start, stop))
    assert coverage.bytes == len(truth)
    assert coverage.prefix == next(byte for byte in range(100) if byte not in truth)
    gaps = coverage.gaps(low, high)
    assert [byte for start, stop in gaps for byte in range(start, stop)] == [b for b in range(low, high) if b not in truth]
    assert all(start < stop for start, stop in gaps)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_ranges_read_what_was_written(lengths: list[int], data: st.DataObject) -> None:
    edges = np.cumsum(lengths).tolist()
    places = [(low, high) for low, high in zip([0, *edges], edges, strict=False)][::2]
    ranges = Ranges(places)
    stream = bytes(range(1, ranges.total + 1))
    buffer = bytearray(edges[-1])
    cuts = sorted({0, ranges.total, *data.draw(st.lists(st.integers(0, ranges.total), max_size=5))})
    for low, high in itertools.pairwise(cuts):
        ranges.write(memoryview(buffer), low, stream[low:high])
    assert b"".join(bytes(buffer[low:high]) for low, high in places) == stream
    assert all(byte == 0 for at, byte in enumerate(buffer) if not any(low <= at < high for low, high in places))
    for low, high in itertools.pairwise(cuts):
        assert bytes(ranges.read(memoryview(buffer), low, high - low)) == stream[low:high]


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_a_stream_arrives_whatever_is_lost_on_the_way(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    payload = np.arange(1, 41, dtype=np.uint8)
    ranges = Ranges([(0, payload.size)])
    outgoing = Outgoing(StreamKey("contribution", "a", 0), digest_bytes(payload), payload, ranges)
    incoming = Incoming(ranges, payload.size, digest_bytes(payload), True)
    for _ in range(100):
        sent = []
        while (span := outgoing.next_span(limit)) is not None:
            sent.append(span)
        for start, stop in rng.sample(sent, rng.randint(0, len(sent))):
            incoming.take(start, outgoing.read(start, stop))
        if incoming.complete:
            break
        outgoing.acknowledge(incoming.coverage.prefix)
        if rng.random() < 0.5:
            outgoing.again()
        else:
            outgoing.want(Range(*gap) for gap in incoming.coverage.gaps(0, payload.size))
    assert incoming.complete
    assert incoming.sound
    assert incoming.buffer.tolist() == payload.tolist()
