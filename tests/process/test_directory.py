"""The directory over the real DHT: who finds whom, and what is not believed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import psutil
import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.canonical import RecordError, pack
from geomesh_p2p.swarm import directory as directories
from geomesh_p2p.swarm.directory import STRANGERS_READ, Directory, Record, open_record, sign_record
from geomesh_p2p.swarm.identity import Identity, load_identity
from geomesh_p2p.swarm.shelf import KEPT_SECONDS, MOST_CHECKED, MOST_NODES, STRANGERS_RECORDS, Shelf, SmallTable
from geomesh_p2p.swarm.transport import Libp2pTransport
from tests.injection.proof import fired, inject

PATIENCE_SECONDS = 20.0
RUN, KEY = bytes(32), bytes(20)


def record(site: str, address: str = "/ip4/127.0.0.1/tcp/1", round: int = 0) -> Record:
    return Record(RUN, RUN, site, True, (address,), round, RUN)


class Place:
    def __init__(self, transport: Libp2pTransport, directory: Directory) -> None:
        self.transport, self.directory = transport, directory

    async def sees(self, condition: Callable[[list[Record]], bool]) -> list[Record]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(records := await self.directory.peers()):  # noqa: ASYNC110 - the DHT tells nobody
                await asyncio.sleep(0.05)
            return records


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Place]]]:
    places: list[Place] = []

    async def start(name: str, listen: str = "/ip4/127.0.0.1/tcp/0", members: set[str] | None = None) -> Place:
        async def nothing(*_: object) -> None: ...

        transport = Libp2pTransport(NetSection(listen=listen), tmp_path / name / "identity.key")
        await transport.start(lambda *_: None, nothing)  # type: ignore[arg-type]
        directory = Directory(transport, "demo", is_member=(set() if members is None else members).__contains__)
        await directory.start()
        if places:
            await transport.seeds.connect(places[0].transport.addresses())
        places.append(Place(transport, directory))
        return places[-1]

    yield start
    for one in places:
        await one.directory.stop()
        await one.transport.stop()


async def test_everybody_finds_everybody_through_one_seed(place: Callable[..., Awaitable[Place]]) -> None:
    places = [await place(name) for name in "abc"]
    for one, name in zip(places, "abc", strict=True):
        assert await one.directory.announce(record(name, one.transport.addresses()[0]))
    for one, name in zip(places, "abc", strict=True):
        found = await one.sees(lambda records: len(records) == 2)
        assert {r.site for r in found} == set("abc") - {name}
        for other in places:
            if other is not one:
                (its,) = (r for r in found if r.peer == other.transport.peer)
                assert its.addresses == other.transport.addresses()


@pytest.mark.case("C060")
async def test_newer_record_replaces_the_older_and_lies_are_not_stored(place: Callable[..., Awaitable[Place]]) -> None:
    a, b = await place("a"), await place("b")
    await b.directory.announce(record("b", "/ip4/127.0.0.1/tcp/1", 1))
    await a.sees(lambda records: [r.round for r in records] == [1])
    await b.directory.announce(record("b", "/ip4/127.0.0.1/tcp/2", 2))
    found = await a.sees(lambda records: [r.round for r in records] == [2])
    assert found[0].addresses == ("/ip4/127.0.0.1/tcp/2",)

    node, expires = b.directory._node, get_dht_time() + 60
    assert node is not None
    forged = sign_record(b.transport.identity, a.directory._key, replace(record("a"), expires=expires + 30))
    junk = {"junk": b"not a record", "forged": forged, "large": bytes(10_000)}
    for name, value in junk.items():
        subkey = a.transport.peer if name == "forged" else name
        assert not await node.store("geomesh/demo", value, expires + 30, subkey=subkey)
    assert (a.directory.ignored + b.directory.ignored)["record: bad signature"], "refused for that and nothing else"
    good = sign_record(b.transport.identity, a.directory._key, record("b", round=9))
    assert not await node.store("geomesh/demo", good, expires + 3600, subkey=b.transport.peer)
    found = await a.directory.peers()
    assert [(r.site, r.round) for r in found] == [("b", 2)]
    assert sum(b.directory.ignored.values()) + sum(a.directory.ignored.values()) >= 4


async def test_a_record_that_is_not_renewed_expires_by_the_readers_clock(
    place: Callable[..., Awaitable[Place]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await place("a"), await place("b")
    await b.directory.announce(record("b"))
    await a.sees(lambda records: len(records) == 1)
    await b.directory.stop()
    now = directories.time.monotonic()
    monkeypatch.setattr(directories.time, "monotonic", lambda: now + directories.LIFETIME_SECONDS + 1)
    assert await a.directory.peers() == []
    assert a.directory.ignored["record: expired"] == 1


async def test_without_a_daemon_there_is_nobody_and_no_error(tmp_path: Path) -> None:
    """As while the daemon is started again."""
    directory = Directory(Libp2pTransport(NetSection(), tmp_path / "identity.key"), "demo")
    await directory.start()
    assert await directory.peers() == []
    assert not await directory.announce(record("a"))
    await directory.stop()


def test_who_is_gone_for_long_is_forgotten(tmp_path: Path) -> None:
    """A run that newcomers come to and leave for weeks remembers those that may still be there."""
    directory = Directory(Libp2pTransport(NetSection(), tmp_path / "identity.key"), "demo", is_member={"member"}.__contains__)
    directory._seen = {"member": (1, 0.0), "listed": (1, 0.0), "gone": (1, 0.0), "just gone": (1, 900.0)}
    assert set(directory._still_to_know({"listed"}, 1000.0)) == {"member", "listed", "just gone"}
    directory._seen |= {f"flood {i}": (1, 999.0) for i in range(directories.MAX_RECORDS)}
    assert len(directory._still_to_know(set(), 1000.0)) == directories.MAX_RECORDS


@pytest.mark.fault
@pytest.mark.case("C048")
async def test_it_goes_on_when_the_daemon_is_killed_under_load(place: Callable[..., Awaitable[Place]]) -> None:
    """32 readers and writers at once; none of them fails or waits for ever, and afterwards the two see each other's news."""
    a, b = await place("a"), await place("b")
    for one, name in ((a, "a"), (b, "b")):
        await one.directory.announce(record(name))
    await a.sees(lambda records: len(records) == 1)
    assert a.transport.daemon is not None
    first, over = a.transport.daemon.process_id, asyncio.Event()
    answers = Counter[int]()

    async def reader() -> None:
        while not over.is_set():
            answers[len(await a.directory.peers())] += 1
            await asyncio.sleep(0)  # no daemon, no answer: that takes no time at all

    async def writer(number: int) -> None:
        while not over.is_set():
            await a.directory.announce(record("a", round=number))
            await asyncio.sleep(0)

    busy = [asyncio.create_task(work) for number in range(16) for work in (reader(), writer(number))]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while answers[1] < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        inject(lambda: os.kill(first, signal.SIGKILL))
        await asyncio.sleep(0.5)
        fired(not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE, "the daemon is killed")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while a.transport.daemon is None or a.transport.daemon.process_id == first:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            seen = answers[1]
            while answers[1] < seen + 50:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        over.set()
        await asyncio.wait_for(asyncio.gather(*busy), PATIENCE_SECONDS)
    await a.transport.seeds.connect(b.transport.addresses())
    await a.directory.announce(record("a", round=77))
    await b.sees(lambda records: [r.round for r in records] == [77])
    await b.directory.announce(record("b", round=78))
    await a.sees(lambda records: [r.round for r in records] == [78])


# ---------------------------------------------------------------- a flood


def made_up(folder: Path, count: int) -> list[Identity]:
    """Identities as anybody can make them, by the thousand."""
    path, made = folder / "made-up.key", []
    for _ in range(count):
        path.unlink(missing_ok=True)
        made.append(load_identity(path))
    return made


@pytest.mark.fault
@pytest.mark.long
@pytest.mark.case("C118")
async def test_ten_thousand_records_and_forged_ones_hide_nobody(
    place: Callable[..., Awaitable[Place]], tmp_path: Path
) -> None:
    """Three honest peers and a stranger, whose node stores 10,000 well-signed records of made-up peers at theirs, forged ones
    of b, and b's own old one with a longer life."""
    members: set[str] = set()
    a, b, c = [await place(name, members=members) for name in "abc"]
    members |= {one.transport.peer for one in (a, b, c)}
    for one, name in ((a, "a"), (b, "b"), (c, "c")):
        await one.directory.announce(record(name, round=1))
    await c.sees(lambda records: {r.site for r in records} == {"a", "b"})
    stranger = await place("s")
    await stranger.directory.peers()
    key, node = a.directory._key, stranger.directory._node
    assert node is not None
    old = b.directory._node.protocol.storage.records().get(b.transport.peer)  # type: ignore[union-attr]
    await b.directory.announce(record("b", round=2))

    identities = made_up(tmp_path, 500)
    targets = [PeerID.from_base58(one.transport.peer) for one in (a, b, c)]

    async def flood() -> int:
        """Every identity sends twenty records one after the other: 10,000 in all, at each of three nodes."""
        sent = 0
        for turn in range(20):
            expires = get_dht_time() + 140 + turn
            values = [
                msgpack.packb(sign_record(i, key, replace(record(f"s{n}"), serial=turn, expires=expires)))
                for n, i in enumerate(identities)
            ]
            subkeys = [i.peer for i in identities]
            for target in targets:
                await node.protocol.call_store(target, [DHTID.from_bytes(key)] * len(values), values, expires, subkeys)
            sent += len(values)
        lies = replace(record("b", round=9), expires=expires)
        forged = [msgpack.packb(sign_record(i, key, replace(lies, serial=n))) for n, i in enumerate(identities[:50])]
        for target in targets:
            for values, until in ((forged, expires), ([old.value], expires + 60), ([bytes(100_000)], expires + 60)):
                peers = [b.transport.peer] * len(values)
                await node.protocol.call_store(target, [DHTID.from_bytes(key)] * len(values), values, until, peers)
            others = [DHTID.generate() for _ in range(300)]
            await node.protocol.call_store(target, others, [b"\xc0"] * 300, expires, ["x"] * 300)
        return sent

    flooding = inject(flood)
    sent = await flooding if flooding is not None else 0
    fired(sent and a.directory.ignored.total() > 5000, "10,000 records and more from a stranger")
    assert sent == 10_000
    for one in (a, b, c):
        protocol = one.directory._node.protocol  # type: ignore[union-attr]
        kept = protocol.storage.records()
        assert len(kept.data) <= STRANGERS_RECORDS + len(members) + 1
        assert len(kept.expiration_heap) <= 3 * len(kept.data) + 32
        assert set(protocol.storage.data) == {DHTID.from_bytes(key)}
        assert len(protocol.cache.data) == 0
        assert len(one.directory._checked) <= MOST_CHECKED
    for one, others in ((a, "bc"), (b, "ac"), (c, "ab")):
        found = await one.sees(lambda records, others=others: set(others) <= {r.site for r in records if r.peer in members})
        (its,) = (r for r in found if r.peer == b.transport.peer) if one is not b else (None,)
        assert its is None or its.round == 2, "the newest record of b, and no other"
        assert len(found) <= len(members) + STRANGERS_READ
        assert len(one.directory._seen) <= directories.MAX_RECORDS + STRANGERS_READ


@pytest.mark.case("C011")
@pytest.mark.parametrize("off", [-14 * 3600.0, 14 * 3600.0])
async def test_a_record_of_a_clock_that_is_hours_off_is_stored_and_found(
    off: float, place: Callable[..., Awaitable[Place]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = [await place(name) for name in "abc"]
    with monkeypatch.context() as patched:
        patched.setattr(directories, "get_dht_time", lambda: get_dht_time() + off)
        assert await b.directory.announce(record("b"))
    for one in (a, c):
        await one.sees(lambda records: [r.site for r in records] == ["b"])


@pytest.mark.case("C062")
def test_a_shelf_forgets_what_is_not_renewed() -> None:
    key, now = DHTID.generate(source="demo"), [0.0]
    shelf, expires = Shelf(key.to_bytes(), {"b"}.__contains__, lambda: now[0]), get_dht_time() + 86_400
    assert shelf.store_subkey(key, "a", b"old", expires)
    assert shelf.store_subkey(key, "b", b"old", expires)
    now[0] = KEPT_SECONDS - 1
    assert shelf.store_subkey(key, "b", b"new", expires + 10)
    assert not shelf.store_subkey(key, "a", b"old", expires), "the same record is no newer one"
    assert set(shelf.records().data) == {"a", "b"}  # type: ignore[union-attr]
    now[0] = KEPT_SECONDS + 1
    assert set(shelf.get(key).value.data) == {"b"}
    now[0] = 2 * KEPT_SECONDS
    assert not shelf.records().data  # type: ignore[union-attr]
    assert shelf.store_subkey(key, "a", b"again", expires + 20), "who comes back is kept again"


@pytest.mark.case("C118")
def test_a_shelf_has_room_for_members_whatever_strangers_store() -> None:
    key, members = DHTID.generate(source="demo"), {f"m{n}" for n in range(40)}
    shelf, now = Shelf(key.to_bytes(), members.__contains__), get_dht_time()
    for n in range(40):
        assert shelf.store_subkey(key, f"m{n}", b"member", now + 100)
    for n in range(20_000):
        shelf.store_subkey(key, f"s{n % 7000}", b"stranger" * 100, now + 100 + n * 0.001)
    kept = shelf.records()
    assert kept is not None
    assert members <= set(kept.data)
    assert len(kept.data) == len(members) + STRANGERS_RECORDS
    assert len(kept.expiration_heap) <= 2 * len(kept.data) + 16
    assert not shelf.store_subkey(key, "m1", b"older", now + 99), "an older record neither replaces a newer one nor ends it"
    assert kept.get("m1").value == b"member"  # type: ignore[union-attr]
    assert kept.key_to_heap["m1"].expiration_time == now + 100
    assert not shelf.store_subkey(DHTID.generate(), "m1", b"another key", now + 200)
    assert not shelf.store(key, b"no subkey", now + 200)


@pytest.mark.case("C118")
def test_a_table_has_one_node_for_each_peer_and_few_strangers() -> None:
    def peer(number: int) -> PeerID:
        return PeerID(b"\x12\x20" + number.to_bytes(32, "big"))

    members = {peer(n).to_base58() for n in range(30)}
    table = SmallTable(DHTID.generate(), 20, 5, members.__contains__)
    for n in range(30):
        table.add_or_update_node(DHTID.generate(), peer(n))
    for n in range(5000):
        table.add_or_update_node(DHTID.generate(), peer(100 + n))
        table.add_or_update_node(DHTID.generate(), peer(100))
    assert len(table.uid_to_peer_id) <= MOST_NODES
    assert len(table.peer_id_to_uid) == len(table.uid_to_peer_id)
    assert sum(len(b.nodes_to_peer_id) + len(b.replacement_nodes) for b in table.buckets) <= MOST_NODES
    assert {p.to_base58() for p in table.peer_id_to_uid} >= members


# ---------------------------------------------------------------- signatures


def test_only_the_owner_can_make_a_record(tmp_path: Path) -> None:
    mine, other = load_identity(tmp_path / "a"), load_identity(tmp_path / "b")
    value = sign_record(mine, KEY, record("a"))
    assert open_record(KEY, mine.peer, value) == replace(record("a"), peer=mine.peer)
    packed, public, signature = msgpack.unpackb(value)
    changed = pack(record("z"))
    for peer, bad in [
        (other.peer, value),
        (mine.peer, sign_record(other, KEY, record("a"))),
        (mine.peer, msgpack.packb([changed, public, signature])),
        (mine.peer, msgpack.packb([packed, other.public, signature])),
        (mine.peer, msgpack.packb([packed, public, bytes(64)])),
        (mine.peer, msgpack.packb([packed, b"\xff" * 40, signature])),
        (mine.peer, msgpack.packb([packed, public])),
        (mine.peer, b""),
        (mine.peer, "text"),
        (mine.peer, bytes(5000)),
    ]:
        with pytest.raises(RecordError):
            open_record(KEY, peer, bad)
    with pytest.raises(RecordError):
        open_record(b"another key of the directory", mine.peer, value)


def test_rsa_identities_made_by_hivemind_work_too(tmp_path: Path) -> None:
    from hivemind.p2p import P2P, PeerID

    path = tmp_path / "rsa.key"
    P2P.generate_identity(str(path))
    identity = load_identity(path)
    assert identity.peer == PeerID.from_identity(path.read_bytes()).to_base58()
    assert open_record(KEY, identity.peer, sign_record(identity, KEY, record("a"))).site == "a"


def test_identity_is_kept_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    first = load_identity(path)
    assert load_identity(path).peer == first.peer
    assert path.stat().st_mode & 0o777 == 0o400
    assert [p.name for p in path.parent.iterdir()] == ["identity.key"]


async def test_the_directory_dials_nobody(place: Callable[..., Awaitable[Place]]) -> None:
    """Who is listed is the transport's to dial: a call to a node that is not connected fails instead."""
    _, b, c = [await place(name) for name in "abc"]
    for one, name in ((b, "b"), (c, "c")):
        assert await one.directory.announce(record(name, one.transport.addresses()[0]))
    await b.sees(lambda records: [r.site for r in records] == ["c"])
    await c.sees(lambda records: [r.site for r in records] == ["b"])
    for one, other in ((b, c), (c, b)):
        node = one.directory._node
        assert node is not None
        assert await node.protocol.call_ping(PeerID.from_base58(other.transport.peer)) is None
        assert one.transport.daemon is not None
        assert not await one.transport.daemon.connected(other.transport.peer)
    await c.transport.seeds.connect(b.transport.addresses())
    assert b.directory._node is not None
    assert await b.directory._node.protocol.call_ping(PeerID.from_base58(c.transport.peer)) == c.directory._node.node_id  # type: ignore[union-attr]


async def test_any_peer_of_a_settled_run_shows_a_joiner_the_others(place: Callable[..., Awaitable[Place]]) -> None:
    """hivemind stores records at the five nodes nearest to the key; a joiner that knows another one reaches none of them."""
    places = [await place(f"p{number}") for number in range(8)]
    for number, one in enumerate(places):
        for other in places[:number]:
            await one.transport.seeds.connect(other.transport.addresses())
            other.transport.learn(one.transport.peer, one.transport.addresses())
            other.transport._met_peers[one.transport.peer] = None
    for number, one in enumerate(places):
        assert await one.directory.announce(record(f"p{number}", round=1))
    for number, one in enumerate(places):  # those of before lie at the first of all
        assert await one.directory.announce(record(f"p{number}", round=2))
    for one in places:
        await one.sees(lambda records: len(records) == 7 and {record.round for record in records} == {2})
    key = DHTID.generate(source="geomesh/demo")

    def distance(of: Place) -> int:
        assert of.directory._node is not None
        return of.directory._node.node_id.xor_distance(key)

    farthest = max(places, key=distance)
    joiner = await place("joiner")
    assert joiner.transport.daemon is not None
    await joiner.transport.daemon.disconnect(places[0].transport.peer)
    await joiner.transport.seeds.connect(farthest.transport.addresses())
    found = await joiner.directory.peers()
    assert {record.site for record in found} == {f"p{number}" for number in range(8)}
