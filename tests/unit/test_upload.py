"""A peer's uplink with a limit: what it sends in bulk, what it says of its links, and what is planned with that."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomesh_p2p.core.bounds import figures_fault
from geomesh_p2p.core.forecast import LinkTable, Volume, best_fractions, choose_exchange, cut, gather_seconds, reduce_seconds
from geomesh_p2p.core.messages import Chunk, ChunkAck, Heartbeat
from geomesh_p2p.core.types import NO_TERM, Link, Range
from geomesh_p2p.swarm import links as measured
from geomesh_p2p.swarm.remote import SMALL_ANSWER_BYTES, Remote
from geomesh_p2p.swarm.shaping import WINDOW_BYTES, Shape, Shaper
from geomesh_p2p.swarm.streams import FrameStream
from geomesh_p2p.swarm.virtual_time import run_virtual

CAP = 1_000_000.0  # bytes a second
FRAME = 131_072
VOLUME = Volume(2_000_000, 250_000, 250_000)


# ---------------------------------------------------------------- what is sent


class Wire(asyncio.Transport):
    """What a stream writes to: notes when how much was written, and on what kind of stream."""

    def __init__(self, uplink: "Uplink", peer: str, protocol: str) -> None:
        super().__init__()
        self.uplink, self.peer, self.protocol = uplink, peer, protocol.rpartition("/")[2]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        now = asyncio.get_running_loop().time()
        self.uplink.written.append((now, self.peer, self.protocol, len(data)))

    def writelines(self, buffers: Any) -> None:
        self.write(b"".join(buffers))

    def abort(self) -> None: ...


class Uplink:
    """Ways to some peers behind one limit."""

    def __init__(self, peers: str, bytes_per_second: float | None = CAP, shape: Shape | None = None) -> None:
        self.written: list[tuple[float, str, str, int]] = []
        self.shaper = Shaper(Shape(bytes_per_second=bytes_per_second))
        self.remotes = [Remote(peer, self.open, 4, shape or Shape(), self.shaper) for peer in peers]

    async def open(self, peer: str, protocol: str, addresses: tuple[str, ...], stream: FrameStream) -> None:
        await asyncio.sleep(0.01)
        stream.connection_made(Wire(self, peer, protocol))

    def bytes(self, protocol: str = "bulk", peer: str = "") -> int:
        return sum(size for _, to, kind, size in self.written if kind == protocol and peer in ("", to))

    def most_in_a_second(self, protocol: str) -> int:
        bulk = [(at, size) for at, _, kind, size in self.written if kind == protocol]
        return max(sum(size for at, size in bulk if begun <= at < begun + 1.0) for begun, _ in bulk)


async def send_for(uplink: Uplink, seconds: float, beside: Callable[[], None] = lambda: None) -> None:
    async def work(remote: Remote) -> None:
        while True:
            await remote.send_bulk([bytes(FRAME)], FRAME)

    workers = [asyncio.ensure_future(work(remote)) for remote in uplink.remotes for _ in range(4)]
    for _ in range(round(seconds / 0.1)):
        beside()
        await asyncio.sleep(0.1)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


def test_bulk_to_all_together_never_passes_the_limit_and_uses_it() -> None:
    async def scene() -> None:
        uplink = Uplink("abcdefg")
        await send_for(uplink, 30.0)
        assert uplink.most_in_a_second("bulk") <= CAP + FRAME
        assert 0.97 * 30 * CAP <= uplink.bytes() <= 30 * CAP + FRAME
        each = [uplink.bytes(peer=peer) for peer in "abcdefg"]
        assert max(each) - min(each) <= 4 * FRAME, "all in turn"

    run_virtual(scene())


def test_heartbeats_do_not_wait_for_bulk() -> None:
    async def scene() -> None:
        uplink, begun = Uplink("abc"), list[float]()

        def beat() -> None:
            begun.append(asyncio.get_running_loop().time())
            uplink.remotes[0].send([bytes(2000)])

        await send_for(uplink, 20.0, beat)
        sent = [at for at, _, kind, _ in uplink.written if kind == "control"]
        assert len(sent) == len(begun)
        waits = [after - before for before, after in zip(begun[1:], sent[1:], strict=True)]
        assert max(waits) < 1e-6, "the first one waits for its stream"

    run_virtual(scene())


def test_control_on_an_emulated_way_does_not_stand_in_line_behind_bulk_and_takes_its_bytes_from_it() -> None:
    async def scene() -> None:
        way = Uplink("a", None, Shape(0.2, CAP))
        begun = list[float]()

        def beat() -> None:
            begun.append(asyncio.get_running_loop().time())
            way.remotes[0].send([bytes(2000)])

        await send_for(way, 20.0, beat)
        await asyncio.sleep(1.0)
        sent = [at for at, _, kind, _ in way.written if kind == "control"]
        assert len(sent) == len(begun)
        waits = [after - before for before, after in zip(begun[1:], sent[1:], strict=True)]
        assert max(waits) == pytest.approx(0.2 + 2000 / CAP, abs=0.002)
        both = way.bytes("bulk") + way.bytes("control")
        assert 0.95 * 20 * CAP <= both <= 20 * CAP + FRAME + WINDOW_BYTES

    run_virtual(scene())


def test_large_answers_pass_the_limit_as_well_and_small_ones_do_not_wait() -> None:
    async def scene() -> None:
        uplink = Uplink("ab")
        a, b = uplink.remotes
        stream = FrameStream()
        stream.connection_made(Wire(uplink, "a", "/answer"))
        begun = asyncio.get_running_loop().time()
        giving = asyncio.ensure_future(a.answer(stream, [bytes(4_000_000)], lambda: None))
        await asyncio.sleep(1.0)
        await b.answer(stream, [bytes(SMALL_ANSWER_BYTES)], lambda: None)
        assert asyncio.get_running_loop().time() == begun + 1.0
        await giving
        taken = asyncio.get_running_loop().time() - begun
        assert taken == pytest.approx(4.0, abs=2 * WINDOW_BYTES / CAP)
        assert uplink.most_in_a_second("answer") <= CAP + WINDOW_BYTES + SMALL_ANSWER_BYTES

    run_virtual(scene())


@pytest.mark.parametrize("uplink", [None, CAP])
@pytest.mark.parametrize("shape", [Shape(0.05, CAP / 2), Shape(0.05, CAP / 3)])
def test_answers_and_bulk_over_one_emulated_way_come_in_turn(uplink: float | None, shape: Shape) -> None:
    """No answer waits for another to end: who asked gives up an answer of which nothing comes."""

    async def scene() -> None:
        way, rate = Uplink("a", uplink, shape), shape.bytes_per_second
        assert rate is not None
        names = [f"/answer-{k}" for k in range(4)]
        streams = [FrameStream() for _ in names]
        for name, stream in zip(names, streams, strict=True):
            stream.connection_made(Wire(way, "a", name))
        bulk = asyncio.ensure_future(send_for(way, 60.0))
        await asyncio.gather(*(way.remotes[0].answer(stream, [bytes(1 << 20)], lambda: None) for stream in streams))
        ended = asyncio.get_running_loop().time()
        await asyncio.sleep(3.0)  # what was submitted comes through
        turns = len(streams) * WINDOW_BYTES + 4 * FRAME
        for name in names:
            came = [0.0, *(at for at, _, kind, _ in way.written if kind == name[1:])]
            pauses = [after - before for before, after in itertools.pairwise(came)]
            assert max(pauses) <= (turns + FRAME + WINDOW_BYTES) / rate + shape.delay_seconds
            assert way.bytes(name[1:]) == 1 << 20
        assert way.bytes() > 0
        assert ended <= 16 * turns / rate + 1.0, "the way is used"
        bulk.cancel()
        await asyncio.gather(bulk, return_exceptions=True)

    run_virtual(scene())


def test_an_emulated_way_behind_the_limit_is_as_slow_as_the_slower_of_both() -> None:
    async def scene() -> None:
        slow = Uplink("a", shape=Shape(0.05, CAP / 4))
        await send_for(slow, 20.0)
        assert slow.bytes() == pytest.approx(20 * CAP / 4, rel=0.05)
        fast = Uplink("a", shape=Shape(0.05, CAP * 4))
        await send_for(fast, 20.0)
        assert fast.bytes() == pytest.approx(20 * CAP, rel=0.05)

    run_virtual(scene())


# ---------------------------------------------------------------- what is said


def test_no_rate_is_said_to_be_above_the_limit_which_is_told_as_well() -> None:
    links = measured.LinkTable(upload_bytes_per_second=CAP)
    assert links.round_trips_from("me") == (Link.uplink("me", CAP),)
    for peer in "bc":
        links.round_trip(peer, 0.1)
        links.sent(peer, Chunk(b"p", "part", "me", b"", 0, 0, 500_000, bytes(500_000)), 0.0)
        links.acknowledged(peer, ChunkAck(b"p", "part", "me", 0, 500_000), 0.2)  # 5 MB/s: all of a burst
    told = links.round_trips_from("me")
    assert [link.bytes_per_second for link in told] == [CAP, CAP, CAP]
    beat = Heartbeat("n", NO_TERM, "", 1, b"", "idle", True, True, False, None, 0, 0.0, told, 0, 0.0)
    assert figures_fault("me", beat) == ""


# ---------------------------------------------------------------- what is planned


def table(size: int, uplinks: dict[int, float], rate: float = 1e8, rtt: float = 0.1) -> LinkTable:
    peers = [str(k) for k in range(size)]
    pairs = [Link(a, b, rtt, rate) for a in peers for b in peers if a != b]
    return LinkTable.of(peers, [*pairs, *(Link.uplink(peers[k], limit) for k, limit in uplinks.items())])


def test_an_uplink_limits_all_ways_of_its_peer_and_no_other() -> None:
    links = table(3, {1: 1e6})
    assert links.rates[1, 0] == links.rates[1, 2] == 1e6
    assert links.rates[0, 1] == links.rates[2, 1] == 1e8
    assert links.uplinks.tolist() == [np.inf, 1e6, np.inf]
    assert links.only((0, 1)).uplinks.tolist() == [np.inf, 1e6]
    assert links.guessed == 0


def test_a_gather_sends_to_all_others_over_one_uplink() -> None:
    codec = gather_seconds(table(4, {}), VOLUME) - 250_000 / 1e8
    assert gather_seconds(table(4, {2: 1e6}), VOLUME) == pytest.approx(codec + 3 * 0.25)


def test_a_reduce_sends_what_it_does_not_reduce_itself_and_its_part_to_all() -> None:
    quarters, none = cut([1.0] * 4, VOLUME.parameters), cut([1.0, 1.0, 0.0, 1.0], VOLUME.parameters)
    free = reduce_seconds(table(4, {}), VOLUME, quarters)
    limited = reduce_seconds(table(4, {2: 1e6}), VOLUME, quarters)
    assert limited - free == pytest.approx(2 * (0.75 * 0.25 - 0.25 * 250_000 / 1e8), rel=1e-3)
    assert reduce_seconds(table(4, {2: 1e6}), VOLUME, none) < limited, "it receives, and sends its bits once"


@settings(max_examples=40)
@given(st.lists(st.sampled_from([1e5, 5e5, 2e6, 1e7]), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_shares_under_limits_are_no_worse_than_any_others(uplinks: list[float], draw: Any) -> None:
    links, size = table(len(uplinks), dict(enumerate(uplinks)), rate=5e6), len(uplinks)

    def seconds(fractions: Any) -> float:
        ends = [round(VOLUME.parameters * part) for part in np.cumsum(fractions) / np.sum(fractions)]
        return reduce_seconds(links, VOLUME, [Range(start, stop) for start, stop in itertools.pairwise([0, *ends])])

    best = seconds(np.maximum(best_fractions(links, VOLUME), 1e-9))
    for _ in range(20):
        assert best <= seconds([draw.uniform(0.0, 1.0) + 1e-3 for _ in range(size)]) * (1 + 1e-3)
    assert best <= seconds([1.0] * size) * (1 + 1e-3)


def test_no_exchange_is_planned_to_send_more_than_the_limit_lets_through() -> None:
    for limit, size in itertools.product((1e5, 1e6), (2, 3, 8)):
        links = table(size, {0: limit})
        exchange = choose_exchange(links, VOLUME, 1)
        sent = (size - 1) * VOLUME.payload_bytes
        if exchange.topology == "reduce":
            part = len(exchange.shares[0]) / VOLUME.parameters
            sent = (1 - part) * VOLUME.payload_bytes + (size - 1) * part * VOLUME.answer_bytes
        assert sent / exchange.seconds <= limit
        assert exchange.topology == "gather" or len(exchange.shares[0]) < len(exchange.shares[1])
