"""What a peer does to be reached, from its start in a run to its end: it has others dial it back, takes places at relays if
they cannot, and, where it relays, keeps strangers off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from geomesh_p2p.config import NetSection
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.addresses import parse
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.reachability import DIAL_BACK, DialsBack, SelfCheck, Verdict
from geomesh_p2p.swarm.relaying import Bouncer, Places
from geomesh_p2p.swarm.transport import Libp2pTransport

log = logging.getLogger("geomesh.reach")
BOUNCE_SECONDS = 5.0
TELL_SECONDS = 1.0


class Reaching:
    def __init__(
        self, transport: Libp2pTransport, membership: Membership, net: NetSection, observe: Callable[[Any], None]
    ) -> None:
        self._transport, self._membership, self._net, self._observe = transport, membership, net, observe
        self._dials_back = DialsBack(transport.seen_at, self._membership.admitted, time.monotonic)
        self._places = Places(transport, self._places_changed)
        self._keeping: asyncio.Task[None] | None = None
        self._ways: dict[PeerId, PeerId] = {}
        self._renewed: dict[PeerId, int] = {}

    async def answer(self, sender: PeerId, fetch: Fetch) -> Fetched | None:
        """The answer to `fetch`, if it is a matter of reaching."""
        return await self._dials_back.answer(sender, fetch) if fetch.what == DIAL_BACK else None

    async def keep(self) -> None:
        """Until cancelled."""
        announced = parse(self._transport.addresses()[0], "net.announce")
        check = SelfCheck(announced, self._transport.request, self._connected_directly, self._net.relay)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(check.keep(self._told))
                group.create_task(self._tell_ways())
                if self._net.relay:
                    group.create_task(self._bounce())
        finally:
            self._stop_keeping_places()

    def _connected_directly(self) -> list[tuple[PeerId, str]]:
        live = {one.peer: one.site for one in self._membership.live(time.monotonic())}
        return [
            (peer, site)
            for peer, site in sorted(live.items(), key=lambda entry: entry[1])
            if self._transport.seen_at(peer) and not self._transport.circuits.relay(peer)
        ]

    def _told(self, verdict: Verdict) -> None:
        if verdict.reachable:
            log.info("%s", verdict.words)
            self._stop_keeping_places()
            return
        self._observe(obs.Warned("not_reachable", verdict.words))
        if self._net.relay and self._keeping is None:
            self._keeping = asyncio.ensure_future(self._places.keep())

    def _stop_keeping_places(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
            self._transport.relayed_through(())

    def _places_changed(self, relays: tuple[PeerId, ...], why: str) -> None:
        if relays:
            caps = "; ".join(
                f"{self._membership.site_of(relay)} ({self._transport.circuits.caps[relay].words})" for relay in relays
            )
            log.info("others reach this peer through %s", caps)
        else:
            text = f"no peer relays for this one ({why}): set net.relay = true on a peer that can be dialled"
            self._observe(obs.Warned("no_relay", text))

    async def _tell_ways(self) -> None:
        """Which links are relayed, once their other ends are known by name."""
        circuits, site = self._transport.circuits, self._membership.site_of
        while True:
            for peer in [*self._membership.known]:
                relay, renewed = circuits.relay(peer), circuits.renewed[peer]
                before = self._ways.get(peer, "")
                if relay and relay != before:
                    self._ways[peer] = relay
                    caps = circuits.open[peer].caps.words
                    log.info("the link to %s is relayed through %s (%s)", site(peer), site(relay), caps)
                elif before and not relay and self._transport.seen_at(peer):
                    del self._ways[peer]
                    log.info("the link to %s is direct now", site(peer))
                if renewed != self._renewed.get(peer, 0):
                    self._renewed[peer] = renewed
                    words = "the relayed connection with %s was replaced to stay within its caps: %d times so far"
                    log.info(words, site(peer), renewed)
            await asyncio.sleep(TELL_SECONDS)

    async def _bounce(self) -> None:
        bouncer = Bouncer()
        while True:
            await asyncio.sleep(BOUNCE_SECONDS)
            if (daemon := self._transport.daemon) is None:
                continue
            for peer in bouncer.unwelcome(await daemon.connections(), self._membership.admitted, time.monotonic()):
                log.debug("%s is no peer of this run: disconnected, so that this peer does not relay for it", peer)
                await daemon.disconnect(peer)
