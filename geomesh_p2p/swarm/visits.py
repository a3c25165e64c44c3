"""Questions and orders of those who take no part: `geomesh status`, `drain`, `stop`, `rollback`. Whoever may join the run may
give them.

A visitor proves what a newcomer proves: the join secret, or a peer id that is allowed. A question is answered in JSON: what the
peer says of itself, and how it sees the others: their newest heartbeats, the links to them, and where they can be asked
themselves. An order goes to one peer, which passes it on to the one that it is for, once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from geomesh_p2p.core.messages import Fetch, Fetched, Order, Request
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.transport import Libp2pTransport

log = logging.getLogger("geomesh.visits")
STATUS = "status"
MOST_BYTES = 1 << 20
PASS_ON_SECONDS = 5.0
MOST_WORDS = 400
TRY_AGAIN = TemporaryError.exit_code
"""The hint of a refusal that may be over soon."""


@dataclass(frozen=True)
class Host:
    """What this peer can say and do: `own` is what it says of itself, `leader` whom it follows ("" if nobody), `leave(why)`
    lets it leave the run, `stop_run()` ends the run for all. `roll_back(round)` has the run go back, if this peer leads it and
    can: whether it will, in words."""

    own: Callable[[], dict[str, Any]]
    leader: Callable[[], PeerId]
    leave: Callable[[str], None]
    stop_run: Callable[[], None]
    roll_back: Callable[[int], Awaitable[tuple[bool, str]]]


class Visits:
    """The answering side."""

    def __init__(self, membership: Membership, transport: Libp2pTransport, host: Host) -> None:
        self._membership, self._transport, self._host = membership, transport, host

    async def answer(self, sender: PeerId, request: Request) -> Fetched | None:
        """None if `request` is not a visitor's."""
        if isinstance(request, Fetch) and request.what != STATUS:
            return None
        proof = request.proof if isinstance(request, Order) else request.seal
        me, admission = self._membership.me, self._membership.admission
        if not self._membership.admitted(sender) and (why := admission.refusal(me.peer, sender, proof)):
            return _said(False, why)
        return await self._obey(sender, request) if isinstance(request, Order) else self._tell()

    # ------------------------------------------------------------ orders

    async def _obey(self, sender: PeerId, order: Order) -> Fetched:
        member = self._membership.admitted(sender)
        giver = f"a visitor, passed on by {self._membership.site_of(sender)}" if member else f"a visitor ({sender})"
        match order.verb:
            case "drain" if order.site == self._membership.me.site:
                log.info("told to leave by %s", giver)
                self._host.leave(f"drained by {giver}")
                return _said(True, f"{order.site} leaves after its round, and one that is planned without it")
            case "drain":
                peer = next((one.peer for one in self._membership.known.values() if one.site == order.site), "")
                if not peer:
                    sites = ", ".join(sorted(self._membership.sites().values()))
                    return _said(False, f"no site {order.site[:32]!r} here: there are {self._membership.me.site}, {sites}")
                return await self._pass_on(peer, order) or _said(False, f"{order.site} does not answer")
            case "stop":
                leader = self._host.leader()
                if leader and leader != self._membership.me.peer and (told := await self._pass_on(leader, order)):
                    return told
                log.info("told to stop the run by %s", giver)
                self._host.stop_run()
                return _said(True, "the run stops after the round going on; every peer saves, and ends with exit code 0")
            case "rollback":
                told = await self._roll_back(order)
                words = ("" if told.found else "refused, ") + told.header.decode(errors="replace")[:MOST_WORDS]
                log.info("rollback to round %d ordered by %s: %s", order.round, giver, words)
                return told
        return _said(False, f"{order.verb[:32]!r} is no order")

    async def _roll_back(self, order: Order) -> Fetched:
        leader = self._host.leader()
        if not leader:
            return _later("there is no leader now: try again when geomesh status shows one")
        if leader != self._membership.me.peer:
            return await self._pass_on(leader, order) or _later("the leader does not answer: try again")
        return _said(*await self._host.roll_back(order.round))

    async def _pass_on(self, peer: PeerId, order: Order) -> Fetched | None:
        """None if it does not answer, or the order was passed on before: two peers that take each other for the one that it
        is for would send it to and fro."""
        if order.passed_on:
            return None
        proof = self._membership.admission.proof(self._membership.me.peer, peer)
        try:
            return await self._transport.request(peer, replace(order, passed_on=True, proof=proof), PASS_ON_SECONDS)
        except Unreachable:
            return None

    # ------------------------------------------------------------ questions

    def _tell(self) -> Fetched:
        text = json.dumps(self.overview()).encode()
        if len(text) > MOST_BYTES:
            return _said(False, f"its answer has {len(text)} bytes: too many")
        return Fetched(True, b"", 0, len(text), text, 0)

    def overview(self) -> dict[str, Any]:
        me = self._membership.me
        run = me.founding.run.hex() if me.founding else None
        limit = self._membership.limit_seconds
        return {**self._host.own(), "peer": me.peer, "run": run, "heartbeat_limit_seconds": limit, "others": self._others()}

    def _others(self) -> list[dict[str, Any]]:
        now, links = time.monotonic(), self._transport.links
        found = []
        for known in sorted(self._membership.known.values(), key=lambda known: known.site):
            beat = known.heartbeat
            found.append({
                "site": known.site,
                "peer": known.peer,
                "heard_seconds_ago": max(0.0, now - known.heard_at),
                "phase": beat.phase if beat else None,
                "round": beat.round if beat else None,
                "trains": known.trains,
                "ready": beat.ready if beat else False,
                "leaving": beat.leaving if beat else False,
                "step_batch": beat.step_batch if beat else None,
                "step_seconds": beat.step_seconds if beat else None,
                "device": beat.profile.device if beat and beat.profile else None,
                "rtt_seconds": links.rtt_seconds(known.peer),
                "bytes_per_second": links.bytes_per_second(known.peer),
                "relayed": bool(self._transport.circuits.relay(known.peer)),
                "addresses": list(self._transport.addresses_of(known.peer)),
            })  # fmt: skip
        return found


def _said(done: bool, words: str) -> Fetched:
    return Fetched(done, words.encode(), 0, 0, b"", 0)


def _later(words: str) -> Fetched:
    return Fetched(False, words.encode(), 0, 0, b"", TRY_AGAIN)
