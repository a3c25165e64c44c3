"""Random schedules of the protocol: none may break an invariant, and with any one rule off one of them does.

More of them, and other seeds: `python -m tests.mesh.simulator --help`."""

from __future__ import annotations

import pytest

from geomesh_p2p.core.rules import RULES
from tests.mesh.simulator import BIASES, play

# One seed for each rule, on which a schedule without it goes wrong; found with `--without RULE --bias BIAS --stop 1`.
WITHOUT = {
    "pair_terms": ("commit-crash", 5, "both lead term"),
    "saved_terms": ("restarts", 22, "went back from term"),
    "found_once": ("partitions", 1, "another update for round"),
    "higher_term": ("old-leader", 119, "takes no part"),
    "plan_has_quorum": ("partitions", 0, "no quorum of"),
    "parts_agree": ("slow-out", 1, "parts list other contributions"),
    "held_survives": ("commit-crash", 0, "another update for round"),
    "newest_attempt": ("late-reports", 553, "another update for round"),
    "count_view": ("slow-out", 1, "no quorum of"),
    "ranges_within": ("partitions", 1, "credited already"),
    "no_retrain": ("restarts", 353, "two contributions for one plan"),
    "held_again": ("partial-hold", 706, "another update for round"),
    "stop_lower_terms": ("old-leader", 317, "another update for round"),
    "identity_unit": ("restarts", 8, "another update for round"),
    "wait_quorum": ("blackout", 1, "another update for round"),
}
BATCH = 27


@pytest.mark.parametrize("first", range(0, 297, BATCH))
def test_no_schedule_breaks_an_invariant(first: int) -> None:
    rounds = 0
    for seed in range(first, first + BATCH):
        violation, counts = play(seed)
        assert not violation
        rounds += counts["rounds"]
    assert rounds > 5 * BATCH, "the schedules hardly commit anything, so they prove nothing"


def test_the_faults_really_happen() -> None:
    totals = play(0)[1]
    for seed in range(1, 3 * len(BIASES)):
        totals += play(seed)[1]
    for fault in ("crash", "crash in commit", "discard", "leader", "adopt", "fault partition", "fault slow", "fault loss"):
        assert totals[fault], fault


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str) -> None:
    bias, seed, symptom = WITHOUT[rule]
    violation, _ = play(seed, frozenset([rule]), bias)
    assert symptom in violation
    assert play(seed, frozenset(), bias)[0] == "", "with the rule the same schedule is sound"


def test_a_seed_is_one_schedule() -> None:
    assert play(4)[1] == play(4)[1]
