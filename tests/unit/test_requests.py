"""Questions and answers on one stream, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.streams import FrameStream
from geomesh_p2p.swarm.transport import Libp2pTransport

PEER = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"


class QuickAsker(FrameStream):
    """The other end asks again in the very instant in which it has the whole answer."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self.questions, self.answers, self.arrived = questions, 0, b""

    def ask(self) -> None:
        self.questions -= 1
        packed = b"".join(bytes(buffer) for buffer in wire.encode(Fetch("update", 1, b"", 0, 0), b"", 1))
        self.on_body(self, packed[wire.LENGTH_BYTES :])

    def write(self, buffers: Any) -> None:
        self.arrived += b"".join(bytes(buffer) for buffer in buffers)
        size = int.from_bytes(self.arrived[: wire.LENGTH_BYTES], "big")
        if len(self.arrived) == wire.LENGTH_BYTES + size:
            self.answers, self.arrived = self.answers + 1, b""
            if self.questions:
                self.ask()


async def test_a_question_may_follow_at_once_upon_the_answer_before(tmp_path: Path) -> None:
    warned: list[str] = []
    transport = Libp2pTransport(NetSection(), tmp_path / "identity.key", on_warning=lambda reason, text: warned.append(text))

    async def answer(sender: str, fetch: Fetch) -> Fetched:
        return Fetched(True, b"header", 0, 300_000, bytes(300_000), 0)

    transport._on_request = answer
    stream = QuickAsker(5)
    transport._accept_requests(PEER, stream)
    stream.ask()
    while transport._tasks:
        for task in list(transport._tasks):
            await task
    assert (stream.answers, warned) == (5, [])
