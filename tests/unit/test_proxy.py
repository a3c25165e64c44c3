"""The proxies do to real sockets what a rule says, to the pair it says, and count it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.injection.proxy import ANYBODY, STRANGER, Network, Rule


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        network.process("a", os.getpid())
        yield network


class Echo:
    """Sends back what it gets."""

    def __init__(self, network: Network) -> None:
        self.network = network

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.proxy = self.network.front("b", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        writer.close()

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.proxy.port)

    async def stop(self) -> None:
        self._server.close()


@pytest.fixture
async def echo(network: Network) -> AsyncIterator[Echo]:
    echo = Echo(network)
    await echo.start()
    yield echo
    await echo.stop()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes = b"x" * 1000) -> bytes:
    writer.write(text)
    return await reader.readexactly(len(text))


async def until_counted(
    network: Network, name: str, sender: str = ANYBODY, receiver: str = ANYBODY, least: float = 1e-9
) -> None:
    async with asyncio.timeout(10):
        while getattr(network.count(sender, receiver), name) < least:  # noqa: ASYNC110 - a thread counts
            await asyncio.sleep(0.01)


async def test_bytes_and_connections_are_counted_by_pair(echo: Echo) -> None:
    end = await echo.dial()
    assert await said(*end) == b"x" * 1000
    there, back = echo.network.count("a", "b"), echo.network.count("b", "a")
    assert (there.bytes, back.bytes) == (1000, 1000)
    assert (there.connections, back.connections) == (1, 0)
    assert echo.network.count(STRANGER).connections == 0
    assert echo.network.connections("a", "b") == echo.network.connections("b", "a") == 1


async def test_a_stranger_is_one(network: Network, echo: Echo) -> None:
    network.process("a", 2**22 + 1)  # no such process
    await said(*await echo.dial())
    assert network.count(STRANGER, "b").connections == 1


async def test_cut_resets_and_refuses_until_healed(network: Network, echo: Echo) -> None:
    reader, writer = await echo.dial()
    await said(reader, writer)
    network.between("a", "b", Rule(cut=True))
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await said(reader, writer)
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        await said(*await echo.dial())
    count = network.count()
    assert count.resets >= 1
    assert count.refused >= 1
    assert count.cut_seconds > 0
    network.heal()
    assert await said(*await echo.dial(), b"again") == b"again"


async def test_a_one_way_freeze_holds_one_direction_of_old_and_new_connections(network: Network, echo: Echo) -> None:
    reader, writer = await echo.dial()
    await said(reader, writer)
    network.rule("b", "a", Rule(freeze=True))
    writer.write(b"y" * 500)
    new_reader, new_writer = await echo.dial()
    await until_counted(network, "frozen_seconds", "b", "a")
    await until_counted(network, "bytes", "a", "b", least=1500)
    assert network.count("b", "a").bytes == 1000
    network.heal()
    assert await reader.readexactly(500) == b"y" * 500, "what was frozen was not lost"
    assert await said(new_reader, new_writer, b"new") == b"new"


async def test_reset_after_bytes(network: Network, echo: Echo) -> None:
    network.rule("a", "b", Rule(reset_after_bytes=100_000))
    reader, writer = await echo.dial()
    await said(reader, writer)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await said(reader, writer, bytes(200_000))
    assert network.count("a", "b").resets == 1
    assert network.count("a", "b").bytes >= 100_000


@pytest.mark.parametrize("reset", [False, True])
async def test_an_idle_connection_is_dropped_with_or_without_notice(network: Network, echo: Echo, reset: bool) -> None:
    network.rule("a", "b", Rule(idle_seconds=0.2, idle_reset=reset))
    reader, writer = await echo.dial()
    await said(reader, writer)
    await until_counted(network, "idle_drops")
    assert network.count().idle_drops == 1
    if reset:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await said(reader, writer)
    else:
        writer.write(b"lost")
        await until_counted(network, "frozen_seconds")
        assert network.count("b", "a").bytes == 1000
    assert await said(*await echo.dial(), b"new") == b"new"


async def test_delay_and_rate(network: Network, echo: Echo) -> None:
    """Lower bounds alone: a busy machine makes everything later, nothing earlier."""
    network.around("b", Rule(delay_seconds=0.1, jitter_seconds=0.05))
    reader, writer = await echo.dial()
    begun = time.monotonic()
    assert await said(reader, writer, b"abc" * 100) == b"abc" * 100
    assert time.monotonic() - begun >= 0.2
    assert network.count("a", "b").delayed_bytes == 300
    network.heal()
    network.rule("a", ANYBODY, Rule(bytes_per_second=100_000))
    begun = time.monotonic()
    ends = [await echo.dial() for _ in range(3)]
    await asyncio.gather(*(said(*end, bytes(10_000)) for end in ends))
    assert time.monotonic() - begun >= 0.29, "connections share the link"
    assert network.count("a", "b").throttled_seconds > 0


async def test_partition_cuts_islands_from_each_other_alone(network: Network, echo: Echo) -> None:
    network.partition({"a", "b"}, {"c", "d"})
    assert await said(*await echo.dial()) == b"x" * 1000
    network.partition({"a", "c"}, {"b", "d"})
    _, writer = await echo.dial()
    writer.write(b"hello")
    await until_counted(network, "frozen_seconds", "a", "b")


async def test_reset_now(network: Network, echo: Echo) -> None:
    reader, writer = await echo.dial()
    await said(reader, writer)
    assert network.reset("b", "a") == 1
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await said(reader, writer)


async def test_nobody_behind_the_proxy_is_a_closed_connection(network: Network) -> None:
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        await said(*await asyncio.open_connection("127.0.0.1", network.front("z", 1).port))
