"""Whether others can dial this peer: it asks some of them to try, and says in one line what to do if they cannot.

When asked to dial back, a peer tries one TCP connection to the address that the question itself came from, at the port that
it names, and to nothing else: so it can be used to look at no other host. It does so for admitted peers alone, one at a time,
each at most once in AGAIN_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from geomesh_p2p.core.canonical import RecordError, pack, unpack
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.swarm.addresses import Address, answering, parse
from geomesh_p2p.swarm.relaying import relay_of

log = logging.getLogger("geomesh.reach")

DIAL_BACK = "dial-back"
AGAIN_SECONDS = 20.0
DIAL_SECONDS = 5.0
ANSWER_SECONDS = 10.0
PEERS_ASKED = 3
MOST_REMEMBERED = 1000
CHECK_SECONDS, RECHECK_SECONDS = 2.0, 600.0


@dataclass(frozen=True)
class DialBack:
    """`host` is where the question came from, `why` it could not be dialled there, empty if it could."""

    host: str
    why: str


@dataclass(frozen=True)
class Report:
    """What one peer found: `site` says who."""

    site: str
    found: DialBack


def declined(seconds: float = 0.0) -> Fetched:
    return Fetched(False, b"", 0, 0, b"", max(0, round(seconds)))


class DialsBack:
    """The answering side. `seen_at(peer)` is the address of the connection with it, "" if there is none."""

    def __init__(
        self,
        seen_at: Callable[[PeerId], str],
        admitted: Callable[[PeerId], bool],
        clock: Callable[[], float],
        dial: Callable[[Sequence[str], float], Awaitable[str]] = answering,
    ) -> None:
        self._seen_at, self._admitted, self._clock, self._dial = seen_at, admitted, clock, dial
        self._asked: dict[PeerId, float] = {}
        self._busy = False

    async def answer(self, sender: PeerId, fetch: Fetch) -> Fetched:
        now, port = self._clock(), fetch.offset
        wait = self._asked.get(sender, -AGAIN_SECONDS) + AGAIN_SECONDS - now
        if not self._admitted(sender) or not 0 < port < 65536:
            return declined()
        if self._busy or wait > 0:
            return declined(max(wait, 1.0))
        seen = self._seen_at(sender)
        if not seen or relay_of(seen):
            return declined()
        try:
            address = parse(seen, "address")
        except ConfigError:
            return declined()
        if len(self._asked) >= MOST_REMEMBERED:
            self._asked.clear()
        self._asked[sender] = now
        self._busy = True
        try:
            kind = "ip6" if ":" in address.host else "ip4"
            why = await self._dial((f"/{kind}/{address.host}/tcp/{port}",), DIAL_SECONDS)
        finally:
            self._busy = False
        return Fetched(True, pack(DialBack(address.host, why[:200])), 0, 0, b"", 0)


def read_answer(answer: Fetched) -> DialBack | None:
    """None if the other end declined, or its answer is not one."""
    try:
        return unpack(DialBack, answer.header) if answer.found and len(answer.header) < 1024 else None
    except RecordError:
        return None


@dataclass(frozen=True)
class Verdict:
    reachable: bool
    words: str


def judge(announced: Address, reports: Sequence[Report], relay: bool) -> Verdict | None:
    """What the reports say of the address that this peer announces; None if there are none yet."""
    if not reports:
        return None
    reached = [report for report in reports if not report.found.why]
    where = ", ".join(sorted({report.found.host for report in reports}))
    if reached:
        sites = ", ".join(sorted(report.site for report in reached))
        text = f"reachable: {sites} dialled this peer back on port {announced.port}"
        hosts = {report.found.host for report in reached}
        if announced.ip is not None and announced.host not in hosts:
            text += f" (at {where}; net.announce says {announced.host})"
        return Verdict(True, text)
    sites = ", ".join(sorted(report.site for report in reports))
    why = "; ".join(sorted({report.found.why for report in reports}))
    steps = (
        f"open TCP port {announced.port} in this host's firewall and forward it in its router, with net.announce = "
        f'"/ip4/{reports[0].found.host}/tcp/{announced.port}"'
    )
    if relay:
        steps = f"net.relay is set, so a place at a relay is looked for; for a direct way {steps}"
    else:
        steps += ", or set net.relay = true here and on a peer that can be dialled; until then only those it dials hear it"
    what = f"not reachable from {sites} on port {announced.port}"
    return Verdict(False, f"{what} ({why}; others see this peer at {where}): {steps}")


class SelfCheck:
    """The asking side. `request` is a transport's, `others()` names peers that are connected directly, with their sites."""

    def __init__(
        self,
        announced: Address,
        request: Callable[[PeerId, Fetch, float], Awaitable[Fetched]],
        others: Callable[[], Sequence[tuple[PeerId, str]]],
        relay: bool,
    ) -> None:
        self._announced, self._request, self._others, self._relay = announced, request, others, relay

    async def ask(self) -> Verdict | None:
        """Once: some of the others, all at once. None if nobody could say."""
        asked = list(self._others())[:PEERS_ASKED]
        found = await asyncio.gather(*(self._ask_one(peer) for peer, _ in asked))
        reports = [Report(site, one) for (_, site), one in zip(asked, found, strict=True) if one is not None]
        return judge(self._announced, reports, self._relay)

    async def _ask_one(self, peer: PeerId) -> DialBack | None:
        try:
            return read_answer(await self._request(peer, Fetch(DIAL_BACK, 0, b"", self._announced.port, 0), ANSWER_SECONDS))
        except Unreachable:
            return None

    async def keep(self, tell: Callable[[Verdict], None]) -> None:
        """Until cancelled: ask until somebody can say, then now and then; tell each verdict that is new."""
        told: Verdict | None = None
        while True:
            verdict = await self.ask()
            if verdict is not None and (told is None or verdict.reachable != told.reachable):
                told = verdict
                tell(verdict)
            await asyncio.sleep(CHECK_SECONDS if verdict is None else RECHECK_SECONDS)
