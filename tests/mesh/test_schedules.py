"""Random schedules of the protocol: none may break an invariant, and with any one rule off one of them does.

More of them, and other seeds: `python -m tests.mesh.simulator --help`."""

from __future__ import annotations

import pytest

from geomesh_p2p.core.rules import RULES
from tests.injection.proof import fired
from tests.mesh.simulator import BIASES, play

# One seed for each rule, on which a schedule without it goes wrong; found with `--without RULE --bias BIAS --stop 1`. For
# elected_by_view, which takes several rare things, tests/mesh/test_new_voters.py.
WITHOUT = {
    "pair_terms": ("commit-crash", 36, "both lead term"),
    "saved_terms": ("restarts", 48, "went back from term"),
    "found_once": ("partitions", 1, "another update for round"),
    "higher_term": ("old-leader", 396, "takes no part"),
    "plan_has_quorum": ("partitions", 0, "no quorum of"),
    "parts_agree": ("slow-out", 4, "parts list other contributions"),
    "held_survives": ("commit-crash", 0, "another update for round"),
    "newest_attempt": ("late-reports", 6544, "another update for round"),
    "count_view": ("slow-out", 7, "no quorum of"),
    "ranges_within": ("partitions", 7, "credited already"),
    "no_retrain": ("restarts", 1057, "two contributions for one plan"),
    "held_again": ("partial-hold", 706, "another update for round"),
    "stop_lower_terms": ("old-leader", 317, "another update for round"),
    "identity_unit": ("restarts", 0, "another update for round"),
    "wait_quorum": ("blackout", 5, "another update for round"),
}
BATCH = 30
FAULTS = 3               # that made a difference, in each schedule


@pytest.mark.fault
@pytest.mark.parametrize("first", range(0, 300, BATCH))
def test_no_schedule_breaks_an_invariant(first: int) -> None:
    rounds = 0
    for seed in range(first, first + BATCH):
        violation, counts = play(seed, faults=FAULTS)
        assert not violation
        fired(counts["faults fired"] >= FAULTS, f"{FAULTS} faults that made a difference")
        rounds += counts["rounds"]
    assert rounds > 5 * BATCH, "the schedules hardly commit anything, so they prove nothing"


@pytest.mark.fault
def test_the_faults_really_happen() -> None:
    totals = play(0)[1]
    for seed in range(1, 3 * len(BIASES)):
        totals += play(seed)[1]
    fired(totals["faults fired"], "any fault")
    for happened in ("crash", "crash in commit", "discard", "leader", "adopt"):
        assert totals[happened], happened
    for kind in ("crash", "partition", "slow", "loss", "pause", "stall", "half-open", "reset", "helper", "donor"):
        assert totals[f"fired {kind}"], kind


@pytest.mark.fault
def test_a_schedule_with_too_few_faults_is_drawn_again() -> None:
    few = next(seed for seed in range(100) if play(seed)[1]["faults fired"] < 10)
    violation, counts = play(few, faults=10)
    fired(counts["faults fired"], "any fault")
    assert not violation
    assert counts["faults fired"] >= 10
    assert counts["draws"] > 1
    assert play(few, faults=10)[1] == counts, "and the same way each time"


# Schedules on which something once went wrong, and what it was.
ONCE_WRONG = {
    124: "who waited for its exchange to bring what the others had committed waited for ever once that had failed",
    128705: "a leader that had just heard of a higher term held a rollback under a term that nobody had given it yet",
    8750: "a leaver whose last save failed never ended: its Halt was dropped with the list that the save was in",
}


@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_what_once_went_wrong(seed: int) -> None:
    assert play(seed)[0] == ""


def test_every_rule_is_switched_off_somewhere() -> None:
    assert set(WITHOUT) | {"elected_by_view"} == set(RULES)


@pytest.mark.parametrize("rule", WITHOUT)
def test_each_rule_is_needed(rule: str) -> None:
    bias, seed, symptom = WITHOUT[rule]
    violation, _ = play(seed, frozenset([rule]), bias)
    assert symptom in violation
    assert play(seed, frozenset(), bias)[0] == "", "with the rule the same schedule is sound"


def test_a_seed_is_one_schedule() -> None:
    assert play(4)[1] == play(4)[1]
