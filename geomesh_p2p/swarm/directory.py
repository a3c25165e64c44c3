"""The meeting point: signed, expiring records of a run's peers in hivemind's DHT. It is no authority.

Key: the run's name. Subkey: the peer id. Value: [record, public key, signature], signed by the peer's libp2p key, which
hashes to the peer id. Every node refuses to store or to pass on what is not signed so, is too large, or would live too
long; readers check again. A record's age is taken from the reader's own monotonic clock, counted from when it first saw
that record, so hosts' clocks may differ by up to SKEW_SECONDS without harm. What a node keeps is bounded (shelf.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import get_dht_time

from geomesh_p2p import PROTOCOL_VERSION
from geomesh_p2p.core.canonical import Digest, RecordError, pack, unpack
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.identity import Identity, verify
from geomesh_p2p.swarm.shelf import KEPT_SECONDS, Checked, IsMember, Shelf, SmallTable

LIFETIME_SECONDS = 30.0
REFRESH_SECONDS = 10.0
SKEW_SECONDS = 86_400.0      # clocks set to local time instead of UTC are hours off
MAX_RECORD_BYTES = 4096
MAX_RECORDS = 512            # of members, read at one time
STRANGERS_READ = 64
STOP_SECONDS = 3.0

# hivemind's node serves others before it has put down who it is: until then it is nobody, whom nobody adds to a table.
DHTProtocol.node_info = dht_pb2.NodeInfo()


@dataclass(frozen=True)
class Record:
    """One peer's entry. `peer` is filled in by the reader from what the signature proves; `serial` grows with each one."""

    run: Digest                   # empty: not known yet
    fingerprint: Digest
    site: str
    trains: bool
    addresses: tuple[str, ...]
    round: int
    digest: Digest
    protocol: int = PROTOCOL_VERSION
    lifetime_seconds: float = LIFETIME_SECONDS
    serial: int = 0
    peer: PeerId = ""
    expires: float = 0.0          # as the DHT knows it: nobody else can give an old record a longer life


class Host(Protocol):
    """What the directory needs of the transport whose daemon it shares."""

    identity: Identity

    @property
    def p2p(self) -> P2P | None:
        """Another one each time the daemon was started again; None while that goes on."""
        ...

    def met(self) -> tuple[PeerId, ...]:
        """Peers that there is or was a connection with."""
        ...


def sign_record(identity: Identity, key: bytes, record: Record) -> bytes:
    """The value to be stored under `key` (a DHT id)."""
    packed = pack(replace(record, peer=""))
    return bytes(msgpack.packb([packed, identity.public, identity.sign(_signed(key, packed))]))


def open_record(key: bytes, peer: PeerId, value: Any) -> Record:
    """The record in `value`, if it is `peer`'s own. Raises RecordError with the reason."""
    if not isinstance(value, bytes):
        raise RecordError("record: bytes expected")
    if len(value) > MAX_RECORD_BYTES:
        raise RecordError("record: too large")
    try:
        packed, public, signature = msgpack.unpackb(value)
    except Exception:
        raise RecordError("record: not one") from None
    if not all(isinstance(part, bytes) for part in (packed, public, signature)):
        raise RecordError("record: not one")
    if not verify(peer, public, _signed(key, packed), signature):
        raise RecordError("record: bad signature")
    return replace(unpack(Record, packed), peer=peer)


def _signed(key: bytes, packed: bytes) -> bytes:
    return b"geomesh record\0" + key + packed


class _OnlySigned(RecordValidatorBase):
    """What this node stores for others, and takes from them: signed records of its own run's name, none for longer than
    records live or than they say themselves."""

    def __init__(self, key: bytes, ignored: Counter[str], is_member: IsMember, checked: Checked) -> None:
        self._key, self._ignored, self._is_member, self._checked = key, ignored, is_member, checked

    def validate(self, record: DHTRecord) -> bool:
        try:
            if record.key != self._key:
                raise RecordError("record: of another run's name")
            if record.expiration_time > get_dht_time() + LIFETIME_SECONDS + 2 * SKEW_SECONDS:
                raise RecordError("record: lives too long")
            if len(record.value) > MAX_RECORD_BYTES + 8 or len(record.subkey) > 128:
                raise RecordError("record: too large")
            expires = self._checked.knows(record.subkey, record.value)
            if expires is None:
                expires = self._verified(record)
            if abs(record.expiration_time - expires) > 0.01:
                raise RecordError("record: another's idea of when it expires")
        except RecordError as error:
            self._ignored[str(error)] += 1
            return False
        except Exception:
            self._ignored["record: not one"] += 1
            return False
        return True

    def _verified(self, record: DHTRecord) -> float:
        peer, value = msgpack.unpackb(record.subkey), msgpack.unpackb(record.value)
        if not isinstance(peer, str) or len(peer) > 100:
            raise RecordError("record: no peer id")
        if not self._is_member(peer) and not self._checked.affordable():
            raise RecordError("record: too many at once")
        expires = open_record(record.key, peer, value).expires
        self._checked.remember(record.subkey, record.value, expires)
        return expires


class Directory:
    """One peer's view of the directory. start() after the transport's; whomever that meets is introduced."""

    def __init__(
        self, host: Host, run_name: str, lifetime_seconds: float = LIFETIME_SECONDS, refresh_seconds: float = REFRESH_SECONDS,
        is_member: IsMember = lambda peer: False,
    ) -> None:  # fmt: skip
        """`is_member`: whose records matter more than strangers'."""
        self.ignored: Counter[str] = Counter()
        self._is_member = is_member
        self._checked = Checked(time.monotonic)
        self._host = host
        self._name = f"geomesh/{run_name}"
        self._key = DHTID.generate(source=self._name).to_bytes()
        self._lifetime_seconds, self._refresh_seconds = lifetime_seconds, refresh_seconds
        self._node: DHTNode | None = None
        self._starting = asyncio.Lock()
        self._record: Record | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._expires = 0.0
        self._introduced: set[PeerId] = set()
        self._seen: dict[PeerId, tuple[int, float]] = {}   # serial, when it was first seen here

    async def start(self) -> None:
        with contextlib.suppress(Unreachable):  # the daemon is being started again: the node comes with the first question
            await self._living_node()

    async def _living_node(self) -> DHTNode:
        """The node on the daemon that runs now: a new one, with what the old one stored, if that ended. Raises Unreachable."""
        async with self._starting:
            p2p, old = self._host.p2p, self._node
            if old is not None and old.p2p is p2p:
                return old
            if p2p is None:
                raise Unreachable("the libp2p daemon does not run")
            try:
                node = await DHTNode.create(
                    p2p,
                    node_id=old.node_id if old is not None else None,
                    record_validator=_OnlySigned(self._key, self.ignored, self._is_member, self._checked),
                    ensure_bootstrap_success=False,
                    strict=False,
                    cache_locally=False,
                    cache_nearest=0,
                )
            except (P2PDaemonError, OSError) as error:
                raise Unreachable(str(error)) from None
            protocol = node.protocol
            protocol.storage, protocol.cache = Shelf(self._key, self._is_member), Shelf(self._key, self._is_member)
            table = protocol.routing_table
            protocol.routing_table = SmallTable(node.node_id, table.bucket_size, table.depth_modulo, self._is_member)
            if old is not None:
                old.is_alive = False
                protocol.storage = old.protocol.storage
            self._introduced.clear()
            self._node = node
            return node

    async def _get_to_know(self) -> DHTNode:
        """Introduce the node to those of peers that the transport has met since the last time. Raises Unreachable."""
        node = await self._living_node()
        met = self._host.met()
        self._introduced &= set(met)
        new = [peer for peer in met if peer not in self._introduced]
        if not new:
            return node
        answers = await asyncio.gather(*(node.protocol.call_ping(PeerID.from_base58(peer)) for peer in new))
        self._introduced.update(peer for peer, answer in zip(new, answers, strict=True) if answer is not None)
        await node.find_nearest_nodes([node.node_id])
        return node

    async def announce(self, record: Record) -> bool:
        """Publish `record` and keep it alive until the next one or stop(). False: no node took it this time."""
        self._record = replace(record, lifetime_seconds=self._lifetime_seconds)
        try:
            stored = await self._publish()
        except Unreachable:
            stored = False
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        return stored

    async def _publish(self) -> bool:
        assert self._record is not None
        node = await self._get_to_know()
        # A later expiry replaces an earlier one, even if this host's clock has been set back.
        self._expires = max(get_dht_time() + self._lifetime_seconds + SKEW_SECONDS, self._expires + 0.001)
        record = replace(self._record, serial=time.time_ns(), expires=self._expires)
        value = sign_record(self._host.identity, self._key, record)
        stored = bool(await node.store(self._name, value, self._expires, subkey=self._host.identity.peer))
        self._keep(node, self._host.identity.peer, value, self._expires)
        return stored

    def _keep(self, node: DHTNode, peer: PeerId, value: bytes, expires: float) -> None:
        """Have it here too: whoever comes may know no other node, and of those nearest to the key, which hivemind stores at, it
        could reach none."""
        protocol = node.protocol
        protocol.storage.store_subkey(DHTID.from_bytes(self._key), peer, protocol.serializer.dumps(value), expires)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_seconds)
            try:
                await self._publish()
            except Exception as error:  # the daemon may be gone: whoever owns it says so
                self.ignored[f"publish: {type(error).__name__}"] += 1

    async def peers(self) -> list[Record]:
        """The other peers' records that are alive, newest first: of members all, of others at most STRANGERS_READ, another
        choice each time, so that a flood of records hides nobody for long."""
        try:
            node = await self._get_to_know()
        except Unreachable:
            return []
        found = await node.get(self._name, latest=True)
        if found is None or not isinstance(found.value, dict):
            return []
        now, records = time.monotonic(), []
        for peer, (value, expires) in self._chosen(found.value):
            try:
                record = open_record(self._key, str(peer), value)
            except RecordError as error:
                self.ignored[str(error)] += 1
                continue
            serial, seen = self._seen.get(record.peer, (-1, now))
            if record.serial > serial:
                serial, seen = self._seen[record.peer] = (record.serial, now)
            if record.serial < serial or now - seen > min(record.lifetime_seconds, LIFETIME_SECONDS):
                self.ignored["record: expired"] += 1
                continue
            records.append(record)
            self._keep(node, record.peer, value, expires)
        self._seen = self._still_to_know(found.value, now)
        return sorted(records, key=lambda record: -record.serial)

    def _still_to_know(self, found: Container[str], now: float) -> dict[PeerId, tuple[int, float]]:
        """Whose serial numbers are kept: of members, of who is listed, and of who was while a record of theirs may still be
        about; the newest MAX_RECORDS."""
        gone = now - (KEPT_SECONDS + LIFETIME_SECONDS)
        kept = [
            (peer, known) for peer, known in self._seen.items() if known[1] > gone or peer in found or self._is_member(peer)
        ]
        return dict(sorted(kept, key=lambda entry: entry[1][1])[-MAX_RECORDS:])

    def _chosen(self, found: dict[Any, Any]) -> list[tuple[Any, Any]]:
        """Whose records are looked at."""
        others = {peer: value for peer, value in found.items() if isinstance(peer, str) and peer != self._host.identity.peer}
        members = [peer for peer in others if self._is_member(peer)]
        strangers = [peer for peer in others if not self._is_member(peer)]
        if len(strangers) > STRANGERS_READ:
            self.ignored["record: one of too many"] += len(strangers) - STRANGERS_READ
            strangers = random.sample(strangers, STRANGERS_READ)
        return [(peer, others[peer]) for peer in (*members[:MAX_RECORDS], *strangers)]

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None
        node, self._node = self._node, None
        if node is not None:
            with contextlib.suppress(TimeoutError, P2PDaemonError):  # the daemon may be gone
                async with asyncio.timeout(STOP_SECONDS):
                    await node.shutdown()

