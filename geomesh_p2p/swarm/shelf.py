"""What this peer's node keeps for the directory: bounded, whoever sends whatever.

hivemind's storage and routing table take all that is valid. Here records of members always find room, those of strangers
have few places and give way to each other at random, so that a flood hides nobody for long; an older record never replaces
or shortens a newer one; what is not renewed goes, by this host's monotonic clock; and a peer counts as one node, whatever ids
it claims.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import TimedStorage

from geomesh_p2p.core.types import PeerId

KEPT_SECONDS = 150.0  # a record that no newer one of its peer replaced
STRANGERS_RECORDS = 128
MOST_RECORDS = 1024
MOST_NODES = 512
MOST_CHECKED = 4096
CHECKS_AT_ONCE, CHECKS_PER_SECOND = 2048, 128.0

IsMember = Callable[[PeerId], bool]


class Shelf(DHTLocalStorage):
    """Records under one key, by peer id."""

    def __init__(self, key: bytes, is_member: IsMember, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(maxsize=4)
        self._key, self._is_member, self._clock = key, is_member, clock
        self._since: dict[PeerId, float] = {}  # when the record that is kept came

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        if key.to_bytes() != self._key or not isinstance(subkey, str):
            return False
        entries = self.records()
        if entries is None:
            entries = DictionaryDHTValue()
        old = entries.get(subkey)
        if old is not None and expiration_time <= old.expiration_time:
            return False  # hivemind would shorten the newer one's life
        if old is None and not self._make_room(entries, subkey):
            return False
        stored = bool(entries.store(subkey, value, expiration_time))
        if stored:
            self._since[subkey] = self._clock()
            TimedStorage.store(self, key, entries, entries.latest_expiration_time)
        for kept in (self, entries):
            _compact(kept)
        return stored

    def records(self) -> DictionaryDHTValue | None:
        """What is kept, by peer id."""
        found = self.get(DHTID.from_bytes(self._key))
        return found.value if found is not None and isinstance(found.value, DictionaryDHTValue) else None

    def get(self, key: DHTID) -> Any:
        found = super().get(key)
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            entries, too_old = found.value.data, self._clock() - KEPT_SECONDS
            self._since = {peer: since for peer, since in self._since.items() if peer in entries}
            for peer in [peer for peer, since in self._since.items() if since < too_old]:
                del found.value[peer], self._since[peer]
        return found

    def _make_room(self, entries: DictionaryDHTValue, newcomer: PeerId) -> bool:
        strangers = [peer for peer in entries.data if not self._is_member(peer)]
        member = self._is_member(newcomer)
        if len(strangers) >= STRANGERS_RECORDS or (strangers and len(entries.data) >= MOST_RECORDS):
            del entries[random.choice(strangers)]
        return len(entries.data) < MOST_RECORDS or (member and bool(strangers))


def _compact(kept: TimedStorage[Any, Any]) -> None:
    """hivemind keeps a heap entry for each store until it expires; those that stand for nothing any more go here."""
    if len(kept.expiration_heap) > 2 * len(kept.key_to_heap) + 16:
        kept.expiration_heap = list(kept.key_to_heap.values())
        heapq.heapify(kept.expiration_heap)


class SmallTable(RoutingTable):
    """One node for each peer, and at most MOST_NODES: strangers give way, at random."""

    def __init__(self, node_id: DHTID, bucket_size: int, depth_modulo: int, is_member: IsMember) -> None:
        super().__init__(node_id, bucket_size, depth_modulo)
        self._is_member = is_member

    def add_or_update_node(self, node_id: DHTID, peer_id: PeerID) -> Any:
        former = self.peer_id_to_uid.get(peer_id)
        if former is not None and former != node_id:
            del self[former]
        if node_id in self.uid_to_peer_id and self.uid_to_peer_id[node_id] != peer_id:
            return None  # another's id
        if node_id not in self.uid_to_peer_id and len(self.uid_to_peer_id) >= MOST_NODES:
            strangers = [uid for uid, peer in self.uid_to_peer_id.items() if not self._is_member(peer.to_base58())]
            if not strangers:
                return None
            del self[random.choice(strangers)]
        return super().add_or_update_node(node_id, peer_id)


class Checked:
    """Signatures found good, so that each is verified once, and how many more may be verified now: verifying takes time, and a
    stranger must not be able to take all of it. Members' records are always verified."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level, self._at = float(CHECKS_AT_ONCE), clock()
        self._good: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()

    def knows(self, subkey: bytes, value: bytes) -> float | None:
        """The expiry that a good record names."""
        return self._good.get((subkey, value))

    def remember(self, subkey: bytes, value: bytes, expires: float) -> None:
        self._good[subkey, value] = expires
        while len(self._good) > MOST_CHECKED:
            self._good.popitem(last=False)

    def affordable(self) -> bool:
        now = self._clock()
        self._level = min(float(CHECKS_AT_ONCE), self._level + (now - self._at) * CHECKS_PER_SECOND)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def __len__(self) -> int:
        return len(self._good)
