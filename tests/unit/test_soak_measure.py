"""The soak's judgement of growth: a leak is told from noise."""

from __future__ import annotations

import random

import pytest

from tests.soak.measure import growing, slope


@pytest.mark.parametrize(("leak", "found"), [(0.0, False), (0.02, True)])
def test_a_leak_is_told_from_noise(leak: float, found: bool) -> None:
    rng = random.Random(0)
    points = [(float(round), 200 + leak * round + rng.gauss(0, 3)) for round in range(0, 2000, 20)]
    one = slope("a peer_rss_mib", points)
    assert one.per_thousand == pytest.approx(1000 * leak, abs=4 * one.error)
    assert 0.1 < one.error < 1.0
    assert bool(growing([one])) == found


def test_few_points_are_no_judgement() -> None:
    assert growing([slope("a size_known", [(0.0, 0.0), (1.0, 50.0)])]) == []


def remembered_for(rounds: int, leak: float, seed: int) -> list[tuple[float, float]]:
    """The size of a table of who came within the last `rounds`, looked at every 20th round; `leak` are never forgotten."""
    rng = random.Random(seed)
    came = [round for round in range(-1000, 2000) if rng.random() < 0.06]
    kept = {round: rng.random() < leak for round in came}
    return [
        (float(now), float(sum(now - rounds < round <= now or (kept[round] and round <= now) for round in came)))
        for now in range(0, 2000, 20)
    ]


def test_a_table_that_remembers_for_a_while_is_told_from_one_that_does_not_forget() -> None:
    """Samples of it are alike for as long as it remembers: taken for independent, chance looks like growth."""
    tables = {leak: [slope("a size_seen", remembered_for(300, leak, seed)) for seed in range(40)] for leak in (0.0, 0.5)}
    assert len(growing(tables[0.0])) <= 2
    assert len(growing(tables[0.5])) >= 36
