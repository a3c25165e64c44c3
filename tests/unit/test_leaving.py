"""Who leaves, when, and what is left of the vote: the protocol's side, in steps."""

from __future__ import annotations

import pytest
from replicas import beat, of_kind, plan, replica

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.types import Contribution, Plan


def abstention(of: Plan, peer: str) -> Contribution:
    return Contribution(peer, f"site-{peer}", of.round, of.base, 0, (), b"", 0, reason="w is not finite")


@pytest.mark.case("C072")
def test_a_newcomer_that_abstains_does_not_let_the_view_shrink_below_min_peers() -> None:
    """a leads and stays, b leaves, d would be the second voter, and abstains: the leaver trains once more instead."""
    leader = replica("a", view="ab", min_peers=2)
    leader.handle(ev.Tick(), 20.0)  # with the lowest id it is a quorum of two
    told = [beat("d", leader.term, "a"), beat("b", leader.term, "a", leaving=True)]
    needs = [need for event in told for need in of_kind(leader.handle(event, 20.5), ev.NeedPlan)]
    needs += of_kind(leader.handle(ev.Tick(), 23.6), ev.NeedPlan)
    first = plan(leader.term, 1, "ad")
    leader.handle(ev.Planned(first), 23.7)
    assert leader.plan == first
    actions = leader.handle(ev.Received("d", m.Finished(first.digest, abstention(first, "d"), 1.0)), 24.3)
    assert [n.fields["reason"] for n in of_kind(actions, ev.Note) if n.kind == "discard"] == ["too_few_voters"]
    assert [need.members for need in of_kind(actions, ev.NeedPlan)] == [("a", "b", "d")]


@pytest.mark.case("C072")
def test_the_first_round_does_not_begin_a_run_with_fewer_voters_than_min_peers() -> None:
    leader = replica("b", view="b", min_peers=2)
    leader.handle(beat("d"), 1.0)
    actions = [a for now in (20.0, 24.0, 28.0) for a in leader.handle(ev.Tick(), now)]
    leader.handle(beat("d", leader.term, "b"), 28.1)
    actions += leader.handle(ev.Tick(), 32.0)
    first = plan(leader.term, 1, "bd")
    leader.handle(ev.Planned(first), 32.1)
    assert leader.plan == first
    actions = leader.handle(ev.Received("d", m.Finished(first.digest, abstention(first, "d"), 1.0)), 32.3)
    assert [n.fields["reason"] for n in of_kind(actions, ev.Note) if n.kind == "discard"] == ["too_few_voters"]
    assert not of_kind(actions, ev.NeedPlan), "nobody else is there"
    assert leader.waiting_for == "newcomers that contribute: the next round needs 2 voters (min_peers)"
    leader.handle(beat("d", leader.term, "b"), 50.0)
    assert of_kind(leader.handle(ev.Tick(), 50.1), ev.NeedPlan), "it is tried again"


def test_a_founder_stays_for_a_newcomer_that_would_be_left_without_a_vote() -> None:
    alone = replica("b", view="b", min_peers=1)
    alone.handle(beat("d"), 1.0)
    assert not of_kind(alone.handle(ev.LeaveWanted("asked to"), 1.1), ev.Halt), "d is about to have one"
    halts = [halt for now in range(2, 60) for halt in of_kind(alone.handle(beat("d"), now), ev.Halt)]
    assert [halt.exit_code for halt in halts] == [0]
    assert "site-d cannot go on without this peer's vote, and will wait for it: start it again" in halts[0].reason


def test_a_founder_that_nobody_follows_leaves_at_once() -> None:
    for newcomer in (None, beat("d", leaving=True), beat("d", trains=False)):
        alone = replica("b", view="b", min_peers=1)
        if newcomer is not None:
            alone.handle(newcomer, 1.0)
        (halt,) = of_kind(alone.handle(ev.LeaveWanted("asked to"), 1.1), ev.Halt)
        assert halt == ev.Halt(0, "left: asked to")


def test_the_last_line_names_the_exit_code_that_the_process_will_have() -> None:
    alone = replica("b", view="b", min_peers=1)
    actions = alone.handle(ev.LeaveWanted("signal SIGINT", 130), 1.0)
    assert of_kind(actions, ev.Halt)[0].exit_code == 130
    assert [note.fields["exit_code"] for note in of_kind(actions, ev.Note) if note.kind == "stop"] == [130]


@pytest.mark.parametrize(("leaving", "view", "left"), [(True, "ab", True), (True, "abd", False), (False, "ab", False)])
def test_who_has_left_as_it_said_is_not_told_as_lost(leaving: bool, view: str, left: bool) -> None:
    """Lost all the same while it has a vote, or if it said nothing."""
    me = replica("a", view=view)
    me.handle(beat("d", leaving=leaving), 1.0)
    notes = of_kind(me.handle(ev.Tick(), 60.0), ev.Note)
    assert [(n.fields["peer_id"], n.fields["left"]) for n in notes if n.kind == "lost"] == [("d", left)]
