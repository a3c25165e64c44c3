"""Filler: bytes without meaning that open TCP's congestion windows just before an exchange needs them.

A connection sends ten segments in its first round trip and twice as much in each further one. On a long way a megabyte takes
seven round trips so, and one once the window is open. Linux closes the windows of a connection that was idle, as all are while
their ends train, unless net.ipv4.tcp_slow_start_after_idle is 0 or the congestion control is BBR, which keeps what it knows.

The receiver asks, because the plan tells it when bytes will come; the sender answers, because it knows its kernel: before each
exchange if windows close, else once for each connection. Ways with a limited uplink, a relay or an emulated link get none.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.messages import Fetch, Fetched, Request
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId, Plan
from geomesh_p2p.swarm.transport import Libp2pTransport

FILLER = "filler"
MOST_BYTES = 1 << 20             # to one peer before one exchange
PIECE_BYTES = 256 * 1024         # of one question: what a new stream of the daemon takes without waiting for the other end
FIRST_WINDOW_BYTES = 14_600      # ten segments
LEAST_RTT_SECONDS = 0.01         # on shorter ways a closed window costs nothing worth mentioning
RATE_FACTOR = 4.0                # a window needs rate x round trip; what was measured so far may be too low
PATIENCE_SECONDS = 10.0
LOOK_SECONDS = 0.25              # how often a way is looked at whose round trip is not known, or that is not connected yet
LINUX = Path("/proc/sys/net/ipv4")

log = logging.getLogger("geomesh.filler")


@dataclass(frozen=True)
class Wish:
    """Bytes wanted of `peer`, from `at_seconds` after the plan's arrival on; if it cannot be asked then, as soon as it can be,
    but not after `due_seconds`, when its own bytes come."""

    peer: PeerId
    at_seconds: float
    size: int
    due_seconds: float


def wishes(
    plan: Plan, me: PeerId, payload_bytes: int, rtt_of: Callable[[PeerId], float], rate_of: Callable[[PeerId], float | None]
) -> tuple[Wish, ...]:
    """What to ask for so that each window is as wide as what comes through it, when it comes. `payload_bytes` are those of a
    whole contribution."""
    found, of_all = [], sum(map(len, plan.shares)) or 1
    for member, share in zip(plan.members, plan.shares or [None] * len(plan.members), strict=True):
        rtt, rate = rtt_of(member.peer), rate_of(member.peer)
        if member.peer == me or rtt < LEAST_RTT_SECONDS:
            continue
        need, ready = payload_bytes, member.finish_seconds
        if share is not None:  # a slice for the own share, or the answer for theirs
            mine = len(plan.shares[plan.peers.index(me)])
            need, ready = payload_bytes * max(mine, len(share)) // of_all, plan.train_seconds
        size = min(need, MOST_BYTES, MOST_BYTES if rate is None else int(RATE_FACTOR * rate * rtt))
        if size > FIRST_WINDOW_BYTES:
            found.append(Wish(member.peer, max(0.0, ready - lead_seconds(size, rtt)), size, ready))
    return tuple(found)


def lead_seconds(size: int, rtt_seconds: float) -> float:
    """From the question until the window is as wide as `size`, with half a round trip to spare."""
    return (math.log2(size / FIRST_WINDOW_BYTES + 1) + 1.0) * rtt_seconds


def windows_close(folder: Path = LINUX) -> bool:
    """Whether this host's kernel closes the windows of idle connections. Others than Linux: taken to do so."""
    try:
        restarts = (folder / "tcp_slow_start_after_idle").read_text().strip() != "0"
        return restarts and (folder / "tcp_congestion_control").read_text().strip() != "bbr"
    except OSError:
        return True


class Filler:
    """Both sides. An observer of this peer's plans, and `answer` for the questions of members."""

    def __init__(self, transport: Libp2pTransport, payload_bytes: int, closes: bool) -> None:
        self._transport, self._payload_bytes, self._closes = transport, payload_bytes, closes
        self._given: dict[PeerId, tuple[object, int]] = {}  # on which connection, and for which round, filler was sent last
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ asking

    def __call__(self, event: Any) -> None:
        if not isinstance(event, obs.PlanAdopted):
            return
        self.stop()  # what an earlier plan wanted
        self._spawn(self._look(event.plan))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, plan: Plan) -> None:
        """Ask each member in time. Pairs that met just before the plan may know their round trip only a little later."""
        clock, links, asked = asyncio.get_running_loop().time, self._transport.links, set[PeerId]()
        begun, passed = clock(), 0.0
        latest = max(plan.train_seconds, *(member.finish_seconds for member in plan.members))
        while passed <= latest:
            wait = LOOK_SECONDS
            for wish in wishes(
                plan, self._transport.peer, self._payload_bytes, links.least_rtt_seconds, links.bytes_per_second
            ):
                if wish.peer in asked or passed > max(wish.at_seconds, wish.due_seconds):
                    continue
                if passed < wish.at_seconds:
                    wait = min(wait, wish.at_seconds - passed)
                elif self._transport.bare_connection(wish.peer) is not None:
                    asked.add(wish.peer)
                    self._spawn(self._ask(wish, plan.round))
            await asyncio.sleep(wait)
            passed = clock() - begun

    async def _ask(self, wish: Wish, round: int) -> None:
        sizes = [min(PIECE_BYTES, wish.size - start) for start in range(0, wish.size, PIECE_BYTES)]
        questions = [
            self._transport.request(wish.peer, Fetch(FILLER, round, b"", place, size), PATIENCE_SECONDS)
            for place, size in enumerate(sizes)
        ]
        answers: Sequence[Fetched | BaseException] = await asyncio.gather(*questions, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Unreachable):
                log.warning("filler of %s: %r", wish.peer, answer)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    # ------------------------------------------------------------ answering

    def answer(self, sender: PeerId, fetch: Request) -> Fetched | None:
        """None if `fetch` is no question for filler. The sender is a member."""
        if not isinstance(fetch, Fetch) or fetch.what != FILLER:
            return None
        nothing, connection = Fetched(False, b"", 0, 0, b"", 0), self._transport.bare_connection(sender)
        if connection is None or not 0 < fetch.length <= PIECE_BYTES or not 0 <= fetch.offset < MOST_BYTES // PIECE_BYTES:
            return nothing
        given, round = self._given.get(sender, (None, 0))
        if given is connection and round != fetch.round and not self._closes:
            return nothing
        self._given = {peer: last for peer, last in self._given.items() if self._transport.bare_connection(peer) is last[0]}
        self._given[sender] = connection, fetch.round
        return Fetched(True, b"", 0, fetch.length, bytes(fetch.length), 0)
