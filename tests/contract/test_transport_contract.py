"""What every transport must do (ports.Transport), asked of the one in memory and of the real one."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from transport_sites import PATIENCE_SECONDS, Mesh, Site

from geomesh_p2p.core.messages import Chunk, Close, Fetch, Fetched, Hello, Leave
from geomesh_p2p.core.ports import Unreachable

KIB = 1024
RUN, OTHER_RUN = bytes(32), bytes([1] * 32)


def chunk(owner: str, offset: int, data: bytes, total: int = 0) -> Chunk:
    return Chunk(RUN, "contribution", owner, RUN, 0, offset, total, data)


async def pair(mesh: Mesh) -> tuple[Site, Site]:
    return await mesh.site("a"), await mesh.site("b")


async def test_control_messages_arrive_in_order_from_their_authenticated_sender(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    for number in range(500):
        a.transport.send(b.peer, Leave(str(number)))
    await b.until(lambda: len(b.heard) >= 500)
    assert b.heard == [(a.peer, Leave(str(number))) for number in range(500)]


async def test_both_ways_at_once(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    for number in range(50):
        a.transport.send(b.peer, Leave(f"a{number}"))
        b.transport.send(a.peer, Leave(f"b{number}"))
    await a.until(lambda: len(a.heard) >= 50)
    await b.until(lambda: len(b.heard) >= 50)
    assert {sender for sender, _ in a.heard} == {b.peer}
    assert {sender for sender, _ in b.heard} == {a.peer}


async def test_send_to_somebody_unknown_is_dropped_and_counted(mesh: Mesh) -> None:
    a = await mesh.site("a")
    a.transport.send(mesh.stranger(), Leave("hello?"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while a.transport.traffic()[mesh.stranger()].dropped != 1:  # noqa: ASYNC110 - nothing tells of a drop
            await asyncio.sleep(0.01)


async def test_send_never_raises(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    a.transport.send("not an id at all", Leave("x"))
    a.transport.send(b.peer, Leave("x" * 1_000_000))  # above its limit
    a.transport.send(a.peer, Leave("to myself"))
    assert a.transport.traffic()[b.peer].dropped == 1
    await a.transport.stop()
    a.transport.send(b.peer, Leave("too late"))
    assert a.transport.traffic()[b.peer].dropped == 2


async def test_bulk_arrives_whole_and_is_counted_as_payload(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    parts = [bytes([number]) * (128 * KIB) for number in range(40)]
    for number, part in enumerate(parts):
        await a.transport.send_bulk(b.peer, chunk(a.peer, number, part))
    got = sorted(await b.chunks(len(parts)), key=lambda c: c.offset)
    assert [c.offset for c in got] == list(range(len(parts)))
    assert [hashlib.sha1(c.data).digest() for c in got] == [hashlib.sha1(part).digest() for part in parts]
    total = sum(map(len, parts))
    sent, received = a.transport.traffic()[b.peer], b.transport.traffic()[a.peer]
    assert sent.payload_sent == received.payload_received == total
    assert 0 < sent.overhead_sent == received.overhead_received < 0.01 * total
    assert sent.payload_received == received.payload_sent == 0


async def test_largest_chunk_and_empty_chunk(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    big = bytes(range(256)) * 4096
    await a.transport.send_bulk(b.peer, chunk(a.peer, 0, big))
    await a.transport.send_bulk(b.peer, chunk(a.peer, 1, b""))
    got = {c.offset: c.data for c in await b.chunks(2)}
    assert got == {0: big, 1: b""}


async def test_bulk_from_a_view_is_sent_as_it_is(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    whole = memoryview(bytes(range(256)) * 1024)
    await a.transport.send_bulk(b.peer, chunk(a.peer, 0, whole[1000:2000]))  # type: ignore[arg-type]
    (got,) = await b.chunks(1)
    assert got.data == bytes(whole[1000:2000])


async def test_many_senders_of_bulk_at_once(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    c = await mesh.site("c")
    await asyncio.gather(
        *(a.transport.send_bulk(b.peer, chunk(a.peer, i, bytes(64 * KIB))) for i in range(60)),
        *(c.transport.send_bulk(b.peer, chunk(c.peer, i, bytes(64 * KIB))) for i in range(60)),
    )
    got = await b.chunks(120)
    assert {(x.owner, x.offset) for x in got} == {(s, i) for s in (a.peer, c.peer) for i in range(60)}
    assert all(message.owner == sender for sender, message in b.heard)


async def test_bulk_to_nobody_raises_unreachable(mesh: Mesh) -> None:
    a = await mesh.site("a")
    with pytest.raises(Unreachable):
        await a.transport.send_bulk(mesh.stranger(), chunk(a.peer, 0, b"x"))
    with pytest.raises(Unreachable):
        await a.transport.send_bulk(a.peer, chunk(a.peer, 0, b"x"))


async def test_request_is_answered(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    answer = await a.transport.request(b.peer, Fetch("update", 3, RUN, 10, 2000), PATIENCE_SECONDS)
    assert answer == Fetched(True, a.peer.encode(), 10, 2000, bytes(2000), 0)


async def test_requests_run_side_by_side_and_do_not_hold_up_control(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    gate = asyncio.Event()

    async def answer(sender: str, fetch: Fetch) -> Fetched:
        if fetch.round == 0:
            await gate.wait()
        return Fetched(True, b"", fetch.round, 0, b"", 0)

    b.answer = answer
    slow = asyncio.create_task(a.transport.request(b.peer, Fetch("update", 0, RUN, 0, 0), PATIENCE_SECONDS))
    quick = await asyncio.gather(
        *(a.transport.request(b.peer, Fetch("update", n, RUN, 0, 0), PATIENCE_SECONDS) for n in range(1, 6))
    )
    assert [fetched.offset for fetched in quick] == [1, 2, 3, 4, 5]
    a.transport.send(b.peer, Leave("now"))
    await b.until(lambda: bool(b.heard))
    assert not slow.done()
    gate.set()
    assert (await slow).offset == 0


async def test_request_raises_unreachable_at_its_deadline_and_the_next_one_works(mesh: Mesh) -> None:
    a, b = await pair(mesh)

    async def never(sender: str, fetch: Fetch) -> Fetched:
        await asyncio.Event().wait()
        raise AssertionError

    b.answer = never
    for _ in range(12):  # more than may run side by side: a slot that is not given back would show
        with pytest.raises(Unreachable, match="within"):
            await a.transport.request(b.peer, Fetch("update", 0, RUN, 0, 0), 0.05)
    b.answer = None
    assert (await a.transport.request(b.peer, Fetch("update", 0, RUN, 0, 5), PATIENCE_SECONDS)).data == bytes(5)


async def test_request_to_nobody_raises_unreachable(mesh: Mesh) -> None:
    a = await mesh.site("a")
    with pytest.raises(Unreachable):
        await a.transport.request(mesh.stranger(), Fetch("update", 0, RUN, 0, 0), 1.0)


async def test_largest_answer(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    size = 4 * KIB * KIB
    answer = await a.transport.request(b.peer, Fetch("snapshot", 0, RUN, 0, size), PATIENCE_SECONDS)
    assert len(answer.data) == size


async def test_frames_of_another_run_are_not_heard(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    a.transport.run, b.transport.run = OTHER_RUN, RUN
    a.transport.send(b.peer, Close(RUN))
    hello = Hello(1, OTHER_RUN, RUN, "", "a", True, b"", 0, RUN, b"")
    a.transport.send(b.peer, hello)  # greetings are heard, so that they can be refused
    a.transport.run = RUN
    a.transport.send(b.peer, Leave("same run"))
    await b.until(lambda: len(b.heard) >= 2)
    assert [message for _, message in b.heard] == [hello, Leave("same run")]


async def test_a_failing_handler_does_not_end_the_connection(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    def failing(sender: str, message: object) -> None:
        b.on_message(sender, message)  # type: ignore[arg-type]
        raise RuntimeError("a bug")

    await b.transport.stop()
    b = await mesh.restart(b)
    b.transport._on_message = failing
    a.transport.send(b.peer, Leave("1"))
    a.transport.send(b.peer, Leave("2"))
    await b.until(lambda: len(b.heard) >= 2)


async def test_restarted_peer_is_heard_and_reached_again(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    a.transport.send(b.peer, Leave("before"))
    await a.transport.send_bulk(b.peer, chunk(a.peer, 0, bytes(KIB)))
    await b.until(lambda: len(b.heard) >= 2)
    again = await mesh.restart(b)
    assert again.peer == b.peer
    again.transport.send(a.peer, Leave("I am back"))
    await a.until(lambda: bool(a.heard))
    assert a.heard == [(b.peer, Leave("I am back"))]
    a.transport.send(b.peer, Leave("after"))
    await again.until(lambda: bool(again.messages(Leave)))
    assert again.messages(Leave) == [Leave("after")]
    await a.transport.send_bulk(b.peer, chunk(a.peer, 7, bytes(KIB)))
    assert [c.offset for c in await again.chunks(1)] == [7]
    assert (await a.transport.request(b.peer, Fetch("update", 0, RUN, 0, 5), PATIENCE_SECONDS)).found


async def test_peer_that_went_away_fails_bulk_and_requests(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    await a.transport.send_bulk(b.peer, chunk(a.peer, 0, bytes(KIB)))
    await b.chunks(1)
    await mesh.kill(b)

    async def send_until_it_fails() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:  # some may still be taken by buffers under way
                await a.transport.send_bulk(b.peer, chunk(a.peer, 1, bytes(KIB)))
                await asyncio.sleep(0.001)

    with pytest.raises(Unreachable):
        await send_until_it_fails()
    with pytest.raises(Unreachable):
        await a.transport.request(b.peer, Fetch("update", 0, RUN, 0, 0), 1.0)


async def test_a_crowd_of_control_messages_drops_the_oldest(mesh: Mesh) -> None:
    a = await mesh.site("a")
    stranger = mesh.stranger()
    for number in range(3000):
        a.transport.send(stranger, Leave(str(number)))
    assert a.transport.traffic()[stranger].dropped >= 3000 - 1024


async def test_a_forgotten_peer_leaves_nothing_and_may_come_back(mesh: Mesh) -> None:
    a, b = await pair(mesh)
    a.transport.send(b.peer, Leave("before"))
    await b.until(lambda: len(b.heard) == 1)
    b.transport.send(a.peer, Leave("before"))
    await a.until(lambda: len(a.heard) == 1)
    a.transport.forget(b.peer)
    a.transport.forget(mesh.stranger())
    assert b.peer not in a.transport.traffic()
    a.transport.learn(b.peer, b.transport.addresses() if hasattr(b.transport, "addresses") else ())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(b.heard) < 2 or len(a.heard) < 2:
            a.transport.send(b.peer, Leave("again"))
            b.transport.send(a.peer, Leave("again"))
            await asyncio.sleep(0.05)
    assert b.heard[1] == (a.peer, Leave("again"))
    assert a.heard[1] == (b.peer, Leave("again"))
