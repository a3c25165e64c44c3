"""Filler: who is asked for how much and when, and who answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.types import Assignment, Plan, Range, Term
from geomesh_p2p.swarm.filler import (
    FILLER,
    LOOK_SECONDS,
    MOST_BYTES,
    PIECE_BYTES,
    Filler,
    Wish,
    lead_seconds,
    windows_close,
    wishes,
)
from geomesh_p2p.swarm.virtual_time import run_virtual

PAYLOAD = 1_000_000


def plan_of(shares: tuple[Range, ...] = (), round: int = 1) -> Plan:
    members = tuple(
        Assignment(peer, f"s{peer}", 8, 4, 8, (Range(32 * i, 32 * i + 32),), 1.0, 10.0 - i) for i, peer in enumerate("abc")
    )
    topology = "reduce" if shares else "gather"
    return Plan(b"r" * 32, round, Term(1, "a"), 1, b"b" * 32, members, topology, shares, 0, 0, 10.0, 1.0, 1.0, True)  # type: ignore[arg-type]


def test_each_distant_sender_is_asked_for_what_it_will_send_just_before_it_is_done() -> None:
    rtts = {"a": 0.0, "b": 0.1, "c": 0.002}
    (wish,) = wishes(plan_of(), "a", PAYLOAD, rtts.__getitem__, lambda peer: None)
    assert wish == Wish("b", pytest.approx(9.0 - lead_seconds(PAYLOAD, 0.1)), PAYLOAD, 9.0)  # c is near
    assert 0.6 < lead_seconds(PAYLOAD, 0.1) < 0.9  # seven round trips from ten segments to a megabyte


def test_a_window_is_no_wider_than_rate_and_payload_need() -> None:
    slow = wishes(plan_of(), "a", PAYLOAD, lambda peer: 0.1, lambda peer: 250_000.0)
    assert {wish.size for wish in slow} == {100_000}
    large = wishes(plan_of(), "a", 100 * PAYLOAD, lambda peer: 0.1, lambda peer: None)
    assert {wish.size for wish in large} == {MOST_BYTES}
    assert wishes(plan_of(), "a", 1000, lambda peer: 0.1, lambda peer: None) == ()  # the first window holds it


def test_in_a_reduce_a_way_carries_a_share_and_is_busy_at_the_end() -> None:
    shares = (Range(0, 100), Range(100, 800), Range(800, 800))
    asked = wishes(plan_of(shares), "a", 800_000, lambda peer: 0.1, lambda peer: None)
    assert {wish.peer: wish.size for wish in asked} == {"b": 700_000, "c": 100_000}
    assert all(wish.at_seconds == pytest.approx(10.0 - lead_seconds(wish.size, 0.1)) for wish in asked)


@pytest.mark.parametrize(
    ("after_idle", "control", "closes"), [("1", "cubic", True), ("0", "cubic", False), ("1", "bbr", False), (None, None, True)]
)
def test_what_the_kernel_does_with_idle_windows(
    tmp_path: Path, after_idle: str | None, control: str | None, closes: bool
) -> None:
    for name, text in (("tcp_slow_start_after_idle", after_idle), ("tcp_congestion_control", control)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    assert windows_close(tmp_path) is closes


class Ways:
    """A transport as far as filler needs one."""

    def __init__(self) -> None:
        self.peer = "a"
        self.asked: list[tuple[str, Fetch]] = []
        self.links = SimpleNamespace(least_rtt_seconds=lambda peer: 0.1, bytes_per_second=lambda peer: None)
        self.connection: object | None = object()

    def bare_connection(self, peer: str) -> object | None:
        return self.connection

    async def request(self, to: str, fetch: Fetch, timeout_seconds: float) -> Fetched:
        self.asked.append((to, fetch))
        return Fetched(False, b"", 0, 0, b"", 0)


def question(round: int, place: int = 0, length: int = PIECE_BYTES) -> Fetch:
    return Fetch(FILLER, round, b"", place, length)


def given(filler: Filler, fetch: Fetch) -> int:
    answer = filler.answer("b", fetch)
    assert answer is not None
    return len(answer.data)


def test_open_windows_are_filled_once_for_each_connection() -> None:
    ways: Any = Ways()
    filler = Filler(ways, PAYLOAD, closes=False)
    assert [given(filler, question(7, place)) for place in range(4)] == [PIECE_BYTES] * 4
    assert given(filler, question(8)) == 0
    ways.connection = object()
    assert given(filler, question(9)) == PIECE_BYTES
    ways.connection = None  # through a relay, say
    assert given(filler, question(9)) == 0


def test_windows_that_close_are_filled_before_each_exchange_within_bounds() -> None:
    ways: Any = Ways()
    filler = Filler(ways, PAYLOAD, closes=True)
    assert [given(filler, question(round)) for round in (1, 2, 3)] == [PIECE_BYTES] * 3
    assert given(filler, question(4, length=PIECE_BYTES + 1)) == 0
    assert given(filler, question(4, place=4)) == 0
    assert filler.answer("b", Fetch("clock", 0, b"", 0, 0)) is None


async def test_a_plan_makes_it_ask_in_pieces_and_a_newer_plan_instead_of_the_older() -> None:
    ways: Any = Ways()
    filler = Filler(ways, PAYLOAD, closes=True)
    soon = plan_of((Range(0, 800), Range(800, 800), Range(800, 800)), round=2)
    filler(obs.PlanAdopted(plan_of(round=1)))
    object.__setattr__(soon, "train_seconds", 0.0)
    filler(obs.PlanAdopted(soon))
    while len(ways.asked) < 8:  # noqa: ASYNC110 - tasks without a time of their own
        await asyncio.sleep(0)
    assert {fetch.round for _, fetch in ways.asked} == {2}
    assert sum(fetch.length for peer, fetch in ways.asked if peer == "b") == PAYLOAD
    ways.connection = None  # nothing is asked for on an emulated link, say
    filler(obs.PlanAdopted(soon))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(ways.asked) == 8
    filler.stop()


def test_a_pair_that_met_just_before_the_plan_is_asked_as_soon_as_it_can_be() -> None:
    """Neither its round trip nor a connection is known when the plan comes: without filler its first exchange starts cold."""

    async def main() -> None:
        ways: Any = Ways()
        loop, rtts, at = asyncio.get_running_loop(), {"a": 0.0, "b": 0.0, "c": 0.1}, list[tuple[float, str]]()
        ways.links.least_rtt_seconds, ways.connection = rtts.__getitem__, None
        filler = Filler(ways, PIECE_BYTES, closes=True)
        ask = ways.request

        async def request(to: str, fetch: Fetch, timeout_seconds: float) -> Fetched:
            at.append((loop.time(), to))
            return await ask(to, fetch, timeout_seconds)  # type: ignore[no-any-return]

        ways.request = request
        filler(obs.PlanAdopted(plan_of()))  # b is done after 9 s, c after 8
        await asyncio.sleep(8.5)
        assert at == []
        rtts["b"], ways.connection = 0.1, object()
        await asyncio.sleep(60.0)
        assert [to for _, to in at] == ["b"], "once, and what c sends is on its way by then"
        assert 8.5 <= at[0][0] <= 8.5 + LOOK_SECONDS
        filler(obs.PlanAdopted(plan_of(round=2)))
        begun = loop.time()
        await asyncio.sleep(60.0)
        lead = lead_seconds(PIECE_BYTES, 0.1)
        assert at[1:] == [(pytest.approx(begun + 8.0 - lead), "c"), (pytest.approx(begun + 9.0 - lead), "b")]
        assert not filler._tasks

    run_virtual(main())
