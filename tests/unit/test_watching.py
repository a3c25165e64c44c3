"""Connections that went dead without a word are closed; those that are only quiet are left alone."""

from __future__ import annotations

import asyncio
import logging

import pytest

from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.swarm.remote import Remote
from geomesh_p2p.swarm.shaping import Shape
from geomesh_p2p.swarm.streams import FrameStream
from geomesh_p2p.swarm.virtual_time import VirtualClockLoop, run_virtual
from geomesh_p2p.swarm.watching import LinkWatch
from tests.injection.proof import fired, inject

LIMIT_SECONDS = 4.0


class FakeDaemon:
    """`dead` connections answer no ping; `closed` ones refuse it."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.closed: set[str] = set()
        self.pinged: list[str] = []
        self.disconnected: list[tuple[float, str]] = []
        self.at: dict[str, tuple[str, ...]] = {}

    async def connections(self) -> dict[str, tuple[str, ...]]:
        return self.at

    async def ping(self, peer: str) -> None:
        self.pinged.append(peer)
        if peer in self.closed:
            raise Unreachable("closed")
        if peer in self.dead:
            await asyncio.Event().wait()

    async def disconnect(self, peer: str) -> None:
        self.disconnected.append((asyncio.get_running_loop().time(), peer))
        self.dead.discard(peer)


async def no_stream(peer: str, protocol: str, addresses: tuple[str, ...], stream: FrameStream) -> None:
    raise Unreachable("none here")


def remote(peer: str, in_use: bool = True) -> Remote:
    made = Remote(peer, no_stream, 4, Shape())
    if in_use:
        made._opened_at[FrameStream()] = 0.0
    return made


@pytest.mark.fault
@pytest.mark.case("C008")
@pytest.mark.case("C059")
@pytest.mark.case("C061")
def test_a_dead_connection_is_closed_within_two_limits_and_a_quiet_one_is_not() -> None:
    async def scene() -> None:
        daemon, loop = FakeDaemon(), asyncio.get_running_loop()
        remotes = {name: remote(name, name != "unused") for name in ("talks", "quiet", "dead", "closed", "unused")}
        inject(lambda: daemon.dead.add("dead"))
        daemon.closed.add("closed")
        watch = asyncio.create_task(LinkWatch(remotes, lambda: daemon, LIMIT_SECONDS).run())
        for one in remotes.values():
            one.heard_at = loop.time()
        for _ in range(400):
            remotes["talks"].heard_at = loop.time()
            await asyncio.sleep(0.1)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        fired(daemon.disconnected, "a connection that is dead without a word")
        (found,) = daemon.disconnected
        assert found[1] == "dead"
        assert found[0] < 2 * LIMIT_SECONDS
        assert not remotes["dead"].in_use
        assert remotes["quiet"].in_use
        assert "talks" not in daemon.pinged
        assert "unused" not in daemon.pinged
        assert daemon.pinged.count("quiet") <= 40 / LIMIT_SECONDS * 2

    loop = VirtualClockLoop()
    try:
        loop.run_until_complete(scene())
    finally:
        loop.close()


@pytest.mark.case("C046")
def test_a_busy_host_is_not_kept_busy_with_new_connections() -> None:
    """One whose heartbeats come late, and pings not at all, keeps its connection; one that is never heard is dialled ever less
    often."""

    async def scene() -> None:
        daemon, loop = FakeDaemon(), asyncio.get_running_loop()
        remotes = {name: remote(name) for name in ("late", "never")}
        watch = asyncio.create_task(LinkWatch(remotes, lambda: daemon, LIMIT_SECONDS).run())
        for one in remotes.values():
            one.heard_at = loop.time()
        for second in range(600):
            daemon.dead.update(remotes)
            remotes["never"]._opened_at[FrameStream()] = 0.0  # it is connected again at once
            if second % 5 == 0:
                remotes["late"].heard_at = loop.time()
            await asyncio.sleep(1.0)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert {peer for _, peer in daemon.disconnected} == {"never"}
        assert len(daemon.disconnected) <= 9

    loop = VirtualClockLoop()
    try:
        loop.run_until_complete(scene())
    finally:
        loop.close()


@pytest.mark.case("C021")
async def test_each_way_and_each_change_of_speed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    b = remote("12D3b")
    b.called("not a site name\nERROR")
    b.called("b")
    b.addresses = ("/ip4/10.0.0.2/tcp/4100/p2p/12D3b",)
    watch = LinkWatch({"12D3b": b}, lambda: None, LIMIT_SECONDS)
    for _ in range(3):
        watch.say_which_ways({"12D3b": ("/ip4/10.0.0.2/tcp/4100",)})
        for rate in (125_000.0, 150_000.0):
            watch.measured(b, rate)
    watch.say_which_ways({"12D3b": ("/ip4/192.168.0.2/tcp/50123",)})
    watch.measured(b, 12_500_000.0)
    watch.measured(b, 125_000.0)
    assert [record.getMessage() for record in caplog.records] == [
        "b: connected, dialled at /ip4/10.0.0.2/tcp/4100",
        "b: 1.00 Mbit/s measured, over /ip4/10.0.0.2/tcp/4100",
        "b: connected, comes from /ip4/192.168.0.2/tcp/50123",
        "b: 100.00 Mbit/s measured, over /ip4/192.168.0.2/tcp/50123",
    ]


def test_a_speed_that_jumps_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scene() -> None:
        b = remote("12D3b")
        watch = LinkWatch({"12D3b": b}, lambda: None, LIMIT_SECONDS)
        for second in range(150):
            watch.measured(b, 125_000.0 if second % 2 else 125_000_000.0)
            await asyncio.sleep(1.0)

    run_virtual(scene())
    assert len(caplog.records) == 3
