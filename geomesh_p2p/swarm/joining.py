"""How a peer comes into a run: founding it, or meeting those who are in it, and keeping up with who is."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from itertools import chain

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.messages import Refused
from geomesh_p2p.core.types import Founding, PeerId
from geomesh_p2p.errors import ConfigError, DataError, NotListedError, RefusedError, UnreachableError
from geomesh_p2p.swarm.acquaintances import Acquaintances
from geomesh_p2p.swarm.addresses import parse
from geomesh_p2p.swarm.directory import Directory, Record
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.transport import Libp2pTransport

log = logging.getLogger("geomesh")
DIRECTORY_SECONDS = 10.0
STARTING_SECONDS = 2.0           # a seed that has not answered a greeting by then is still starting
EAGER_DIRECTORY_SECONDS = 1.0
LOOK_SECONDS = 1.0               # from one look at the files that seeds come from to the next


def found(membership: Membership, seed: int, weights: Digest) -> Founding:
    """A new run, whose first voter is this peer."""
    me = membership.me
    return Founding(me.fingerprint, secrets.token_bytes(16), seed, weights, me.peer)


async def join(transport: Libp2pTransport, membership: Membership, net: NetSection, weights: Digest) -> Founding:
    """The founding record of the run behind the seeds. Raises UnreachableError, RefusedError, ConfigError if there is nobody
    else to ask, or DataError if this peer's initial weights are not the run's.

    A refusal that may pass (a name is taken until its holder, perhaps this peer's former self, is taken for lost) is final
    once it has stood for twice that long."""
    deadline = time.monotonic() + net.reach_seconds
    addresses = await transport.seeds.newest(net.seeds)
    seeds = await transport.seeds.connect(net.seeds)
    if not seeds:
        raise ConfigError("net.seeds names nobody but this peer: give the address of another one, or pass --first")
    refused_since, silent_since, told = None, time.monotonic(), False
    look_at = silent_since + LOOK_SECONDS
    while (founding := membership.heard_founding) is None:
        now = time.monotonic()
        refused = next((membership.refused_by[seed] for seed in seeds if seed in membership.refused_by), None)
        if refused is not None:
            refused_since = refused_since or now
            if refused.final or now > min(deadline, refused_since + 2 * net.heartbeat_limit_seconds):
                raise refusal(refused)
        elif not membership.known and all(seed in membership.refused for seed in seeds):
            raise RefusedError(f"this peer refuses the run's peers: {membership.refused[seeds[0]]}: set here what is set there")
        elif now > deadline:
            raise UnreachableError(
                f"no answer from the run within {net.reach_seconds:g} s (net.reach_seconds), though a seed is there: "
                "it may still be starting, try again"
            )
        elif not told and now > silent_since + STARTING_SECONDS:
            told = True
            log.info(
                "%s is there but does not speak for the run yet: it is still starting (it loads its model and data first); "
                "waiting for it, at most %.0f s more (net.reach_seconds)", ", ".join(seeds), deadline - now,
            )  # fmt: skip
        if now > look_at:
            newest, look_at = await transport.seeds.newest(net.seeds), now + LOOK_SECONDS
            if newest != addresses and (reached := await transport.seeds.connect(net.seeds, required=False, warn=False)):
                seeds, addresses = reached, newest
        for peer in seeds:
            membership.greet(peer, time.monotonic())
        await asyncio.sleep(0.05)
    if founding.weights != weights:
        raise DataError("the initial weights made here differ from the run's: use the releases of the other peers")
    return founding


def refusal(refused: Refused) -> RefusedError:
    kind = NotListedError if "(net.allow)" in refused.reason else RefusedError
    return kind(f"the run refuses this peer: {' '.join(refused.reason.split())}")


async def keep_meeting(
    transport: Libp2pTransport, membership: Membership, net: NetSection, directory: Directory, known: Acquaintances
) -> None:
    """Keep the own record alive in the directory, and greet whom it lists, the seeds, and, while nobody is heard, whom this
    peer knew before, until cancelled. Raises RefusedError if a seed refuses this peer and there is nobody else."""
    me = membership.me
    seeds = await _others(transport, net, me.peer)
    eager_until = time.monotonic() + net.reach_seconds
    dialling = asyncio.ensure_future(_keep_dialling(transport, membership, net, known, eager_until))
    try:
        while True:
            seeds = await _others(transport, net, me.peer)
            refused = [membership.refused_by[seed] for seed in seeds if seed in membership.refused_by]
            if not membership.known and refused and refused[0].final:
                raise refusal(refused[0])
            if dialling.done():
                dialling.result()
            run = me.founding.run if me.founding else b""
            at = transport.addresses()
            await directory.announce(Record(run, me.fingerprint, me.site, me.trains, at, me.round, me.digest))
            for record in await directory.peers():
                transport.learn(record.peer, record.addresses)
                if record.peer in membership.known:
                    known.met(record.peer, record.addresses)
                if record.peer not in membership.known:
                    membership.greet(record.peer, time.monotonic())
            with suppress(OSError):  # a full disk is told by what matters more
                known.save()
            await asyncio.sleep(_pause(eager_until))
    finally:
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)


async def _keep_dialling(
    transport: Libp2pTransport, membership: Membership, net: NetSection, known: Acquaintances, eager_until: float
) -> None:
    """Dial and greet seeds that are not heard: at a start of all peers one may come later, or the first greeting get lost.
    While nobody at all is heard, also those met before."""
    warn = True
    while True:
        seeds = await _others(transport, net, membership.me.peer)
        live = {acquaintance.peer for acquaintance in membership.live(time.monotonic())}
        missing = [address for peer, address in seeds.items() if peer not in live]
        former = known.addresses(but=seeds) if not live else ()
        reached = await asyncio.gather(
            transport.seeds.connect(missing, required=False, warn=warn),
            transport.seeds.connect(former, required=False, warn=False),
        )
        for peer in chain(*reached):
            membership.greet(peer, time.monotonic())
        warn = warn and not missing
        await asyncio.sleep(_pause(eager_until))


async def _others(transport: Libp2pTransport, net: NetSection, me: PeerId) -> dict[PeerId, str]:
    """The seeds as they are to be dialled by now, but for this peer."""
    newest = await transport.seeds.newest(net.seeds)
    return {peer: seed for seed in newest if (peer := parse(seed, "net.seeds").peer) != me}


def _pause(eager_until: float) -> float:
    return EAGER_DIRECTORY_SECONDS if time.monotonic() < eager_until else DIRECTORY_SECONDS
