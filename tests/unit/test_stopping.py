"""The end of a run by order: the same last round for all, whoever was told first."""

from __future__ import annotations

from typing import Any

import pytest

from geomesh_p2p.core import events as ev
from geomesh_p2p.core.replica import Replica
from tests.unit.replicas import beat, replica


def stop_after(peer: Replica) -> int | None:
    return peer.s.stop_after


def test_a_leader_stops_after_the_round_going_on() -> None:
    lone = replica("a", view="a")
    lone.handle(ev.Tick(), 1.0)
    assert lone.is_leader
    lone.handle(ev.StopWanted(), 2.0)
    assert stop_after(lone) == lone.round + 1
    assert lone.heartbeat_fields()["stop_after"] == lone.round + 1


def test_who_follows_nobody_stops_where_it_is() -> None:
    peer = replica("b", view="abc")
    peer.handle(ev.StopWanted(), 1.0)
    assert stop_after(peer) == peer.round
    assert peer.s.final


def test_heartbeats_tell_everybody_and_the_earliest_end_counts() -> None:
    peer = replica("b", view="abc")
    for said, known in ((0, None), (9, 9), (12, 9), (7, 7)):
        peer.handle(beat("a", stop_after=said), 1.0)
        assert stop_after(peer) == known
    assert peer.s.last_round == 7
    assert peer.heartbeat_fields()["stop_after"] == 7


@pytest.mark.parametrize(("goal", "said", "last"), [(5, 9, 5), (9, 5, 5), (None, 5, 5), (9, 0, 9)])
def test_an_order_ends_a_run_sooner_never_later(goal: int | None, said: int, last: int) -> None:
    peer = replica("b", view="abc", final_round=goal)
    peer.handle(beat("a", stop_after=said), 1.0)
    assert peer.s.last_round == last


def test_without_goal_or_order_there_is_no_end() -> None:
    peer: Any = replica("b", view="abc")
    assert peer.s.last_round == float("inf")
    assert not peer.s.final
