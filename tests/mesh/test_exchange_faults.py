"""Exchanges whose links and members fail: survivors assemble one body, or say whom they miss; nobody waits without a limit."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.messages import Chunk, ChunkAck, ChunkWanted, PartHeader
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm.chunks import StreamKey
from geomesh_p2p.swarm.deadlines import DueStreams
from geomesh_p2p.swarm.exchange import ExchangeInbox, ExchangeLimits, Missed, Waiting
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.mesh.exchanges import CHUNK_BYTES, LAYOUT, Mesh, contribution_of, payload_of, plan_for
from tests.mesh.test_exchange import TOPOLOGIES, assert_all_equal, expected_body


def bodies_of(mesh: Mesh) -> set[bytes]:
    return {mesh.body(index) for index in mesh.survivors if mesh.heard[index].all_assembled}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_lost_messages_and_chunks_are_asked_for_again(topology: str, seed: int) -> None:
    async def main() -> int:
        # control messages get lost too; the headers of contributions are repeated, as the replica does
        network = Network(seed=seed, latency_seconds=0.05, loss=0.2)
        async with Mesh(plan_for(4, topology), network) as mesh:
            mesh.start()
            mesh.finish_all()
            for _ in range(20):
                await asyncio.sleep(1.0)
                for index, contribution in enumerate(mesh.contributions):
                    for other, exchange in enumerate(mesh.exchanges):
                        if other != index:
                            exchange.member_finished(contribution)
            await mesh.all_assembled(2000)
            assert_all_equal(mesh)
            return sum(mesh.payload_sent(index) for index in range(4))

    run_virtual(main())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_an_exchange_stopped_as_the_last_contribution_arrives(topology: str) -> None:
    """Its parts may each take one more step before they are cancelled: with all that they count on (a peer once ended so)."""

    async def main() -> None:
        async with Mesh(plan_for(3, topology), Network(latency_seconds=0.02)) as mesh:
            mesh.start()
            mesh.finish(0)
            await asyncio.sleep(1.0)
            for index in (1, 2):
                mesh.exchanges[0].member_finished(mesh.contributions[index])
            await mesh.exchanges[0].stop("a higher term")

    run_virtual(main())


class DiesAfter:
    """Crashes member `victim` of a mesh when it has handed its k-th chunk to the network."""

    def __init__(self, mesh: Mesh, victim: int, chunks: int) -> None:
        self.left, self.fired = chunks, False
        transport = mesh.transports[victim]
        send_bulk = transport.send_bulk

        async def counting(to: str, chunk: Chunk) -> None:
            if self.left == 0 and not self.fired:
                self.fired = True
                mesh.crash(victim)
            await send_bulk(to, chunk)
            self.left -= 1

        transport.send_bulk = counting  # type: ignore[method-assign]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.case("C058")
def test_a_member_that_dies_after_any_chunk(topology: str, count: int) -> None:
    async def main(chunks: int) -> tuple[bool, bool]:
        limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES, parallel_chunks=1)
        async with Mesh(plan_for(count, topology), Network(latency_seconds=0.02, bytes_per_second=2e4), limits=limits) as mesh:
            death = DiesAfter(mesh, 1, chunks)
            mesh.start()
            mesh.finish_all()
            await mesh.until(lambda: all(mesh.heard[i].all_assembled or mesh.heard[i].lost_at for i in mesh.survivors))
            await asyncio.sleep(30.0)
            assembled = [bool(mesh.heard[index].all_assembled) for index in mesh.survivors]
            assert len(bodies_of(mesh)) <= 1
            assert all(assembled) or not any(assembled), "what one survivor has, all get"
            for index in mesh.survivors:
                assert mesh.heard[index].all_assembled or mesh.heard[index].lost_peers == {"peer-1"}
                assert mesh.heard[index].all_assembled or mesh.exchanges[index].waiting()
                assert not mesh.heard[index].all_refused
            return death.fired, all(assembled)

    outcomes = []
    for chunks in range(200):
        fired, assembled = run_virtual(main(chunks))
        outcomes.append(assembled)
        if not fired:
            break
    assert not fired, "every boundary was tried"
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 5


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_cut_link_is_got_round_by_other_members(topology: str) -> None:
    async def main() -> None:
        network = Network(latency_seconds=0.02)
        async with Mesh(plan_for(4, topology), network) as mesh:
            network.cut("peer-0", "peer-1")
            mesh.start()
            mesh.finish_all()
            # the headers come by other ways, from the replica
            mesh.exchanges[0].member_finished(mesh.contributions[1])
            mesh.exchanges[1].member_finished(mesh.contributions[0])
            await mesh.all_assembled()
            assert_all_equal(mesh)
            assert all(not heard.lost_at for heard in mesh.heard)

    run_virtual(main())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_link_cut_one_way(topology: str) -> None:
    async def main() -> None:
        network = Network(latency_seconds=0.02)
        async with Mesh(plan_for(3, topology), network) as mesh:
            network.cut("peer-2", "peer-0", one_way=True)
            mesh.start()
            mesh.finish_all()
            mesh.exchanges[0].member_finished(mesh.contributions[2])
            await mesh.all_assembled()
            # one missed deadline, and then the way round at once
            assert asyncio.get_running_loop().time() < mesh.limits.deadline_seconds + 0.3
            assert_all_equal(mesh)

    run_virtual(main())


def test_a_link_that_heals_is_used_again_from_where_it_broke() -> None:
    async def main() -> None:
        network = Network(latency_seconds=0.02, bytes_per_second=500.0)
        limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES, deadline_seconds=60.0, acknowledge_chunks=1, parallel_chunks=2)
        network.WINDOW_BYTES = 200  # type: ignore[misc]
        async with Mesh(plan_for(2, "gather"), network, limits=limits) as mesh:
            mesh.start()
            mesh.finish_all()
            network.play([(1.0, lambda n: n.cut("peer-0", "peer-1")), (20.0, lambda n: n.heal())])
            await mesh.all_assembled()
            assert network.played == [1.0, 20.0]
            assert asyncio.get_running_loop().time() < 50.0  # by the sender's own doing, before the receiver misses anything
            assert_all_equal(mesh)
            assert not mesh.heard[0].lost_at
            # only what was under way is sent twice
            assert mesh.codec.payload_bytes < mesh.payload_sent(0) <= mesh.codec.payload_bytes + 4 * CHUNK_BYTES

    run_virtual(main())


def test_a_reducer_that_waits_for_another_member_is_not_blamed() -> None:
    async def main() -> None:
        async with Mesh(plan_for(4, "reduce"), Network(latency_seconds=0.02)) as mesh:
            DiesAfter(mesh, 3, 0)
            mesh.start()
            mesh.finish_all()
            await asyncio.sleep(60.0)
            assert [mesh.heard[index].lost_peers for index in mesh.survivors] == [{"peer-3"}] * 3
            assert not any(mesh.heard[index].all_assembled for index in mesh.survivors)

    run_virtual(main())


def test_chunks_are_small_where_the_rate_is_not_known() -> None:
    """Four of 128 KiB at once take 8 s at 0.5 Mbit/s: no byte would count before, and the sender would be lost after 5 s."""

    async def main() -> None:
        limits = ExchangeLimits(chunk_bytes=131_072, rates={"peer-1": 1e6})
        layout = Layout((Tensor("w", 300_000, 1),))
        async with Mesh(plan_for(3, "gather"), Network(), CodecSection(payload="fp32"), layout, limits) as mesh:
            sizes: dict[str, set[int]] = {"peer-1": set(), "peer-2": set()}
            send_bulk = mesh.transports[0].send_bulk

            async def noting(to: str, chunk: Chunk) -> None:
                sizes[to].add(len(chunk.data))
                await send_bulk(to, chunk)

            mesh.transports[0].send_bulk = noting  # type: ignore[method-assign]
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert {to: max(each) for to, each in sizes.items()} == {"peer-1": 131_072, "peer-2": 16_384}

    run_virtual(main())


def slow_way() -> Mesh:
    network = Network(latency_seconds=0.02)
    network.WINDOW_BYTES = 1000  # type: ignore[misc]
    return Mesh(plan_for(4, "reduce"), network, CodecSection(payload="fp32"), limits=ExchangeLimits(chunk_bytes=512))


async def reduce_with_a_slow_way(mesh: Mesh) -> None:
    """From peer-2 to the reducer peer-3: that takes several times as long as bytes are waited for."""
    mesh.network.set_link("peer-2", "peer-3", one_way=True, bytes_per_second=500.0)
    mesh.start()
    mesh.finish_all()
    await asyncio.sleep(6.0)
    assert 0 < mesh.exchanges[3].progress().done_bytes < mesh.exchanges[3].progress().total_bytes


def test_a_reducer_that_still_receives_is_not_blamed() -> None:
    async def main() -> None:
        async with slow_way() as mesh:
            await reduce_with_a_slow_way(mesh)
            moved = [exchange.progress().moved for exchange in mesh.exchanges]
            await asyncio.sleep(4.0)
            assert all(e.progress().moved > before for e, before in zip(mesh.exchanges, moved, strict=True)), "they know it"
            await mesh.all_assembled()
            assert asyncio.get_running_loop().time() > 20.0
            assert_all_equal(mesh)
            assert all(not heard.lost_at for heard in mesh.heard)
            assert sum(exchange.refusals["duplicate"] for exchange in mesh.exchanges) == 0

    run_virtual(main())


def test_who_dies_while_a_reducer_still_receives_from_it_is_lost_soon() -> None:
    async def main() -> None:
        async with slow_way() as mesh:
            await reduce_with_a_slow_way(mesh)
            mesh.crash(2)
            await mesh.until(lambda: all(mesh.heard[index].lost_at for index in mesh.survivors))
            assert asyncio.get_running_loop().time() < 6.0 + 3 * (2.0 + 3.0)
            assert [mesh.heard[index].lost_peers for index in mesh.survivors] == [{"peer-2"}] * 3

    run_virtual(main())


def test_lost_is_said_after_a_known_time_and_again_ever_later() -> None:
    async def main() -> None:
        limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES, deadline_seconds=2.0, deadline_growth=1.5)
        async with Mesh(plan_for(2, "gather"), Network(), limits=limits) as mesh:
            mesh.exchanges[0].start()
            await asyncio.sleep(100.0)
            assert mesh.heard[0].lost_at == []  # nobody has finished: nothing is due
            begun = asyncio.get_running_loop().time()
            mesh.exchanges[0].member_finished(mesh.contributions[1])
            (waiting,) = mesh.exchanges[0].waiting()
            assert (waiting.peer, waiting.what, waiting.since_seconds) == ("peer-1", "contribution", 0.0)
            assert waiting.remaining_seconds == pytest.approx(2.0)
            await asyncio.sleep(30.0)
            times = [at - begun for at, _ in mesh.heard[0].lost_at]
            assert times == pytest.approx([2 + 3, 2 + 3 + 4.5, 2 + 3 + 4.5 + 6.75, 2 + 3 + 4.5 + 6.75 + 8])

    run_virtual(main())


def test_a_slow_but_steady_stream_misses_no_deadline() -> None:
    async def main() -> None:
        # 128 bytes take 1.3 s, all of them 8 s: each chunk is in time
        network = Network(bytes_per_second=100.0)
        limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES, deadline_seconds=6.0)
        async with Mesh(plan_for(2, "gather", exchange_seconds=0.01), network, limits=limits) as mesh:
            mesh.start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert all(not heard.lost_at for heard in mesh.heard)
            assert sum(exchange.refusals["duplicate"] for exchange in mesh.exchanges) == 0

    run_virtual(main())


PART_OF_B = StreamKey("part", "b", 1)


def due_part() -> DueStreams:
    due = DueStreams("me", ("b", "c", "d"), ExchangeLimits(deadline_seconds=8.0, deadline_growth=1.0), plan_for(2, "gather"))
    due.add(PART_OF_B, 0.0)
    return due


def test_whom_a_late_stream_is_asked_of() -> None:
    due = due_part()
    due.add(PART_OF_B, 5.0)  # it is due since 0
    assert due.check(7.9) == ([], ())
    assert due.check(8.0) == ([(PART_OF_B, ["b", "c"])], ())
    assert due.ask_next(PART_OF_B, 8.1) == ["d"]  # c has nothing
    assert due.ask_next(PART_OF_B, 8.2) == []     # nor has d
    assert due.check(10.1) == ([], ())
    assert due.check(10.2) == ([(PART_OF_B, ["b", "c"])], ())
    assert due.check(12.2) == ([(PART_OF_B, ["b", "d"])], ())
    due.progressed(PART_OF_B, 13.0)
    assert due.check(20.9) == ([], ())
    assert due.waiting(20.0) == (Waiting("b", "part", 20.0, 1.0, 1),)
    assert due.check(21.0) == ([(PART_OF_B, ["b", "c"])], ())  # the first miss since then
    asks, missed = due.check(29.0)
    assert (asks, missed) == ([(PART_OF_B, ["b", "c"])], (Missed("b", 16.0),))
    due.whole(PART_OF_B)
    assert due.check(1000.0) == ([], ())
    assert due.waiting(1000.0) == ()


def test_who_is_reported_is_asked_anew_at_each_deadline() -> None:
    due = due_part()
    due.check(8.0)
    due.blocked(PART_OF_B, ("d", "me"))
    assert due.check(10.0) == ([], ())  # b has answered: nobody else is asked meanwhile
    assert due.check(16.0)[1] == (Missed("d", 16.0),)
    assert due.check(24.0)[1] == (Missed("b", 24.0),)  # b has not said again that it waits
    due.blocked(PART_OF_B, ("me",))
    assert due.check(32.0)[1] == ()  # b waits for this very peer


# ---------------------------------------------------------------- order, repetition, rubbish


def chunks_of(mesh: Mesh, index: int, size: int = CHUNK_BYTES) -> list[Chunk]:
    payload, contribution = mesh.payloads[index], mesh.contributions[index]
    assert payload is not None
    head = (mesh.plan.digest, "contribution", contribution.peer, contribution.payload, 0)
    return [
        Chunk(*head, at, payload.size, payload[at : at + size].tobytes())
        for at in range(0, payload.size, size)
    ]


def test_chunks_may_come_before_their_header_twice_and_in_any_order() -> None:
    async def main() -> None:
        async with Mesh(plan_for(3, "gather"), Network()) as mesh:
            exchange, rng = mesh.exchanges[0], np.random.default_rng(5)
            exchange.start()
            for owner in (1, 2):
                pieces = chunks_of(mesh, owner) + chunks_of(mesh, owner, 100) + chunks_of(mesh, owner, 37)
                for at in rng.permutation(len(pieces)):
                    exchange.receive(f"peer-{owner}", pieces[at])
            mesh.finish(0)
            assert not mesh.heard[0].all_assembled
            exchange.member_finished(mesh.contributions[2])
            exchange.member_finished(mesh.contributions[1])
            await mesh.until(lambda: mesh.heard[0].all_assembled)
            assert mesh.body(0) == b"".join(bytes(payload) for payload in mesh.payloads)  # type: ignore[arg-type]
            assert exchange.waiting() == ()

    run_virtual(main())


def test_early_chunks_of_another_contribution_are_dropped_when_the_header_comes() -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather"), Network()) as mesh:
            exchange = mesh.exchanges[0]
            exchange.start()
            for chunk in chunks_of(mesh, 1)[:3]:
                exchange.receive("peer-1", dataclasses.replace(chunk, payload=b"x" * 32))
            assert exchange.buffered_bytes == 3 * CHUNK_BYTES
            exchange.member_finished(mesh.contributions[1])
            assert exchange.buffered_bytes == 0
            for chunk in chunks_of(mesh, 1):
                exchange.receive("peer-1", chunk)
            mesh.finish(0)
            await mesh.until(lambda: mesh.heard[0].all_assembled)

    run_virtual(main())


RUBBISH: list[tuple[str, dict[str, Any]]] = [
    ("a chunk that does not fit", {"total": 10}),
    ("a chunk that does not fit", {"total": 2**40}),
    ("a chunk that does not fit", {"offset": -1}),
    ("a chunk that does not fit", {"offset": 700}),
    ("a chunk that does not fit", {"data": b""}),
    ("a chunk that does not fit", {"data": b"x" * 10_000}),
    ("a chunk that is not for this peer", {"kind": "part"}),
    ("a chunk that is not for this peer", {"kind": "nonsense"}),
    ("a chunk that is not for this peer", {"share": 1}),
    ("a chunk that is not for this peer", {"owner": "peer-0"}),
    ("a chunk that is not for this peer", {"owner": "stranger"}),
]


@pytest.mark.parametrize(("reason", "changes"), RUBBISH)
def test_chunks_that_do_not_fit_are_refused_and_their_sender_named(reason: str, changes: dict[str, Any]) -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather"), Network()) as mesh:
            mesh.exchanges[0].receive("peer-1", dataclasses.replace(chunks_of(mesh, 1)[0], **changes))
            assert mesh.heard[0].all_refused == [("peer-1", reason)]
            assert mesh.exchanges[0].refusals[reason] == 1
            assert mesh.exchanges[0].buffered_bytes == 0

    run_virtual(main())


def test_reduce_refuses_what_does_not_fit() -> None:
    async def main() -> None:
        async with Mesh(plan_for(3, "reduce"), Network()) as mesh:
            plan, exchange = mesh.plan.digest, mesh.exchanges[0]
            for share in (-1, 0, 3):
                exchange.receive("peer-1", PartHeader(plan, share, (), b"h" * 32, 100))
            exchange.receive("peer-1", PartHeader(plan, 1, (), b"h" * 32, 100))
            for share in (-1, 1, 2, 7):
                exchange.receive("peer-1", Chunk(plan, "contribution", "peer-1", b"h" * 32, share, 0, 100, b"x"))
            for share in (-1, 0, 2, 7):
                exchange.receive("peer-1", Chunk(plan, "part", "peer-1", b"h" * 32, share, 0, 100, b"x"))
            assert len(mesh.heard[0].all_refused) == 3 + 1 + 4 + 4
            assert exchange.buffered_bytes == 0

    run_virtual(main())


@pytest.mark.case("C073")
def test_messages_of_other_plans_and_of_strangers_are_ignored() -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather"), Network()) as mesh:
            chunk = chunks_of(mesh, 1)[0]
            mesh.exchanges[0].receive("stranger", chunk)
            mesh.exchanges[0].receive("peer-1", dataclasses.replace(chunk, plan=b"p" * 32))
            assert mesh.exchanges[0].buffered_bytes == 0
            assert mesh.heard[0].all_refused == []
            mesh.exchanges[0].receive("peer-1", chunk)
            assert mesh.exchanges[0].buffered_bytes == len(chunk.data), "from its sender and of this plan it counts"

    run_virtual(main())


def test_contributions_of_another_round_or_size_and_second_ones_are_refused() -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather"), Network()) as mesh:
            exchange, good = mesh.exchanges[0], mesh.contributions[1]
            exchange.member_finished(dataclasses.replace(good, round=9))
            exchange.member_finished(dataclasses.replace(good, payload_bytes=9))
            exchange.member_finished(good)
            exchange.member_finished(good)
            exchange.member_finished(dataclasses.replace(good, tokens=9))
            reasons = [reason for _, reason in mesh.heard[0].all_refused]
            assert reasons == ["contribution to another round", "contribution of the wrong size", "a second contribution"]

    run_virtual(main())


def test_flipped_bits_are_found_and_the_bytes_asked_for_again() -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather"), Network()) as mesh:
            mesh.exchanges[0].start()
            mesh.exchanges[0].member_finished(mesh.contributions[1])
            for chunk in chunks_of(mesh, 1):
                flipped = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
                mesh.exchanges[0].receive("peer-1", dataclasses.replace(chunk, data=flipped))
            assert mesh.heard[0].all_refused == [("peer-1", "bytes that are not what their hash says")]
            mesh.exchanges[1].start()
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)

    run_virtual(main())


@pytest.mark.case("C073")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("forged", [np.array([np.nan], "<f4").tobytes(), bytes(64)], ids=["nan", "zeros"])
def test_nobody_writes_into_a_stream_of_another(topology: str, forged: bytes) -> None:
    """A reduce's slices have no hash: what a third member wrote there would be averaged, or its owner blamed for it."""

    async def main() -> None:
        async with Mesh(plan_for(3, topology), Network(latency_seconds=0.05, bytes_per_second=1e5)) as mesh:
            mesh.start()
            exchange, theirs = mesh.exchanges[0], mesh.contributions[1]
            key = exchange._streams.contribution_of("peer-1")
            layout = exchange._streams.inbound(key)
            assert layout is not None
            exchange.member_finished(theirs)
            exchange.receive("peer-2", Chunk(mesh.plan.digest, *key[:2], theirs.payload, key.share, 0, layout.total, forged))
            assert exchange.buffered_bytes == 0
            assert exchange.refusals["not asked for"] == 1
            mesh.finish_all()
            await mesh.all_assembled()
            assert_all_equal(mesh)
            assert mesh.body(0) == expected_body(mesh)
            assert mesh.heard[0].all_refused == mesh.heard[0].all_rejected == []

    run_virtual(main())


def test_who_passes_on_other_bytes_is_named_and_not_their_owner() -> None:
    """Of several senders nobody knows who it was."""

    async def main(of_the_owner: int, named: list[str]) -> None:
        network = Network(latency_seconds=0.02)
        async with Mesh(plan_for(3, "gather"), network) as mesh:
            network.cut("peer-0", "peer-1")
            exchange, chunks = mesh.exchanges[0], chunks_of(mesh, 1)
            exchange.start()
            exchange.member_finished(mesh.contributions[1])
            await asyncio.sleep(1.5 * mesh.limits.deadline_seconds)  # by now peer-2 has been asked, which knows of nothing yet
            for chunk in chunks[:of_the_owner]:
                exchange.receive("peer-1", chunk)
            for chunk in chunks[of_the_owner:]:
                exchange.receive("peer-2", dataclasses.replace(chunk, data=bytes(len(chunk.data))))
            assert exchange.refusals["bytes that are not what their hash says"] == len(named)
            assert [peer for peer, _ in mesh.heard[0].all_refused] == named
            for other in (1, 2):
                mesh.exchanges[other].start()
            mesh.finish_all()
            mesh.exchanges[1].member_finished(mesh.contributions[0])
            await mesh.all_assembled()
            assert_all_equal(mesh)

    run_virtual(main(0, ["peer-2"]))
    run_virtual(main(1, []))


def test_an_absurd_contribution_is_refused_by_rule_and_its_owner_reported() -> None:
    async def main(topology: str) -> None:
        async with Mesh(plan_for(3, topology), Network()) as mesh:
            absurd = payload_of(LAYOUT, mesh.codec.settings, 2)
            absurd[: 4 * LAYOUT.magnitudes].view("<f4")[:] = np.float32(-1)  # magnitudes are not negative
            mesh.payloads[2], mesh.contributions[2] = absurd, contribution_of(mesh.plan, 2, absurd)
            mesh.start()
            mesh.finish_all()
            await asyncio.sleep(20.0)
            for index in (0, 1):
                assert not mesh.heard[index].all_assembled
                assert mesh.heard[index].lost_peers == {"peer-2"}
                assert any(peer == "peer-2" and "magnitudes" in reason for peer, reason in mesh.heard[index].all_refused)

    for topology in TOPOLOGIES:
        run_virtual(main(topology))


def test_parts_of_unequal_contributions_are_never_assembled() -> None:
    async def main() -> None:
        async with Mesh(plan_for(3, "reduce"), Network()) as mesh:
            other = payload_of(LAYOUT, mesh.codec.settings, 77)
            # peer-2 tells peer-1 of another contribution than peer-0
            mesh.start()
            mesh.exchanges[1].member_finished(contribution_of(mesh.plan, 2, other))
            for chunk_owner in (0, 1):
                mesh.finish(chunk_owner)
            mesh.finish(2)
            share = mesh.plan.shares[1]
            data = b"".join(other[low:high].tobytes() for low, high in mesh.codec.slices(share))
            head = (mesh.plan.digest, "contribution", "peer-2", digest_bytes(other), 1)
            mesh.exchanges[1].receive("peer-2", Chunk(*head, 0, len(data), data))
            await asyncio.sleep(10.0)
            assert mesh.heard[0].all_unequal == [("peer-1",)]
            assert mesh.heard[2].all_unequal == [("peer-1",)]
            assert mesh.heard[1].all_unequal[-1] == ("peer-0", "peer-2")
            assert not any(heard.all_assembled for heard in mesh.heard)

    run_virtual(main())


# ---------------------------------------------------------------- asking, stopping, starting late


def test_requests_that_do_not_fit_are_refused() -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather"), Network()) as mesh:
            mesh.finish(0)
            for gaps in ((Range(-1, 5),), (Range(0, 10**9),), (Range(5, 5),), (Range(0, 8),) * 100):
                mesh.exchanges[0].receive("peer-1", ChunkWanted(mesh.plan.digest, "contribution", "peer-0", 0, gaps))
            assert mesh.exchanges[0].refusals["a request that does not fit"] == 4

    run_virtual(main())


def test_what_an_earlier_attempt_brought_does_not_come_again() -> None:
    async def main() -> None:
        network = Network(latency_seconds=0.01, bytes_per_second=5e3)
        network.WINDOW_BYTES = 200  # type: ignore[misc]
        limits = ExchangeLimits(chunk_bytes=64, parallel_chunks=1)
        async with Mesh(plan_for(3, "gather"), network, limits=limits) as first:
            first.start()
            first.finish_all()
            await first.all_assembled()
            brought = [exchange.payloads() for exchange in first.exchanges]
            assert [len(payloads) for payloads in brought] == [3, 3, 3]
            sent = first.payload_sent(0)
        async with Mesh(plan_for(3, "gather", attempt=2), network, limits=limits) as second:
            for exchange, payloads in zip(second.exchanges, brought, strict=True):
                exchange.start(payloads)
            second.finish_all()
            await second.all_assembled()
            assert_all_equal(second)
            await asyncio.sleep(5.0)
            assert second.payload_sent(0) < sent / 2

    run_virtual(main())


def test_what_is_known_takes_the_place_of_what_has_begun_to_come() -> None:
    async def main() -> None:
        async with Mesh(plan_for(2, "gather", attempt=2), Network()) as mesh:
            exchange, payload = mesh.exchanges[0], mesh.payloads[1]
            assert payload is not None
            exchange.start({mesh.contributions[1].payload: payload})
            exchange.receive("peer-1", chunks_of(mesh, 1)[0])
            assert exchange.buffered_bytes > 0
            exchange.member_finished(mesh.contributions[1])
            assert exchange.buffered_bytes == payload.size

    run_virtual(main())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_stop_at_any_moment_leaves_nothing_behind(topology: str) -> None:
    async def main(seconds: float) -> None:
        network = Network(latency_seconds=0.05, bytes_per_second=2e3)
        async with Mesh(plan_for(3, topology), network) as mesh:  # which checks that no task and no byte is left
            mesh.start()
            mesh.finish_all()
            await asyncio.sleep(seconds)
            for exchange in mesh.exchanges:
                await exchange.stop("the leader says so")
            assert all(exchange.buffered_bytes == 0 and exchange.waiting() == () for exchange in mesh.exchanges)
            known = [len(heard.all_assembled) for heard in mesh.heard]
            for chunk in chunks_of(mesh, 1):
                mesh.exchanges[0].receive("peer-1", chunk)
            await asyncio.sleep(5.0)
            assert [len(heard.all_assembled) for heard in mesh.heard] == known

    for step in range(24):
        run_virtual(main(step * 0.1))


def test_progress_goes_from_nothing_to_all() -> None:
    async def main(topology: str) -> None:
        async with Mesh(plan_for(3, topology), Network(latency_seconds=0.05, bytes_per_second=2e3)) as mesh:
            mesh.start()
            before = mesh.exchanges[0].progress()
            assert (before.done_bytes, before.remaining_seconds) == (0, None)
            mesh.finish_all()
            await mesh.until(lambda: mesh.exchanges[0].progress().done_bytes > before.total_bytes // 2)
            halfway = mesh.exchanges[0].progress()
            assert halfway.remaining_seconds is not None
            assert 0 < halfway.remaining_seconds < 10
            await mesh.all_assembled()
            assert mesh.exchanges[0].progress().done_bytes == before.total_bytes

    for topology in TOPOLOGIES:
        run_virtual(main(topology))


def test_a_member_that_accepts_the_plan_late_loses_nothing() -> None:
    async def main() -> None:
        async with Mesh(plan_for(3, "gather"), Network(latency_seconds=0.01)) as mesh:
            late, inbox = mesh.exchanges[2], ExchangeInbox(max_bytes=100_000)
            accepted = False
            receive = late.receive
            late.receive = lambda s, m: receive(s, m) if accepted else inbox.keep(s, m)  # type: ignore[method-assign,assignment]
            mesh.start()
            mesh.finish_all()
            await asyncio.sleep(1.0)
            assert inbox.bytes > 2 * mesh.codec.payload_bytes
            accepted = True
            for sender, message in inbox.take(mesh.plan.digest):
                receive(sender, message)
            assert inbox.bytes == 0
            await mesh.all_assembled()
            assert_all_equal(mesh)
            assert [mesh.payload_sent(index) for index in range(3)] == [2 * mesh.codec.payload_bytes] * 3

    run_virtual(main())


def ack(plan: bytes, offset: int = 0) -> ChunkAck:
    return ChunkAck(plan, "contribution", "a", 0, offset)


def test_what_is_kept_of_a_plan_that_is_over_gives_way_to_its_senders_next_one() -> None:
    """A peer that has just come does not know that a plan is over, whose last chunks still arrive."""
    inbox = ExchangeInbox(max_bytes=2_000)
    old, new = b"1" * 32, b"2" * 32
    assert [inbox.keep("a", ack(old, at)) for at in range(3)] == [True, True, True]
    assert inbox.keep("b", ack(old))
    assert inbox.keep("a", ack(new))
    assert inbox.take(new) == [("a", ack(new))]
    assert inbox.take(old) == [("b", ack(old))]
    assert (inbox.bytes, inbox.dropped) == (0, 3)


def test_the_inbox_is_bounded_for_each_sender_and_in_plans() -> None:
    inbox = ExchangeInbox(max_bytes=2_000, max_plans=2)
    one, two, three = b"1" * 32, b"2" * 32, b"3" * 32
    assert [inbox.keep("a", ack(one, at)) for at in range(4)] == [True, True, True, False]
    assert inbox.keep("b", ack(one))
    assert inbox.keep("b", ack(two))
    assert inbox.keep("b", ack(three))  # the oldest plan gives way
    assert inbox.take(one) == []
    assert inbox.dropped == 1 + 4
    inbox.close(two)
    assert inbox.take(two) == []
    assert not inbox.keep("a", ack(two))
    assert inbox.take(three) == [("b", ack(three))]
    assert inbox.bytes == 0
