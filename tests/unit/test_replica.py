"""One replica at a time: the order of its actions in a round, what it refuses, and what it does after a restart."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.log import LogState, RoundLog
from geomesh_p2p.core.replica import Replica, Settings
from geomesh_p2p.core.round import BEHIND, NOT_READY, RESTARTED, STILL_SHARE
from geomesh_p2p.core.types import NO_TERM, Plan, Range, Term
from tests.unit.replicas import BASE, RUN, T1, T2, beat, contribution, elect, held, of_kind, order, plan, replica, sent, update


def offer(p: object, sender: str = "a") -> ev.Received:
    return ev.Received(sender, m.PlanOffer(p))  # type: ignore[arg-type]


def accepted(peer: object) -> ev.Durable:
    return peer.s.durable  # type: ignore[attr-defined,no-any-return]


def test_a_lone_founder_leads_plans_trains_and_commits_by_itself() -> None:
    lone = replica("a", view="a")
    assert lone.is_leader
    need = of_kind(lone.handle(ev.Tick(), lone.next_deadline()), ev.NeedPlan)[0]
    assert (need.round, need.attempt, need.members, need.base) == (4, 1, ("a",), BASE)
    p = plan(lone.term, members="a")
    assert order(lone.handle(ev.Planned(p), 5.0)) == ["SaveDurable", "StartExchange", "Train"]
    assert order(lone.handle(ev.Trained(p.digest, contribution(p, "a"), 4.0), 9.0)) == ["MemberFinished"]
    u = update(p, view="a")
    assert order(lone.handle(ev.Assembled(p.digest, u), 9.0)) == ["SaveHeld", "AppendCommit", "NeedPlan"]
    assert (lone.round, lone.digest) == (4, u.digest)


def test_the_way_of_a_round_at_a_member() -> None:
    member = replica("b")
    p = plan()
    assert order(member.handle(offer(p), 1.0)) == ["SaveDurable", "SaveDurable", "StartExchange", "Train"]
    finished = member.handle(ev.Trained(p.digest, contribution(p, "b"), 4.0), 5.0)
    assert order(finished) == ["Finished", "Finished", "MemberFinished"]
    for peer in "ac":
        told = ev.Received(peer, m.Finished(p.digest, contribution(p, peer), 4.0))
        assert order(member.handle(told, 5.0)) == ["MemberFinished"]
    u = update(p)
    reported = member.handle(ev.Assembled(p.digest, u), 6.0)
    assert order(reported) == ["SaveHeld", "HeldReport"]
    assert sent(reported, m.HeldReport)[0][0] == "a"
    assert order(member.handle(ev.Received("a", m.Commit(T1, u)), 6.0)) == ["AppendCommit"]
    assert member.held is None


def test_a_commit_without_the_update_at_hand_is_caught_up() -> None:
    peer = replica("z")
    actions = peer.handle(ev.Received("a", m.Commit(T1, update(plan()))), 1.0)
    assert of_kind(actions, ev.CatchUp)[0].sources == ("a",)
    assert peer.phase == "catch_up"
    peer.handle(ev.CaughtUp((update(plan()),)), 2.0)
    assert (peer.round, peer.phase) == (4, "joining")


def test_a_commit_that_overtakes_the_exchange_waits_for_it() -> None:
    member = replica("b")
    p = plan()
    member.handle(offer(p), 1.0)
    member.handle(ev.Trained(p.digest, contribution(p, "b"), 4.0), 5.0)
    for peer in "ac":
        member.handle(ev.Received(peer, m.Finished(p.digest, contribution(p, peer), 4.0)), 5.0)
    assert order(member.handle(ev.Received("a", m.Commit(T1, update(p))), 5.1)) == []
    follow = plan(T1, 1, start=200, round=5, base=update(p).digest)
    assert order(member.handle(offer(follow), 5.2)) == []
    actions = order(member.handle(ev.Assembled(p.digest, update(p)), 5.3))
    assert actions == ["AppendCommit", "SaveDurable", "StartExchange", "Train"], "the kept plan follows the commit"


def test_a_commit_that_overtakes_the_word_of_a_contributor_stands_for_it() -> None:
    member, offered = replica("c"), plan()
    made = update(offered)
    member.handle(ev.Received("a", m.PlanOffer(offered)), 0.0)
    for peer in "ac":
        final = m.Finished(offered.digest, contribution(offered, peer), 4.0)
        event = ev.Trained(offered.digest, final.contribution, 4.0) if peer == "c" else ev.Received(peer, final)
        member.handle(event, 4.0)
    others = m.Commit(T1, replace(made, contributors=tuple(contribution(offered, peer, "!") for peer in "abc")))
    for sender, commit in (("b", m.Commit(T1, made)), ("a", m.Commit(T2, made)), ("a", others)):
        assert not of_kind(copy.deepcopy(member).handle(ev.Received(sender, commit), 5.0), ev.MemberFinished)
    actions = member.handle(ev.Received("a", m.Commit(T1, made)), 5.0)
    assert [action.contribution for action in of_kind(actions, ev.MemberFinished)] == [contribution(offered, "b")]
    assert not of_kind(actions, ev.ProveClaim)
    assert not of_kind(actions, ev.CatchUp)
    late = m.Finished(offered.digest, contribution(offered, "b"), 4.0)
    assert not of_kind(member.handle(ev.Received("b", late), 5.1), ev.MemberFinished)
    assert of_kind(member.handle(ev.Assembled(offered.digest, made), 5.2), ev.AppendCommit)


def test_a_plan_is_accepted_once_and_older_ones_are_refused() -> None:
    member = replica("b")
    member.handle(offer(plan(attempt=2)), 1.0)
    assert order(member.handle(offer(plan(attempt=2)), 1.1)) == []
    assert order(member.handle(offer(plan(attempt=1)), 1.2)) == ["PlanRefused"]
    assert order(member.handle(offer(plan(attempt=2, start=300)), 1.3)) == ["PlanRefused"]


def test_a_plan_without_a_quorum_of_the_view_is_refused() -> None:
    assert order(replica("b").handle(offer(plan(members="bx")), 1.0))[-1] == "PlanRefused"


def test_work_serves_the_next_attempt_if_its_ranges_are_within() -> None:
    member = replica("b")
    member.handle(offer(plan(attempt=1)), 1.0)
    again = member.handle(offer(plan(attempt=2)), 2.0)
    assert of_kind(again, ev.Train)[0].reuse
    assert not of_kind(again, ev.Rewind)
    other = member.handle(offer(plan(attempt=3, members="bc")), 3.0)
    assert not of_kind(other, ev.Train)[0].reuse
    assert order(other).index("Rewind") < order(other).index("Train")


def test_a_restarted_member_never_trains_for_a_plan_it_had_accepted() -> None:
    first = replica("b")
    first.handle(offer(plan()), 1.0)
    restarted = replica("b", durable=accepted(first))
    refused = sent(restarted.handle(offer(plan()), 1.0), m.PlanRefused)
    assert refused[0][1].reason == RESTARTED
    assert of_kind(restarted.handle(offer(plan(attempt=2)), 2.0), ev.Train)


def test_nothing_of_a_lower_term_is_held_after_a_vote() -> None:
    member = replica("b")
    p = plan()
    member.handle(offer(p), 1.0)
    stopped = member.handle(ev.Received("c", m.VoteRequest(False, Term(2, "c"), 3, BASE, None)), 2.0)
    assert of_kind(stopped, ev.StopExchange)
    assert order(member.handle(ev.Assembled(p.digest, update(p)), 3.0)) == []
    assert order(member.handle(ev.Trained(p.digest, contribution(p, "b"), 4.0), 3.0)) == []


def test_a_held_record_survives_votes_and_new_plans_until_the_commit() -> None:
    record = held(plan(T1))
    member = replica("b", durable=ev.Durable(T1, False), held=record)
    member.handle(ev.Received("c", m.VoteRequest(False, Term(2, "c"), 3, BASE, record)), 1.0)
    member.handle(offer(plan(Term(2, "c"), start=300), "c"), 2.0)
    assert member.held == record
    member.handle(ev.Received("c", m.Commit(T2, record.update)), 3.0)
    assert member.held is None


def test_a_leader_commits_only_its_newest_attempt() -> None:
    leader = replica("a")
    elect(leader)
    for peer in "bc":
        leader.handle(beat(peer, leader="a", term=leader.term), 20.1)
    leader.handle(ev.Tick(), 21.9)
    first = plan(leader.term, 1)
    leader.handle(ev.Planned(first), 23.1)
    assert leader.plan == first
    refused = ev.Received("b", m.PlanRefused(first.digest, leader.term, "a", 3, BASE, NOT_READY))
    need = of_kind(leader.handle(refused, 23.2), ev.NeedPlan)
    assert [(n.attempt, n.members, n.previous) for n in need] == [(2, ("a", "c"), first)]
    leader.handle(ev.Planned(plan(leader.term, 2, "ac")), 23.3)
    for peer in "bc":
        late = m.HeldReport(4, leader.term, 1, first.digest, update(first))
        assert order(leader.handle(ev.Received(peer, late), 23.4)) == []


@pytest.mark.parametrize(("reason", "first_round"), [(NOT_READY, 5), (BEHIND, 5), ("it has a fault", 6)])
def test_a_member_that_had_not_caught_up_misses_that_round_alone(reason: str, first_round: int) -> None:
    leader, now = replica("a"), 21.0
    elect(leader)
    base, actions, members = BASE, list[ev.Action](), dict[int, tuple[str, ...]]()
    for round in (4, 5, 6):
        needs = of_kind(actions, ev.NeedPlan)
        while not needs:
            now += 0.5
            for peer in "bcd":
                leader.handle(beat(peer, leader.term, "a", leader.round, leader.digest), now)
            needs = of_kind(leader.handle(ev.Tick(), now), ev.NeedPlan)
        members[round] = needs[0].members
        p = plan(leader.term, 1, "".join(needs[0].members), start=100 * round, round=round, base=base)
        leader.handle(ev.Planned(p), now)
        if round == 4:
            (need,) = of_kind(
                leader.handle(ev.Received("d", m.PlanRefused(p.digest, leader.term, "a", 3, BASE, reason)), now), ev.NeedPlan
            )
            assert need.members == ("a", "b", "c")
            p = plan(leader.term, 2, "abc", start=100 * round, round=round, base=base)
            leader.handle(ev.Planned(p), now)
        made = update(p, "".join(leader.view))
        leader.handle(ev.Trained(p.digest, contribution(p, "a"), 4.0), now)
        for peer in p.peers[1:]:
            leader.handle(ev.Received(peer, m.Finished(p.digest, contribution(p, peer), 4.0)), now)
        now += 0.5
        leader.handle(beat("d", leader.term, "a", leader.round, leader.digest), now)
        actions = leader.handle(ev.Assembled(p.digest, made), now)
        for peer in p.peers[1:]:
            report = m.HeldReport(round, p.term, p.attempt, p.digest, made)
            actions += leader.handle(ev.Received(peer, report), now)
        assert leader.round == round
        base = made.digest
    assert members[4] == ("a", "b", "c", "d")
    assert min(round for round in (5, 6) if "d" in members[round]) == first_round


def test_an_unsaved_promise_stops_the_peer() -> None:
    halt = of_kind(replica("a").handle(ev.SaveFailed("no space left"), 1.0), ev.Halt)[0]
    assert halt.exit_code == 75
    assert "no space left" in halt.reason


def test_a_voter_that_the_others_cannot_do_without_leaves_by_an_update_without_bits() -> None:
    leader = replica("b", view="ab")
    elect(leader, "a")
    actions = leader.handle(beat("a", leader="b", term=leader.term, leaving=True), 20.5)
    (to, again), = sent(actions, m.HoldAgain)
    assert to == "a"
    assert (again.held.update.voters, again.held.update.body_bytes) == (("b",), 0)
    report = m.HeldReport(4, again.term, again.attempt, b"", again.held.update)
    assert "AppendCommit" in order(leader.handle(ev.Received("a", report), 20.6))
    assert leader.view == ("b",)


def test_a_peer_that_has_lost_a_committed_round_votes_only_once_it_has_it_again() -> None:
    """Else it could be half of a quorum that commits another update for the round that it was part of committing."""
    log = RoundLog(LogState(RUN, 3, BASE, ("a", "b", "c"), (Range(0, 100),), 100))
    b = Replica("b", "site-b", log, ev.Durable(T1, False), None, Settings(), newest_ever=4)
    b.handle(ev.Tick(), 0.0)
    for number in range(1, 40):
        assert not sent(b.handle(ev.Tick(), number), m.VoteRequest)
    assert "updates up to round 4, which this peer has lost" in b.waiting_for
    for pre in (True, False):
        vote = sent(b.handle(ev.Received("c", m.VoteRequest(pre, Term(2, "c"), 3, BASE, None)), 40.0), m.Vote)[0][1]
        assert not vote.granted
    b.handle(beat("a", round=4, digest=update(plan()).digest), 41.0)
    b.handle(ev.CaughtUp((update(plan()),)), 42.0)
    request = m.VoteRequest(False, Term(3, "c"), 4, update(plan()).digest, None)
    assert sent(b.handle(ev.Received("c", request), 43.0), m.Vote)[0][1].granted


def test_a_lone_peer_that_has_lost_its_newest_round_goes_on_from_the_one_before() -> None:
    log = RoundLog(LogState(RUN, 3, BASE, ("a",), (Range(0, 100),), 100))
    a = Replica("a", "site-a", log, ev.Durable(T1, False), None, Settings(), newest_ever=4)
    a.handle(ev.Tick(), 0.0)
    assert a.is_leader


def test_leavers_train_once_more_so_that_a_newcomer_gets_the_vote_that_is_needed_after_them() -> None:
    """Two of three voters leave; the third and a newcomer are enough trainers, but only one of them is a voter."""
    leader = replica("b", min_peers=2)
    elect(leader, "c")
    told = [beat(peer, leader="b", term=leader.term, leaving=peer in "ac") for peer in "acd"]
    need = [n for event in told for n in of_kind(leader.handle(event, 20.5), ev.NeedPlan)]
    need += of_kind(leader.handle(ev.Tick(), 23.6), ev.NeedPlan)
    assert [n.members for n in need] == [("a", "b", "c", "d")]
    p = plan(leader.term, members="abcd")
    leader.handle(ev.Planned(p), 23.7)
    u = update(p)
    actions = [a for peer in "ac" for a in leader.handle(ev.Received(peer, m.HeldReport(4, p.term, 1, p.digest, u)), 24.0)]
    leader.handle(ev.Trained(p.digest, contribution(p, "b"), 0.1), 24.0)
    actions += leader.handle(ev.Assembled(p.digest, u), 24.1)
    assert "AppendCommit" in order(actions)
    again = [message.held.update.voters for _, message in sent(actions, m.HoldAgain)]
    assert set(again) == {("b", "d")}, "the leavers go at once, and two voters are left"


def test_a_newcomer_does_not_wait_for_a_leader_that_is_lost() -> None:
    newcomer = replica("z")
    newcomer.handle(beat("a", leader="a"), 1.0)
    assert newcomer.waiting_for == "a plan of site-a"
    newcomer.handle(ev.Tick(), 9.0)
    assert newcomer.leader == ""
    assert newcomer.waiting_for.startswith("a leader; voters not heard:")


@pytest.mark.parametrize(("min_peers", "plans"), [(3, True), (4, False)])
def test_nothing_is_planned_with_fewer_than_min_peers(min_peers: int, plans: bool) -> None:
    leader = replica("a", min_peers=min_peers)
    elect(leader)
    actions = [a for peer in "bc" for a in leader.handle(beat(peer, leader="a", term=leader.term), 20.1)]
    actions += leader.handle(ev.Tick(), 23.0)
    assert bool(of_kind(actions, ev.NeedPlan)) == plans
    assert plans or leader.waiting_for == "1 more peer, min_peers is 4"
    assert leader.lacking == (0 if plans else 1)


def test_whoever_lost_a_peer_that_min_peers_asks_for_says_so_and_not_that_it_is_slow() -> None:
    """The leader, once it has given the attempt up; a member, once the one whose contribution it lacks is silent."""
    leader, member = replica("a", min_peers=3), replica("b", min_peers=3)
    elect(leader)
    p = plan(leader.term)
    for peer in "bc":
        leader.handle(beat(peer, leader="a", term=leader.term), 20.1)
    leader.handle(ev.Tick(), 23.0)
    leader.handle(ev.Planned(p), 23.1)
    for peer in "ac":
        member.handle(beat(peer, leader="a", term=leader.term), 23.1)
    member.handle(ev.Received("a", m.PlanOffer(p)), 23.2)
    for peer in (leader, member):
        assert (peer.phase, peer.lacking) == ("training", 0)
        peer.handle(ev.Trained(p.digest, contribution(p, peer.s.me), 4.0), 27.0)
        assert (peer.phase, peer.lacking) == ("straggler_idle", 0)
    for now in (29.0, 35.0):
        leader.handle(beat("b", leader="a", term=leader.term, phase="straggler_idle"), now)
        leader.handle(ev.Received("b", m.Finished(p.digest, contribution(p, "b"), 4.0)), now)
        member.handle(beat("a", leader="a", term=leader.term), now)
        for peer in (leader, member):
            peer.handle(ev.Tick(), now + 0.1)
    for peer, phase in ((leader, "planning"), (member, "idle")):
        assert (peer.phase, peer.lacking, peer.waiting_for) == (phase, 1, "1 more peer, min_peers is 3")
        assert peer.heartbeat_fields()["phase"] == "straggler_idle", "to the leader it is at work on the plan still"


def test_who_has_reached_the_end_of_the_run_and_ends_is_not_lost() -> None:
    peer = replica("a", final_round=3)
    peer.handle(beat("b", round=3), 1.0)
    peer.handle(beat("c", round=2), 1.0)
    lost = [note.fields["peer_id"] for note in of_kind(peer.handle(ev.Tick(), 30.0), ev.Note) if note.kind == "lost"]
    assert lost == ["c"]


def test_the_final_round_is_the_last_one_planned() -> None:
    lone = replica("a", view="a", final_round=3)
    assert not of_kind(lone.handle(ev.Tick(), 60.0), ev.NeedPlan)


@pytest.mark.case("C030")
def test_a_peer_that_comes_back_is_ready_only_once_it_has_what_the_others_have() -> None:
    back = replica("b")
    assert not back.heartbeat_fields()["ready"], "it has heard nobody yet"
    back.handle(beat("a", round=5, digest=b"5" * 32), 1.0)
    assert not back.heartbeat_fields()["ready"], "the run is two rounds ahead"
    back.handle(ev.FetchFailed("catch_up", "a"), 1.1)
    assert not back.s.catching_up
    assert not back.heartbeat_fields()["ready"], "it still is, though nobody could help yet"
    level = replica("b")
    level.handle(beat("a"), 1.0)
    assert level.heartbeat_fields()["ready"]


def test_a_peer_without_which_nothing_can_be_committed_does_not_wait_to_leave() -> None:
    pair = replica("b", view="ab", min_peers=2)
    pair.handle(beat("a"), 1.0)
    assert of_kind(pair.handle(ev.LeaveWanted("asked to"), 1.1), ev.Halt)
    three = replica("b", view="abc", min_peers=2)
    three.handle(beat("a"), 1.0)
    three.handle(beat("c"), 1.0)
    assert not of_kind(three.handle(ev.LeaveWanted("asked to"), 1.1), ev.Halt), "the others can go on: it leaves in order"


def test_a_plan_whose_leader_is_silent_long_past_its_deadline_is_given_up_and_its_work_kept() -> None:
    """An isolated member: it says so in its history, stops sending, and uses the work for the leader's next attempt."""
    member, p = replica("b"), plan()
    member.handle(offer(p), 1.0)
    member.handle(ev.Trained(p.digest, contribution(p, "b"), 4.0), 5.0)
    noted: list[ev.Action] = []
    now = 5.0
    while now < 60.0 and not of_kind(noted, ev.StopExchange):
        now = max(now + 0.5, member.next_deadline())
        noted = member.handle(ev.Tick(), now)
    assert now < 1.0 + 5.5 + 4 * 5.0 + 5.0, "its deadline and four heartbeat limits, about"
    assert [note.fields["reason"] for note in of_kind(noted, ev.Note) if note.kind == "discard"] == ["exchange_failed"]
    assert member.plan is None
    again = member.handle(offer(p), now + 1.0)
    assert [message.reason for _, message in sent(again, m.PlanRefused)] == [RESTARTED], "the leader opens the next attempt"
    (train,) = of_kind(member.handle(offer(plan(attempt=2)), now + 2.0), ev.Train)
    assert train.reuse, "nobody trains a step twice"


def test_a_plan_whose_leader_is_heard_is_not_given_up() -> None:
    member, p = replica("b"), plan()
    member.handle(offer(p), 1.0)
    for second in range(2, 90):
        member.handle(beat("a", leader="a"), float(second))
        assert not of_kind(member.handle(ev.Tick(), second + 0.5), ev.StopExchange)
    assert member.plan is not None


def test_a_silent_member_of_a_long_round_is_waited_for_while_others_train() -> None:
    """A quarter of the round's training; but no longer than the heartbeat limit once all others are done."""

    def silent_since_one(others_done: bool) -> float:
        leader = replica("a")
        elect(leader)
        now = 21.0
        for peer in "bc":
            leader.handle(beat(peer, leader.term), now)
        actions = leader.handle(ev.Tick(), leader.next_deadline())
        while not of_kind(actions, ev.NeedPlan):
            now += 0.5
            for peer in "bc":
                leader.handle(beat(peer, leader.term), now)
            actions = leader.handle(ev.Tick(), now)
        short = plan(leader.term)
        p = replace(short, train_seconds=400.0, members=tuple(replace(a, finish_seconds=400.0) for a in short.members))
        leader.handle(ev.Planned(p), now)
        begun = now
        if others_done:
            leader.handle(ev.Trained(p.digest, contribution(p, "a"), 4.0), now)
            leader.handle(ev.Received("b", m.Finished(p.digest, contribution(p, "b"), 4.0)), now)
        while now < begun + 300.0:
            now += 0.5
            leader.handle(beat("b", leader.term, leader="a", phase="training"), now)
            lost = [n for n in of_kind(leader.handle(ev.Tick(), now), ev.Note) if n.kind == "discard"]
            if lost:
                assert lost[0].fields["reason"] == "member_lost"
                return now - begun
        raise AssertionError("never planned without it")

    assert 100.0 <= silent_since_one(False) <= 102.0
    assert 5.0 <= silent_since_one(True) <= 8.0


def test_a_peer_that_cannot_save_what_comes_before_its_end_ends_all_the_same() -> None:
    """The driver drops the rest of the list with the save that failed, and the Halt in it: it once waited for ever."""
    peer = replica("a", view="a", final_round=4)
    need = of_kind(peer.handle(ev.Tick(), peer.next_deadline()), ev.NeedPlan)[0]
    p = plan(need.term, members="a")
    peer.handle(ev.Planned(p), 5.0)
    peer.handle(ev.Trained(p.digest, contribution(p, "a"), 4.0), 9.0)
    peer.handle(ev.LeaveWanted("asked to"), 9.0)
    peer.handle(ev.Assembled(p.digest, update(p, view="a")), 9.0)
    assert peer.halted
    (halt,) = of_kind(peer.handle(ev.SaveFailed("no space left on device"), 9.0), ev.Halt)
    assert halt.exit_code == 75
    assert "no space left" in halt.reason
    assert peer.handle(ev.Tick(), 10.0) == []


# ---------------------------------------------------------------- claims of rounds beyond


def claims(me: Replica, peer: str, round: int, now: float) -> list[ev.Action]:
    return me.handle(beat(peer, round=round, digest=b"?" * 32), now)


def answers(me: Replica, peer: str, proof: Any, now: float) -> list[ev.Action]:
    return me.handle(ev.ClaimAnswered(peer, me.round, proof), now)


def at_work() -> tuple[Replica, Plan]:
    """b trains for a plan of a's, who leads."""
    member, p = replica("b"), plan()
    for peer in "ac":
        member.handle(beat(peer, T1, "a"), 0.5)
    member.handle(offer(p), 1.0)
    return member, p


def test_a_claim_costs_the_round_at_work_nothing_until_it_is_proved() -> None:
    member, p = at_work()
    actions = claims(member, "c", 10**12, 1.1)
    (asked,) = of_kind(actions, ev.ProveClaim)
    assert (asked.peer, asked.round, asked.base) == ("c", 10**12, member.log.state)
    assert not of_kind(actions, ev.CatchUp)
    assert not of_kind(claims(member, "c", 10**12 + 1, 1.2), ev.ProveClaim), "it is being asked"
    assert not of_kind(answers(member, "c", "refuted", 1.3), ev.CatchUp)
    assert member.plan == p
    claims(member, "a", 5, 1.4)
    actions = answers(member, "a", "proved", 1.5)
    assert (of_kind(actions, ev.CatchUp)[0].round, of_kind(actions, ev.CatchUp)[0].sources[0]) == (5, "a")
    assert of_kind(actions, ev.Rewind)
    assert member.plan is None


def test_who_cannot_show_what_it_claims_is_asked_ever_more_rarely_named_once_and_not_believed() -> None:
    back, asked, named = replica("b"), list[float](), list[float]()
    for tenth in range(1200):
        now = 1.0 + tenth / 10
        actions = claims(back, "c", 10**12, now)
        if of_kind(actions, ev.ProveClaim):
            asked.append(now)
            actions = answers(back, "c", "refuted", now)
        named += [now for note in of_kind(actions, ev.Note) if note.kind == "unproved"]
    assert [round(later - before) for before, later in pairwise(asked)] == [1, 2, 4, 8, 16, 32], "after the last, 60 s"
    assert named == [asked[1]]
    assert back.heartbeat_fields()["ready"], "this peer does not wait for what nobody has"


def test_who_does_not_answer_is_asked_again_and_the_others_meanwhile() -> None:
    me = replica("b", view="abcdefg")
    asked = [claim.peer for peer in "acdefg" for claim in of_kind(claims(me, peer, 9, 1.0), ev.ProveClaim)]
    assert asked == ["a", "c", "d"], "a few at once"
    assert [claim.peer for claim in of_kind(answers(me, "a", "silent", 1.1), ev.ProveClaim)] == ["e"]
    assert [claim.peer for claim in of_kind(answers(me, "c", "silent", 1.1), ev.ProveClaim)] == ["f"]
    assert of_kind(answers(me, "e", "proved", 1.2), ev.CatchUp)
    assert me.next_deadline() > 1.2
    actions = [*me.handle(ev.FetchFailed("catch_up", "e"), 2.5), *me.handle(ev.Tick(), 3.0)]
    assert [claim.peer for claim in of_kind(actions, ev.ProveClaim)] == ["g"], "d and f are being asked, e has failed"


def test_a_claim_that_comes_true_speaks_for_its_peer() -> None:
    me = replica("b")
    for now in (1.0, 2.5):
        claims(me, "a", 4, now)
        answers(me, "a", "refuted", now)
    assert not me.behind.believes("a")
    claims(me, "a", 4, 5.0)
    answers(me, "a", "proved", 5.1)
    me.handle(ev.CaughtUp((update(plan()),)), 5.2)
    assert me.round == 4
    assert me.behind.believes("a")
    assert not me.behind.claims


def test_claims_of_many_take_bounded_room() -> None:
    me = replica("b")
    for number in range(3000):
        me.handle(ev.Received(f"stranger-{number}", m.Vote(False, T1, False, NO_TERM, "", 10**12, b"?" * 32, None)), 1.0)
    assert len(me.behind.claims) <= 1024


def exchanging_leader() -> tuple[Replica, Plan, float]:
    """The leader of a round that all three have finished: their bytes are under way."""
    leader = replica("a")
    elect(leader)
    now, actions = 21.0, list[ev.Action]()
    while not of_kind(actions, ev.NeedPlan):
        now += 0.5
        for peer in "bc":
            leader.handle(beat(peer, leader.term), now)
        actions = leader.handle(ev.Tick(), now)
    p = replace(plan(leader.term), exchange_seconds=30.0)
    leader.handle(ev.Planned(p), now)
    leader.handle(ev.Trained(p.digest, contribution(p, "a"), 4.0), now)
    for peer in "bc":
        leader.handle(ev.Received(peer, m.Finished(p.digest, contribution(p, peer), 4.0)), now)
    return leader, p, now


def held_by_the_others(leader: Replica, p: Plan, now: float) -> list[ev.Action]:
    for peer in "bc":
        leader.handle(beat(peer, leader.term, leader="a", phase="exchange"), now)
    reports = [ev.Received(peer, m.HeldReport(4, p.term, 1, p.digest, update(p))) for peer in "bc"]
    return [action for report in reports for action in leader.handle(report, now)]


def test_a_leader_whose_exchange_ends_a_moment_after_the_others_fetches_nothing() -> None:
    """The whole update once more over links that are just being used would make the next exchange late, and so on."""
    leader, p, now = exchanging_leader()
    assert not of_kind(held_by_the_others(leader, p, now + 30.0), ev.FetchHeld)
    assert not of_kind(leader.handle(ev.Tick(), now + 31.0), ev.FetchHeld)
    done = leader.handle(ev.Assembled(p.digest, update(p)), now + 31.5)
    assert of_kind(done, ev.AppendCommit), "it commits at once with its own bytes"
    assert not of_kind(done, ev.FetchHeld)


def test_a_leader_whose_exchange_does_not_end_fetches_what_the_others_hold() -> None:
    leader, p, now = exchanging_leader()
    held_by_the_others(leader, p, now + 30.0)
    begun, fetches = now + 30.0, list[ev.FetchHeld]()
    now = begun
    while not fetches and now < begun + 100.0:
        now += 0.5
        for peer in "bc":
            leader.handle(beat(peer, leader.term, leader="a", phase="exchange"), now)
        fetches = of_kind(leader.handle(ev.Tick(), now), ev.FetchHeld)
    assert 30.0 <= now - begun <= 35.0, "as long again as was planned for the exchange"
    assert fetches[0].held.update == update(p)


def test_a_leader_that_has_lost_its_exchange_fetches_at_once() -> None:
    leader, p, now = exchanging_leader()
    held_by_the_others(leader, p, now + 30.0)
    assert of_kind(leader.handle(ev.ExchangeLost(p.digest, ("c",)), now + 30.5), ev.FetchHeld)


def seconds_until_given_up(moves_for_seconds: float) -> float:
    """How long the leader, with 30 s planned, waits for an exchange that goes on for so long and then is still."""
    leader, p, begun = exchanging_leader()
    now = begun
    while now < begun + 3000.0:
        now += 1.0
        for peer in "bc":
            leader.handle(beat(peer, leader.term, leader="a", phase="exchange"), now)
        if now <= begun + moves_for_seconds:
            assert not leader.handle(ev.ExchangeMoved(p.digest), now)
        given_up = [note for note in of_kind(leader.handle(ev.Tick(), now), ev.Note) if note.kind == "discard"]
        if given_up:
            assert given_up[0].fields["reason"] == "exchange_failed"
            return now - begun
    raise AssertionError("never given up")


def test_an_exchange_is_given_up_when_nothing_of_it_comes_and_not_because_it_takes_long() -> None:
    patience = 4 * 30.0 + 2 * 5.0
    assert patience <= seconds_until_given_up(0.0) <= patience + 2.0
    assert 500.0 + patience <= seconds_until_given_up(500.0) <= 500.0 + patience + 2.0
    assert 900.0 <= seconds_until_given_up(3000.0) <= 902.0, "there is an end to it"


@pytest.mark.parametrize("moves", [True, False])
def test_a_commit_that_overtakes_a_slow_exchange_waits_as_long_again_as_it_took_the_others_while_it_moves(moves: bool) -> None:
    member, p = replica("b"), plan()
    member.handle(offer(p), 1.0)
    member.handle(ev.Trained(p.digest, contribution(p, "b"), 4.0), 5.0)
    for peer in "ac":
        member.handle(ev.Received(peer, m.Finished(p.digest, contribution(p, peer), 4.0)), 5.0)
    now, begun = 5.0 + 100 * p.exchange_seconds, list[ev.CatchUp]()
    assert order(member.handle(ev.Received("a", m.Commit(T1, update(p))), now)) == []
    until = now + 100 * p.exchange_seconds * (1.0 if moves else STILL_SHARE)
    while not begun and now < until + 100.0:
        now += 0.5
        actions = member.handle(ev.ExchangeMoved(p.digest), now) if moves else []
        for peer in "ca":
            actions += member.handle(beat(peer, T1, "a", round=4, digest=update(p).digest), now)
        begun = of_kind(actions + member.handle(ev.Tick(), now), ev.CatchUp)
    assert until <= now <= until + 5.0
    assert begun[0].sources[0] == "a", "who has shown it"


def test_a_commit_of_an_attempt_without_this_peer_is_not_waited_for() -> None:
    member, first = replica("c"), plan()
    made = update(plan(attempt=2, members="ab"))
    member.handle(offer(first), 1.0)
    member.handle(ev.Trained(first.digest, contribution(first, "c"), 4.0), 5.0)
    for heard in ("", "a", "b"):
        if heard:
            member.handle(ev.Received(heard, m.Finished(first.digest, contribution(first, heard), 4.0)), 5.0)
        actions = copy.deepcopy(member).handle(ev.Received("a", m.Commit(T1, made)), 5.5)
        assert not of_kind(actions, ev.MemberFinished)
        assert of_kind(actions, ev.CatchUp)


def test_a_leader_lets_others_take_as_long_again_as_its_own_exchange_took_before_it_sends_them_all() -> None:
    leader, p, begun = exchanging_leader()
    now = begun + 200.0
    leader.handle(ev.Assembled(p.digest, update(p)), now)
    until, pushed = now + 200.0, list[Any]()
    while not pushed:
        now += 0.5
        for peer in "bc":
            leader.handle(beat(peer, leader.term, leader="a", phase="exchange"), now)
        pushed = sent(leader.handle(ev.Tick(), now), m.HoldAgain)
    assert until <= now <= until + 2.0
