"""How a peer comes into a run: founding it, or meeting those who are in it, and keeping up with who is."""

from __future__ import annotations

import asyncio
import secrets
import time

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.types import Founding
from geomesh_p2p.errors import DataError, RefusedError, UnreachableError
from geomesh_p2p.swarm.directory import Directory, Record
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.transport import Libp2pTransport

DIRECTORY_SECONDS = 10.0
EAGER_DIRECTORY_SECONDS = 1.0


def found(membership: Membership, seed: int, weights: Digest) -> Founding:
    """A new run, whose first voter is this peer."""
    me = membership.me
    return Founding(me.fingerprint, secrets.token_bytes(16), seed, weights, me.peer)


async def join(transport: Libp2pTransport, membership: Membership, net: NetSection, weights: Digest) -> Founding:
    """The founding record of the run behind the seeds. Raises UnreachableError, RefusedError, or DataError if this peer's
    initial weights are not the run's."""
    deadline = time.monotonic() + net.reach_seconds
    seeds = await transport.connect_seeds(net.seeds)
    while (founding := membership.heard_founding) is None:
        refused = membership.refused_me
        if refused is not None and refused.final:
            raise RefusedError(f"the run refuses this peer: {refused.reason}")
        if time.monotonic() > deadline:
            said = f": {refused.reason}" if refused else ""
            raise UnreachableError(f"no answer from the run after {net.reach_seconds:g} s (net.reach_seconds){said}")
        for peer in seeds:
            membership.greet(peer, time.monotonic())
        await asyncio.sleep(0.05)
    if founding.weights != weights:
        raise DataError("the initial weights made here differ from the run's: use the releases of the other peers")
    return founding


async def keep_meeting(transport: Libp2pTransport, membership: Membership, net: NetSection, directory: Directory) -> None:
    """Keep the own record alive in the directory, and greet whom it lists, until cancelled."""
    me, addresses = membership.me, transport.addresses()
    for seed in await transport.connect_seeds(net.seeds, required=False):
        membership.greet(seed, time.monotonic())
    eager_until = time.monotonic() + net.reach_seconds
    while True:
        run = me.founding.run if me.founding else b""
        await directory.announce(Record(run, me.fingerprint, me.site, me.trains, addresses, me.round, me.digest))
        for record in await directory.peers():
            transport.learn(record.peer, record.addresses)
            if record.peer not in membership.known:
                membership.greet(record.peer, time.monotonic())
        await asyncio.sleep(EAGER_DIRECTORY_SECONDS if time.monotonic() < eager_until else DIRECTORY_SECONDS)
