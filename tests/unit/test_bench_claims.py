"""Claims hold or fail by the figures of a report, each for itself."""

from __future__ import annotations

from typing import Any

import pytest

from geomesh_p2p.lab.bench.claims import claims

GOOD: dict[str, Any] = {"time_to_target_seconds": 24.0, "straggler_idle_share_fastest": 0.02, "straggler_idle_share": 0.01,
                        "wan_idle_share": 0.07, "final_ppl": 5.05}  # fmt: skip
DILOCO: dict[str, Any] = {"time_to_target_seconds": 100.0, "straggler_idle_share_fastest": 0.25, "straggler_idle_share": 0.1,
                          "wan_idle_share": 0.66, "final_ppl": 5.0}  # fmt: skip


def failing(ours: dict[str, Any], **others: dict[str, Any]) -> list[str]:
    found = claims({"methods": {"geomesh": ours, "diloco": DILOCO, **others}})
    assert len(found) == 6 + len(others)
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
        ("final_ppl", 5.11, "perplexity"),
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
    assert failing(GOOD, **{"async": {**DILOCO, "time_to_target_seconds": None}}) == []


def test_nothing_is_claimed_without_both() -> None:
    assert claims({"methods": {"geomesh": GOOD}}) == []
