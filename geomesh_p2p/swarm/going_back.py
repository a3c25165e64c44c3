"""Orders to take the run back to an earlier round, at the peer that leads, and the question that they begin with.

A rollback that few can carry out would leave the run standing: so the leader first asks the voters whether they can make the
state, and orders it only if a quorum can. Whoever says that it can deletes nothing of its past until it has been decided.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from geomesh_p2p.core import events as ev
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.ports import Past, Transport, Unreachable
from geomesh_p2p.core.replica import Replica
from geomesh_p2p.core.types import PeerId, Rollback
from geomesh_p2p.errors import DataError

log = logging.getLogger("geomesh.going_back")
REACHES = "reaches"
ASK_SECONDS = 2.5       # well within what whoever passes the order on waits (visits.py)
DECIDED_ROUNDS = 3      # the round going on, the rollback, and one more while the order was on its way
DECIDED_SECONDS = 60.0  # and not before this: while the voters are asked, a mesh of fast rounds commits many of them


class GoingBack:
    """One peer's part in it. `put` hands events to the replica."""

    def __init__(
        self, transport: Transport, past: Past, replica: Replica, put: Callable[[ev.Event], None], clock: Callable[[], float]
    ) -> None:
        self._transport, self._past, self._replica, self._put, self._clock = transport, past, replica, put, clock
        self._promised: dict[int, tuple[int, float]] = {}  # by round that this peer can go back to: until which round and time
        self._past_in_use = threading.Lock()

    @contextmanager
    def may_delete(self) -> Iterator[bool]:
        """Whether something of this peer's past may be deleted now; while that is done, nobody is told that it is there. For
        any thread."""
        with self._past_in_use:
            round, now = self._replica.round, self._clock()
            for to_round, (until_round, until) in tuple(self._promised.items()):
                if round >= until_round and now >= until:
                    self._promised.pop(to_round, None)
            yield not self._promised and not self._replica.s.checking

    def went_back(self, to_round: int) -> None:
        """The run is back there: what was promised for it has been kept."""
        self._promised.pop(to_round, None)

    async def order(self, to_round: int) -> tuple[bool, str]:
        """(whether the run will go back, in words)."""
        s = self._replica.s
        if not self._replica.is_leader:
            return False, "this peer does not lead now: try again"
        if not 0 <= to_round < s.round:
            return False, f"round {s.round} is the last one committed: --to-round takes an earlier one, 0 at least"
        if s.round + 1 >= s.last_round:
            return False, f"the run ends with round {s.last_round:.0f}: go on with it first, with a larger run.rounds"
        own = await self._reach(to_round)
        if isinstance(own, str):
            return False, own
        others = [peer for peer in s.view if peer != s.me and s.alive(peer)]
        answers = dict(zip(others, await asyncio.gather(*(self._ask(peer, to_round) for peer in others)), strict=True))
        if not s.quorum([s.me, *(peer for peer, words in answers.items() if not words)]):
            reasons = "; ".join(f"{s.site_of(peer)}: {words}" for peer, words in answers.items() if words)
            return False, f"too few of the voters can make that state ({reasons or 'the others are not heard'})"
        self._put(ev.RollbackWanted(own))
        return True, f"the run goes back to round {to_round} after the round going on"

    async def answer(self, to_round: int) -> Fetched:
        """To the leader's question: found, or why not in words."""
        own = await self._reach(to_round)
        words = own if isinstance(own, str) else ""
        return Fetched(not words, words.encode(), 0, 0, b"", 0)

    async def _reach(self, to_round: int) -> Rollback | str:
        before = self._promised.get(to_round)
        self._promised[to_round] = self._replica.round + DECIDED_ROUNDS, self._clock() + DECIDED_SECONDS
        try:
            return await asyncio.to_thread(self._made_of_past, to_round)
        except (LookupError, DataError) as error:
            if before is None:
                self._promised.pop(to_round, None)
            return f"{error}: see save.keep_snapshots"

    def _made_of_past(self, to_round: int) -> Rollback:
        with self._past_in_use:
            return self._past.rollback(to_round)

    async def _ask(self, peer: PeerId, to_round: int) -> str:
        try:
            told = await self._transport.request(peer, Fetch(REACHES, to_round, b"", 0, 0), ASK_SECONDS)
        except Unreachable:
            return "does not answer"
        return "" if told.found else told.header.decode(errors="replace")[:200] or "cannot tell"
