"""The real daemon: addresses, ports, its end, and that of its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from geomesh_p2p.config import LinkSection, NetSection
from geomesh_p2p.core.messages import Chunk, Fetch, Fetched, Leave, Message
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.errors import ConfigError, TemporaryError, UnreachableError
from geomesh_p2p.swarm import addresses, upkeep
from geomesh_p2p.swarm import daemon as daemons
from geomesh_p2p.swarm import transport as transports
from geomesh_p2p.swarm.identity import load_identity
from geomesh_p2p.swarm.remote import BULK, CONTROL, REQUEST
from geomesh_p2p.swarm.streams import FrameStream
from geomesh_p2p.swarm.transport import Libp2pTransport
from tests.injection.ports import free_port
from tests.injection.proof import fired, inject
from tests.injection.proxy import Network, Rule

PATIENCE_SECONDS = 20.0
Opener = Callable[..., "asyncio.Future[Libp2pTransport]"]


async def answer(sender: str, fetch: Fetch) -> Fetched:
    return Fetched(True, b"", fetch.offset, 0, b"", 0)


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opener]:
    """Starts a transport of a given name; all are stopped at the end."""
    transports = []

    async def start(name: str, heard: list[tuple[str, Message]] | None = None, **settings: object) -> Libp2pTransport:
        extra = {key: settings.pop(key) for key in ("links", "on_warning", "on_daemon_exit") if key in settings}
        transport = Libp2pTransport(NetSection(**settings), tmp_path / name / "identity.key", **extra)  # type: ignore[arg-type]
        transports.append(transport)
        await transport.start(lambda peer, message: heard is not None and heard.append((peer, message)), answer)
        return transport

    yield start  # type: ignore[misc]
    for transport in transports:
        await transport.stop()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for is outside this process
            await asyncio.sleep(0.02)


def gone(process_id: int) -> bool:
    try:
        return state(process_id) == "Z"
    except OSError:
        return True


# ---------------------------------------------------------------- addresses


@pytest.mark.case("C006")
async def test_port_zero_is_replaced_by_the_bound_port(opened: Opener) -> None:
    a = await opened("a")
    (address,) = a.addresses()
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert address.endswith(f"/p2p/{a.peer}")
    assert "/tcp/0/" not in address
    b = await opened("b")
    assert await b.seeds.connect([address]) == (a.peer,)


@pytest.mark.case("C005")
@pytest.mark.case("C021")
async def test_announced_address_is_what_others_get(opened: Opener) -> None:
    port = free_port()
    a = await opened("a", listen=f"/ip4/0.0.0.0/tcp/{port}", announce=f"/ip4/127.0.0.2/tcp/{port}")
    assert a.addresses() == (f"/ip4/127.0.0.2/tcp/{port}/p2p/{a.peer}",)
    b = await opened("b")
    assert await b.seeds.connect(a.addresses()) == (a.peer,)


REMOTE = "/ip4/203.0.113.9/tcp/4100/p2p/12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"


@pytest.mark.case("C005")
@pytest.mark.case("C006")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"listen": "/ip4/0.0.0.0/tcp/4100"}, "net.listen: .*wildcard.*net.announce"),
        ({"announce": "/ip4/0.0.0.0/tcp/4100"}, "net.announce: .*wildcard"),
        ({"announce": "/ip6/::/tcp/4100"}, "net.announce: .*wildcard"),
        ({"announce": "/ip4/10.0.0.1/tcp/0"}, "net.announce: .*port 0"),
        ({"announce": "/ip4/127.0.0.1/tcp/4100", "seeds": (REMOTE,)}, "net.announce: .*loopback"),
        ({"seeds": (REMOTE,)}, "net.listen: .*loopback"),
        ({"listen": "127.0.0.1:4100"}, "net.listen: .*not a multiaddress"),
        ({"listen": "/ip4/127.0.0.1"}, "net.listen: .*no TCP port"),
        ({"seeds": ("/ip4/127.0.0.1/tcp/4100",)}, "net.seeds: .*peer id"),
    ],
)
def test_addresses_that_nobody_could_dial_are_refused(settings: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        Libp2pTransport(NetSection(**settings), tmp_path / "identity.key")  # type: ignore[arg-type]
    assert not (tmp_path / "identity.key").exists()


@pytest.mark.case("C019")
async def test_port_in_use_is_a_temporary_error(opened: Opener, tmp_path: Path) -> None:
    a = await opened("a")
    port = a.addresses()[0].split("/")[4]
    with pytest.raises(TemporaryError, match=rf"net\.listen.*{port}.*in use"):
        await opened("b", listen=f"/ip4/127.0.0.1/tcp/{port}")


async def test_address_of_another_host_is_a_config_error(opened: Opener) -> None:
    with pytest.raises(ConfigError, match=r"net\.listen"):
        await opened("a", listen="/ip4/203.0.113.7/tcp/4100")


# ---------------------------------------------------------------- seeds


@pytest.mark.case("C003")
async def test_some_dead_seeds_are_a_warning_each(opened: Opener) -> None:
    a = await opened("a")
    live, stranger = a.addresses()[0], load_identity_of_nobody()
    refused = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{stranger}"
    impostor = live.replace(a.peer, stranger)
    warnings: list[tuple[str, str]] = []
    b = await opened("b", on_warning=lambda *warning: warnings.append(warning))
    assert await b.seeds.connect([refused, live, impostor]) == (a.peer,)
    assert {reason for reason, _ in warnings} == {"seed_unreachable"}
    texts = " ".join(text for _, text in warnings)
    assert refused in texts
    assert "refused" in texts
    assert impostor in texts
    assert "another peer answers" in texts


@pytest.mark.case("C001")
async def test_no_seed_at_all_is_unreachable_with_a_reason_each(opened: Opener) -> None:
    stranger = load_identity_of_nobody()
    seeds = [f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{stranger}" for _ in range(2)]
    b = await opened("b", reach_seconds=1.0)
    with pytest.raises(UnreachableError, match=r"net\.reach_seconds") as caught:
        await b.seeds.connect(seeds)
    assert "\n" not in str(caught.value)
    assert all(f"{seed}: connection refused" in str(caught.value) for seed in seeds)
    assert await b.seeds.connect(seeds, required=False) == ()


@pytest.mark.case("C001")
async def test_a_port_that_never_speaks_is_no_seed(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PROBE_SECONDS", 0.3)
    taken: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _reader, writer: taken.append(writer), "127.0.0.1", 0)
    seed = f"/ip4/127.0.0.1/tcp/{silent.sockets[0].getsockname()[1]}/p2p/{load_identity_of_nobody()}"
    b = await opened("b", reach_seconds=1.5)
    with pytest.raises(UnreachableError) as caught:
        await b.seeds.connect([seed])
    assert f"{seed}: no answer within 0.3 s" in str(caught.value)
    assert taken, "nobody has tried"
    for writer in taken:
        writer.close()
    silent.close()


@pytest.mark.case("C001")
async def test_seed_that_comes_up_later_is_found(opened: Opener, tmp_path: Path) -> None:
    port, identity = free_port(), load_identity(tmp_path / "a" / "identity.key")
    b = await opened("b", reach_seconds=3 * PATIENCE_SECONDS)
    failed, dial = list[str](), b.seeds._dial

    async def watched(target: addresses.Address) -> None:
        try:
            await dial(target)
        except Unreachable as error:
            failed.append(str(error))
            raise

    b.seeds._dial = watched
    trying = asyncio.create_task(b.seeds.connect([f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}"]))
    await eventually(lambda: bool(failed))
    a = await opened("a", listen=f"/ip4/127.0.0.1/tcp/{port}")
    assert a.peer == identity.peer
    assert await trying == (identity.peer,)


def load_identity_of_nobody() -> str:
    return REMOTE.rsplit("/", 1)[1]


# ---------------------------------------------------------------- ends


@pytest.mark.fault
@pytest.mark.case("C014")
@pytest.mark.case("C048")
async def test_daemon_that_dies_is_started_again_with_identity_and_port(opened: Opener) -> None:
    """Frames go through again in both directions, bulk and requests too, though nobody tells the other end."""
    heard: dict[str, list[tuple[str, Message]]] = {"a": [], "b": []}
    warnings: list[tuple[str, str]] = []
    given_up: list[tuple[int, str]] = []
    a = await opened(
        "a", heard["a"], on_warning=lambda *warning: warnings.append(warning), on_daemon_exit=lambda *end: given_up.append(end)
    )
    b = await opened("b", heard["b"])
    await b.seeds.connect(a.addresses())
    a.learn(b.peer, b.addresses())
    b.send(a.peer, Leave("before"))
    a.send(b.peer, Leave("before"))
    await eventually(lambda: bool(heard["a"] and heard["b"]))
    assert a.daemon is not None
    first, address = a.daemon.process_id, a.addresses()
    inject(lambda: os.kill(first, signal.SIGKILL))
    fired(await soon(lambda: gone(first)), "the daemon is killed")
    await eventually(lambda: bool(warnings) and a.daemon is not None)
    assert warnings[0][0] == "daemon_died"
    assert f"ended with {-signal.SIGKILL} (" in warnings[0][1]
    assert "Peer ID" in warnings[0][1]
    assert a.daemon.process_id != first
    assert a.addresses() == address
    for one, other in ((a, b), (b, a)):
        await until_sent(one, other.peer)
        assert (await one.request(other.peer, Fetch("status", 0, b"", 0, 0), PATIENCE_SECONDS)).found
        heard["a" if other is a else "b"].clear()
        one.send(other.peer, Leave("after"))
        await eventually(lambda other=other: bool(heard["a" if other is a else "b"]))
    assert given_up == []


@pytest.mark.fault
@pytest.mark.case("C008")
@pytest.mark.case("C061")
async def test_who_is_dialled_anew_after_a_silent_loss_answers_over_the_new_connection(opened: Opener) -> None:
    """a finds out and dials again; b, which hears it all the while then, must not go on over the old connection."""
    heard: dict[str, list[tuple[str, Message]]] = {"a": [], "b": []}
    port = free_port()
    with Network() as network:
        front = network.front("a", port)
        a = await opened(
            "a", heard["a"], listen=f"/ip4/127.0.0.1/tcp/{port}", announce=f"/ip4/127.0.0.1/tcp/{front.port}",
            heartbeat_limit_seconds=1.0,
        )  # fmt: skip
        b = await opened("b", heard["b"], heartbeat_limit_seconds=60.0)
        await b.seeds.connect(a.addresses())
        a.learn(b.peer, b.addresses())

        async def talk() -> None:
            while True:
                a.send(b.peer, Leave("here"))
                b.send(a.peer, Leave("here"))
                await asyncio.sleep(0.1)

        talking = asyncio.create_task(talk())
        try:
            await eventually(lambda: bool(heard["a"] and heard["b"]))
            inject(lambda: network.around("a", Rule(idle_seconds=0.0)))
            fired(await soon(lambda: network.count().idle_drops > 0), "the silent loss of the connection")
            network.heal()
            lost_at = len(heard["b"])
            await eventually(lambda: len(heard["b"]) > lost_at + 5)  # over the new connection
            heard["a"].clear()
            await eventually(lambda: bool(heard["a"]))  # libp2p gives the old one up after 30 s at the earliest
        finally:
            talking.cancel()


async def until_sent(transport: Libp2pTransport, to: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await transport.send_bulk(to, Chunk(b"", "part", "a", b"", 0, 0, 1, b"x"))
            except Unreachable:
                await asyncio.sleep(0.05)


async def soon(condition: Callable[[], bool], patience_seconds: float = 3.0) -> bool:
    """Whether it comes true: evidence of a fault, which takes the kernel a moment."""
    deadline = asyncio.get_running_loop().time() + patience_seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def state(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.fault
@pytest.mark.case("C014")
async def test_daemon_that_dies_again_and_again_is_given_up(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "FIRST_PAUSE_SECONDS", 0.01)
    given_up: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    a = await opened("a", on_daemon_exit=lambda code, output: given_up.set_result((code, output)))
    for _ in range(upkeep.MOST_DEATHS):
        await eventually(lambda: a.daemon is not None)
        assert a.daemon is not None
        victim = a.daemon.process_id
        inject(lambda victim=victim: os.kill(victim, signal.SIGKILL))
        fired(await soon(lambda victim=victim: gone(victim)), "the daemon is killed")
        await eventually(lambda victim=victim: a.daemon is None or a.daemon.process_id != victim)
    code, output = await asyncio.wait_for(given_up, PATIENCE_SECONDS)
    assert code == -signal.SIGKILL
    assert "Peer ID" in output
    with pytest.raises(Unreachable):
        await a.send_bulk(load_identity_of_nobody(), Chunk(b"", "part", "a", b"", 0, 0, 1, b"x"))
    with pytest.raises(Unreachable):
        await a.request(load_identity_of_nobody(), Fetch("status", 0, b"", 0, 0), 2.0)


@pytest.mark.fault
@pytest.mark.case("C048")
async def test_daemon_that_hangs_while_it_is_used_is_ended_and_started_again(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(upkeep, "PROBE_SECONDS", 0.2)
    warnings: list[tuple[str, str]] = []
    a = await opened("a", on_warning=lambda *warning: warnings.append(warning))
    assert a.daemon is not None
    victim = a.daemon.process_id
    inject(lambda: os.kill(victim, signal.SIGSTOP))
    fired(await soon(lambda: state(victim) == "T"), "the daemon is paused")
    await eventually(lambda: a.daemon is not None and a.daemon.process_id != victim)
    assert "did not answer" in warnings[0][1]
    assert gone(victim)


@pytest.mark.case("C002")
async def test_daemon_that_cannot_start_says_why(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: the limit for a slow one is an hour here, this test's own two minutes."""
    monkeypatch.setattr(daemons, "LAUNCHER", "print('the disk is on fire'); raise SystemExit(3)")
    with pytest.raises(TemporaryError, match=r"code 3.*the disk is on fire"):
        await opened("a", daemon_start_seconds=3600.0)


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.case("C002")
async def test_a_daemon_that_needs_longer_than_hivemind_waits_is_waited_for(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind by itself gives up after 15 s. With the settings that everybody has."""
    slept = tmp_path / "slept"
    slow = f"import time; time.sleep(17); open({str(slept)!r}, 'x').close()\n"
    inject(lambda: monkeypatch.setattr(daemons, "LAUNCHER", slow + daemons.LAUNCHER))
    a = await opened("a")
    fired(slept.exists(), "a start that takes 17 s")
    assert a.daemon is not None
    await a.daemon.answers()


@pytest.mark.case("C002")
async def test_daemon_that_hangs_is_given_up_and_ended(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "LAUNCHER", "import time; print('still here', flush=True); time.sleep(600)")
    with pytest.raises(TemporaryError, match=r"net\.daemon_start_seconds.*still here"):
        await opened("a", daemon_start_seconds=1.5)


PARENT = """
import asyncio, sys
from pathlib import Path
from geomesh_p2p.config import NetSection
from geomesh_p2p.swarm.transport import Libp2pTransport

async def main():
    transport = Libp2pTransport(NetSection(listen=sys.argv[2]), Path(sys.argv[1]) / "identity.key")
    async def nothing(*_): ...
    await transport.start(lambda *_: None, nothing)
    print(transport.daemon.process_id, transport.addresses()[0], transport.daemon.socket_folder, flush=True)
    await asyncio.Event().wait()

import uvloop
uvloop.run(main())
"""


def start_parent(folder: Path, listen: str = "/ip4/127.0.0.1/tcp/0") -> tuple[subprocess.Popen[str], int, str, Path]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), listen], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process_id, address, sockets = parent.stdout.readline().split()
    return parent, int(process_id), address, Path(sockets)


def kill(parent: subprocess.Popen[str]) -> None:
    inject(parent.kill)
    with contextlib.suppress(subprocess.TimeoutExpired):
        parent.wait(5.0)
    fired(parent.returncode == -signal.SIGKILL, "the parent is killed")


@pytest.mark.fault
@pytest.mark.case("C015")
async def test_nothing_is_left_of_a_killed_peer_and_it_starts_again_at_once_on_its_port(tmp_path: Path) -> None:
    parent, daemon, address, sockets = await asyncio.to_thread(start_parent, tmp_path)
    try:
        assert not gone(daemon)
        kill(parent)
        assert await soon(lambda: gone(daemon)), "the daemon outlives its parent"
        assert sockets.exists()
    finally:
        parent.kill()
        parent.wait()
    again, _, same, _ = await asyncio.to_thread(start_parent, tmp_path, address.split("/p2p/")[0])
    again.kill()
    again.wait()
    assert same == address
    assert not sockets.exists(), "the next start sweeps it"


@pytest.mark.fault
async def test_peer_killed_and_started_again_is_reached_on_the_same_port(opened: Opener, tmp_path: Path) -> None:
    parent, _, address, _ = await asyncio.to_thread(start_parent, tmp_path / "b")
    a = await opened("a")
    (peer,) = await a.seeds.connect([address])
    a.send(peer, Leave("before"))
    try:
        kill(parent)
    finally:
        parent.kill()
        parent.wait()
    parent, _, same, _ = await asyncio.to_thread(start_parent, tmp_path / "b", address.split("/p2p/")[0])
    try:
        assert same == address
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await a.send_bulk(peer, Chunk(b"", "part", "a", b"", 0, 0, 1, b"x"))
                    break
                except Unreachable:
                    await asyncio.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.fault
@pytest.mark.case("C059")
async def test_a_peer_that_is_away_is_not_dialled_and_reached_once_it_is_back(opened: Opener) -> None:
    """libp2p by itself would wait a share of the time that it was away, up to minutes: it is not asked while nobody listens.
    One dial of its own, at the moment of the loss, makes it wait for five seconds at most."""
    heard: list[tuple[str, Message]] = []
    a, b = await opened("a"), await opened("b", heard)
    port = b.addresses()[0].split("/")[4]
    await a.seeds.connect(b.addresses())
    a.send(b.peer, Leave("before"))
    await eventually(lambda: bool(heard))
    assert a.daemon is not None
    dialled: list[str] = []
    connect = a.daemon.connect

    async def counted(peer: str, addresses: tuple[str, ...]) -> None:
        try:
            await connect(peer, addresses)
        except Unreachable as error:
            dialled.append(str(error))
            raise

    a.daemon.connect = counted  # type: ignore[method-assign]
    stopping = inject(b.stop)
    fired(stopping, "the other peer is stopped")
    assert stopping is not None
    await stopping
    async with asyncio.timeout(PATIENCE_SECONDS):
        while a.traffic()[b.peer].dropped < 5:  # as many tries have failed
            a.send(b.peer, Leave("away"))
            await asyncio.sleep(0.02)
    heard.clear()
    await opened("b", heard, listen=f"/ip4/127.0.0.1/tcp/{port}")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not heard:
            a.send(b.peer, Leave("back"))
            await asyncio.sleep(0.02)
    assert [why for why in dialled if "backoff" not in why] == [], "dials that lengthen libp2p's wait"


@pytest.mark.fault
@pytest.mark.case("C002")
async def test_slow_is_told_apart_from_broken(opened: Opener) -> None:
    """Four daemons and a process that never rests share one core: all start, however long it takes."""
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    hog = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        inject(lambda: os.sched_setaffinity(hog.pid, one))
        inject(lambda: os.sched_setaffinity(0, one))  # those started from here inherit it
        before = psutil.Process(hog.pid).cpu_times().user
        transports = await asyncio.gather(*(opened(name, daemon_start_seconds=120.0) for name in "abcd"))
        affinities = [set(psutil.Process(t.daemon.process_id).cpu_affinity()) for t in transports if t.daemon is not None]
        fired(affinities == [one] * 4 and len(cores) > 1, "all on one core")
        fired(psutil.Process(hog.pid).cpu_times().user > before, "the core is busy")
    finally:
        hog.kill()
        await hog.wait()
        os.sched_setaffinity(0, cores)


@pytest.mark.case("C052")
async def test_only_tcp_is_used(opened: Opener) -> None:
    """No UDP socket, so nothing depends on the size of UDP buffers, and nothing warns of it."""
    caught: list[str] = []
    a, b = await opened("a", on_warning=lambda *warning: caught.append(str(warning))), await opened("b")
    await b.seeds.connect(a.addresses())
    await until_sent(b, a.peer)
    for one in (a, b):
        assert one.daemon is not None
        sockets = psutil.Process(one.daemon.process_id).net_connections("inet")
        assert {kind.type for kind in sockets} == {socket.SOCK_STREAM}
        assert "buffer" not in daemons.last_words(one.daemon._output)
    assert caught == []


@pytest.mark.fault
@pytest.mark.case("C050")
async def test_a_peer_that_resets_every_stream_costs_no_descriptors(opened: Opener) -> None:
    """The healthy peer goes on trying, ever less often, and neither it nor its daemon holds on to what was reset."""
    a, evil = await opened("a"), await opened("evil")
    await a.seeds.connect(evil.addresses())
    await until_sent(a, evil.peer)
    resets = 0

    def reset(_peer: str, stream: FrameStream) -> None:
        nonlocal resets
        resets += 1
        stream.abort()

    await eventually(lambda: bool(evil._incoming.get(a.peer)))
    inject(lambda: doors_that(evil, reset))
    for stream in tuple(evil._incoming[a.peer]):
        stream.abort()

    async def work(until: int) -> None:
        while resets < until:
            a.send(evil.peer, Leave("beat"))
            with contextlib.suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(0.2):
                    await a.send_bulk(evil.peer, Chunk(b"", "part", "a", b"", 0, 0, 1, b"x"))
            with contextlib.suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(0.2):
                    await a.request(evil.peer, Fetch("status", 0, b"", 0, 0), 0.2)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            await work(until=6)
    fired(resets >= 6, "streams are reset")
    assert a.daemon is not None
    processes = [psutil.Process(os.getpid()), psutil.Process(a.daemon.process_id)]
    first = [process.num_fds() for process in processes]
    async with asyncio.timeout(60.0):
        await work(until=24)
    await asyncio.sleep(0.2)
    assert [process.num_fds() <= before + 6 for process, before in zip(processes, first, strict=True)] == [True, True]


def doors_that(transport: Libp2pTransport, reset: Callable[[str, FrameStream], None]) -> None:
    """From now on, every stream that comes to `transport` is given to `reset`."""
    assert transport.daemon is not None
    for protocol in (CONTROL, BULK, REQUEST):
        transport.daemon.handlers[protocol] = reset


# ---------------------------------------------------------------- frames from outside


async def test_bad_frames_end_their_stream_and_no_other(opened: Opener) -> None:
    heard: list[tuple[str, Message]] = []
    warnings: list[tuple[str, str]] = []
    a = await opened("a", heard, on_warning=lambda *warning: warnings.append(warning))
    b = await opened("b")
    await b.seeds.connect(a.addresses())
    assert b.daemon is not None
    for garbage, reason in ((b"\x00\x00\x00\x09GET / HTTP", "bad_frame"), (b"\x00\x00\x00\x09\x95\x63 other", "other_version")):
        stream, lost = FrameStream(), asyncio.Event()
        stream.on_lost = lambda _stream, lost=lost: lost.set()
        await b.daemon.open(a.peer, CONTROL, stream)
        stream.write_raw(b.identity.public[:8] + garbage)
        await asyncio.wait_for(lost.wait(), PATIENCE_SECONDS)
        await eventually(lambda reason=reason: any(warning[0] == reason and b.peer in warning[1] for warning in warnings))
    b.send(a.peer, Leave("a good one"))
    await eventually(lambda: heard == [(b.peer, Leave("a good one"))])


async def test_emulated_link_delays_but_keeps_order(opened: Opener) -> None:
    heard: list[tuple[str, Message]] = []
    a = await opened("a", heard)
    b = await opened("b", links={"default": LinkSection(rtt_ms=100, mbps=80)})
    await b.seeds.connect(a.addresses())
    for number in range(100):
        b.send(a.peer, Leave(str(number)))
    await b.send_bulk(a.peer, Chunk(b"", "part", "b", b"", 0, 0, 1, bytes(100_000)))
    assert heard == []
    await eventually(lambda: len(heard) == 101)
    assert [m.reason for _, m in heard if isinstance(m, Leave)] == [str(number) for number in range(100)]


async def test_answers_over_a_slow_link_come_at_last_and_leave_room_for_heartbeats(opened: Opener, tmp_path: Path) -> None:
    """Four mebibytes at 1 MB/s take longer than any deadline here; none is missed, as bytes keep coming."""
    heard: list[tuple[str, Message]] = []
    a = await opened("a", heard)
    b = Libp2pTransport(NetSection(), tmp_path / "b" / "identity.key", links={"default": LinkSection(mbps=8)})

    async def give(sender: str, fetch: Fetch) -> Fetched:
        return Fetched(True, b"", fetch.offset, 4 << 20, bytes(1 << 20), 0)

    await b.start(lambda peer, message: None, give)
    try:
        await a.seeds.connect(b.addresses())
        asked = [asyncio.ensure_future(a.request(b.peer, Fetch("update", 1, b"", i << 20, 1 << 20), 2.0)) for i in range(4)]
        await asyncio.sleep(0.5)
        sent_at = asyncio.get_running_loop().time()
        b.send(a.peer, Leave("in between"))
        await eventually(lambda: bool(heard))
        assert asyncio.get_running_loop().time() - sent_at < 1.5
        assert [len(answer.data) for answer in await asyncio.gather(*asked)] == [1 << 20] * 4
        assert asyncio.get_running_loop().time() - sent_at > 2.0, "it did not take longer than the deadline"
    finally:
        await b.stop()


async def test_what_two_peers_get_together_is_within_the_senders_limit_and_heartbeats_pass(opened: Opener) -> None:
    """Counted where it arrives. A busy machine makes it less, never more."""
    cap, chunk, clock = 500_000.0, 50_000, asyncio.get_running_loop().time
    heard: list[tuple[str, Message]] = []
    others = [await opened("a", heard), await opened("b", heard)]
    office = await opened("office", upload_mbps=cap * 8 / 1e6)
    for other in others:
        await office.seeds.connect(other.addresses())
    begun, stop_at = clock(), clock() + 4.0

    def received(other: Libp2pTransport) -> int:
        traffic = other.traffic().get(office.peer)  # none until the first bytes are there
        return traffic.payload_received if traffic is not None else 0

    async def send(to: str) -> None:
        while clock() < stop_at:
            await office.send_bulk(to, Chunk(b"", "part", "office", b"", 0, 0, 1, bytes(chunk)))

    sending = [asyncio.ensure_future(send(other.peer)) for other in others for _ in range(4)]
    got = [(0.0, 0)]
    while clock() < stop_at:
        office.send(others[0].peer, Leave(str(len(got))))
        await asyncio.sleep(0.05)
        got.append((clock() - begun, sum(map(received, others))))
        assert got[-1][1] <= cap * got[-1][0] + chunk, "more than the limit"
    await asyncio.gather(*sending)
    assert min(map(received, others)) > 0, "both get some"
    await eventually(lambda: sum(isinstance(message, Leave) for _, message in heard) == len(got) - 1)
    assert office.traffic()[others[0].peer].dropped == 0
    assert got[-1][1] > 0


async def test_an_answer_that_stops_coming_is_given_up(opened: Opener, tmp_path: Path) -> None:
    a = await opened("a")
    b = Libp2pTransport(NetSection(), tmp_path / "b" / "identity.key")
    asked = asyncio.Event()

    async def nothing(sender: str, fetch: Fetch) -> Fetched:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await b.start(lambda peer, message: None, nothing)
    try:
        await a.seeds.connect(b.addresses())
        with pytest.raises(Unreachable, match="within 1 s"):
            await a.request(b.peer, Fetch("update", 1, b"", 0, 1), 1.0)
        assert asked.is_set()
    finally:
        await b.stop()


async def test_of_two_that_dial_each_other_the_lower_id_does(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """If both did at the same moment, from the ports at which they listen, neither would come through."""
    monkeypatch.setattr(transports, "YIELD_SECONDS", PATIENCE_SECONDS)
    heard: dict[str, list[tuple[str, Message]]] = {"a": [], "b": []}
    low, high = sorted([await opened("a", heard["a"]), await opened("b", heard["b"])], key=lambda transport: transport.peer)
    dialled: list[str] = []
    for one in (low, high):
        assert one.daemon is not None
        monkeypatch.setattr(one.daemon, "connect", noting(one.daemon.connect, dialled, one.peer))
    high.learn(low.peer, low.addresses())
    high.send(low.peer, Leave("test"))
    low.learn(high.peer, high.addresses())
    low.send(high.peer, Leave("test"))
    await eventually(lambda: bool(heard["a"]) and bool(heard["b"]))
    assert set(dialled) == {low.peer}


async def test_the_higher_id_dials_if_the_other_does_not(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, Message]] = []
    low, high = sorted([await opened("a", heard), await opened("b", heard)], key=lambda transport: transport.peer)
    dialled: list[str] = []
    assert high.daemon is not None
    monkeypatch.setattr(high.daemon, "connect", noting(high.daemon.connect, dialled, high.peer))
    high.learn(low.peer, low.addresses())
    high.send(low.peer, Leave("test"))
    await eventually(lambda: [sender for sender, _ in heard] == [high.peer])
    assert dialled == [high.peer]


def noting(connect: Callable[..., Awaitable[None]], dialled: list[str], who: str) -> Callable[..., Awaitable[None]]:
    async def noted(*arguments: object) -> None:
        dialled.append(who)
        await connect(*arguments)

    return noted
