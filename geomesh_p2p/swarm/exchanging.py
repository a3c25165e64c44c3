"""The exchange that is going on at this peer, what came too early for it, and the bodies of updates that are at hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.ports import LocalRound, Store, Transport
from geomesh_p2p.core.types import Contribution, PeerId, Plan, Range, Update
from geomesh_p2p.swarm.exchange import (
    Assembly,
    Exchange,
    ExchangeCodec,
    ExchangeInbox,
    ExchangeLimits,
    ExchangeMessage,
    Missed,
    Progress,
)
from geomesh_p2p.swarm.part_residual import PartResidual

Body = list[Any]  # buffers, in order


@dataclass(frozen=True)
class ExchangeSetup:
    codec: ExchangeCodec
    limits: ExchangeLimits
    inbox_bytes: int
    part_residual: tuple[Range, Any] | None = None
    """From the snapshot that this peer began with."""


@dataclass(frozen=True)
class DeskListeners:
    """Whom the desk tells; all are called in the event loop."""

    assembled: Callable[[Assembly], None]
    lost: Callable[[Plan, tuple[PeerId, ...], str], None]
    refused: Callable[[Plan, PeerId, str], None]
    failed: Callable[[BaseException], None]


class ExchangeDesk:
    """The exchange of the newest plan accepted, and what is still to be sent of that of the round before: a quorum goes on when
    it has the update, and somebody over a slower way still lacks the end of it."""

    def __init__(self, me: PeerId, transport: Transport, store: Store, setup: ExchangeSetup, listeners: DeskListeners) -> None:
        self._me, self._transport, self._store, self._setup, self._listeners = me, transport, store, setup, listeners
        self._inbox = ExchangeInbox(setup.inbox_bytes)
        self.dropped: Counter[str] = Counter()
        """Messages that went nowhere, by reason: those of exchanges that are over, duplicates, what was refused."""
        self._current: Exchange | None = None
        self._before: Exchange | None = None
        self._payloads: tuple[int, Mapping[Digest, Any]] = (0, {})  # of a round's attempt that was given up
        self._bodies: dict[Digest, Body] = {}
        self._sending: Digest | None = None
        self._part_residual = PartResidual(setup.codec, setup.part_residual) if setup.codec.settings.residual else None

    # ---------------------------------------------------------------- the exchange

    async def start(self, plan: Plan, rates: dict[PeerId, float], round_trip_seconds: float) -> None:
        """Begin with what has come already: early messages, and whole payloads of an earlier attempt of the round.
        `rates` are bytes per second to other members, where known; `round_trip_seconds` that to the farthest."""
        going = [one for one in (self._before, self._current) if one is not None]
        kept = next((one for one in going if one.concluded and one.plan.round + 1 == plan.round), None)
        self._set_current_aside()
        self._before = kept
        await self._end([one for one in going if one is not kept], "another attempt")
        of_round, known = self._payloads
        self._payloads = (0, {})
        limits = replace(self._setup.limits, rates=rates, round_trip_seconds=round_trip_seconds)
        try:
            self._current = Exchange(self._me, plan, self._transport, self._setup.codec, limits, _Ears(plan, self._listeners))
        except ValueError as error:  # shares that are none of this model's: the plan's maker is at fault, not this peer
            self._listeners.refused(plan, plan.term.candidate, f"a plan whose shares do not fit: {error}")
            return
        self._current.start(known if of_round == plan.round else {})
        for sender, message in self._inbox.take(plan.digest):
            self._current.receive(sender, message)

    async def stop(self, reason: str, plan: Digest | None = None) -> None:
        """End the exchange (of `plan`, if given; else that of the round before as well)."""
        ending = [one for one in (self._current, self._before) if one is not None and plan in (None, one.plan.digest)]
        if self._current in ending:
            self._set_current_aside()
        if self._before in ending:
            self._before = None
        await self._end(ending, reason)

    async def serve_out(self) -> None:
        """End the exchange of the round before once it is sent, or nobody waits for it any more. Whoever was overtaken by the
        commit gives its own up after as long again as it took the others; then it fetches the update."""
        exchange = self._before
        if exchange is None:
            return
        patience = max(exchange.plan.exchange_seconds, exchange.took_seconds) + self._setup.limits.deadline_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await exchange.all_sent()
        await self.stop("served", exchange.plan.digest)

    def _set_current_aside(self) -> None:
        """What came whole need not come again in a further attempt of its round."""
        if self._current is not None:
            self._payloads = (self._current.plan.round, self._current.payloads())
        self._current = self._sending = None

    async def _end(self, exchanges: Sequence[Exchange], reason: str) -> None:
        for exchange in exchanges:  # all of them before anything is waited for, which may be cancelled
            self._inbox.close(exchange.plan.digest)
            exchange.halt(reason)
        for exchange in exchanges:
            await exchange.stop(reason)
            self.dropped.update(exchange.refusals)

    def receive(self, sender: PeerId, message: ExchangeMessage) -> None:
        exchange = self._of(message.plan)
        if exchange is not None:
            exchange.receive(sender, message)
        elif not self._inbox.keep(sender, message):
            self.dropped["of an exchange that is over" if self._inbox.is_over(message.plan) else "too early"] += 1

    def member_finished(self, plan: Digest, contribution: Contribution) -> None:
        if (exchange := self._of(plan)) is not None:
            exchange.member_finished(contribution)

    def contribute(self, plan: Digest, local: LocalRound) -> None:
        if (exchange := self._of(plan)) is not None:
            share = self._share(exchange.plan)
            residual = self._part_residual.of(share) if self._part_residual is not None and share is not None else None
            exchange.contribute(local.contribution, local.payload, residual)
            self._sending = plan

    @property
    def sending(self) -> bool:
        """Whether this peer's bytes for a round are on their way: from its contribution to the round's commit."""
        return self._sending is not None

    def progress(self) -> tuple[Plan, Progress] | None:
        """How far the exchange is that is going on, if there is one."""
        return (self._current.plan, self._current.progress()) if self._current is not None else None

    def _share(self, plan: Plan) -> Range | None:
        """This peer's share as a reducer."""
        return plan.shares[plan.peers.index(self._me)] if plan.shares else None

    def _of(self, plan: Digest) -> Exchange | None:
        for exchange in (self._current, self._before):
            if exchange is not None and exchange.plan.digest == plan:
                return exchange
        return None

    # ---------------------------------------------------------------- bodies

    def keep_body(self, digest: Digest, body: Sequence[Any]) -> None:
        self._bodies[digest] = list(body)

    def keep_assembly(self, assembly: Assembly) -> None:
        self.keep_body(assembly.body_digest, assembly.body)
        share = self._share(assembly.plan)
        if self._part_residual is not None and share is not None and assembly.mean is not None:
            self._part_residual.answered(assembly.body_digest, share, assembly.mean, assembly.part)

    def body_of(self, update: Update) -> Body:
        """The body of an update that is here: assembled, fetched, or in the held record on disk."""
        if update.body_bytes == 0:
            return []
        body = self._bodies.get(update.body)
        if body is not None:
            return body
        held = self._store.load_held()
        if held is None or held[0].update.body != update.body:
            raise RuntimeError(f"the body of round {update.round} is not here although the replica counts on it")
        return [held[1]]

    def part_residual(self) -> tuple[Range, Any] | None:
        return None if self._part_residual is None else self._part_residual.committed_values()

    def committed(self, update: Update) -> None:
        """Bodies are on disk or void from now on."""
        self._bodies.clear()
        self._payloads = (0, {})
        self._sending = None
        if self._part_residual is not None and update.rollback is not None:
            self._part_residual.forget()
        elif self._part_residual is not None:
            self._part_residual.committed(update.body)


class _Ears:
    """Listens to one exchange; what comes from one that was stopped meanwhile does no harm."""

    def __init__(self, plan: Plan, listeners: DeskListeners) -> None:
        self._plan, self._listeners = plan, listeners

    def assembled(self, assembly: Assembly) -> None:
        self._listeners.assembled(assembly)

    def lost(self, missed: tuple[Missed, ...]) -> None:
        silent = max(m.silent_seconds for m in missed)
        why = f"no bytes for {silent:.1f} s, whoever was asked"
        self._listeners.lost(self._plan, tuple(m.peer for m in missed), why)

    def unequal(self, peers: tuple[PeerId, ...]) -> None:
        self._listeners.lost(self._plan, peers, "averaged other contributions than this peer knows of")

    def refused(self, peer: PeerId, reason: str) -> None:
        self._listeners.refused(self._plan, peer, reason)

    def rejected(self, peer: PeerId, reason: str) -> None:
        self._listeners.lost(self._plan, (peer,), f"sent {reason}")

    def failed(self, error: BaseException) -> None:
        self._listeners.failed(error)
