"""Claims hold or fail by the figures of a report, each for itself."""

from __future__ import annotations

from typing import Any

import pytest

from geomesh_p2p.lab.bench.claims import claims

GOOD: dict[str, Any] = {"time_to_target_seconds": 24.0, "straggler_idle_share_fastest": 0.02, "straggler_idle_share": 0.01,
                        "wan_idle_share": 0.07, "final_ppl_by_seed": [5.05]}  # fmt: skip
DILOCO: dict[str, Any] = {"time_to_target_seconds": 100.0, "straggler_idle_share_fastest": 0.25, "straggler_idle_share": 0.1,
                          "wan_idle_share": 0.66, "final_ppl_by_seed": [5.0]}  # fmt: skip


def failing(ours: dict[str, Any], **others: dict[str, Any]) -> list[str]:
    found = claims({"seeds": [1], "methods": {"geomesh": ours, "diloco": DILOCO, **others}})
    assert len(found) == 6 + len(others) + ("async" in others)
    assert all(claim.text.startswith("geomesh: ") for claim in found)
    return [claim.text for claim in found if not claim.holds]


def test_all_hold() -> None:
    assert failing(GOOD) == []
    assert failing({**GOOD, "straggler_idle_share_fastest": 0.0}) == []


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        ("time_to_target_seconds", 26.0, "time to target"),
        ("time_to_target_seconds", None, "time to target"),
        ("straggler_idle_share_fastest", 0.03, "of the fastest"),
        ("straggler_idle_share", 0.013, "of all sites"),
        ("wan_idle_share", 0.081, "WAN idle"),
        ("final_ppl_by_seed", [5.11], "perplexity"),
    ],
)
def test_each_figure_has_a_claim_of_its_own(figure: str, value: float | None, text: str) -> None:
    failed = failing({**GOOD, figure: value})
    assert failed
    assert all(text in claim for claim in failed)


def test_another_method_is_compared_where_it_was_played() -> None:
    assert failing(GOOD, **{"diloco-tuned-H": {**DILOCO, "time_to_target_seconds": 47.0}}) != []
    assert failing(GOOD, **{"diloco-tuned-H": {**DILOCO, "time_to_target_seconds": 49.0}}) == []
    assert failing(GOOD, **{"async": {**DILOCO, "time_to_target_seconds": 24.0}}) != []
    assert failing(GOOD, **{"async": {**DILOCO, "time_to_target_seconds": None, "final_ppl_by_seed": [5.06]}}) == []
    lost = failing(GOOD, **{"async": {**DILOCO, "final_ppl_by_seed": [5.04]}})
    assert lost == ["geomesh: final perplexity above that of async, as a share, median over seeds"]


@pytest.mark.parametrize(
    ("changes", "failing"),
    [({}, 0), ({"wan_idle_share": 0.021}, 1), ({"final_ppl_by_seed": [5.11]}, 1), ({"time_to_target_seconds": 26.0}, 1)],
)
def test_training_ahead_is_held_to_the_same_and_waits_less(changes: dict[str, Any], failing: int) -> None:
    delayed = {**GOOD, "wan_idle_share": 0.019, **changes}
    found = claims({"seeds": [1], "methods": {"geomesh-delayed": delayed, "diloco": DILOCO}})
    assert len(found) == 6
    assert all(claim.text.startswith("geomesh-delayed: ") for claim in found)
    assert sum(not claim.holds for claim in found) == failing


def test_the_methods_with_lion_are_compared_with_each_other() -> None:
    ours, theirs = {**GOOD, "final_ppl_by_seed": [6.01] * 3}, {**DILOCO, "final_ppl_by_seed": [6.0] * 3}
    methods = {"geomesh-lion": ours, "diloco-lion": theirs}
    found = claims({"seeds": [1, 2, 3], "methods": methods})
    assert len(found) == 6
    assert all(claim.holds and claim.text.startswith("geomesh-lion: ") for claim in found)


def test_over_three_seeds_less_perplexity_may_be_lost() -> None:
    def holds(seeds: list[int]) -> bool:
        ours = {**GOOD, "final_ppl_by_seed": [5.08] * len(seeds)}
        theirs = {**DILOCO, "final_ppl_by_seed": [5.0] * len(seeds)}
        return all(claim.holds for claim in claims({"seeds": seeds, "methods": {"geomesh": ours, "diloco": theirs}}))

    assert holds([1, 2])
    assert not holds([1, 2, 3])


def test_perplexities_are_compared_seed_by_seed() -> None:
    """The medians are 5.0 and 5.05, which would be within 1%; by seeds ours is worse by 4%, 4% and better by a half."""
    ours, theirs = {**GOOD, "final_ppl_by_seed": [5.2, 5.05, 3.0]}, {**DILOCO, "final_ppl_by_seed": [5.0, 4.85, 6.0]}
    found = claims({"seeds": [1, 2, 3], "methods": {"geomesh": ours, "diloco": theirs}})
    [lost] = [claim for claim in found if not claim.holds]
    assert lost.figure == pytest.approx(0.04)


@pytest.mark.parametrize(("accuracy", "low", "failing"), [(0.31, -0.009, 0), (0.29, -0.009, 1), (0.31, -0.011, 1)])
def test_continuation_choice_is_claimed_where_it_was_asked(accuracy: float, low: float, failing: int) -> None:
    diloco = {**DILOCO, "continuation_accuracy": accuracy, "continuation_stderr": 0.01}
    ours = {**GOOD, "continuation_against_diloco": {"low": low}}
    found = claims({"seeds": [1], "methods": {"geomesh": ours, "diloco": diloco}})
    assert len(found) == 8
    assert sum(not claim.holds for claim in found) == failing


def test_nothing_is_claimed_without_both() -> None:
    assert claims({"seeds": [1], "methods": {"geomesh": GOOD}}) == []
