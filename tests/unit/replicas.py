"""What unit tests of the replica need: plans, updates and heartbeats with few words."""

from __future__ import annotations

from typing import Any, TypeVar

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.log import LogState, RoundLog, next_voters
from geomesh_p2p.core.replica import Replica, Settings
from geomesh_p2p.core.types import (
    NO_TERM,
    Assignment,
    BatchTime,
    Contribution,
    Held,
    PeerId,
    Plan,
    Profile,
    Range,
    Rules,
    Term,
    Timing,
    Update,
)

RUN, BASE = b"r" * 32, b"0" * 32
T1, T2 = Term(1, "a"), Term(2, "b")
A = TypeVar("A")


def replica(
    me: PeerId, view: str = "abc", durable: ev.Durable | None = None, held: Held | None = None, **settings: Any
) -> Replica:
    """`me` at round 3, whose voters are the letters of `view`; ready to train; its first events handled."""
    log = RoundLog(LogState(RUN, 3, BASE, tuple(view), (Range(0, 100),), 100))
    made = Replica(me, f"site-{me}", log, durable or ev.Durable(NO_TERM, False), held, Settings(Timing(), Rules(), **settings))
    made.handle(ev.Tick(), 0.0)
    made.handle(ev.Ready(Profile(me, f"site-{me}", "cpu", (BatchTime(1, 1.0),))), 0.0)
    return made


def plan(term: Term = T1, attempt: int = 1, members: str = "abc", start: int = 100, round: int = 4, base: bytes = BASE) -> Plan:
    assignments = tuple(
        Assignment(peer, f"site-{peer}", 1, 4, 1, (Range(start + 4 * i, start + 4 * i + 4),), 1.0, 4.0)
        for i, peer in enumerate(members)
    )
    return Plan(RUN, round, term, attempt, base, assignments, "gather", (), 100, 4 * len(members), 4.0, 0.5, 1.0, True)


def contribution(of: Plan, peer: PeerId, salt: str = "") -> Contribution:
    mine = of.of(peer)
    assert mine is not None
    return Contribution(peer, mine.site, of.round, of.base, 4, mine.ranges, digest_bytes(f"{peer}{salt}".encode()), 8)


def update(of: Plan, view: str = "abc", salt: str = "") -> Update:
    contributors = tuple(contribution(of, peer, salt) for peer in of.peers)
    voters = next_voters(tuple(view), of.peers, of.peers, of.round)
    return Update(of.round, of.base, "gather", (), contributors, voters, digest_bytes(salt.encode(), b"body"), 8)


def held(of: Plan, salt: str = "") -> Held:
    return Held(of.term, of.attempt, of.digest, update(of, salt=salt))


def beat(
    peer: PeerId, term: Term = T1, leader: PeerId = "", round: int = 3, digest: bytes = BASE, **changes: Any
) -> ev.Received:
    profile = Profile(peer, f"site-{peer}", "cpu", (BatchTime(1, 1.0),))
    fields: dict[str, Any] = {
        "site": f"site-{peer}", "term": term, "leader": leader, "round": round, "digest": digest, "phase": "idle",
        "trains": True, "ready": True, "leaving": False, "profile": profile, "step_batch": 0, "step_seconds": 0.0,
        "links": (), "stop_after": 0, "sent_at": 0.0,
    }
    return ev.Received(peer, m.Heartbeat(**{**fields, **changes}))


def of_kind(actions: list[ev.Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: list[ev.Action], kind: type[A]) -> list[tuple[PeerId, A]]:
    return [(a.to, a.message) for a in actions if isinstance(a, ev.Send) and isinstance(a.message, kind)]


def order(actions: list[ev.Action]) -> list[str]:
    """Names of the actions, of messages instead of their sending, without notes."""
    names = [type(a.message).__name__ if isinstance(a, ev.Send) else type(a).__name__ for a in actions]
    return [name for name in names if name != "Note"]


def elect(me: Replica, voter: PeerId = "b", held_by_voter: Held | None = None, now: float = 20.0) -> list[ev.Action]:
    """`me` stands at `now` and wins with the vote of `voter`; the actions of its victory."""
    asked = sent(me.handle(ev.Tick(), now), m.VoteRequest)[0][1].term
    answer = m.Vote(True, asked, True, NO_TERM, "", 3, BASE, held_by_voter)
    asked = sent(me.handle(ev.Received(voter, answer), now), m.VoteRequest)[0][1].term
    return me.handle(ev.Received(voter, m.Vote(False, asked, True, asked, "", 3, BASE, held_by_voter)), now)
