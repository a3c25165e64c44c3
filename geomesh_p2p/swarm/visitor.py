"""The asking side of visits.py: looks at a run, and gives it orders, without taking part in it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from geomesh_p2p.addresses import parse_peer_address
from geomesh_p2p.config import NetSection
from geomesh_p2p.core.messages import Fetch, Fetched, Message, Order, Request
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import ConfigError, GeoMeshError, RefusedError, TemporaryError, UnreachableError
from geomesh_p2p.swarm.membership import Admission
from geomesh_p2p.swarm.seeds import ANOTHER_PEER, dial_reason
from geomesh_p2p.swarm.transport import Libp2pTransport
from geomesh_p2p.swarm.visits import MOST_WORDS, STATUS, TRY_AGAIN

ANSWER_SECONDS = 8.0
NEEDED = ": pass what a peer of the run has (--join-secret-file, --identity)"


class Visitor:
    """To be used as `async with Visitor(...) as visitor`. Without `identity_path` it is a peer that nobody knows, which will do
    for a run that is open or has a secret. Never that of a peer that runs: others would take this for a restart of it."""

    def __init__(self, identity_path: Path | None = None, secret: bytes = b"") -> None:
        self._identity_path, self._admission = identity_path, Admission(secret=secret)
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Visitor:
        async with self._closing:
            folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="geomesh-visit-")))
            net = NetSection(listen="/ip4/127.0.0.1/tcp/0")
            self._transport = Libp2pTransport(net, self._identity_path or folder / "identity.key")
            await self._transport.start(_ignore, _answer_nothing)
            self._closing.push_async_callback(self._transport.stop)
            self._closing = self._closing.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    async def status(self, address: str) -> dict[str, Any]:
        """What the peer at `address` says. Raises ConfigError (no address of a peer), UnreachableError, RefusedError,
        TemporaryError."""
        return dict(json.loads((await self._request(address, lambda proof: Fetch(STATUS, 0, proof, 0, 0))).data))

    async def order(self, address: str, verb: str, site: str = "", round: int = 0) -> str:
        """Have the peer at `address` see to an order (messages.Order). What it says was done. Raises as status()."""
        answer = await self._request(address, lambda proof: Order(verb, site, round, False, proof))
        return answer.header.decode(errors="replace")[:MOST_WORDS]

    async def _request(self, address: str, make: Callable[[bytes], Request]) -> Fetched:
        """`make` gets the proof of the right to join."""
        try:
            target = parse_peer_address(address)
        except ValueError as error:
            raise ConfigError(f'ADDR: "{address}" {error}') from None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._ask(target.peer, target.text, make)
        except TimeoutError:
            raise UnreachableError(f"{address}: no answer within {ANSWER_SECONDS:g} s: see that this peer is up") from None
        except Unreachable as error:
            reason = dial_reason(str(error), target.text)
            anew = "take the address anew from the line that the peer prints"
            step = anew if reason == ANOTHER_PEER else "see that this peer is up"
            raise UnreachableError(f"{address}: {reason}: {step}") from None
        if answer.found:
            return answer
        why = answer.header.decode(errors="replace")[:MOST_WORDS]
        if not why:
            raise UnreachableError(f"{address}: this peer is starting and has nothing to say yet: try again")
        if answer.hint == TRY_AGAIN:
            raise TemporaryError(f"{address}: {why}")
        raise RefusedError(f"{address}: {why}{NEEDED if 'net.' in why else ''}")

    async def _ask(self, peer: PeerId, address: str, make: Callable[[bytes], Request]) -> Fetched:
        daemon = self._transport.daemon
        if daemon is None:
            raise GeoMeshError("the libp2p daemon has ended: try again")
        await daemon.connect(peer, (address,))
        self._transport.learn(peer, (address,))
        proof = self._admission.proof(self._transport.peer, peer)
        return await self._transport.request(peer, make(proof), ANSWER_SECONDS)


def _ignore(peer: PeerId, message: Message) -> None:
    pass


async def _answer_nothing(peer: PeerId, request: Request) -> Fetched:
    return Fetched(False, b"", 0, 0, b"", 0)
