"""Exchanges over the in-memory network in virtual time: what comes out, what it costs, and what happens if links fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core import codec, encoding
from geomesh_p2p.core.codec import decode_part, encode_part, mean_of
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.messages import Chunk
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm import reduce
from geomesh_p2p.swarm.exchange import Exchange, ExchangeLimits, in_thread
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.mesh.exchanges import CHUNK_BYTES, LAYOUT, Mesh, even_shares, plan_for

TOPOLOGIES = ("gather", "reduce")


def direct_mean(mesh: Mesh) -> np.ndarray:
    there = [index for index, payload in enumerate(mesh.payloads) if payload is not None]
    out = np.empty(LAYOUT.parameters, np.float32)
    payloads, tokens = [mesh.payloads[i] for i in there], [mesh.contributions[i].tokens for i in there]
    return mean_of(LAYOUT, mesh.codec.settings, payloads, tokens, 0, LAYOUT.parameters, out)


def expected_body(mesh: Mesh) -> bytes:
    if mesh.plan.topology == "gather":
        return b"".join(bytes(payload) for payload in mesh.payloads if payload is not None)
    mean, settings = direct_mean(mesh), mesh.codec.settings
    parts = [encode_part(LAYOUT, settings, mean[s.start : s.stop], s.start, s.stop) for s in mesh.plan.shares if len(s)]
    return b"".join(bytes(part) for part in parts)


def assert_all_equal(mesh: Mesh) -> None:
    body = expected_body(mesh)
    names = tuple(c.payload for c in mesh.contributions if not c.abstains)
    for index in mesh.survivors:
        assert mesh.body(index) == body
        assert tuple(c.payload for c in mesh.heard[index].all_assembled[0].contributors) == names


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("count", range(1, 7))
def test_every_member_assembles_the_mean_of_all(topology: str, count: int) -> None:
    async def main() -> None:
        async with Mesh(plan_for(count, topology), Network(latency_seconds=0.05, bytes_per_second=1e5)) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)
            assert all(not heard.lost_at and not heard.all_refused for heard in mesh.heard)

    run_virtual(main())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_members_finish_at_unequal_times_and_their_bytes_travel_meanwhile(topology: str) -> None:
    async def main() -> None:
        async with Mesh(plan_for(4, topology), Network(latency_seconds=0.1, bytes_per_second=1e4)) as mesh:
            mesh.start()
            for index in range(3):
                mesh.finish(index)
                await asyncio.sleep(30.0)
            # whatever the three early ones have to say is said before the last one finishes
            early = [mesh.payload_sent(index) for index in range(3)]
            waits = mesh.exchanges[0].waiting()
            assert all(early)
            assert waits == ()
            mesh.finish(3)
            await mesh.all_assembled()
            assert_all_equal(mesh)
            if topology == "gather":
                assert [mesh.payload_sent(index) for index in range(3)] == early
            assert all(not heard.lost_at for heard in mesh.heard)

    run_virtual(main())


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("abstaining", [(0,), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_abstentions_are_left_out(topology: str, abstaining: tuple[int, ...]) -> None:
    async def main() -> None:
        async with Mesh(plan_for(4, topology), Network(latency_seconds=0.05), abstaining=abstaining) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            if len(abstaining) < 4:
                assert_all_equal(mesh)
            else:
                assert [mesh.body(index) for index in range(4)] == [b""] * 4

    run_virtual(main())


def test_reduce_with_an_empty_share_and_uneven_ones() -> None:
    async def main() -> None:
        total = LAYOUT.parameters
        shares = (Range(0, 8), Range(8, 8), Range(8, 4000), Range(4000, total))
        async with Mesh(plan_for(4, "reduce", shares=shares), Network(latency_seconds=0.05)) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)

    run_virtual(main())


@pytest.mark.parametrize("payload", ["fp32", "fp16", "int8", "sign"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_codec(topology: str, payload: str) -> None:
    async def main() -> None:
        settings = CodecSection(payload=payload, second_phase_bits=4, granularity="row")  # type: ignore[arg-type]
        async with Mesh(plan_for(3, topology), Network(latency_seconds=0.05), settings) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)

    run_virtual(main())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_parts_are_made_in_blocks_without_the_whole_mean(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "AVERAGE_PARAMETERS", 1024)
    monkeypatch.setattr(encoding, "CHUNK", 512)
    settings, again, read = CodecSection(second_phase_bits=bits), list[int](), codec.PartEncoder.feed_again  # type: ignore[arg-type]

    def feed_again(encoder: codec.PartEncoder, ready: int, fill: codec.Fill) -> None:
        before = encoder.done_again
        read(encoder, ready, fill)
        again.append(encoder.done_again - before)

    monkeypatch.setattr(codec.PartEncoder, "feed_again", feed_again)

    async def main() -> None:
        async with Mesh(plan_for(3, "reduce"), Network(), settings) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)
            assert [heard.all_assembled[0].mean for heard in mesh.heard] == [None] * 3
        assert sum(again) == (LAYOUT.parameters if bits > 1 else 0)
        assert max(again, default=0) <= 1024 + 512

    run_virtual(main())


def test_the_parts_of_a_reduce_decode_to_about_the_mean_of_a_gather() -> None:
    async def main() -> None:
        settings = CodecSection(second_phase_bits=8)
        async with Mesh(plan_for(3, "reduce"), Network(), settings) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            mean, (assembly,) = direct_mean(mesh), mesh.heard[0].all_assembled
            for share, part in zip(even_shares(LAYOUT.parameters, 3), assembly.body, strict=True):
                out = np.empty(len(share), np.float32)
                decode_part(LAYOUT, settings, part, share.start, share.stop, out)
                assert np.abs(out - mean[share.start : share.stop]).max() < 0.02

    run_virtual(main())


@pytest.mark.parametrize("count", [2, 4, 6])
def test_bytes_sent(count: int) -> None:
    layout = Layout((Tensor("embedding", 64_000, 16), Tensor("rest", 400_000)))
    limits = ExchangeLimits()

    async def main(topology: str) -> tuple[list[int], int]:
        network = Network(latency_seconds=0.05, bytes_per_second=1e6)
        async with Mesh(plan_for(count, topology, layout), network, layout=layout, limits=limits) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert sum(exchange.refusals["duplicate"] for exchange in mesh.exchanges) == 0
            return [mesh.payload_sent(index) for index in range(count)], mesh.codec.payload_bytes

    sent, payload = run_virtual(main("gather"))
    assert sent == [(count - 1) * payload] * count
    sent, payload = run_virtual(main("reduce"))
    assert sent == pytest.approx([(1 + 2) * (count - 1) / count * payload] * count, rel=0.01)  # one bit out, two back


def test_a_reducer_adds_its_residual_and_hands_back_what_the_next_one_follows_from() -> None:
    async def main() -> None:
        settings = CodecSection(residual=True)
        async with Mesh(plan_for(3, "reduce"), Network(), settings) as mesh:
            share = mesh.plan.shares[1]
            residual = np.random.default_rng(9).standard_normal(len(share)).astype(np.float32)
            mesh.part_residuals[1] = residual
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assembly, mean = mesh.heard[1].all_assembled[0], direct_mean(mesh)[share.start : share.stop]
            assert assembly.mean is not None
            assert assembly.part is not None
            assert assembly.mean.tolist() == mean.tolist()
            expected = encode_part(LAYOUT, settings, mean, share.start, share.stop, residual)
            assert isinstance(expected, np.ndarray)
            assert assembly.part.tolist() == assembly.body[1].tolist() == expected.tolist()
            assert len({mesh.body(index) for index in range(3)}) == 1

    run_virtual(main())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_heavy_work_may_run_in_threads(topology: str) -> None:
    async def main() -> None:
        async with Mesh(plan_for(3, topology), Network(latency_seconds=0.01), offload=in_thread) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)

    run_virtual(main())


def test_what_came_is_hashed_while_the_rest_is_on_its_way() -> None:
    async def main() -> None:
        hashed: list[tuple[float, int]] = []
        loop = asyncio.get_running_loop()

        async def noting(job: Callable[[], Any]) -> Any:
            if isinstance(job, partial) and getattr(job.func, "__name__", "") == "update":
                hashed.append((loop.time(), len(job.args[0])))
            return job()

        network = Network(latency_seconds=0.01)
        async with Mesh(plan_for(4, "gather"), network, offload=noting) as mesh:
            for other in mesh.plan.peers[:3]:  # what comes last in the body takes a second
                network.set_link("peer-3", other, one_way=True, bytes_per_second=mesh.codec.payload_bytes)
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)
            assert [size for _, size in hashed] == [mesh.codec.payload_bytes] * 16
            end = loop.time()
            assert sum(at > end - 0.5 for at, _ in hashed) == 3  # at three peers the slow stream alone

    run_virtual(main())


def test_what_a_caller_does_wrong_is_said() -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather"), Network()) as mesh:
            own, payload = mesh.contributions[0], mesh.payloads[0]
            assert payload is not None
            for wrong in (None, payload[:-1]):
                with pytest.raises(ValueError, match="payload"):
                    mesh.exchanges[0].contribute(own, wrong)
            mesh.finish(0)
            with pytest.raises(ValueError, match="already"):
                mesh.finish(0)
            with pytest.raises(ValueError, match="stranger is no member"):
                Exchange("stranger", mesh.plan, mesh.transports[0], mesh.codec, mesh.limits, mesh.heard[0])

    run_virtual(main())


def test_the_slowest_link_is_served_first() -> None:
    async def main() -> None:
        limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES, rates={"peer-1": 3e6, "peer-2": 1e6, "peer-3": 2e6})
        async with Mesh(plan_for(5, "gather"), Network(), limits=limits) as mesh:
            first: list[str] = []
            send_bulk = mesh.transports[0].send_bulk

            async def noting(to: str, chunk: Chunk) -> None:
                first.extend([to] if to not in first else [])
                await send_bulk(to, chunk)

            mesh.transports[0].send_bulk = noting  # type: ignore[method-assign]
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert first == ["peer-2", "peer-3", "peer-1", "peer-4"]

    run_virtual(main())
