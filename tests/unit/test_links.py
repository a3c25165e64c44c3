"""Rates come from busy time alone; a peer that is late does not look like a slow link."""

from __future__ import annotations

import pytest

from geomesh_p2p.core.messages import Chunk, ChunkAck
from geomesh_p2p.core.types import Link
from geomesh_p2p.swarm.links import LinkTable

PLAN, NEXT_PLAN = b"p" * 32, b"q" * 32
KIB = 1024


def chunk(offset: int, size: int, plan: bytes = PLAN, owner: str = "me") -> Chunk:
    return Chunk(plan, "contribution", owner, b"", 0, offset, 0, bytes(size))


def ack(offset: int, plan: bytes = PLAN, owner: str = "me") -> ChunkAck:
    return ChunkAck(plan, "contribution", owner, 0, offset)


def transfer(links: LinkTable, start: float, size: int, seconds: float, plan: bytes = PLAN) -> None:
    links.sent("b", chunk(0, size, plan), start)
    links.acknowledged("b", ack(size, plan), start + seconds)


def test_rate_takes_the_round_trip_off() -> None:
    links = LinkTable()
    links.round_trip("b", 0.1)
    transfer(links, 0.0, 1000 * KIB, 1.1)
    assert links.bytes_per_second("b") == pytest.approx(1000 * KIB)
    assert links.links_from("me") == (Link("me", "b", 0.1, pytest.approx(1000 * KIB)),)


def test_a_way_is_news_once() -> None:
    links, told = LinkTable(), []
    links.on_news = lambda: told.append(links.bytes_per_second("b"))
    for start in (0.0, 10.0):
        transfer(links, start, 1000 * KIB, 1.0)
    assert told == [pytest.approx(1000 * KIB)], "and it is known by then"


def test_waiting_between_transfers_does_not_count() -> None:
    links = LinkTable()
    transfer(links, 0.0, 1000 * KIB, 1.0)
    links.sent("b", chunk(0, 500 * KIB, owner="other"), 100.0)  # the same plan, a minute and a half later
    links.acknowledged("b", ack(500 * KIB, owner="other"), 100.5)
    assert links.bytes_per_second("b") == pytest.approx(1000 * KIB)


def test_pipelined_chunks_are_one_transfer() -> None:
    links = LinkTable()
    for index in range(10):
        links.sent("b", chunk(index * 100 * KIB, 100 * KIB), 0.1 * index)
    for index in range(10):
        links.acknowledged("b", ack((index + 1) * 100 * KIB), 1.0 + 0.1 * index)
    assert links.bytes_per_second("b") == pytest.approx(1000 * KIB / 1.9)


def test_repeated_and_foreign_acknowledgements_count_for_nothing() -> None:
    links = LinkTable()
    links.sent("b", chunk(0, 200 * KIB), 0.0)
    links.acknowledged("b", ack(100 * KIB), 0.1)
    links.acknowledged("b", ack(100 * KIB), 0.2)
    links.acknowledged("b", ack(50 * KIB), 0.2)
    links.acknowledged("b", ack(10**9, NEXT_PLAN), 0.2)
    links.acknowledged("b", ack(10**9, owner="stranger"), 0.2)
    assert links.bytes_per_second("b") is None
    links.acknowledged("b", ack(10**9), 0.5)  # more than was sent
    assert links.bytes_per_second("b") == pytest.approx(400 * KIB)


def test_a_transfer_given_up_counts_up_to_its_last_acknowledgement() -> None:
    links = LinkTable()
    links.sent("b", chunk(0, 400 * KIB), 0.0)
    links.acknowledged("b", ack(200 * KIB), 1.0)
    transfer(links, 60.0, 200 * KIB, 1.0, NEXT_PLAN)
    assert links.bytes_per_second("b") == pytest.approx(200 * KIB)


def test_small_transfers_say_nothing() -> None:
    links = LinkTable()
    transfer(links, 0.0, 1 * KIB, 1.0)
    assert links.bytes_per_second("b") is None
    assert links.links_from("me") == ()


def test_smoothing_moves_part_of_the_way() -> None:
    links = LinkTable()
    transfer(links, 0.0, 1000 * KIB, 1.0)
    transfer(links, 10.0, 1000 * KIB, 2.0, NEXT_PLAN)
    assert links.bytes_per_second("b") == pytest.approx(1000 * KIB - 0.3 * 500 * KIB)
    links.round_trip("b", 0.1)
    links.round_trip("b", 0.2)
    assert links.rtt_seconds("b") == pytest.approx(0.12)
    links.round_trip("b", -1.0)
    assert links.rtt_seconds("b") == pytest.approx(0.12)
    assert links.rtt_seconds("nobody") == 0.0


def test_heartbeats_that_waited_behind_bulk_make_no_link_fast() -> None:
    """80 Gbit/s were once measured over 20 Mbit/s: the round trip that was taken off had grown to all of the transfer."""
    links = LinkTable()
    links.round_trip("b", 0.05)
    for _ in range(20):
        links.round_trip("b", 1.0)
    transfer(links, 0.0, 1000 * KIB, 0.5)
    measured = links.bytes_per_second("b")
    assert measured is not None
    assert 1000 * KIB / 0.5 <= measured < 2 * 1000 * KIB / 0.5
    alone = LinkTable()
    alone.round_trip("b", 1.0)
    transfer(alone, 0.0, 1000 * KIB, 0.5)
    assert alone.bytes_per_second("b") == pytest.approx(20 * 1000 * KIB / 0.5)


def test_two_plans_that_send_in_turn_are_measured_apart() -> None:
    """The end of a round's exchange and the next one's beginning: what was acknowledged before does not count again."""
    rates: list[float] = []
    links, now, size, other = LinkTable(lambda _, rate: rates.append(rate)), 0.0, 131_072, b"o" * 32
    for count in range(64):
        links.sent("b", chunk(count * size, size), now)
        if count % 4 == 3:
            links.sent("b", chunk((count // 4) * size, size, plan=other), now)
            now += size / 100_000.0
            links.acknowledged("b", ack((count // 4 + 1) * size, plan=other), now)
        now += size / 100_000.0
        if count != 40:
            links.acknowledged("b", ack((count + 1) * size), now)
    assert rates
    assert all(20_000.0 <= rate <= 101_000.0 for rate in rates), rates


def test_bytes_of_a_plan_given_up_do_not_count_once_it_goes_on() -> None:
    rates: list[float] = []
    links, size, other = LinkTable(lambda _, rate: rates.append(rate)), 1_000_000, b"o" * 32
    links.sent("b", chunk(0, size), 0.0)
    links.sent("b", chunk(0, 1_000, plan=other), 5.0)  # closes what was measured: nothing yet
    links.acknowledged("b", ack(size), 10.0)           # nobody measures now
    links.sent("b", chunk(size, 100_000), 11.0)
    links.acknowledged("b", ack(size + 100_000), 12.0)
    assert rates == [pytest.approx(100_000.0)]


def test_bytes_that_were_under_way_when_a_plan_was_closed_do_not_count_in_no_time() -> None:
    """1 MB/s. Eight chunks of the round before are queued as the next round's first one is sent; a ninth follows it."""
    rates: list[float] = []
    links, size, other, rate = LinkTable(lambda _, rate: rates.append(rate)), 131_072, b"o" * 32, 1_000_000.0
    for count in range(8):
        links.sent("b", chunk(count * size, size), 0.0)
    arrived = 8 * size / rate
    links.sent("b", chunk(0, size, plan=other), arrived - 0.01)
    links.sent("b", chunk(8 * size, size), arrived - 0.01)
    links.acknowledged("b", ack(8 * size), arrived)
    links.acknowledged("b", ack(size, plan=other), arrived + size / rate)
    links.acknowledged("b", ack(9 * size), arrived + 2 * size / rate)
    assert rates
    assert max(rates) <= rate, rates


def test_of_many_plans_only_the_newest_are_followed() -> None:
    links = LinkTable()
    for round in range(50):
        links.sent("b", chunk(0, 1_000, plan=bytes([round]) * 32), float(round))
    assert links.outstanding("b")
    for round in (48, 49):
        links.acknowledged("b", ack(1_000, plan=bytes([round]) * 32), 50.0)
    assert not links.outstanding("b")
