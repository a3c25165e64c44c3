"""What arrives for an exchange that has not begun here: kept for a while, within bounds."""

from __future__ import annotations

from collections import OrderedDict, deque

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.messages import Chunk, ChunkAck, ChunkMissing, ChunkWanted, PartHeader
from geomesh_p2p.core.types import PeerId

ExchangeMessage = Chunk | ChunkAck | PartHeader | ChunkWanted | ChunkMissing

FRAME_BYTES = 512
"""What a message without data is counted as."""


class ExchangeInbox:
    """Keeps early messages of plans that this peer has not accepted yet (a fast member sends before a slow one has heard
    of the plan). At most `max_bytes` for each sender, whose messages for another plan give way; of too many plans the oldest
    does. Messages of plans that are over are dropped. What is dropped is no loss: the exchange asks for it again at its
    deadlines."""

    def __init__(self, max_bytes: int, max_plans: int = 3) -> None:
        self._max_bytes = max_bytes
        self._max_plans = max_plans
        self._kept: OrderedDict[Digest, list[tuple[PeerId, ExchangeMessage, int]]] = OrderedDict()
        self._bytes: dict[PeerId, int] = {}
        self._over: deque[Digest] = deque(maxlen=32)
        self.dropped = 0

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    def is_over(self, plan: Digest) -> bool:
        return plan in self._over

    def keep(self, sender: PeerId, message: ExchangeMessage) -> bool:
        """False if `message` was dropped."""
        size = FRAME_BYTES + (len(message.data) if isinstance(message, Chunk) else 0)
        if message.plan in self._over or not self._make_room(sender, message.plan, size):
            self.dropped += 1
            return False
        if message.plan not in self._kept and len(self._kept) >= self._max_plans:
            self.dropped += len(self._release(next(iter(self._kept))))
        self._kept.setdefault(message.plan, []).append((sender, message, size))
        self._bytes[sender] = self._bytes.get(sender, 0) + size
        return True

    def _make_room(self, sender: PeerId, plan: Digest, size: int) -> bool:
        """What `sender` sent for another plan may be of one that is over: nobody told a peer that has just come."""
        for older, entries in self._kept.items():
            if older != plan and self._bytes.get(sender, 0) + size > self._max_bytes:
                stale = [entry for entry in entries if entry[0] == sender]
                entries[:] = [entry for entry in entries if entry[0] != sender]
                self._forget(stale)
                self.dropped += len(stale)
        return self._bytes.get(sender, 0) + size <= self._max_bytes

    def take(self, plan: Digest) -> list[tuple[PeerId, ExchangeMessage]]:
        """What was kept for `plan`, in the order of arrival; its exchange receives the rest itself."""
        return [(sender, message) for sender, message, _ in self._release(plan)]

    def close(self, plan: Digest) -> None:
        """`plan` is over: drop what is here and what will still come."""
        self._release(plan)
        if plan not in self._over:
            self._over.append(plan)

    def _release(self, plan: Digest) -> list[tuple[PeerId, ExchangeMessage, int]]:
        entries = self._kept.pop(plan, [])
        self._forget(entries)
        return entries

    def _forget(self, entries: list[tuple[PeerId, ExchangeMessage, int]]) -> None:
        for sender, _, size in entries:
            self._bytes[sender] -= size
            if not self._bytes[sender]:
                del self._bytes[sender]
