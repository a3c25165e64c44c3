"""Getting to where the others are: by updates while somebody still has them, else by a snapshot and the updates since."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from geomesh_p2p.core.anchors import state_in_log
from geomesh_p2p.core.events import CatchUp
from geomesh_p2p.core.log import BrokenChain, LogState, RoundLog
from geomesh_p2p.core.ports import AdoptState, SnapshotStore, Store, Work
from geomesh_p2p.core.types import PeerId, Update
from geomesh_p2p.errors import DataError
from geomesh_p2p.swarm.donor import Fetcher


class CatchingUp:
    """`committed` is told of each update once it is on disk, with the log's state then; `put` hands work to the algorithm."""

    def __init__(
        self,
        fetcher: Fetcher,
        store: Store,
        snapshots: SnapshotStore,
        committed: Callable[[Update, list[Any], LogState], None],
        put: Callable[[Work], None],
    ) -> None:
        self._fetcher, self._store, self._snapshots = fetcher, store, snapshots
        self._committed, self._put = committed, put

    async def run(self, state: LogState, wanted: CatchUp) -> tuple[LogState | None, list[Update]]:
        """(state of a snapshot that was needed, or None; the updates after it). Both empty: nobody could help. All of it is
        then on disk and on its way into the anchor. Raises OSError if it cannot be saved."""
        updates = await self._updates(state, wanted)
        if updates:
            return None, updates
        adopted = await self._snapshot(state, wanted.sources)
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

    async def sound_snapshot(self, run: bytes, sources: Sequence[PeerId]) -> int:
        """Get a snapshot of a round in this peer's own log from the sources, one that the log agrees with; its round, 0 if
        nobody could help. Raises OSError."""
        offers: dict[bytes, list[PeerId]] = {}
        for packed, owner in await self._fetcher.manifests(sources):
            offers.setdefault(packed, []).append(owner)
        for packed, owners in offers.items():
            try:
                manifest = self._snapshots.described(packed)
                following = await asyncio.to_thread(self._store.read_update, manifest.state.round + 1)
            except (ValueError, DataError):
                continue
            if manifest.state.run != run or following is None or following[0].base != manifest.state.digest:
                continue
            if state_in_log(following[0]) != manifest.content:
                continue
            receiver = await asyncio.to_thread(self._snapshots.receive, manifest)
            if await self._fetcher.snapshot(manifest.state.round, receiver, owners):
                await asyncio.to_thread(receiver.finish)
                return manifest.state.round
        return 0

    async def _snapshot(self, state: LogState, sources: Sequence[PeerId]) -> LogState | None:
        """The newest snapshot ahead of `state` that can be got whole from the sources."""
        owners: dict[bytes, list[PeerId]] = {}
        for packed, owner in await self._fetcher.manifests(sources):
            owners.setdefault(packed, []).append(owner)
        offers = []
        for packed, peers in owners.items():
            try:
                manifest = self._snapshots.described(packed)
            except ValueError:
                continue
            if manifest.state.run == state.run and manifest.state.round > state.round:
                offers.append((manifest.state.round, len(peers), packed, manifest))
        for round, _, packed, manifest in sorted(offers, key=lambda offer: offer[:3], reverse=True):
            receiver = await asyncio.to_thread(self._snapshots.receive, manifest)
            others = [source for source in sources if source not in owners[packed]]
            if await self._fetcher.snapshot(round, receiver, [*owners[packed], *others]):
                await asyncio.to_thread(receiver.finish)
                self._put(AdoptState(round, partial(self._snapshots.read_state, round)))
                return manifest.state
        return None
