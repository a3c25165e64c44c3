"""Numbers of whole rounds, with the real engine: what one peer learns, who counts how much, and steps that are skipped."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_run import LENGTH, LocalRun, engine_of, run_config, write_text

from geomesh_p2p.core import codec
from geomesh_p2p.engine.inner import learning_rate
from geomesh_p2p.errors import DataError
from tests.injection.proof import fired, inject
from tests.mesh.torch_peers import plain_training


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def spoil_gradient(engine: Any, steps: Collection[int], spoilt: list[int]) -> None:
    """Makes the gradient infinite in these steps (counted from now on), as an overflow does; `spoilt` fills with them."""
    number = iter(range(1_000_000))
    parameter = next(p for p in engine.model.module.parameters() if p.requires_grad)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if (at := next(number)) in steps:
            spoilt.append(at)
            return grad * math.inf
        return grad

    parameter.register_hook(hook)


# ---------------------------------------------------------------- one peer alone


@pytest.mark.case("C035")
def test_one_peer_equals_plain_training_under_the_outer_step(text: str) -> None:
    """With plain numbers, rate 1 and no momentum the outer step puts the anchor where training went: 100 steps in ten
    rounds are 100 steps of a plain loop, moments kept over the rounds."""
    alone = LocalRun(
        run_config(text, outer={"learning_rate": 1.0, "momentum": 0.0}, codec={"payload": "fp32"}), ["alone"]
    )
    plain = engine_of(alone.run)
    losses = plain_training(plain, alone.run.inner, steps=100, batch=4)
    rounds = [alone.round({"alone": 10})["alone"] for _ in range(10)]
    ours = [local.result.loss for local in rounds]
    theirs = [float(np.mean(losses[10 * i : 10 * i + 10])) for i in range(10)]
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours[-1] < 0.75 * ours[0]
    np.testing.assert_allclose(alone.anchor(), plain.weights(), rtol=1e-3, atol=1e-5)


@pytest.mark.case("C035")
def test_one_peer_learns_with_one_bit_too(text: str) -> None:
    alone = LocalRun(run_config(text), ["alone"])
    before = alone.models["alone"].engine.validate(0, 1)
    for _ in range(10):
        alone.round({"alone": 10})
    after = alone.models["alone"].engine.validate(0, 1)
    assert after[0] / after[1] < 0.8 * before[0] / before[1]


# ---------------------------------------------------------------- steps that are skipped


@pytest.mark.fault
@pytest.mark.case("C063")
def test_an_infinite_gradient_in_the_last_step_before_the_exchange_skips_that_step_alone(text: str) -> None:
    run = LocalRun(run_config(text), ["a", "b"])
    spoilt: list[int] = []
    inject(lambda: spoil_gradient(run.models["b"].engine, range(3, 4), spoilt))
    first = run.round({"a": 4, "b": 4})
    fired(spoilt == [3], "the gradient of b's last step was infinite")
    assert [first[name].result.skipped_steps for name in "ab"] == [0, 1]
    assert [first[name].contribution.abstains for name in "ab"] == [False, False]
    assert first["b"].contribution.tokens == first["a"].contribution.tokens, "what was read is credited: nobody reads it again"
    assert len(run.anchors) == 1
    second = run.round({"a": 4, "b": 4})
    assert [second[name].result.skipped_steps for name in "ab"] == [0, 0]
    assert len(run.anchors) == 1
    assert np.isfinite(run.anchor()).all()


@pytest.mark.fault
@pytest.mark.case("C065")
def test_overflow_in_every_step_abstains_and_then_ends_with_a_cause(text: str) -> None:
    run = LocalRun(run_config(text), ["a", "b"])
    spoilt: list[int] = []
    inject(lambda: spoil_gradient(run.models["b"].engine, range(1000), spoilt))
    anchors = [run.anchor().copy()]
    for _ in range(4):
        locals_ = run.round({"a": 4, "b": 12})
        fired(len(spoilt) >= 12, "every gradient of b overflowed")
        assert locals_["b"].contribution.abstains
        assert locals_["b"].contribution.reason == "none of 12 inner steps had a finite gradient"
        assert not locals_["a"].contribution.abstains
        assert len(run.anchors) == 1
        anchors.append(run.anchor().copy())
    assert not np.array_equal(anchors[0], anchors[-1]), "the others go on"
    with pytest.raises(DataError, match=r"nothing finite came of 50 inner steps in a row \(inner.max_skipped_steps") as raised:
        run.round({"a": 4, "b": 12})
    assert len(spoilt) == 50
    for part in (r"loss \d+\.\d+, ", r"learning rate 0\.00\d+\)", r"lower inner\.learning_rate", r"raise inner\.warmup_tokens"):
        assert re.search(part, str(raised.value)), part
    assert raised.value.exit_code == 4


@pytest.mark.case("C065")
def test_a_step_that_works_starts_the_count_anew(text: str) -> None:
    run, spoilt = LocalRun(run_config(text, inner={"max_skipped_steps": 5}), ["a"]), list[int]()
    spoil_gradient(run.models["a"].engine, [at for at in range(20) if at % 5], spoilt)
    skipped = [run.round({"a": 5})["a"].result.skipped_steps for _ in range(4)]
    assert skipped == [4] * 4
    assert len(spoilt) == 16


@pytest.mark.case("C065")
def test_steps_to_weights_that_cannot_be_sent_count_as_well(text: str) -> None:
    """The first gradient of each round is finite, its step goes far away, and the next round begins at the anchor again."""
    run = LocalRun(run_config(text, inner={"max_skipped_steps": 6, "learning_rate": 1e30, "clip_norm": None}), ["a"])
    for _ in range(2):  # more steps than that, but one round may fail by accident
        local = run.round({"a": 4})["a"]
        assert local.result.skipped_steps == 3
        assert "not finite after the inner steps" in local.contribution.reason
    with pytest.raises(DataError, match="nothing finite came of 12 inner steps in a row"):
        run.round({"a": 4})


# ---------------------------------------------------------------- who counts how much


@pytest.mark.case("C072")
def test_contributions_count_by_their_tokens_and_none_counts_nothing(text: str) -> None:
    """A peer at ten times the speed has ten elevenths; one without data is not in the denominator."""
    run = LocalRun(run_config(text, outer={"learning_rate": 1.0, "momentum": 0.0}), ["empty", "fast", "slow"])
    run.models["empty"].engine.feed.supply = starving(run.models["empty"].engine)  # type: ignore[method-assign]
    before = run.anchor().copy()
    locals_ = run.round({"empty": 4, "fast": 20, "slow": 2})
    assert locals_["empty"].contribution.abstains
    assert "starved" in locals_["empty"].contribution.reason
    assert {name: locals_[name].contribution.tokens for name in locals_} == {
        "empty": 0, "fast": 20 * 4 * LENGTH, "slow": 2 * 4 * LENGTH
    }  # fmt: skip
    layout = run.models["fast"].layout
    payloads = [locals_[name].payload for name in ("fast", "slow")]
    mean = np.empty(layout.parameters, np.float32)
    codec.mean_of(layout, run.run.codec, payloads, [10, 1], 0, layout.parameters, mean)
    assert np.array_equal(run.anchor(), before - mean)
    assert run.log.tokens == 22 * 4 * LENGTH
    credited = sum(len(r) for r in run.log.credited)
    assert credited == 22 * 4
    # What the empty-handed peer was to read is handed out again.
    missing = {p for r in run.plan({"empty": 4}, 4).members[0].ranges for p in range(r.start, r.stop)}
    assert missing == set(range(16))


def starving(engine: Any) -> Any:
    from geomesh_p2p.engine.feed import Feed, Patience

    class Silent:
        def batch(self, positions: Any) -> Any:
            raise OSError("nothing there")

    return Feed(Silent(), Patience(read_seconds=0.05, retry_seconds=0.01)).supply


# ---------------------------------------------------------------- learning rates


@pytest.mark.case("C069")
def test_learning_rates_go_on_over_a_resume_and_are_the_runs_for_a_late_joiner(text: str, tmp_path: Path) -> None:
    """Warm-up and decay follow the tokens of the whole run: what a peer lived through does not matter."""
    settings = run_config(text, inner={"warmup_tokens": 4_000, "total_tokens": 12_000, "scale_learning_rate": "none"})

    def rates(stop_after: int | None) -> list[dict[str, float]]:
        run, seen = LocalRun(settings, ["a", "b"]), []
        for round in range(10):
            if round == stop_after:  # b's process ends and comes back from its folder
                run.models["b"].engine.save_inner(str(tmp_path / "inner"))
                again = engine_of(settings, "b")
                again.load_inner(str(tmp_path / "inner"))
                run.add("b", again)
            if round == 6:
                run.add("late")
            steps = dict.fromkeys(["a", "b"] if round < 6 else ["a", "b", "late"], 5)
            seen.append({name: local.result.learning_rate for name, local in run.round(steps).items()})
        return seen

    whole, resumed = rates(None), rates(7)
    assert whole == resumed
    assert all(len(set(each.values())) == 1 for each in whole), "all peers of a round have one rate"
    by_round = [each["a"] for each in whole]
    top = by_round.index(max(by_round))
    assert 0 < top < 9
    assert by_round[: top + 1] == sorted(by_round[: top + 1])
    assert by_round[top:] == sorted(by_round[top:], reverse=True), "it never warms up again"
    tokens = [640 * (round + 1) for round in range(6)] + [3840 + 960 * (round + 1) for round in range(4)]
    assert by_round == pytest.approx([learning_rate(settings.inner, t) for t in tokens])
