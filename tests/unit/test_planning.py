"""Whom a leader's plans leave out, and when it tries them again."""

from __future__ import annotations

from itertools import pairwise

from geomesh_p2p.swarm.planning import FIRST_TRY_ROUNDS, LAST_TRY_ROUNDS, LeftOut

ALL, FEW = frozenset("abd"), frozenset("ab")


def tries(left: LeftOut, rounds: range, among: frozenset[str] = ALL) -> list[int]:
    """The rounds in which d is tried, if it is left out in all others."""
    found = []
    for round in rounds:
        due = left.due(round)
        found += [round] if due else []
        left.planned(round, among, FEW | due)
    return found


def test_who_is_left_out_is_tried_again_ever_more_rarely() -> None:
    found = tries(LeftOut(), range(1, 400))
    assert found[0] == 1 + FIRST_TRY_ROUNDS
    pauses = [later - earlier for earlier, later in pairwise(found)]
    assert pauses[:3] == [16, 32, 64]
    assert set(pauses[3:]) == {LAST_TRY_ROUNDS}


def test_a_try_that_the_planner_refuses_counts_as_one() -> None:
    left = LeftOut()
    due = []
    for round in range(1, 60):
        due += [round] if left.due(round) else []
        left.planned(round, ALL, FEW)
    assert due == [9, 25, 57]


def test_who_takes_part_again_by_itself_or_is_gone_begins_anew() -> None:
    for among, members in ((ALL, ALL), (FEW, FEW)):
        left = LeftOut()
        tries(left, range(1, 30))
        left.planned(30, among, members)
        assert not left.due(10**6)
        assert tries(left, range(31, 60)) == [31 + FIRST_TRY_ROUNDS, 31 + FIRST_TRY_ROUNDS + 16]


def test_nobody_is_tried_while_all_take_part() -> None:
    assert tries(LeftOut(), range(1, 100), FEW) == []
