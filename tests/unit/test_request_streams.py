"""One question after the other on a stream: the next may come as soon as the last byte of an answer has left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.streams import FrameStream
from geomesh_p2p.swarm.transport import Libp2pTransport

PEER = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"


class Stream(FrameStream):
    """Runs `on_written` before anything else that the event loop has to do, as bytes from outside may."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False
        self.on_written: Any = None

    def write(self, buffers: Any) -> None:
        self.written.append(b"".join(bytes(buffer) for buffer in buffers))
        if self.on_written is not None:
            asyncio.get_running_loop().call_soon(self.on_written)

    def abort(self) -> None:
        self.aborted = True


def question(number: int) -> bytes:
    return b"".join(bytes(buffer) for buffer in wire.encode(Fetch("status", 0, b"", 0, 0), b"", number))[wire.LENGTH_BYTES :]


async def test_a_question_right_behind_an_answer_is_answered_too(tmp_path: Path) -> None:
    transport = Libp2pTransport(NetSection(), tmp_path / "identity.key")

    async def answer(sender: str, fetch: Fetch) -> Fetched:
        return Fetched(True, b"", 0, 0, b"", 0)

    transport._on_request = answer
    stream, asked = Stream(), [1]
    transport._accept_requests(PEER, stream)

    def ask_again() -> None:
        if len(asked) < 5:
            asked.append(1)
            stream.on_body(stream, question(len(asked)))

    stream.on_written = ask_again
    stream.on_body(stream, question(1))
    async with asyncio.timeout(10):
        while len(asked) < 5 or transport._tasks:  # noqa: ASYNC110 - one turn of the loop after the other
            await asyncio.sleep(0)
    assert not stream.aborted
    assert len(stream.written) >= 5
