"""Relays: which way a peer is dialled, what a relay's answer means, when a relayed connection has to be a new one, whom a
relay keeps off, and at which relays a peer takes a place. All without a socket."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.swarm import relaying
from geomesh_p2p.swarm.daemon import packed_address, text_of
from geomesh_p2p.swarm.relaying import (
    Bouncer,
    Caps,
    Circuits,
    Place,
    Places,
    Route,
    choose_route,
    circuit,
    read_answer,
    relay_of,
)

R, S, B = (f"12D3KooW{letter * 44}" for letter in "RSB")
REAL = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
AT_R, AT_S = f"/ip4/45.10.1.2/tcp/4100/p2p/{R}", f"/ip4/45.10.2.2/tcp/4100/p2p/{S}"
DIRECT = f"/ip4/192.168.3.2/tcp/4100/p2p/{B}"
THROUGH_R, THROUGH_S = circuit(AT_R, B), circuit(AT_S, B)
MIB = 2**20


def known(*relays: str) -> Any:
    return dict.fromkeys(relays, Caps()).get


# ---------------------------------------------------------------- direct, relayed, none


@pytest.mark.parametrize(
    ("addresses", "refused", "relays", "route"),
    [
        ((DIRECT,), "", (), Route((DIRECT,))),
        ((DIRECT, THROUGH_R), "", (R,), Route((DIRECT,))),
        ((DIRECT, THROUGH_R), "no answer", (R,), Route((THROUGH_R,), relayed=True)),
        ((DIRECT, THROUGH_R, THROUGH_S), "no answer", (S,), Route((THROUGH_S,), relayed=True)),
        ((DIRECT, THROUGH_R, THROUGH_S), "no answer", (), Route((THROUGH_R, THROUGH_S), relayed=True)),
        ((THROUGH_R,), "", (), Route((THROUGH_R,), relayed=True)),
        ((DIRECT,), "no answer", (R,), Route(why="no answer")),
        ((), "", (), Route(why="no address of it is known")),
    ],
)
@pytest.mark.case("C007")
def test_the_way_to_a_peer(addresses: tuple[str, ...], refused: str, relays: tuple[str, ...], route: Route) -> None:
    assert choose_route(addresses, refused, known(*relays)) == route


def test_the_relay_in_an_address() -> None:
    assert relay_of(THROUGH_R) == R
    assert relay_of(DIRECT) == relay_of("") == ""
    assert relay_of("/p2p-circuit") == ""


def test_addresses_through_a_relay_are_packed_so_that_libp2p_reads_them() -> None:
    text = f"/ip4/45.10.1.2/tcp/4100/p2p/{REAL}/p2p-circuit"
    assert text_of(packed_address(f"{text}/p2p/{B}")) == text
    assert text_of(packed_address(f"/ip4/45.10.1.2/tcp/4100/p2p/{REAL}")) == "/ip4/45.10.1.2/tcp/4100"
    assert text_of(b"\xff\xff") == text_of(b"") == ""


# ---------------------------------------------------------------- what a relay grants


def number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def message(*fields: tuple[int, int | bytes]) -> bytes:
    parts = []
    for name, value in fields:
        if isinstance(value, int):
            parts.append(number(name << 3) + number(value))
        else:
            parts.append(number(name << 3 | 2) + number(len(value)) + value)
    return b"".join(parts)


def test_a_granted_place_with_its_caps() -> None:
    packed = message((1, 2), (3, message((1, 1_700_003_600), (2, b"address"))), (4, message((1, 120), (2, 131_072))), (5, 100))
    assert read_answer(packed, 1_700_000_000.0) == Place(3600.0, Caps(131_072.0, 120.0))
    assert read_answer(packed, 1_700_010_000.0).seconds == 0.0


def test_a_relay_without_limits() -> None:
    place = read_answer(message((1, 2), (3, message((1, 2**33))), (5, 100)), 0.0)
    assert place.caps == Caps(math.inf, math.inf)
    assert "no caps" in place.caps.words


@pytest.mark.parametrize(("status", "words"), [(200, "no place left"), (201, "its limits"), (202, "allow"), (204, "204")])
def test_a_refusal_says_why(status: int, words: str) -> None:
    with pytest.raises(Unreachable, match=words):
        read_answer(message((1, 2), (5, status)), 0.0)


@given(st.binary(max_size=200))
def test_no_answer_of_a_relay_does_more_than_fail(packed: bytes) -> None:
    try:
        place = read_answer(packed, 0.0)
    except Unreachable:
        return
    assert place.seconds >= 0


# ---------------------------------------------------------------- caps


def circuits(caps: Caps) -> Circuits:
    open_ones = Circuits()
    open_ones.caps[R] = caps
    open_ones.seen(B, THROUGH_R, sent=1000, received=500, now=0.0)
    return open_ones


def test_a_transfer_starts_on_a_connection_that_has_room_for_all_of_it() -> None:
    some = circuits(Caps(10 * MIB, 3600.0))
    assert not some.must_renew(B, 1000, 500, 6 * MIB, MIB, None, 1.0)
    used = 5 * MIB
    assert some.must_renew(B, 1000 + used, 500, 6 * MIB, MIB, None, 1.0), "5 of 10 MiB are used, 6 more do not fit"
    assert some.must_renew(B, 1000, 500 + used, 6 * MIB, MIB, None, 1.0), "the cap holds each way"
    assert not some.must_renew(B, 1000 + used, 500 + used, 4 * MIB, MIB, None, 1.0)


def test_a_transfer_larger_than_the_caps_is_split_where_the_next_piece_does_not_fit() -> None:
    some, sent, renewed = circuits(Caps(10 * MIB, 3600.0)), 1000, []
    whole = 64
    for piece in range(whole):
        if some.must_renew(B, sent, 500, (whole - piece) * MIB, MIB, None, 1.0):
            renewed.append(piece)
            some.closed(B)
            some.seen(B, THROUGH_R, sent, 500, 1.0)
        sent += MIB
        assert sent - some.open[B].sent_before <= 10 * MIB
    assert renewed
    assert max(b - a for a, b in zip([0, *renewed], renewed, strict=False)) == 9
    assert len(renewed) == 7


def test_a_transfer_starts_on_a_connection_that_lives_long_enough() -> None:
    some = circuits(Caps(math.inf, 120.0))
    assert not some.must_renew(B, 1000, 500, 50 * MIB, MIB, MIB, 60.0)
    assert some.must_renew(B, 1000, 500, 50 * MIB, MIB, MIB, 80.0), "50 s more would end at 130 s"
    assert not some.must_renew(B, 1000, 500, 500 * MIB, MIB, MIB, 60.0), "longer than any connection lives: goes on"
    assert some.must_renew(B, 1000, 500, 500 * MIB, MIB, MIB, 119.5), "until the next piece does not fit"


def test_caps_too_small_for_anything_renew_nothing() -> None:
    assert not circuits(Caps(131_072.0, 120.0)).must_renew(B, 10**9, 0, MIB, MIB, None, 1.0)


def test_the_account_of_a_connection_and_no_caps_for_a_direct_one() -> None:
    some = Circuits()
    some.caps[R] = Caps(1.0, 2.0)
    some.seen(B, "/ip4/192.168.3.2/tcp/4100", 0, 0, 0.0)
    assert some.relay(B) == ""
    for now in range(3):
        some.seen(B, THROUGH_R, 100 * now, 0, float(now))
    assert some.relay(B) == R
    assert (some.open[B].since, some.open[B].sent_before) == (0.0, 0), "its account is from its first stream"
    some.renew(B)
    assert (some.relay(B), some.renewed[B]) == ("", 1)
    some.seen(B, THROUGH_R, 300, 0, 3.0)
    assert some.open[B].sent_before == 300
    some.seen(B, "/ip4/192.168.3.2/tcp/4100", 0, 0, 0.0)
    assert some.relay(B) == ""
    assert not some.must_renew(B, 10**12, 0, MIB, MIB, None, 1e9)


def test_bytes_through_relays_are_counted_over_connections_and_direct_ones_are_not() -> None:
    some = circuits(Caps())
    assert some.carried(B, 1000, 500) == (0, 0), "what was sent before went another way"
    assert some.carried(B, 1300, 600) == (300, 100)
    assert some.carried(B, 1300, 600) == (300, 100)
    some.renew(B)
    assert some.carried(B, 1400, 700) == (300, 100)
    some.seen(B, THROUGH_R, 1400, 700, 3.0)
    assert some.carried(B, 1500, 700) == (400, 100)
    some.seen(B, "/ip4/192.168.3.2/tcp/4100", 1500, 700, 4.0)
    assert some.carried(B, 9000, 9000) == (400, 100)
    some.forget(B)
    assert some.carried(B, 0, 0) == (0, 0)


# ---------------------------------------------------------------- places


class Host:
    peer = B

    def __init__(self, *relays: tuple[str, str]) -> None:
        self.relays = list(relays)
        self.circuits = Circuits()
        self.daemon: Any = SimpleNamespace()
        self.announced: tuple[str, ...] = ()

    def dialable(self) -> list[tuple[str, str]]:
        return self.relays

    def relayed_through(self, addresses: tuple[str, ...]) -> None:
        self.announced = addresses


@pytest.fixture
def grants(monkeypatch: pytest.MonkeyPatch) -> dict[str, Place]:
    """Who grants a place; the others refuse."""
    granted: dict[str, Place] = {}

    async def take(_daemon: Any, relay: str) -> Place:
        if relay not in granted:
            raise Unreachable("no place at the relay: it does not relay")
        return granted[relay]

    monkeypatch.setattr(relaying, "take_place", take)
    return granted


@pytest.mark.case("C007")
async def test_places_are_taken_told_kept_and_replaced(grants: dict[str, Place]) -> None:
    others = [(f"12D3KooW{letter * 44}", f"/ip4/45.10.9.2/tcp/1/p2p/12D3KooW{letter * 44}") for letter in "TUV"]
    host, told = Host((R, AT_R), (S, AT_S), *others), []
    places = Places(host, lambda relays, why: told.append((relays, why)))
    await places.renew()
    assert host.announced == ()
    assert told == [((), f"{others[-1][0]}: no place at the relay: it does not relay")]
    grants[S] = Place(3600.0, Caps(5.0, 6.0))
    await places.renew()
    assert host.announced == (THROUGH_S,)
    assert host.circuits.caps == {S: Caps(5.0, 6.0)}
    for relay in (R, others[0][0]):
        grants[relay] = Place(3600.0, Caps())
    await places.renew()
    assert host.announced == (THROUGH_S, THROUGH_R), "two are enough, and what is held is kept"
    del grants[S]
    await places.renew()
    assert [relay_of(address) for address in host.announced] == [R, others[0][0]]
    grants.clear()
    host.relays = []
    await places.renew()
    assert host.announced == ()
    assert told[-1] == ((), told[-1][1])


async def test_without_a_daemon_no_place_is_held(grants: dict[str, Place]) -> None:
    host = Host((R, AT_R))
    host.daemon = None
    await Places(host).renew()
    assert host.announced == ()


def test_strangers_are_sent_away_after_a_while() -> None:
    bouncer, admitted = Bouncer(), {R}
    for now in (0.0, 10.0, 19.9):
        assert bouncer.unwelcome([R, S, B], admitted.__contains__, now) == []
    admitted.add(B)
    assert bouncer.unwelcome([R, S, B], admitted.__contains__, 20.0) == [S]
    assert bouncer.unwelcome([R, B], admitted.__contains__, 21.0) == []
    assert bouncer.unwelcome([R, S], admitted.__contains__, 22.0) == [], "back again: it has its time again"
