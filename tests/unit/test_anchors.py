"""Who has another anchor than the others is found when the round commits, named, and makes its own anew before it trains."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from replicas import beat, elect, of_kind, plan, replica, sent, update

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.anchors import ANCHOR_PARTS, part_of, state_in_log, tally
from geomesh_p2p.core.replica import Replica
from geomesh_p2p.core.types import Held, Term, Update

PLAN = plan(Term(1, "b"))


def saying(parts: dict[str, str], states: dict[str, str] | None = None) -> Update:
    """The update of round 4, to which these peers say these hashes (a letter each)."""
    made = update(PLAN)
    told = tuple(
        replace(c, anchor_part=parts.get(c.peer, "").encode() * 32, state=(states or {}).get(c.peer, "").encode() * 32)
        for c in made.contributors
    )
    return replace(made, contributors=told)


def commits(me: Replica, made: Update) -> list[ev.Action]:
    """`me` holds `made` and hears of its commit."""
    me.handle(beat("b", Term(1, "b"), "b"), 1.0)
    me.handle(ev.Received("b", m.HoldAgain(4, Term(1, "b"), 1, Held(Term(1, "b"), 1, PLAN.digest, made))), 1.0)
    me.handle(ev.FetchedHeld(Held(Term(1, "b"), 1, PLAN.digest, made)), 1.0)
    return me.handle(ev.Received("b", m.Commit(Term(1, "b"), made)), 1.1)


def notes(actions: list[ev.Action], kind: str) -> list[dict[str, object]]:
    return [note.fields for note in of_kind(actions, ev.Note) if note.kind == kind]


@pytest.mark.case("C070")
@pytest.mark.parametrize("of", ["anchor_part", "state"])
def test_the_odd_one_is_named_by_all_and_checks_itself(of: str) -> None:
    said = {"a": "x", "b": "x", "c": "y"}
    made = saying(said) if of == "anchor_part" else saying({}, said)
    for peer in "ac":
        actions = commits(replica(peer), made)
        assert [(n["round"], n["of"], n["odd"], n["tied"]) for n in notes(actions, "mismatch")] == [(3, of, ("c",), False)]
        assert len(of_kind(actions, ev.CheckState)) == (peer == "c")


@pytest.mark.case("C070")
def test_of_two_that_differ_each_checks_itself() -> None:
    for peer in "ac":
        actions = commits(replica(peer), saying({"a": "x", "c": "y"}))
        assert [(n["odd"], n["tied"]) for n in notes(actions, "mismatch")] == [(("a", "c"), True)]
        assert of_kind(actions, ev.CheckState)
    assert not of_kind(commits(replica("a"), saying({"b": "x", "c": "y"})), ev.CheckState)


@pytest.mark.case("C070")
def test_who_does_not_contribute_is_compared_by_its_own_hash_whichever_comes_first() -> None:
    for first in (True, False):
        me = replica("c")
        if first:
            me.handle(ev.Hashed(3, "anchor_part", b"y" * 32), 0.5)
        actions = commits(me, saying({"a": "x", "b": "x"}))
        if not first:
            assert not of_kind(actions, ev.CheckState)
            actions = me.handle(ev.Hashed(3, "anchor_part", b"y" * 32), 2.0)
        assert len(of_kind(actions, ev.CheckState)) == 1
    assert not of_kind(me.handle(ev.Hashed(3, "anchor_part", b"y" * 32), 3.0), ev.CheckState), "asked for once"


def test_equal_or_unsaid_hashes_are_no_mismatch() -> None:
    for said in ({"a": "x", "b": "x", "c": "x"}, {"a": "x", "c": "x"}, {}):
        actions = commits(replica("c"), saying(said, said))
        assert not notes(actions, "mismatch")
        assert not of_kind(actions, ev.CheckState)


@pytest.mark.case("C070")
def test_it_trains_nothing_until_it_is_checked() -> None:
    me = replica("c")
    made = saying({"a": "x", "b": "x", "c": "y"})
    commits(me, made)
    assert not me.heartbeat_fields()["ready"]
    following = plan(Term(1, "b"), round=5, start=200, base=made.digest)
    refused = sent(me.handle(ev.Received("b", m.PlanOffer(following)), 2.0), m.PlanRefused)
    assert [refusal.reason for _, refusal in refused] == ["not ready"]
    actions = me.handle(ev.StateChecked(4, "repaired"), 3.0)
    assert notes(actions, "checked") == [{"round": 4, "outcome": "repaired"}]
    assert me.heartbeat_fields()["ready"]
    assert of_kind(me.handle(ev.Received("b", m.PlanOffer(following)), 4.0), ev.Train)


def test_its_old_hashes_do_not_accuse_it_again() -> None:
    me = replica("c")
    me.handle(ev.Hashed(4, "anchor_part", b"y" * 32), 0.5)
    commits(me, saying({"a": "x", "b": "x", "c": "y"}))
    me.handle(ev.StateChecked(4, "repaired"), 3.0)
    assert (4, "anchor_part") not in me.anchors._own


def test_the_leader_does_not_plan_with_the_odd_one_before_it_says_ready() -> None:
    me = replica("b")
    elect(me, "a")
    for peer in "ac":
        me.handle(beat(peer, me.term, "b"), 20.1)
    made = saying({"a": "x", "b": "x", "c": "y"})
    for _ in range(3):
        me.handle(ev.Tick(), 24.0)
    me.leading.on_planned(plan(me.term, me.leading.attempt + 1), "")  # type: ignore[union-attr]
    me.member.assembled = made
    actions: list[ev.Action] = []
    for peer in "ab":
        report = m.HeldReport(4, me.term, me.leading.attempt, b"", made)  # type: ignore[union-attr]
        if peer == "b":
            me.s.held = Held(me.term, me.leading.attempt, b"", made)  # type: ignore[union-attr]
            me.leading.on_report("b", report)  # type: ignore[union-attr]
            actions = me.handle(ev.Tick(), 24.2)
        else:
            me.handle(ev.Received(peer, report), 24.1)
    assert me.round == 4
    needs = of_kind(actions, ev.NeedPlan)
    assert [need.members for need in needs] == [("a", "b")]


def test_the_log_vouches_for_a_state_by_what_most_had() -> None:
    assert state_in_log(saying({}, {"a": "x", "b": "y", "c": "x"})) == b"x" * 32
    assert state_in_log(saying({}, {"a": "x", "b": "y"})) == b""
    assert state_in_log(saying({}, {"a": "x"})) == b"x" * 32
    assert state_in_log(saying({})) == b""
    assert tally(saying({"a": "x", "b": "y", "c": "z"}).contributors, "anchor_part").odd == ("a", "b", "c")
    assert saying({}, {"a": "x"}).digest != saying({}, {"a": "y"}).digest, "the chain covers it"


def test_the_parts_cover_the_anchor_once_a_rotation() -> None:
    for size in (1, 15, 16, 4096, 100_003):
        spans = sorted(part_of(round, size)[1:] for round in range(7, 7 + ANCHOR_PARTS))
        assert spans[0][0] == 0
        assert spans[-1][1] == size
        assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_malformed_hashes_are_no_contribution() -> None:
    me = replica("a")
    me.handle(beat("b", Term(1, "b"), "b"), 1.0)
    me.handle(ev.Received("b", m.PlanOffer(PLAN)), 1.0)
    odd = replace(update(PLAN).contributors[1], anchor_part=b"short")
    assert not of_kind(me.handle(ev.Received("b", m.Finished(PLAN.digest, odd, 1.0)), 1.1), ev.MemberFinished)


