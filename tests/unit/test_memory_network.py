"""The network in memory: virtual time, links and faults do what their names say, the same every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from geomesh_p2p.core.messages import Chunk, Fetch, Fetched, Leave, Message
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.swarm.memory import MemoryTransport, Network
from geomesh_p2p.swarm.virtual_time import VirtualClockLoop, run_virtual

Heard = list[tuple[float, str, Any]]


async def site(network: Network, name: str) -> tuple[MemoryTransport, Heard]:
    heard: Heard = []
    clock = asyncio.get_running_loop().time

    def on_message(sender: str, message: Message) -> None:
        heard.append((round(clock(), 6), sender, message.offset if isinstance(message, Chunk) else message))

    async def on_request(sender: str, fetch: Fetch) -> Fetched:
        return Fetched(True, b"", fetch.offset, 0, b"", 0)

    transport = network.transport(name)
    await transport.start(on_message, on_request)
    return transport, heard


def chunk(number: int, size: int) -> Chunk:
    return Chunk(b"", "part", "a", b"", 0, number, 0, bytes(size))


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        run_virtual(test())

    wrapped.__name__ = test.__name__
    return wrapped


# ---------------------------------------------------------------- virtual time


@virtual
async def test_hours_pass_at_once_and_exactly() -> None:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(7200)
    assert clock() == pytest.approx(7200)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await asyncio.Event().wait()
    assert clock() == pytest.approx(7230)


@virtual
async def test_a_worker_thread_takes_no_virtual_time() -> None:
    ticking = asyncio.create_task(asyncio.sleep(1000))
    assert await asyncio.to_thread(sum, range(1_000_000)) == sum(range(1_000_000))
    assert asyncio.get_running_loop().time() == 0
    assert not ticking.done()
    ticking.cancel()


def test_waiting_for_what_cannot_come_is_an_error_and_not_a_hang() -> None:
    loop = VirtualClockLoop()
    with pytest.raises(RuntimeError, match="for ever"):
        loop.run_until_complete(asyncio.Event().wait())
    loop.close()


# ---------------------------------------------------------------- links


@virtual
async def test_latency_and_rate() -> None:
    network = Network(latency_seconds=0.1, bytes_per_second=1e6)
    a, _ = await site(network, "a")
    _, heard = await site(network, "b")
    start = asyncio.get_running_loop().time()
    for number in range(20):
        await a.send_bulk("b", chunk(number, 100_000))
    assert asyncio.get_running_loop().time() - start > 1.0  # 2 MB, of which half a megabyte may be under way
    await asyncio.sleep(10)
    assert [number for _, _, number in heard] == list(range(20))
    assert heard[-1][0] == pytest.approx(2.1, abs=0.01)


@virtual
async def test_small_words_do_not_wait_behind_bulk() -> None:
    network = Network(latency_seconds=0.1, bytes_per_second=1e6)
    a, _ = await site(network, "a")
    _, heard = await site(network, "b")
    await a.send_bulk("b", chunk(0, 500_000))
    a.send("b", Leave("first"))
    await asyncio.sleep(5)
    assert [what for _, _, what in heard] == [Leave("first"), 0]


@virtual
async def test_order_holds_when_the_latency_drops() -> None:
    network = Network(latency_seconds=1.0)
    a, _ = await site(network, "a")
    _, heard = await site(network, "b")
    a.send("b", Leave("1"))
    network.set_link("a", "b", latency_seconds=0.01)
    a.send("b", Leave("2"))
    await asyncio.sleep(5)
    assert [what.reason for _, _, what in heard] == ["1", "2"]


def lossy_run(seed: int) -> list[str]:
    async def run() -> list[str]:
        network = Network(seed=seed, loss=0.3)
        a, _ = await site(network, "a")
        _, heard = await site(network, "b")
        for number in range(200):
            a.send("b", Leave(str(number)))
        await asyncio.sleep(1)
        return [what.reason for _, _, what in heard]

    return run_virtual(run())


def test_loss_is_random_and_repeatable() -> None:
    got = lossy_run(1)
    assert 100 < len(got) < 180
    assert got == sorted(got, key=int)
    assert got == lossy_run(1) != lossy_run(2)


# ---------------------------------------------------------------- faults


@virtual
async def test_cut_one_way_and_heal_by_script() -> None:
    network = Network(latency_seconds=0.1)
    a, heard_a = await site(network, "a")
    b, heard_b = await site(network, "b")
    network.play([(1.0, lambda n: n.cut("a", "b", one_way=True)), (3.0, lambda n: n.heal())])
    for number in range(5):
        a.send("b", Leave(f"a{number}"))
        b.send("a", Leave(f"b{number}"))
        await asyncio.sleep(1.0)
    assert [what.reason for _, _, what in heard_a] == ["b0", "b1", "b2", "b3", "b4"]
    assert [what.reason for _, _, what in heard_b] == ["a0", "a3", "a4"]
    assert network.played == [1.0, 3.0]
    assert a.traffic()["b"].dropped == 2


@virtual
async def test_what_is_under_way_is_lost_in_a_cut() -> None:
    network = Network(latency_seconds=1.0)
    a, _ = await site(network, "a")
    _, heard = await site(network, "b")
    a.send("b", Leave("lost"))
    network.isolate("b")
    await asyncio.sleep(0.5)
    network.heal("b")
    a.send("b", Leave("kept"))
    network.cut("a", "b")
    await asyncio.sleep(0.6)
    network.heal("a", "b")
    await asyncio.sleep(5)
    assert [what.reason for _, _, what in heard] == ["kept"]


@virtual
async def test_bulk_over_a_cut_waits_and_then_fails() -> None:
    network = Network(stall_seconds=3.0)
    a, _ = await site(network, "a")
    _, heard = await site(network, "b")
    network.cut("a", "b")
    with pytest.raises(Unreachable, match="3 s"):
        await a.send_bulk("b", chunk(1, 10))
    assert asyncio.get_running_loop().time() == pytest.approx(3.0, abs=0.4)
    network.play([(1.0, lambda n: n.heal())])
    await a.send_bulk("b", chunk(2, 10))
    await asyncio.sleep(1)
    assert [number for _, _, number in heard] == [2]


@virtual
async def test_pause_holds_both_directions_and_resume_lets_go() -> None:
    network = Network(latency_seconds=0.1)
    a, heard_a = await site(network, "a")
    b, heard_b = await site(network, "b")
    network.pause("b")
    a.send("b", Leave("in"))
    b.send("a", Leave("out"))
    await asyncio.sleep(10)
    assert heard_a == heard_b == []
    network.resume("b")
    await asyncio.sleep(1)
    assert [what.reason for _, _, what in heard_b] == ["in"]
    assert [what.reason for _, _, what in heard_a] == ["out"]


@virtual
async def test_crash_and_restart() -> None:
    network = Network(latency_seconds=0.1)
    a, heard_a = await site(network, "a")
    b, old = await site(network, "b")
    asking = asyncio.create_task(a.request("b", Fetch("update", 0, b"", 0, 0), 2.0))
    a.send("b", Leave("too late"))
    await asyncio.sleep(0.05)
    network.crash("b")
    b.send("a", Leave("from beyond"))
    with pytest.raises(Unreachable):
        await asking
    with pytest.raises(Unreachable):
        await a.send_bulk("b", chunk(1, 10))
    _, new = await site(network, "b")
    a.send("b", Leave("welcome back"))
    await asyncio.sleep(1)
    assert old == []
    assert heard_a == []
    assert [what.reason for _, _, what in new] == ["welcome back"]
