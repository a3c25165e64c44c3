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
