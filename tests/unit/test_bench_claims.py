"""Claims hold or fail by the figures of a report, each for itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.claims import Claim, checked, claims

GOOD: dict[str, Any] = {"time_to_target_seconds_by_seed": [24.0], "straggler_idle_share_fastest": 0.02,
                        "straggler_idle_share": 0.01, "wan_idle_share": 0.07, "final_ppl_by_seed": [5.05]}  # fmt: skip
DILOCO: dict[str, Any] = {"time_to_target_seconds_by_seed": [100.0], "straggler_idle_share_fastest": 0.25,
                          "straggler_idle_share": 0.1, "wan_idle_share": 0.66, "final_ppl_by_seed": [5.0]}  # fmt: skip


def seconds(*by_seed: float | None) -> dict[str, Any]:
    return {"time_to_target_seconds_by_seed": list(by_seed)}


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
        ("time_to_target_seconds_by_seed", [26.0], "time to target"),
        ("time_to_target_seconds_by_seed", [None], "time to target"),
        ("straggler_idle_share_fastest", 0.03, "of the fastest"),
        ("straggler_idle_share", 0.013, "of all sites"),
        ("wan_idle_share", 0.081, "WAN idle"),
        ("final_ppl_by_seed", [5.11], "perplexity"),
    ],
)
def test_each_figure_has_a_claim_of_its_own(figure: str, value: Any, text: str) -> None:
    failed = failing({**GOOD, figure: value})
    assert failed
    assert all(text in claim for claim in failed)


def test_another_method_is_compared_where_it_was_played() -> None:
    assert failing(GOOD, **{"diloco-tuned-H": {**DILOCO, **seconds(47.0)}}) != []
    assert failing(GOOD, **{"diloco-tuned-H": {**DILOCO, **seconds(49.0)}}) == []
    assert failing(GOOD, **{"async": {**DILOCO, **seconds(24.0)}}) != []
    assert failing(GOOD, **{"async": {**DILOCO, **seconds(None), "final_ppl_by_seed": [5.06]}}) == []
    lost = failing(GOOD, **{"async": {**DILOCO, "final_ppl_by_seed": [5.04]}})
    assert lost == ["geomesh: final perplexity above that of async, as a share, median over seeds"]


@pytest.mark.parametrize(
    ("changes", "failing"),
    [({}, 0), ({"wan_idle_share": 0.021}, 1), ({"final_ppl_by_seed": [5.11]}, 1),
     ({"time_to_target_seconds_by_seed": [26.0]}, 1)],
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
    report = {"seeds": [1], "methods": {"geomesh": GOOD, "diloco[momentum=0]": DILOCO}}
    assert claims(report) == []
    said, holds = checked(report)
    assert said[0].startswith("no claim can be checked")
    assert not holds


# ---------------------------------------------------------------- figures that are missing, or that cannot fail


def of(ours: dict[str, Any], theirs: dict[str, Any], text: str) -> Claim:
    methods = {"geomesh": {**GOOD, **ours}, "diloco": {**DILOCO, **theirs}}
    (found,) = (claim for claim in claims({"seeds": [1], "methods": methods}) if text in claim.text)
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "figure", "holds", "said"),
    [
        ((20.0, 30.0, 90.0), (100.0, 100.0, 100.0), 0.7, False, ": 0.7 (wanted"),
        ((20.0, None, 20.0), (100.0, 100.0, 100.0), 0.8, True, "0.8 (1 of 3 seeds does not reach it)"),
        ((None, None, 20.0), (100.0, 100.0, 100.0), None, False, ": not reached (wanted"),
        ((20.0, 30.0), (100.0, None), 0.8, True, "0.8 (diloco: 1 of 2 seeds does not reach it)"),
        ((30.0, 30.0), (100.0, None), 0.7, False, "0.7 (diloco: 1 of 2 seeds does not reach it)"),
        ((20.0, 30.0, None), (None, None, 100.0), None, True, "not reached by diloco; 1 of 3 seeds does not reach it"),
        ((None,), (None,), None, False, "not reached"),
        ((0.0,), (0.0,), 0.0, False, ": 0 "),
        ((5.0,), (0.0,), None, False, "diloco has it at the start"),
    ],
)
def test_times_are_compared_seed_by_seed_and_no_figure_is_made_up(
    ours: tuple[float | None, ...], theirs: tuple[float | None, ...], figure: float | None, holds: bool, said: str
) -> None:
    found = of(seconds(*ours), seconds(*theirs), "time to target")
    assert found.figure == (None if figure is None else pytest.approx(figure))
    assert found.holds is holds
    assert said in str(found)


@pytest.mark.parametrize(
    ("key", "text"), [("straggler_idle_share_fastest", "of the fastest site"), ("wan_idle_share", "WAN idle, so")]
)
def test_where_the_reference_hardly_waits_nothing_is_claimed(key: str, text: str) -> None:
    found = of({key: 0.0}, {key: 1e-17}, text)
    assert found.holds is None
    assert "not comparable, diloco has 0.00% of it" in str(found)
    report = {"seeds": [1], "methods": {"geomesh": {**GOOD, key: 0.0}, "diloco": {**DILOCO, key: 1e-17}}}
    assert checked(report)[1], "what is no claim fails nothing"


@pytest.mark.parametrize(
    ("tokens", "holds", "note"),
    [
        (1000, True, ""),
        (1019, True, " (this trained 1.019 of diloco's tokens)"),
        (981, True, " (this trained 0.981 of diloco's tokens)"),
        (1219, None, "not comparable, this trained 1.219 of diloco's tokens"),
        (979, None, "not comparable, this trained 0.979 of diloco's tokens"),
    ],
)
def test_a_final_perplexity_counts_at_equal_tokens_alone(tokens: int, holds: bool | None, note: str) -> None:
    found = of({"tokens": tokens}, {"tokens": 1000}, "perplexity")
    assert found.holds is holds
    assert str(found).count(note or "(this trained") == bool(note)
    assert of({"tokens": 1219, "final_ppl_by_seed": [None]}, {"tokens": 1000}, "perplexity").holds is False


def test_continuation_choice_counts_at_equal_tokens_alone() -> None:
    ours = {"continuation_against_diloco": {"low": -0.5}}
    theirs = {"continuation_accuracy": 0.5, "continuation_stderr": 0.01}
    assert of({**ours, "tokens": 1010}, {**theirs, "tokens": 1000}, "the low end").holds is False
    found = of({**ours, "tokens": 1219}, {**theirs, "tokens": 1000}, "the low end")
    assert found.holds is None
    assert "not comparable, this trained 1.219 of diloco's tokens" in str(found)


def test_what_is_rounding_or_without_end_is_said_in_words() -> None:
    assert ": 0 (wanted: at most 0.012)" in str(of({"straggler_idle_share": 4.624e-18}, {}, "of all sites"))
    endless = str(of({"wan_idle_share": 1e-18}, {}, "WAN idle, so"))
    assert endless.endswith("lower than that of diloco: none of it, diloco 66.00% (wanted: at least 8)")
    noted = str(of({"straggler_idle_share_fastest": 0.0, "sites_without_work": ["far"]}, {}, "of the fastest"))
    assert ": none of it, diloco 25.00%; far never trained, and is not in it (wanted: at least 10)" in noted


def test_a_site_that_never_trained_is_said_where_waiting_is_claimed() -> None:
    for text in ("of the fastest site", "of all sites"):
        assert "(far never trained, and is not in it)" in str(of({"sites_without_work": ["far"]}, {}, text))


def test_a_site_that_hardly_trained_is_said_where_waiting_is_claimed() -> None:
    little = {"site": "far", "rounds": 1, "of_rounds": 16, "tokens_share": 0.006, "speed_share": 0.2}
    told = "(far trained 0.60% of the tokens in 1 of 16 rounds, with 20.00% of all sites' best speed)"
    for text in ("of the fastest site", "of all sites", "WAN idle, so", "WAN idle"):
        found = next(one for one in claims({"seeds": [1], "methods": {"geomesh": {**GOOD, "sites_with_little_work": [little]},
                                                                     "diloco": DILOCO}}) if text in one.text)  # fmt: skip
        assert told in str(found)


@pytest.mark.parametrize("lost", [math.inf, math.nan, None])
def test_a_perplexity_that_is_no_number_fails_and_is_said(lost: float | None) -> None:
    for ours, theirs, said in ((lost, 5.0, "1 of 1 seeds ends"), (5.0, lost, "of diloco not all seeds end")):
        found = of({"final_ppl_by_seed": [ours]}, {"final_ppl_by_seed": [theirs]}, "perplexity")
        assert found.holds is False
        assert said in str(found)


def test_a_share_that_is_not_known_is_said_and_a_figure_that_lacks_is_a_damaged_report() -> None:
    assert "not known" in str(of({"wan_idle_share": None}, {}, "WAN idle, so"))
    for key in GOOD:
        with pytest.raises(ConfigError, match=f"geomesh has no {key}: it is damaged.*again"):
            claims({"seeds": [1], "methods": {"geomesh": {k: v for k, v in GOOD.items() if k != key}, "diloco": DILOCO}})
