"""Votes: what is saved before it is said, who is elected, and what the winner must go on with."""

from __future__ import annotations

import pytest

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.election import Ambiguous, choose_held
from geomesh_p2p.core.types import NO_TERM, Term
from tests.unit.replicas import BASE, T1, T2, beat, elect, held, of_kind, order, plan, replica, sent, update


def request(term: Term, pre: bool = False, round: int = 3, with_held: object = None) -> m.VoteRequest:
    return m.VoteRequest(pre, term, round, BASE if round == 3 else b"x" * 32, with_held)  # type: ignore[arg-type]


def test_a_vote_is_on_disk_before_it_is_given() -> None:
    voter = replica("c")
    actions = voter.handle(ev.Received("b", request(T2)), 1.0)
    assert order(actions) == ["SaveDurable", "Vote"]
    assert sent(actions, m.Vote)[0][1].granted
    assert voter.term == T2


def test_a_pre_vote_changes_nothing() -> None:
    voter = replica("c")
    actions = voter.handle(ev.Received("b", request(T2, pre=True)), 1.0)
    assert order(actions) == ["Vote"]
    assert sent(actions, m.Vote)[0][1].granted
    assert voter.term == NO_TERM


def test_no_pre_vote_while_the_leader_is_heard() -> None:
    voter = replica("c")
    voter.handle(beat("a", leader="a"), 1.0)
    assert not sent(voter.handle(ev.Received("b", request(T2, pre=True)), 2.0), m.Vote)[0][1].granted
    assert sent(voter.handle(ev.Received("b", request(T2, pre=True)), 9.0), m.Vote)[0][1].granted


def test_a_term_is_a_pair_so_that_two_candidates_of_one_number_do_not_share_it() -> None:
    voter = replica("c")
    assert sent(voter.handle(ev.Received("a", request(Term(2, "a"))), 1.0), m.Vote)[0][1].granted
    assert sent(voter.handle(ev.Received("b", request(Term(2, "b"))), 1.0), m.Vote)[0][1].granted
    assert not sent(voter.handle(ev.Received("a", request(Term(2, "a"))), 1.0), m.Vote)[0][1].granted
    assert sent(voter.handle(ev.Received("a", m.PlanOffer(plan(Term(2, "a")))), 1.0), m.PlanRefused)[0][1].term == Term(2, "b")


def test_no_vote_for_a_candidate_with_fewer_rounds_or_a_lower_held_record() -> None:
    voter = replica("c", held=held(plan(T1)), durable=ev.Durable(T1, False))
    refused = sent(voter.handle(ev.Received("b", request(T2)), 1.0), m.Vote)[0][1]
    assert not refused.granted
    assert refused.held == held(plan(T1))
    assert not sent(voter.handle(ev.Received("b", request(T2, round=2)), 1.0), m.Vote)[0][1].granted
    assert sent(voter.handle(ev.Received("b", request(T2, with_held=held(plan(T1, 2)))), 1.0), m.Vote)[0][1].granted


def test_a_candidate_needs_a_quorum_of_the_whole_view() -> None:
    alone = replica("b", view="abcd")
    asked = sent(alone.handle(ev.Tick(), 20.0), m.VoteRequest)
    assert [to for to, _ in asked] == ["a", "c", "d"]
    one = m.Vote(True, asked[0][1].term, True, NO_TERM, "", 3, BASE, None)
    assert not sent(alone.handle(ev.Received("c", one), 20.0), m.VoteRequest), "half without the lowest id is no quorum"
    assert sent(alone.handle(ev.Received("d", one), 20.0), m.VoteRequest)


def test_nobody_stands_who_is_no_voter_or_an_observer() -> None:
    joiner = replica("z")
    assert not order(joiner.handle(ev.Tick(), 100.0))


def test_the_winner_has_a_held_update_held_again_under_its_own_term() -> None:
    old = held(plan(T1))
    leader = replica("c", durable=ev.Durable(T1, False), held=old)
    actions = elect(leader, "b")
    saved = of_kind(actions, ev.SaveHeld)[0].held
    assert saved.term == leader.term > T1
    assert saved.update == old.update
    assert [to for to, _ in sent(actions, m.HoldAgain)] == ["a", "b"]
    assert order(actions).index("SaveHeld") < order(actions).index("HoldAgain")
    assert not of_kind(actions, ev.AppendCommit), "held by a quorum under the old term is not enough"
    report = m.HeldReport(4, saved.term, saved.attempt, saved.plan, saved.update)
    committed = leader.handle(ev.Received("b", report), 21.0)
    assert order(committed)[:3] == ["Commit", "Commit", "AppendCommit"]


def test_the_winner_fetches_a_held_update_that_only_a_voter_has() -> None:
    old = held(plan(T1))
    leader = replica("c", durable=ev.Durable(T1, False), held=held(plan(T1)))
    leader.s.held = None
    actions = elect(leader, "b", held_by_voter=old)
    fetch = of_kind(actions, ev.FetchHeld)[0]
    assert fetch.sources == ("b",)
    assert not of_kind(actions, ev.NeedPlan)
    actions = leader.handle(ev.FetchedHeld(fetch.held), 21.0)
    assert order(actions) == ["SaveHeld", "HoldAgain", "HoldAgain"]


def test_a_leader_stands_again_above_any_higher_term_it_hears_of() -> None:
    leader = replica("a")
    elect(leader)
    actions = leader.handle(beat("z", term=Term(7, "z")), 21.0)
    assert not leader.is_leader
    assert order(actions)[:2] == ["SaveDurable", "VoteRequest"]
    assert leader.term == Term(8, "a")


def test_a_leader_steps_down_when_no_quorum_is_heard_for_a_lease() -> None:
    leader = replica("a")
    elect(leader, now=20.0)
    leader.handle(beat("b", leader="a", term=leader.term), 22.0)
    leader.handle(ev.Tick(), 27.9)
    assert leader.is_leader
    leader.handle(ev.Tick(), 28.1)
    assert not leader.is_leader
    assert "site-b" in leader.waiting_for


def test_choice_among_held_records() -> None:
    low, high = held(plan(T1, 1)), held(plan(T1, 2))
    assert choose_held({"a": None, "b": None}, ("a", "b", "c")) is None
    assert choose_held({"a": low, "b": high}, ("a", "b", "c")) == high
    odd = held(plan(T1, 2), salt="odd")
    with pytest.raises(Ambiguous):
        choose_held({"a": high, "b": odd}, ("a", "b", "c"))
    assert choose_held({"a": high, "b": odd, "c": high}, ("a", "b", "c")) == high
    assert choose_held({"a": high, "b": odd, "c": odd, "d": None}, ("a", "b", "c", "d", "e")) == odd


def test_two_committed_digests_of_one_round_stop_the_peer() -> None:
    peer = replica("a")
    actions = peer.handle(beat("b", digest=b"9" * 32), 1.0)
    halt = of_kind(actions, ev.Halt)[0]
    assert halt.exit_code == 4
    assert BASE.hex()[:16] in halt.reason
    assert (b"9" * 32).hex()[:16] in halt.reason
    assert peer.handle(ev.Received("b", m.Commit(T1, update(plan()))), 2.0) == []


def test_a_candidate_waits_as_long_as_answers_take() -> None:
    """Where every answer takes 10 s no quorum would ever answer in time; late answers tell how long to wait."""
    peer, answers = replica("a"), list[tuple[float, m.Vote]]()
    for quarter in range(40, 400):
        now = quarter / 4
        events: list[ev.Event] = [ev.Received("b", vote) for due, vote in answers if due == now]
        for event in [*events, ev.Tick()]:
            for to, asked in sent(peer.handle(event, now), m.VoteRequest):
                if to == "b":
                    answers.append((now + 10.0, m.Vote(asked.pre, asked.term, True, asked.term, "", 3, BASE, None)))
        if peer.is_leader:
            break
    assert peer.is_leader
    assert now < 60.0
