"""Getting to where the others are: by updates while somebody still has them, else by a snapshot and the updates since.

A snapshot is taken only if the log vouches for it: the update after it says what most contributors had (core/anchors.py), and
the chain from there leads to the digest that this peer has heard of. The newest snapshot has no such update yet; it is taken
if a quorum of the voters of its round has the same, else the one before it. Whoever offers another is named and left out.

Of those that can be had, the one is taken that costs the fewest bytes from here, updates included: so a snapshot that was
received in part is completed though there is a newer one, while the updates after it are still there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from geomesh_p2p.core.anchors import state_in_log
from geomesh_p2p.core.behind import Proof
from geomesh_p2p.core.canonical import Digest, unpack
from geomesh_p2p.core.events import CatchUp, ProveClaim
from geomesh_p2p.core.log import BrokenChain, LogState, RoundLog, is_quorum, lineage
from geomesh_p2p.core.ports import AdoptState, SnapshotManifest, SnapshotReceiver, SnapshotStore, Store, Unreachable
from geomesh_p2p.core.types import PeerId, Update
from geomesh_p2p.errors import DataError
from geomesh_p2p.swarm.fetching import Fetcher

HEADERS_AT_ONCE = 8
PROOF_SECONDS = 15.0


@dataclass
class Offer:
    """One snapshot and who has it."""

    packed: bytes
    manifest: SnapshotManifest
    owners: list[PeerId] = field(default_factory=list)
    bytes_to_fetch: int = 0

    @property
    def round(self) -> int:
        return self.manifest.state.round


class CatchingUp:
    """`committed` is told of each update once it is on disk, with the log's state then; `adopt` of a snapshot once it is this
    peer's own, with the work that puts the anchor there."""

    def __init__(
        self,
        fetcher: Fetcher,
        store: Store,
        snapshots: SnapshotStore,
        committed: Callable[[Update, list[Any], LogState], None],
        adopt: Callable[[LogState, AdoptState], None],
    ) -> None:
        self._fetcher, self._store, self._snapshots = fetcher, store, snapshots
        self._committed, self._adopt = committed, adopt
        self._named: set[PeerId] = set()  # during one attempt to catch up

    async def proof_of(self, claim: ProveClaim) -> Proof:
        """Whether the peer shows that the log goes on from where this peer's stands, in PROOF_SECONDS and few bytes."""
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                return "proved" if await self._shows(claim) else "refuted"
        except (TimeoutError, Unreachable, ExceptionGroup):
            return "silent"

    async def _shows(self, claim: ProveClaim) -> bool:
        base = claim.base
        try:
            found = await self._fetcher.body(claim.peer, "header", base.round + 1)
            if found is not None:
                update = unpack(Update, found[0])
                return update.round == base.round + 1 and update.base == base.digest
            found = await self._fetcher.body(claim.peer, "manifest", 0)
            if found is None:
                return False
            state = self._snapshots.described(found[1]).state
            return state.run == base.run and base.round < state.round <= claim.round
        except ValueError:
            return False

    async def run(self, state: LogState, wanted: CatchUp) -> tuple[LogState | None, list[Update]]:
        """(state of a snapshot that was needed, or None; the updates after it). Both empty: nobody could help. All of it is
        then on disk and on its way into the anchor. Raises OSError if it cannot be saved."""
        updates = await self._updates(state, wanted)
        if updates:
            return None, updates
        adopted = await self._snapshot(state, wanted)
        return adopted, [] if adopted is None else await self._updates(adopted, wanted)

    async def _updates(self, state: LogState, wanted: CatchUp) -> list[Update]:
        """What follows `state`, as far as the sources have it and the chain holds."""
        log, updates = RoundLog(state), []
        for round in range(state.round + 1, wanted.round + 1):
            found = await self._fetcher.update(round, wanted.sources)
            if found is None:
                break
            update, body = found
            try:
                log.append(update)
            except BrokenChain:
                break
            await asyncio.to_thread(self._store.append, update, [body])
            self._committed(update, [body], log.state)
            updates.append(update)
        return updates

    # ---------------------------------------------------------------- a snapshot for one's own log

    async def sound_snapshot(self, log: LogState, sources: Sequence[PeerId]) -> int:
        """Get a snapshot of a round in this peer's own log from the sources, one that the log agrees with and that leads to
        where it stands; its round, 0 if nobody could help. Raises OSError."""
        way = set(await asyncio.to_thread(lambda: list(lineage(log.round, self._store.read_header))))
        for offer in await self._offers(log.run, sources):
            if offer.round not in way:
                continue
            try:
                following = await asyncio.to_thread(self._store.read_update, offer.round + 1)
            except DataError:
                continue
            if following is None or following[0].base != offer.manifest.state.digest:
                continue
            said = state_in_log(following[0])
            if said and said != offer.manifest.content:
                self._name(offer.owners, f"offers another snapshot of round {offer.round} than the log says")
            elif said and await self._receive(offer, offer.owners):
                return offer.round
        return 0

    # ---------------------------------------------------------------- a snapshot of the run

    async def _snapshot(self, state: LogState, wanted: CatchUp) -> LogState | None:
        """A snapshot ahead of `state`, vouched for by the log, that can be got whole: the one that costs the least."""
        offers = [offer for offer in await self._offers(state.run, wanted.sources) if offer.round > state.round]
        headers: dict[int, Update] = {}
        for round in sorted({offer.round for offer in offers}):
            await self._headers(headers, range(round + 1, wanted.round + 1), wanted.sources)
        good = []
        for offer in offers:
            if self._vouched(offer, headers, wanted):
                updates = sum(header.body_bytes for round, header in headers.items() if round > offer.round)
                offer.bytes_to_fetch = await asyncio.to_thread(self._missing_bytes, offer) + updates
                good.append(offer)
        for offer in sorted(good, key=lambda offer: (offer.bytes_to_fetch, -offer.round, -len(offer.owners))):
            others = [source for source in wanted.sources if source not in offer.owners and source not in self._named]
            if await self._receive(offer, [*offer.owners, *others]):
                state = offer.manifest.state
                self._adopt(state, AdoptState(offer.round, partial(self._snapshots.read_state, offer.round)))
                return state
        return None

    async def _offers(self, run: Digest, sources: Sequence[PeerId]) -> list[Offer]:
        """What the sources have: their newest snapshots, those before, and those that were received here in part."""
        self._named.clear()
        found = await self._fetcher.manifests(sources)
        for round in self._snapshots.receiving():
            found += await self._fetcher.manifests(sources, round)
        offers = self._sorted_offers(found, run)
        rounds = sorted({offer.round for offer in offers})
        if rounds:
            found += await self._fetcher.manifests(sources, rounds[-1] - 1)
        return self._sorted_offers(found, run)

    def _sorted_offers(self, found: Iterable[tuple[bytes, PeerId]], run: Digest) -> list[Offer]:
        offers: dict[bytes, Offer] = {}
        for packed, owner in found:
            try:
                offer = offers.get(packed) or Offer(packed, self._snapshots.described(packed))
            except ValueError as error:
                self._name([owner], f"offers a snapshot that is none: {error}")
                continue
            if offer.manifest.state.run == run:
                offers[packed] = offer
                if owner not in offer.owners:
                    offer.owners.append(owner)
        return sorted(offers.values(), key=lambda offer: (-offer.round, -len(offer.owners), offer.packed))

    async def _headers(self, known: dict[int, Update], rounds: range, sources: Sequence[PeerId]) -> None:
        """Of as many of `rounds` as there are: their end is what somebody claims."""
        missing = (round for round in rounds if round not in known)
        while some := list(islice(missing, HEADERS_AT_ONCE)):
            found = await asyncio.gather(*(self._fetcher.header(round, sources) for round in some))
            known |= {header.round: header for header in found if header is not None}
            if None in found:
                return

    def _vouched(self, offer: Offer, headers: dict[int, Update], wanted: CatchUp) -> bool:
        """Whether the log says that this is the state of its round, and does not go back behind it later; owners of what it
        contradicts are named."""
        log = RoundLog(offer.manifest.state)
        try:
            for round in range(offer.round + 1, wanted.round + 1):
                if round not in headers:
                    return False  # its updates are gone: it leads nowhere
                log.append(headers[round])
        except BrokenChain as broken:
            self._name(offer.owners, f"offers a snapshot of round {offer.round} from which the log does not go on ({broken})")
            return False
        if log.round == wanted.round and log.digest != wanted.digest:
            self._name(offer.owners, f"offers a snapshot of round {offer.round} that does not lead to round {wanted.round}")
            return False
        since = (headers[round].rollback for round in range(offer.round + 1, wanted.round + 1))
        if any(rollback is not None and rollback.to_round < offer.round for rollback in since):
            return False
        following = headers.get(offer.round + 1)
        said = b"" if following is None else state_in_log(following)
        if said:
            if said != offer.manifest.content:
                self._name(offer.owners, f"offers another snapshot of round {offer.round} than the log says")
            return said == offer.manifest.content
        return is_quorum(offer.owners, offer.manifest.state.voters)

    def _missing_bytes(self, offer: Offer) -> int:
        if offer.round not in self._snapshots.receiving():
            return offer.manifest.size_bytes
        receiver = self._snapshots.receive(offer.manifest)
        receiver.close()
        return sum(len(piece) for piece in receiver.missing())

    async def _receive(self, offer: Offer, sources: Sequence[PeerId]) -> bool:
        receiver: SnapshotReceiver = await asyncio.to_thread(self._snapshots.receive, offer.manifest)
        try:
            if not await self._fetcher.snapshot(offer.round, receiver, sources):
                return False
            await asyncio.to_thread(receiver.finish)
            await asyncio.to_thread(self._snapshots.forget_received)
        finally:
            receiver.close()
        return True

    def _name(self, peers: Iterable[PeerId], what: str) -> None:
        for peer in peers:
            self._named.add(peer)
            self._fetcher.fault(peer, what)
