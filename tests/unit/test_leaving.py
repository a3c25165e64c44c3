"""Who leaves, when, and what is left of the vote: the protocol's side, in steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replicas import T1, beat, elect, of_kind, plan, replica, update

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.replica import Replica
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


def leaver_between_rounds() -> Replica:
    """c wants to leave, is no member of the plan of round 4, and hears everybody."""
    leaver = replica("c")
    for peer in "ab":
        leaver.handle(beat(peer, T1, "a"), 20.0)
    leaver.handle(ev.LeaveWanted("asked to"), 20.5)
    return leaver


def commit_without_c() -> m.Commit:
    return m.Commit(T1, update(plan(members="ab")))


def test_a_leaver_goes_once_a_round_without_it_is_committed_and_need_not_have_that_round() -> None:
    leaver, commit = leaver_between_rounds(), commit_without_c()
    assert leaver.waiting_for == "a round without this peer"
    beats = [beat(peer, T1, "a", round=4, digest=commit.update.digest) for peer in "ab"]
    actions = leaver.handle(ev.Received("a", commit), 24.0)
    assert not of_kind(actions, ev.CatchUp)
    assert not of_kind(actions, ev.Halt), "not before a quorum of those who stay has committed it"
    assert leaver.next_deadline() > 24.0
    actions = [a for told in beats for a in leaver.handle(told, 24.1)]
    assert [halt.exit_code for halt in of_kind(actions, ev.Halt)] == [0]
    assert of_kind(actions, ev.Halt)[0].reason == "left: asked to"
    assert not of_kind(actions, ev.CatchUp)
    assert leaver.round == 3


def test_a_leaver_whose_commit_is_lost_gets_the_round_from_the_others() -> None:
    leaver, commit = leaver_between_rounds(), commit_without_c()
    told = beat("b", T1, "a", round=4, digest=commit.update.digest)
    assert not of_kind(leaver.handle(told, 24.0), ev.CatchUp), "the commit is probably on its way"
    assert of_kind(leaver.handle(ev.Tick(), 26.1), ev.ProveClaim)
    assert of_kind(leaver.handle(ev.ClaimAnswered("b", 3, "proved"), 26.1), ev.CatchUp)
    leaver.handle(ev.CaughtUp((commit.update,)), 26.2)
    actions = [a for peer in "ab" for a in leaver.handle(beat(peer, T1, "a", round=4, digest=commit.update.digest), 26.3)]
    assert of_kind(actions, ev.Halt)


def test_a_leaver_is_not_let_go_by_a_round_that_still_counts_on_it_or_of_another_history() -> None:
    for unlike in ({"voters": ("a", "b", "c")}, {"base": b"x" * 32}):
        leaver = leaver_between_rounds()
        leaver.handle(ev.Received("a", m.Commit(T1, replace(commit_without_c().update, **unlike))), 24.0)
        assert leaver.leaving.let_go is None


@pytest.mark.parametrize(("finish_seconds", "closes"), [(4.0, False), (400.0, True)])
def test_a_leaver_in_a_long_round_ends_its_training_in_time_to_send_what_it_has(finish_seconds: float, closes: bool) -> None:
    leaver, p = replica("c"), plan()
    members = tuple(replace(each, finish_seconds=finish_seconds, inner_steps=100) for each in p.members)
    long = replace(p, members=members, train_seconds=finish_seconds)
    for peer in "ab":
        leaver.handle(beat(peer, T1, "a"), 20.0)
    leaver.handle(ev.Received("a", m.PlanOffer(long)), 20.0)
    leaver.handle(ev.LeaveWanted("asked to"), 21.0)     # its time is up at 51
    seen: list[float] = []
    now = 21.0
    while now < 51.0 and not leaver.halted:
        now = min(leaver.next_deadline(), now + 1.0)
        seen += [now for _ in of_kind(leaver.handle(ev.Tick(), now), ev.CloseTraining)]
        for peer in "ab":
            leaver.handle(beat(peer, T1, "a"), now)
    assert len(seen) == int(closes), "said once"
    if closes:
        assert seen[0] == pytest.approx(51.0 - 2 * (4.0 + 0.5 + 1.0)), "a step, the exchange and a message, with room to spare"


def test_a_leader_that_goes_leads_no_more_and_the_others_stand_soon() -> None:
    leader = replica("a")
    elect(leader)
    for peer in "bc":
        leader.handle(beat(peer, leader.term, "a"), 20.1)
    leader.handle(ev.LeaveWanted("asked to"), 20.2)
    assert leader.is_leader
    actions = leader.handle(ev.Tick(), 50.3)
    assert of_kind(actions, ev.Halt)
    last = leader.heartbeat_fields()
    assert (last["leader"], last["leaving"]) == ("", True)
    follower = replica("b")
    follower.handle(beat("a", leader.term, "a"), 50.2)
    patient = follower.next_deadline()
    follower.handle(ev.Received("a", m.Heartbeat(**{**vars(beat("a").message), **last})), 50.4)
    assert follower.next_deadline() < patient - 1.0
