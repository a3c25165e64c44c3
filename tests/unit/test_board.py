"""What a peer says of itself to `geomesh status`, made from observations alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from geomesh_p2p.core import observations as seen
from geomesh_p2p.telemetry.board import LONGEST_TEXT, PERPLEXITIES_KEPT, WARNINGS_KEPT, StatusBoard
from tests.unit.test_telemetry import PLAN, ROUND, FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def board(clock: FakeClock) -> StatusBoard:
    return StatusBoard("north", goal=10, clock=clock)


def test_before_anything_has_happened_nothing_is_claimed(board: StatusBoard) -> None:
    told = board.snapshot()
    assert (told["site"], told["phase"], told["goal"]) == ("north", "starting", 10)
    for unknown in ("eta_seconds", "perplexity", "plan", "straggler_idle_share", "committed_seconds_ago"):
        assert told[unknown] is None


def test_rounds_give_pace_idle_shares_and_an_end(board: StatusBoard, clock: FakeClock) -> None:
    board(seen.PlanAdopted(PLAN))
    for round in (5, 6):
        board(replace(ROUND, round=round))
    board(seen.Validated(6, 9.5, final=False))
    board(seen.LeaderChanged(3, "south", False))
    clock.now += 4.0
    told = board.snapshot()
    assert (told["round"], told["leader"], told["term"]) == (6, "south", 3)
    assert told["committed_seconds_ago"] == 4.0
    assert told["round_seconds"] == pytest.approx(2.8)
    assert told["eta_seconds"] == pytest.approx(4 * 2.8)
    assert told["straggler_idle_share"] == pytest.approx(0.2 / 2.8)
    assert told["wan_idle_share"] == pytest.approx(0.3 / 2.8)
    assert (told["perplexity"], told["perplexity_round"]) == (9.5, 6)
    assert [member["site"] for member in told["plan"]["members"]] == ["north", "south"]
    assert json.loads(json.dumps(told)) == told


def test_what_was_caught_up_is_no_pace(board: StatusBoard) -> None:
    board(ROUND)
    board(seen.CaughtUpTo(9, 4, 1.0))
    told = board.snapshot()
    assert (told["round"], told["round_seconds"], told["eta_seconds"]) == (9, None, None)


def test_figures_of_a_phase_go_with_it(board: StatusBoard) -> None:
    board(seen.PhaseChanged("training", 5))
    board(seen.TrainingProgress(6, 2, 4, 1000.0, float("nan")))
    told = board.snapshot()
    assert (told["step"], told["tokens_per_second"], told["loss"]) == ([2, 4], 1000.0, None)
    board(seen.PhaseChanged("exchange", 5, "south"))
    board(seen.ExchangeProgress(6, 30, 60, 10, 1.0))
    told = board.snapshot()
    assert (told["step"], told["exchange_share"], told["waiting_for"]) == (None, 0.5, "south")


def test_warnings_are_the_newest_and_bounded(board: StatusBoard, clock: FakeClock) -> None:
    for number in range(3 * WARNINGS_KEPT):
        board(seen.Warned("seed_unreachable", f"{number} " + "x" * 10_000))
        clock.now += 1.0
    warnings = board.snapshot()["warnings"]
    assert len(warnings) == WARNINGS_KEPT
    assert warnings[-1]["text"].startswith(f"{3 * WARNINGS_KEPT - 1} ")
    assert warnings[-1]["seconds_ago"] == 1.0
    assert max(len(one["text"]) for one in warnings) == LONGEST_TEXT


def test_who_is_lost_is_among_the_warnings_and_who_has_left_is_not(board: StatusBoard, clock: FakeClock) -> None:
    board(seen.PeerLost("p", "south", 5.2))
    board(seen.PeerLost("q", "west", 5.2, left=True))
    clock.now += 2.0
    text = "south is lost: not heard for 5.2 s"
    assert board.snapshot()["warnings"] == [{"seconds_ago": 2.0, "reason": "peer_lost", "text": text}]


def test_there_is_no_telling_the_end_while_there_is_nobody_to_plan_or_to_train_with(board: StatusBoard) -> None:
    board(seen.LeaderChanged(3, "south", False))
    board(ROUND)
    assert board.snapshot()["eta_seconds"] is not None
    for waiting_for, lacking in (("a quorum of the voters: south", 0), ("a leader to be elected", 0), ("1 more peer", 1)):
        board(seen.PhaseChanged("planning", 5, waiting_for, lacking=lacking))
        assert board.snapshot()["eta_seconds"] is None, waiting_for
    board(seen.PhaseChanged("exchange", 5, "the exchange"))
    assert board.snapshot()["eta_seconds"] is not None
    board(seen.LeaderChanged(4, "", False))
    assert board.snapshot()["eta_seconds"] is None


def test_perplexities_of_earlier_rounds_are_kept_some_time(board: StatusBoard) -> None:
    for round in range(2 * PERPLEXITIES_KEPT):
        board(seen.Validated(round, 9.0 - round / 1000, final=False))
    told = board.snapshot()["perplexities"]
    assert len(told) == PERPLEXITIES_KEPT
    assert told[-1] == {"round": 127, "perplexity": pytest.approx(8.873)}
