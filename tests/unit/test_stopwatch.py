"""Where a round's time went: the parts add up, and what is trained ahead is compute, not idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from geomesh_p2p.core.observations import PeerTimes
from geomesh_p2p.core.ports import InnerResult, LocalRound
from geomesh_p2p.swarm.stopwatch import Ahead, Stopwatch, times_of

RESULT = InnerResult(
    tokens=10, ranges=(), steps=5, loss=1.0, seconds=4.0, data_wait_seconds=0.5, step_seconds=(), skipped_steps=0,
    overrun_seconds=0.0, learning_rate=0.1,
)  # fmt: skip
LOCAL = LocalRound(contribution=None, payload=None, result=RESULT, codec_seconds=0.2, validation_seconds=0.0)  # type: ignore[arg-type]


def times(ahead: tuple[Ahead, ...] = (), **local: Any) -> PeerTimes:
    """Opened at 0, encoded at 5, the last member finished at 6, folded at 9, which took 0.5."""
    watch = Stopwatch(None, 0.1, 5.0, replace(LOCAL, **local), finished={"b": 6.0})  # type: ignore[arg-type]
    found = times_of(watch, 0.0, 9.0, 0.5, ahead)
    assert found.wall == 9.0
    assert sum(vars(found).values()) == pytest.approx(18.0)
    return found


def test_without_overlap() -> None:
    found = times()
    assert (found.compute, found.data_wait, found.straggler_idle, found.wan_idle, found.codec) == (3.5, 0.5, 1.0, 2.5, 0.7)


def test_who_trains_ahead_all_the_time_is_never_idle() -> None:
    found = times((Ahead(5.0, 8.5, 0.0),))
    assert (found.compute, found.straggler_idle, found.wan_idle) == (7.0, 0.0, 0.0)


def test_idle_is_what_is_left_once_the_steps_are_used_up() -> None:
    found = times((Ahead(5.0, 6.5, 0.25),))
    assert (found.compute, found.data_wait, found.straggler_idle, found.wan_idle) == (4.75, 0.75, 0.0, 2.0)
    found = times((Ahead(5.0, 5.25, 0.0),))
    assert (found.straggler_idle, found.wan_idle) == (0.75, 2.5)


def test_steps_done_in_the_round_before_are_not_of_this_one() -> None:
    """Of 4 s, 3 were done ahead: 2 before the last update, in the round before, and 1 before this round's plan."""
    found = times((Ahead(0.0, 1.0, 0.1), Ahead(5.0, 7.0, 0.0)), ahead_seconds=3.0, ahead_data_wait_seconds=0.3)
    assert found.data_wait == pytest.approx(0.1 + 0.2)
    assert found.compute == pytest.approx((1.0 - 0.1) + (1.0 - 0.2) + 2.0)
    assert (found.straggler_idle, found.wan_idle) == (0.0, 1.5)


def test_who_is_no_member_any_more_has_computed_all_the_same() -> None:
    found = times_of(None, 0.0, 4.0, 0.5, (Ahead(0.0, 1.0, 0.25),))
    assert (found.compute, found.data_wait, found.codec, found.control) == (0.75, 0.25, 0.5, 2.5)
