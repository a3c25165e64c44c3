"""A mesh of exchanges over the in-memory network in virtual time, without the rest of a peer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.codec import NotFinite, encode
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.messages import Finished
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import Assignment, Contribution, Plan, Range, Term
from geomesh_p2p.swarm.exchange import Assembly, Exchange, ExchangeCodec, ExchangeLimits, Missed, inline
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.offload import Offload

LAYOUT = Layout((Tensor("embedding", 640, 40), Tensor("matrix", 4000), Tensor("norm", 37)))
BASE = b"b" * 32
CHUNK_BYTES = 128


def even_shares(parameters: int, count: int) -> tuple[Range, ...]:
    edges = [parameters * index // count // 8 * 8 for index in range(count)] + [parameters]
    return tuple(Range(low, high) for low, high in itertools.pairwise(edges))


def plan_for(
    count: int,
    topology: str,
    layout: Layout = LAYOUT,
    shares: tuple[Range, ...] | None = None,
    exchange_seconds: float = 0.1,
    attempt: int = 1,
) -> Plan:
    members = tuple(
        Assignment(f"peer-{index}", f"site-{index}", 8, 4, 8, (Range(100 * index, 100 * index + 32),), 1.0, 10.0)
        for index in range(count)
    )
    if topology == "gather":
        shares = ()
    elif shares is None:
        shares = even_shares(layout.parameters, count)
    return Plan(
        b"r" * 32, 3, Term(1, "peer-0"), attempt, BASE, members, topology, shares, 0, 1000, 10.0, exchange_seconds, 2.0, True
    )  # type: ignore[arg-type]


def payload_of(layout: Layout, settings: CodecSection, seed: int) -> np.ndarray:
    anchor = np.random.default_rng(seed).standard_normal(layout.parameters).astype(np.float32)
    payload = encode(layout, anchor, np.zeros_like(anchor), settings)
    assert not isinstance(payload, NotFinite)
    return payload


def contribution_of(plan: Plan, index: int, payload: np.ndarray | None) -> Contribution:
    member = plan.members[index]
    if payload is None:
        return Contribution(member.peer, member.site, plan.round, plan.base, 0, (), b"", 0, reason="NaN")
    return Contribution(
        member.peer, member.site, plan.round, plan.base, 1000 + 100 * index, member.ranges, digest_bytes(payload), payload.size
    )


class Heard:
    """An ExchangeListener that remembers what it was told."""

    def __init__(self) -> None:
        self.all_assembled: list[Assembly] = []
        self.lost_at: list[tuple[float, tuple[Missed, ...]]] = []
        self.all_unequal: list[tuple[str, ...]] = []
        self.all_refused: list[tuple[str, str]] = []
        self.all_rejected: list[tuple[str, str]] = []
        self.all_failed: list[BaseException] = []

    @property
    def lost_peers(self) -> set[str]:
        return {missed.peer for _, each in self.lost_at for missed in each}

    def assembled(self, assembly: Assembly) -> None:
        self.all_assembled.append(assembly)

    def lost(self, missed: tuple[Missed, ...]) -> None:
        self.lost_at.append((asyncio.get_running_loop().time(), missed))

    def unequal(self, peers: tuple[str, ...]) -> None:
        self.all_unequal.append(peers)

    def refused(self, peer: str, reason: str) -> None:
        self.all_refused.append((peer, reason))

    def rejected(self, peer: str, reason: str) -> None:
        self.all_rejected.append((peer, reason))

    def failed(self, error: BaseException) -> None:
        self.all_failed.append(error)


class Mesh:
    """Exchanges of all members of a plan. `finish` stands for the session: it hands in a contribution and tells the others."""

    def __init__(
        self,
        plan: Plan,
        network: Network,
        settings: CodecSection | None = None,
        layout: Layout = LAYOUT,
        limits: ExchangeLimits | None = None,
        abstaining: Sequence[int] = (),
        offload: Offload = inline,
    ) -> None:
        self.plan, self.network = plan, network
        self.codec = ExchangeCodec(layout, settings or CodecSection())
        self.limits = limits or ExchangeLimits(chunk_bytes=CHUNK_BYTES)
        self.offload = offload
        self.payloads = [
            None if index in abstaining else payload_of(layout, self.codec.settings, index)
            for index in range(len(plan.members))
        ]
        self.part_residuals: list[np.ndarray | None] = [None] * len(plan.members)
        self.contributions = [contribution_of(plan, index, payload) for index, payload in enumerate(self.payloads)]
        self.transports = [network.transport(peer) for peer in plan.peers]
        self.heard = [Heard() for _ in plan.members]
        self.exchanges: list[Exchange] = []
        self.crashed: set[int] = set()

    async def __aenter__(self) -> Mesh:
        for index, transport in enumerate(self.transports):
            self.exchanges.append(self.new_exchange(index))
            await transport.start(self._receiver(index), self._answer)
        return self

    async def __aexit__(self, *_: object) -> None:
        for exchange in self.exchanges:
            await exchange.stop("end of the test")
            assert exchange.buffered_bytes == 0
        for transport in self.transports:
            await transport.stop()
        await asyncio.sleep(0)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        assert [error for heard in self.heard for error in heard.all_failed] == []

    def new_exchange(self, index: int) -> Exchange:
        me = self.plan.peers[index]
        return Exchange(me, self.plan, self.transports[index], self.codec, self.limits, self.heard[index], self.offload)

    def _receiver(self, index: int) -> Any:
        def receive(sender: str, message: Any) -> None:
            if isinstance(message, Finished):
                self.exchanges[index].member_finished(message.contribution)
            else:
                self.exchanges[index].receive(sender, message)

        return receive

    async def _answer(self, sender: str, fetch: Any) -> Any:
        raise Unreachable("an exchange asks for chunks, it makes no requests")

    def start(self) -> None:
        for exchange in self.exchanges:
            exchange.start()

    def finish(self, index: int) -> None:
        contribution = self.contributions[index]
        self.exchanges[index].contribute(contribution, self.payloads[index], self.part_residuals[index])
        for peer in self.plan.peers:
            if peer != contribution.peer:
                self.transports[index].send(peer, Finished(self.plan.digest, contribution, 1.0))

    def finish_all(self) -> None:
        for index in range(len(self.plan.members)):
            self.finish(index)

    def crash(self, index: int) -> None:
        """As after kill -9: its exchange goes on talking to nobody, and is stopped with the others."""
        self.crashed.add(index)
        self.network.crash(self.plan.peers[index])

    @property
    def survivors(self) -> list[int]:
        return [index for index in range(len(self.plan.members)) if index not in self.crashed]

    async def until(self, condition: Any, limit_seconds: float = 300.0) -> None:
        deadline = asyncio.get_running_loop().time() + limit_seconds
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "the condition did not come true in virtual time"
            await asyncio.sleep(0.01)

    async def all_assembled(self, limit_seconds: float = 300.0) -> None:
        await self.until(lambda: all(self.heard[index].all_assembled for index in self.survivors), limit_seconds)

    def body(self, index: int) -> bytes:
        (assembly,) = self.heard[index].all_assembled
        body = b"".join(bytes(buffer) for buffer in assembly.body)
        assert digest_bytes(body) == assembly.body_digest
        assert len(body) == assembly.body_bytes
        return body

    def payload_sent(self, index: int) -> int:
        return sum(traffic.payload_sent for traffic in self.transports[index].traffic().values())
