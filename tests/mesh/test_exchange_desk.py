"""The desk: what is left to be sent of a round's exchange goes on beside the next one, for as long as somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from geomesh_p2p.core.messages import Chunk, ChunkWanted
from geomesh_p2p.core.types import Plan, Range
from geomesh_p2p.swarm.chunks import CONTRIBUTION
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.exchanging import DeskListeners, ExchangeDesk, ExchangeSetup
from geomesh_p2p.swarm.memory import Network
from tests.mesh.calm import virtual
from tests.mesh.exchanges import CHUNK_BYTES, LAYOUT, CodecSection, ExchangeCodec, contribution_of, payload_of, plan_for


class Alone:
    """The desk of peer-0; the other members are not there, so its lanes to them are never idle."""

    def __init__(self) -> None:
        self.transport = Network().transport("peer-0")
        self.limits = ExchangeLimits(chunk_bytes=CHUNK_BYTES)
        setup = ExchangeSetup(ExchangeCodec(LAYOUT, CodecSection()), self.limits, 2**20)
        self.refused: list[tuple[int, str, str]] = []
        ears = DeskListeners(lambda _: None, lambda *_: None, self._refused, lambda _: None)
        self.desk = ExchangeDesk("peer-0", self.transport, Any, setup, ears)  # type: ignore[arg-type]

    def _refused(self, plan: Plan, peer: str, reason: str) -> None:
        self.refused.append((plan.round, peer, reason))

    async def start(self, round: int) -> None:
        await self.desk.start(self.plan(round), {}, 0.0)

    async def go_on(self) -> None:
        """Round 3 has its update, and round 4 begins."""
        await self.start(3)
        await self.conclude(3)
        await self.start(4)

    async def conclude(self, round: int) -> None:
        """Its own contribution is out, and the update here."""
        plan, payload = self.plan(round), payload_of(LAYOUT, CodecSection(), 0)
        exchange = self.desk._of(plan.digest)
        assert exchange is not None
        exchange.contribute(contribution_of(plan, 0, payload), payload)
        await asyncio.sleep(1.0)
        exchange.concluded = True

    @staticmethod
    def plan(round: int) -> Plan:
        return replace(plan_for(3, "gather"), round=round)

    def rounds(self) -> list[int]:
        return [round for round in range(1, 10) if self.desk._of(self.plan(round).digest) is not None]


@asynccontextmanager
async def alone() -> AsyncIterator[Alone]:
    mesh = Alone()
    await mesh.transport.start(lambda *_: None, None)  # type: ignore[arg-type, return-value]
    try:
        yield mesh
    finally:
        await mesh.desk.stop("end")
        await mesh.transport.stop()


async def left_running() -> list[str]:
    """The exchanges that go on although all were told to end."""
    await asyncio.sleep(0.1)  # of virtual time, in which what was cancelled ends
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("exchange")]


@virtual
async def test_a_concluded_exchange_stays_beside_the_next_and_no_longer() -> None:
    async with alone() as mesh:
        await mesh.go_on()
        assert mesh.rounds() == [3, 4]
        await mesh.start(4)  # a further attempt
        assert mesh.rounds() == [3, 4]
        await mesh.start(5)
        assert mesh.rounds() == [5]  # that of round 4 never had its update


@virtual
async def test_what_is_refused_in_an_exchange_is_told_with_its_round() -> None:
    async with alone() as mesh:
        await mesh.go_on()
        await mesh.conclude(4)
        for round in (3, 4):
            nonsense = ChunkWanted(mesh.plan(round).digest, CONTRIBUTION, "peer-0", 0, (Range(5, 5),))
            mesh.desk.receive("peer-1", nonsense)
        assert mesh.refused == [(round, "peer-1", "a request that does not fit") for round in (3, 4)]


@virtual
async def test_after_rounds_that_were_caught_up_with_nothing_stays() -> None:
    async with alone() as mesh:
        await mesh.go_on()
        await mesh.desk.stop("committed", mesh.plan(4).digest)
        await mesh.start(5)
        assert mesh.rounds() == [5]


@virtual
async def test_who_has_died_is_served_for_as_long_as_it_would_wait() -> None:
    async with alone() as mesh:
        await mesh.go_on()
        serving = asyncio.create_task(mesh.desk.serve_out())
        await asyncio.sleep(mesh.limits.deadline_seconds / 2)
        assert mesh.rounds() == [3, 4]
        began = asyncio.get_running_loop().time()
        await serving
        assert mesh.rounds() == [4]
        assert asyncio.get_running_loop().time() - began <= mesh.plan(3).exchange_seconds + mesh.limits.deadline_seconds


@virtual
async def test_what_came_whole_in_a_lost_attempt_need_not_come_again() -> None:
    """The replica ends an attempt's exchange before it begins the next one's."""
    async with alone() as mesh:
        first = mesh.plan(3)
        second, third = replace(first, attempt=2), replace(first, attempt=3)
        payload = payload_of(LAYOUT, CodecSection(), 1)
        theirs = contribution_of(first, 1, payload)
        await mesh.desk.start(first, {}, 0.0)
        mesh.desk.member_finished(first.digest, theirs)
        head = (first.digest, CONTRIBUTION, "peer-1", theirs.payload, 0)
        mesh.desk.receive("peer-1", Chunk(*head, 0, payload.size, payload.tobytes()))
        for plan, before in ((second, first), (third, second)):
            await mesh.desk.stop("member_lost", before.digest)
            await mesh.desk.start(plan, {}, 0.0)
        mesh.desk.member_finished(third.digest, theirs)
        exchange = mesh.desk._of(third.digest)
        assert exchange is not None
        assert bytes(exchange._stored[exchange._streams.contribution_of("peer-1")].buffer) == payload.tobytes()
        await mesh.start(4)
        assert mesh.desk._payloads == (0, {}), "of a round that is over nothing is kept"


@virtual
@pytest.mark.parametrize("ending", ["start", "stop"])
async def test_of_two_exchanges_that_end_none_is_left_when_that_is_cancelled(ending: str) -> None:
    async with alone() as mesh:
        await mesh.go_on()
        work = asyncio.create_task(mesh.start(5) if ending == "start" else mesh.desk.stop("shutdown"))
        await asyncio.sleep(0)
        work.cancel()
        assert (await asyncio.gather(work, return_exceptions=True))[0].__class__ is asyncio.CancelledError, "it was under way"
        await mesh.desk.stop("shutdown")
        assert await left_running() == []


@virtual
async def test_what_begins_while_the_desk_is_closed_is_closed_too() -> None:
    """As a session ends: the desk is stopped, then whoever was about to begin an exchange, then the desk once more."""
    async with alone() as mesh:
        for round in (3, 4):
            await mesh.start(round)
            await mesh.conclude(round)
        beginning = asyncio.create_task(mesh.start(5))
        await asyncio.sleep(0)
        await mesh.desk.stop("shutdown")
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await mesh.desk.stop("shutdown")
        assert mesh.rounds() == []
        assert await left_running() == []
