"""Peers that come and go leave nothing behind: neither in the membership, nor in the replica, nor in the metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from geomesh_p2p.core import events as ev
from geomesh_p2p.core.messages import Hello
from geomesh_p2p.core.observations import MembersChanged, PeerLost, RoundCommitted
from geomesh_p2p.core.ports import PeerTraffic
from geomesh_p2p.core.types import Term, Timing, Update
from geomesh_p2p.swarm.membership import PROTOCOL_VERSION, Admission, Membership, Self
from geomesh_p2p.swarm.rounds import RoundBook
from geomesh_p2p.telemetry.metrics import MAX_GONE, Metrics
from tests.unit.replicas import beat, replica

FORGET_SECONDS = Timing().forget_seconds


def test_a_peer_is_forgotten_after_long_silence_unless_it_has_a_vote() -> None:
    me = Membership(Self("me", "here", True, b"f", {}), Admission(), lambda peer, message: None, 5.0)
    for number, peer in enumerate("abc"):
        hello = Hello(PROTOCOL_VERSION, b"", b"f", "{}", f"site-{peer}", True, b"", 0, b"", b"")
        assert me.on_hello(peer, hello, float(number))
    assert me.forget_gone(FORGET_SECONDS, FORGET_SECONDS, ()) == []
    assert me.forget_gone(FORGET_SECONDS + 1.5, FORGET_SECONDS, ("a",)) == ["b"]
    assert set(me.known) == {"a", "c"}
    again = Hello(PROTOCOL_VERSION, b"", b"f", "{}", "site-b", True, b"", 0, b"", b"")
    assert me.on_hello("b", again, FORGET_SECONDS + 2.0)
    assert me.admitted("b")


def test_a_replica_keeps_voters_and_whoever_was_heard_of_late() -> None:
    me = replica("a", view="ab")
    for peer in "bcd":
        me.handle(beat(peer), 1.0)
    me.handle(beat("d"), FORGET_SECONDS)
    me.handle(ev.Tick(), FORGET_SECONDS + 2.0)
    assert set(me.s.peers) == {"b", "d"}
    me.handle(beat("c"), FORGET_SECONDS + 3.0)
    assert set(me.s.peers) == {"b", "c", "d"}


def test_metrics_remember_a_bounded_number_of_the_lost() -> None:
    metrics = Metrics("here", 0.7)
    for number in range(3 * MAX_GONE):
        metrics(MembersChanged(("here", f"guest-{number}"), "here", 1))
        metrics(PeerLost(f"peer-{number}", f"guest-{number}", 5.0))
    assert len(metrics._gone) == MAX_GONE
    assert f"guest-{3 * MAX_GONE - 1}" in metrics._gone


def test_who_votes_no_more_is_named_where_the_round_before_was_seen() -> None:
    me = Membership(Self("me", "here", True, b"f", {}), Admission(), lambda peer, message: None, 5.0)
    assert me.on_hello("a", Hello(PROTOCOL_VERSION, b"", b"f", "{}", "site-a", True, b"", 0, b"", b""), 0.0)
    said = list[Any]()
    transport: Any = SimpleNamespace(traffic=dict)
    book = RoundBook("me", me, transport, said.append, 0.0)
    for round, voters in ((1, ("a", "me")), (2, ("me",)), (3, ("me",))):
        update = Update(round, b"", "gather", (), (), voters, b"", 0)
        book.committed(update, Term(1, "me"), "here", 0)
        book.folded(update, 0.0, float(round))
    assert [event.gone for event in said if isinstance(event, RoundCommitted)] == [(), ("site-a",), ()]


def test_traffic_with_a_peer_that_was_forgotten_and_met_again_is_never_negative() -> None:
    me = Membership(Self("me", "here", True, b"f", {}), Admission(), lambda peer, message: None, 5.0)
    assert me.on_hello("a", Hello(PROTOCOL_VERSION, b"", b"f", "{}", "site-a", True, b"", 0, b"", b""), 0.0)
    totals = PeerTraffic(payload_sent=1000, payload_received=1000)
    book = RoundBook("me", me, SimpleNamespace(traffic=lambda: {"a": totals}), lambda event: None, 0.0)  # type: ignore[arg-type]
    assert book._traffic_since()["payload_sent"] == {"site-a": 1000}
    totals = PeerTraffic(payload_sent=10, payload_received=2000)
    assert book._traffic_since()["payload_sent"] == {"site-a": 10}
    totals = PeerTraffic(payload_sent=15, payload_received=2000)
    assert book._traffic_since()["payload_sent"] == {"site-a": 5}
