"""Opening a stream that is given up: a late answer, or the end of the connection, has nobody to go to and is no error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2

from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.swarm.daemon import Daemon, delimited
from geomesh_p2p.swarm.streams import FrameStream

PEER = PeerID(b"\x12\x20" + bytes(32)).to_base58()
ANSWER = delimited(p2pd_pb2.Response(type=p2pd_pb2.Response.OK).SerializeToString())


def arrive(stream: FrameStream, data: bytes) -> None:
    buffer = stream.get_buffer(len(data))
    buffer[: len(data)] = data
    stream.buffer_updated(len(data))


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One that takes what is asked and does not answer by itself."""
    daemon = Daemon.__new__(Daemon)
    daemon.p2p = SimpleNamespace(_daemon_listen_maddr={"unix": "/nowhere"})  # type: ignore[assignment]
    return daemon


async def asked(daemon: Daemon, stream: FrameStream, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[None]:
    async def connect(make: Any, path: str) -> None: ...

    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", connect, raising=False)
    task = asyncio.ensure_future(daemon.open(PEER, "/geomesh/1/control", stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_an_answer_after_the_opener_gave_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FrameStream()
    task = await asked(daemon, stream, monkeypatch)
    task.cancel()
    arrive(stream, ANSWER)  # before the task has run
    await asyncio.wait({task})
    assert task.cancelled()


async def test_the_end_of_a_connection_after_the_opener_gave_up_leaves_no_exception(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    stream = FrameStream()

    async def connect(make: Any, path: str) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", connect, raising=False)
    task = asyncio.ensure_future(daemon.open(PEER, "/geomesh/1/control", stream))
    await asyncio.wait({task})
    stream.connection_lost(None)
    del stream, task
    await asyncio.sleep(0)
    assert unseen == []


async def test_a_stream_that_is_closed_at_once_is_unreachable(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FrameStream()
    task = await asked(daemon, stream, monkeypatch)
    stream.connection_lost(None)
    with pytest.raises(Unreachable, match="closed the stream"):
        await task


async def test_an_answer_in_time_opens_it(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FrameStream()
    task = await asked(daemon, stream, monkeypatch)
    arrive(stream, ANSWER)
    await task
