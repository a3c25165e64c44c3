"""Training ahead with the real engine: what becomes of the weights when the update comes, and what is dropped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomesh_p2p import train
from geomesh_p2p.core import ahead, codec, outer
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.ports import AdoptState, FoldUpdate, LocalRound, RollBack, TrainRound
from geomesh_p2p.core.types import Plan, Range, Update
from geomesh_p2p.train import LocalModel, fold, go_ahead, inner_round, validate_anchor
from tests.unit.local_run import LocalRun, NeverCloses, run_config, write_text

BATCH, STEPS, AHEAD = 4, 6, 3


class Waits:
    """The mesh of a peer whose next work comes after so many steps."""

    def __init__(self, model: LocalModel, steps: int) -> None:
        self.loop, self.until = model.engine.loop, model.engine.loop.steps + steps  # type: ignore[attr-defined]

    def has_work(self) -> bool:
        return bool(self.loop.steps >= self.until)


class Delayed(LocalRun):
    """Rounds of a and b with three steps ahead each."""

    def assign(self) -> Plan:
        """What the planner does: the beginning is what was reserved, if this is not the first round."""
        plan = self.plan(dict.fromkeys(self.names, STEPS), BATCH)
        each, beyond, start, members = STEPS * BATCH, AHEAD * BATCH, len(self.names) * STEPS * BATCH * (plan.round - 1), []
        for k, member in enumerate(plan.members):
            first, rest = Range(start + k * beyond, start + (k + 1) * beyond), each - beyond
            fresh = start + len(self.names) * beyond + k * rest
            following = start + len(self.names) * each + k * beyond
            ranges = (first, Range(fresh, fresh + rest)) if plan.round > 1 else member.ranges
            members.append(replace(member, ranges=ranges, ahead=(Range(following, following + beyond),)))
        return replace(plan, members=tuple(members))

    def contribute(self, plan: Plan, validate: bool = False) -> dict[str, LocalRound]:
        return {
            m.site: inner_round(NeverCloses(), self.models[m.site], TrainRound(plan, m, validate=validate))
            for m in plan.members
        }

    def update(self, plan: Plan, locals_: dict[str, LocalRound]) -> tuple[Update, bytes]:
        body = b"".join(local.payload.tobytes() for local in locals_.values())
        contributors = tuple(local.contribution for local in locals_.values())
        update = Update(plan.round, plan.base, "gather", (), contributors, ("id",), digest_bytes(body), len(body))
        self.log.append(update)
        return update, body

    def commit(self, plan: Plan, locals_: dict[str, LocalRound]) -> None:
        update, body = self.update(plan, locals_)
        for name, model in self.models.items():
            fold(model, FoldUpdate(update, body, locals_[name].payload))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Delayed]:
    path = write_text(tmp_path)
    return lambda **sections: Delayed(run_config(path, **sections), ["a", "b"])


def weights(model: LocalModel) -> Any:
    return np.array(model.engine.weights())


def test_it_goes_ahead_from_where_it_expects_the_anchor(make: Callable[..., Delayed]) -> None:
    run, twin = make(), make()
    for number in (1, 2):
        plan = run.assign()
        locals_ = run.contribute(plan)
        if number == 1:
            again = twin.contribute(plan)
            run.commit(plan, locals_)
            twin.commit(plan, again)
    again = twin.contribute(replace(plan, members=tuple(replace(m, ahead=()) for m in plan.members)))
    assert again["a"].contribution.payload == locals_["a"].contribution.payload
    a, b = run.models["a"], twin.models["a"]
    assert a.state.momentum.any()
    expected = outer.expected_anchor(b.state, weights(b), 0.5, b.outer)
    assert weights(a).tobytes() == expected.tobytes(), "its share of the tokens is a half"


def test_the_weights_are_re_based_bit_for_bit(make: Callable[..., Delayed]) -> None:
    run = make()
    plan = run.assign()
    locals_ = run.contribute(plan)
    a = run.models["a"]
    sent = weights(a)
    result = go_ahead(Waits(a, 2), a)
    assert (result.steps, result.ranges) == (2, (Range(48, 56),))
    now = weights(a)
    assert (now != sent).any()
    run.commit(plan, locals_)
    assert weights(a).tobytes() == (a.state.anchor + (now - sent)).tobytes()
    assert run.models["b"].engine.weights().tobytes() == a.state.anchor.tobytes(), "b has done nothing ahead"
    assert len(run.anchors) == 1


def test_a_round_goes_on_from_what_was_done_ahead_of_it(make: Callable[..., Delayed]) -> None:
    """Against the same steps done by hand: before the update, between update and plan, and after."""
    run, twin = make(), make()
    plan = run.assign()
    locals_ = run.contribute(plan)
    again = twin.contribute(twin.assign())
    assert locals_["a"].contribution.payload == again["a"].contribution.payload
    a, b = run.models["a"], twin.models["a"]
    mine = plan.members[0]

    go_ahead(Waits(a, 1), a)
    sent = weights(b)
    first_plan, first = ahead.steps_ahead(plan, mine, 0)
    steps = iter((False, True))
    b.engine.train(first, first_plan, lambda: next(steps), time.monotonic())
    progress = weights(b) - sent

    run.commit(plan, locals_)
    go_ahead(Waits(a, 1), a)
    twin.commit(plan, again)
    b.engine.set_weights(b.state.anchor + progress)
    then_plan, then = ahead.steps_ahead(plan, mine, 1)
    steps = iter((False, True))
    b.engine.train(then, then_plan, lambda: next(steps), time.monotonic())
    assert weights(a).tobytes() == weights(b).tobytes()

    second = run.assign()
    last = replace(second.members[0], ahead=())  # so that the weights stay those that its contribution is made from
    local = inner_round(NeverCloses(), a, TrainRound(second, last, validate=True))
    b.ahead = None
    rest_plan, rest = ahead.steps_left(second, second.members[0], 2)
    b.engine.train(rest, rest_plan, lambda: False, time.monotonic())
    assert weights(a).tobytes() == weights(b).tobytes()
    assert local.contribution.ranges == second.members[0].ranges
    assert local.contribution.tokens == STEPS * BATCH * 16
    assert local.result.steps == STEPS
    assert 0 < local.ahead_seconds < local.result.seconds


def test_validation_is_of_the_anchor_and_progress_comes_back(make: Callable[..., Delayed]) -> None:
    run = make()
    plan = run.assign()
    locals_ = run.contribute(plan)
    a, b = run.models["a"], run.models["b"]
    go_ahead(Waits(a, 2), a)
    run.commit(plan, locals_)
    kept = weights(a)
    assert validate_anchor(a, 0, 1) == validate_anchor(b, 0, 1)
    assert weights(a).tobytes() == kept.tobytes()
    assert validate_anchor(a, 0, 1, skip=True) == (0.0, 0)
    assert weights(a).tobytes() == kept.tobytes()


def test_the_residual_is_of_what_was_sent(make: Callable[..., Delayed]) -> None:
    run, twin = (make(codec={"residual": True}) for _ in range(2))
    for model in (*run.models.values(), *twin.models.values()):
        model.residual = np.zeros_like(model.state.anchor)
    plan = run.assign()
    locals_ = run.contribute(plan)
    a, b = run.models["a"], twin.models["a"]
    again = twin.contribute(replace(plan, members=tuple(replace(m, ahead=()) for m in plan.members)))
    assert again["a"].contribution.payload == locals_["a"].contribution.payload
    sent = weights(b)
    assert (sent != weights(a)).any(), "it goes ahead from elsewhere"
    wanted = codec.new_residual(a.layout, a.state.anchor, sent, a.codec, locals_["a"].payload, a.residual)
    go_ahead(Waits(a, 3), a)
    run.commit(plan, locals_)
    assert a.residual is not None
    assert a.residual.tobytes() == wanted.tobytes()


def test_no_more_is_trained_than_is_reserved(make: Callable[..., Delayed]) -> None:
    run = make()
    plan = run.assign()
    run.contribute(plan)
    a = run.models["a"]
    assert go_ahead(Waits(a, 1), a).steps == 1
    assert a.ahead is not None
    assert a.ahead.goes_on
    assert go_ahead(Waits(a, 100), a).steps == AHEAD - 1
    assert not a.ahead.goes_on


def test_rounds_follow_each_other_and_stay_equal(make: Callable[..., Delayed]) -> None:
    """Peers do unlike numbers of steps ahead; every position is credited once, and the anchors stay the same."""
    run = make()
    for number in range(1, 5):
        plan = run.assign()
        locals_ = run.contribute(plan, validate=True)
        assert all(local.contribution.tokens == STEPS * BATCH * 16 for local in locals_.values())
        assert [local.result.steps for local in locals_.values()] == [STEPS, STEPS]
        for k, model in enumerate(run.models.values()):
            if number != 2:
                go_ahead(Waits(model, (number + k) % 4), model)
        run.commit(plan, locals_)
        assert len(run.anchors) == 1
    assert run.log.credited == (Range(0, 2 * STEPS * BATCH * 4),)


# ---------------------------------------------------------------- dropped


def begun(run: Delayed) -> tuple[Plan, dict[str, LocalRound], LocalModel]:
    plan = run.assign()
    locals_ = run.contribute(plan)
    a = run.models["a"]
    go_ahead(Waits(a, 2), a)
    return plan, locals_, a


def test_who_is_not_in_the_update_begins_from_the_anchor(make: Callable[..., Delayed]) -> None:
    run = make()
    plan, locals_, a = begun(run)
    update, body = run.update(plan, {"b": locals_["b"]})
    fold(a, FoldUpdate(update, body, None))
    assert a.ahead is None
    assert a.engine.weights().tobytes() == a.state.anchor.tobytes()


@pytest.mark.parametrize("change", ["batch", "positions", "round"])
def test_another_assignment_begins_from_the_anchor(make: Callable[..., Delayed], change: str) -> None:
    run = make()
    plan, locals_, a = begun(run)
    run.commit(plan, locals_)
    second = run.assign()
    mine = second.members[0]
    if change == "batch":
        mine = replace(mine, batch=3, inner_steps=8, last_batch=3)
    elif change == "positions":
        mine = replace(mine, ranges=(Range(500, 524),))
    else:
        second = replace(second, round=second.round + 1)
    second = replace(second, members=(mine, *second.members[1:]))
    started: list[bytes] = []
    real = a.engine.train

    def spying(*args: Any) -> Any:
        started.append(a.engine.weights().tobytes())
        return real(*args)

    a.engine.train = spying  # type: ignore[method-assign]
    local = inner_round(NeverCloses(), a, TrainRound(second, mine, validate=False))
    assert started == [a.state.anchor.tobytes()]
    assert local.contribution.ranges == mine.ranges
    assert local.ahead_seconds == 0


def test_a_round_planned_anew_begins_from_the_anchor(make: Callable[..., Delayed]) -> None:
    """Other positions for the same round: the contribution is void, and what came after it too."""
    run = make()
    plan, _, a = begun(run)
    other = replace(plan, attempt=2, members=(replace(plan.members[0], ranges=(Range(100, 124),)), plan.members[1]))
    inner_round(NeverCloses(), a, TrainRound(other, other.members[0], validate=False))
    assert a.ahead is not None
    assert (a.ahead.plan, a.ahead.steps) == (other, 0)


@pytest.mark.parametrize("how", ["adopt", "roll_back"])
def test_another_state_drops_it(make: Callable[..., Delayed], how: str) -> None:
    run = make()
    _, _, a = begun(run)
    state = a.state.anchor * np.float32(0.5), np.zeros_like(a.state.momentum)
    if how == "adopt":
        train.adopt(a, AdoptState(7, lambda: state))
    else:
        update = Update(1, run.log.digest, "gather", (), (), ("id",), b"", 0)
        assert train.roll_back(a, RollBack(update, lambda _round: state)) == "rolled_back"
    assert a.ahead is None
    assert a.engine.weights().tobytes() == state[0].tobytes()


def test_who_abstains_trains_nothing_ahead(make: Callable[..., Delayed]) -> None:
    run = make()
    plan = run.assign()
    a = run.models["a"]
    local = inner_round(NeverCloses(lambda _plan: True), a, TrainRound(plan, plan.members[0], validate=False))
    assert local.contribution.abstains
    assert a.ahead is None
