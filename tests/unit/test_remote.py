"""The way to one peer: streams opened when needed, again with back-off, and never in a loop with a peer that resets them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.swarm.remote import Remote
from geomesh_p2p.swarm.retrying import LAST_RETRY_SECONDS, Retrying
from geomesh_p2p.swarm.shaping import Shape
from geomesh_p2p.swarm.streams import FrameStream
from geomesh_p2p.swarm.virtual_time import VirtualClockLoop
from tests.injection.proof import fired, inject


class Wire(asyncio.Transport):
    """What a stream writes to; counts those that are open."""

    def __init__(self, place: "Place", stream: FrameStream) -> None:
        super().__init__()
        self.place, self.stream, self.closed = place, stream, False
        place.open.add(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: Any) -> None:
        self.place.written += len(data)
        self.place.carried[self] += len(data)

    def writelines(self, buffers: Any) -> None:
        for data in buffers:
            self.write(data)

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self.place.open.discard(self)
            asyncio.get_running_loop().call_soon(self.stream.connection_lost, None)


class Place:
    """The other end: takes streams, refuses them, or resets each one `reset_after` seconds later."""

    def __init__(self) -> None:
        self.open: set[Wire] = set()
        self.opened: list[float] = []
        self.most_open = self.written = 0
        self.carried: Counter[Wire] = Counter()
        self.refuses = False
        self.reset_after: float | None = None
        self.remote = Remote("peer", self.open_stream, 4, Shape())

    async def open_stream(self, peer: str, protocol: str, addresses: tuple[str, ...], stream: FrameStream) -> None:
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        self.opened.append(loop.time())
        if self.refuses:
            raise Unreachable("refused")
        stream.connection_made(wire := Wire(self, stream))
        self.most_open = max(self.most_open, len(self.open))
        if self.reset_after is not None:
            loop.call_later(self.reset_after, wire.abort)


def virtually(scene: Callable[[], Any]) -> None:
    loop = VirtualClockLoop()
    try:
        loop.run_until_complete(scene())
    finally:
        loop.close()


def misbehave(place: Place, how: str) -> None:
    if how == "refuse":
        place.refuses = True
    else:
        place.reset_after = 0.0 if how == "reset at once" else 1.0


@pytest.mark.fault
@pytest.mark.case("C050")
@pytest.mark.parametrize("how", ["refuse", "reset at once", "reset after a second"])
def test_ten_minutes_with_a_peer_that_takes_no_stream(how: str) -> None:
    """Heartbeats, chunks and requests go on being tried, and neither streams nor tries pile up."""

    async def scene() -> None:
        place = Place()
        inject(lambda: misbehave(place, how))
        stop_at = asyncio.get_running_loop().time() + 600.0

        async def heartbeats() -> None:
            while asyncio.get_running_loop().time() < stop_at:
                place.remote.send([b"beat"])
                await asyncio.sleep(0.3)

        async def bulk() -> None:
            while asyncio.get_running_loop().time() < stop_at:
                with suppress(Unreachable):
                    await place.remote.send_bulk([b"chunk"], 5)
                await asyncio.sleep(0.01)

        async def requests() -> None:
            while asyncio.get_running_loop().time() < stop_at:
                with suppress(Unreachable, TimeoutError):
                    async with asyncio.timeout(5.0):
                        await place.remote.request(1, [b"question"], lambda: None)
                await asyncio.sleep(0.01)

        working = [asyncio.ensure_future(work()) for work in (heartbeats, bulk, requests)]
        try:
            await asyncio.sleep(60.0)
            fired(injected(place), how)
            first = len(place.opened)
            await asyncio.wait(working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            place.remote.close()
            await asyncio.sleep(0.1)
        # six streams at a time (control, four of bulk, a request), each at most once in LAST_RETRY_SECONDS
        assert len(place.opened) - first <= 6 * 540 / LAST_RETRY_SECONDS * 1.5
        assert place.most_open <= 6
        assert place.remote.traffic.dropped + place.written > 0
        assert not place.open

    virtually(scene)


def injected(place: Place) -> bool:
    """Whether streams were in fact refused or lost: a peer that behaves is asked for six and keeps them."""
    return len(place.opened) - len(place.open) > 20


def test_a_peer_that_behaves_again_is_used_as_before() -> None:
    async def scene() -> None:
        place = Place()
        place.reset_after = 0.0
        for _ in range(100):
            place.remote.send([b"beat"])
            await asyncio.sleep(0.3)
        place.reset_after = None
        await asyncio.sleep(LAST_RETRY_SECONDS)
        place.remote.send([b"beat"])
        await asyncio.sleep(LAST_RETRY_SECONDS)
        opened, written = len(place.opened), place.written
        for _ in range(100):
            place.remote.send([b"beat"])
            await asyncio.sleep(0.3)
        assert place.written - written == 400
        assert len(place.opened) == opened
        place.remote.close()

    virtually(scene)


def test_news_ends_the_wait_for_a_peer_that_could_not_be_reached() -> None:
    async def scene() -> None:
        place = Place()
        place.refuses = True
        loop = asyncio.get_running_loop()
        while loop.time() < 60.0:
            place.remote.send([b"beat"])
            await asyncio.sleep(0.3)
        place.refuses = False
        place.remote.send([b"beat"])
        await asyncio.sleep(0.05)
        tried = len(place.opened)
        place.remote.try_now()
        await asyncio.sleep(0.05)
        assert len(place.opened) > tried
        assert place.written >= 4
        place.remote.close()

    virtually(scene)


# ---------------------------------------------------------------- the rule by itself


def test_waits_grow_with_failures_and_end_with_success() -> None:
    retrying, waits = Retrying(), []
    for _ in range(8):
        retrying.failed(100.0)
        waits.append(retrying.wait_seconds(100.0))
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert retrying.wait_seconds(104.0) == 1.0
    retrying.opened()
    retrying.failed(200.0)
    assert retrying.wait_seconds(200.0) == 0.25


def test_streams_of_one_connection_that_are_lost_together_count_once() -> None:
    retrying = Retrying()
    for _ in range(5):
        retrying.lost(10.0, 9.5)
    assert retrying.wait_seconds(10.0) == 0.25
    retrying.lost(11.0, 10.5)
    assert retrying.wait_seconds(11.0) == 0.5


def test_a_stream_that_lasted_wipes_the_slate_and_news_alone_does_not() -> None:
    retrying = Retrying()
    for second in range(10):
        retrying.lost(float(second), second - 0.5)
    retrying.news()
    assert retrying.wait_seconds(9.0) == LAST_RETRY_SECONDS, "a peer that resets streams and opens its own is still one"
    retrying.lost(60.0, 20.0)
    retrying.lost(70.0, 69.0)
    assert retrying.wait_seconds(70.0) == 0.25
    retrying.another()
    assert retrying.wait_seconds(70.0) == 0.0


def test_chunks_are_spread_evenly_also_while_the_daemon_takes_everything_at_once() -> None:
    """A stream's window is a quarter of a mebibyte: bytes beyond wait a round trip, while the other streams are idle."""

    async def scene() -> None:
        place = Place()
        for _ in range(16):
            await place.remote.send_bulk([bytes(1000)], 1000)
            await asyncio.sleep(0.1)
        carried = Counter(place.carried.values())
        assert carried == {4000: 4}
        place.remote.close()
        await asyncio.sleep(0.1)

    virtually(scene)
