"""The forecast of an exchange: links, topologies, reducer shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from geomesh_p2p.core.forecast import (
    CONTROL_SECONDS,
    DEFAULT_BYTES_PER_SECOND,
    LinkTable,
    Volume,
    best_fractions,
    choose_exchange,
    commit_seconds,
    cut,
    equal_exchange,
    gather_seconds,
    reduce_seconds,
)
from geomesh_p2p.core.types import Link, Range

VOLUME = Volume(2_000_000, 250_000, 250_000)
CODEC_FREE = Volume(16, 250_000, 250_000)  # so few parameters that only bytes count


def table(size: int, rate: float = 1e6, rtt: float = 0.1) -> LinkTable:
    peers = [str(k) for k in range(size)]
    return LinkTable.of(peers, [Link(a, b, rtt, rate) for a in peers for b in peers if a != b])


def changed(links: LinkTable, pairs: list[tuple[int, int]], rate: float) -> LinkTable:
    rates = links.rates.copy()
    for pair in pairs:
        rates[pair] = rate
    return LinkTable(rates, links.rtts, 0)


# ---------------------------------------------------------------- links


def test_links_not_measured_take_the_opposite_direction_then_the_median() -> None:
    links = [Link("a", "b", 0.1, 10.0), Link("a", "c", 0.3, 30.0), Link("c", "a", 0.5, 50.0), Link("x", "a", 9.0, 1.0)]
    known = LinkTable.of(["a", "b", "c"], links)
    assert known.guessed == 3
    assert known.rates[1, 0] == 10.0  # b to a as a to b
    assert known.rates[1, 2] == known.rates[2, 1] == 30.0  # the median of 10, 30, 50
    assert known.rtts[1, 2] == 0.3
    assert np.isinf(known.rates.diagonal()).all()
    senseless = [Link("a", "b", float("nan"), 10.0), Link("b", "a", 0.1, 0.0), Link("a", "a", 0.1, 5.0)]
    assert LinkTable.of(["a", "b"], senseless).guessed == 2
    unknown = LinkTable.of(["a", "b"], [])
    assert (unknown.rates[0, 1], unknown.rtts[0, 1], unknown.guessed) == (DEFAULT_BYTES_PER_SECOND, 0.0, 2)


def test_of_two_reports_on_one_pair_the_slower_counts() -> None:
    links = [Link("a", "b", 0.1, 10.0), Link("a", "b", 0.2, 20.0)]
    for order in (links, links[::-1]):
        known = LinkTable.of(["a", "b"], order)
        assert (known.rates[0, 1], known.rtts[0, 1]) == (10.0, 0.2)


# ---------------------------------------------------------------- seconds


def test_a_gather_takes_as_long_as_its_slowest_pair() -> None:
    assert gather_seconds(table(4), CODEC_FREE) == pytest.approx(0.25 + 0.05, rel=1e-4)
    assert gather_seconds(changed(table(4), [(1, 3)], 1e5), CODEC_FREE) == pytest.approx(2.5 + 0.05, rel=1e-4)


def test_a_reduce_takes_two_hops_of_a_share_each() -> None:
    halves = (Range(0, 8), Range(8, 16))
    assert reduce_seconds(table(2), CODEC_FREE, halves) == pytest.approx(2 * (0.125 + 0.05), rel=1e-4)
    wide = Volume(16, 250_000, 1_000_000)  # answers of 4 bits a parameter
    assert reduce_seconds(table(2), wide, halves) == pytest.approx(0.125 + 0.05 + 0.5 + 0.05, rel=1e-4)
    one = (Range(0, 16), Range(16, 16))  # peer 1 reduces nothing: nothing is sent to it but the answer
    assert reduce_seconds(changed(table(2), [(0, 1)], 1e9), CODEC_FREE, one) == pytest.approx(0.25 + 0.05 + 0.05, rel=1e-2)


def test_a_commit_is_a_round_trip_of_the_leader() -> None:
    links = LinkTable(table(3).rates, np.array([[0, 0.1, 0.1], [0.1, 0, 0.9], [0.1, 0.9, 0]]), 0)
    assert commit_seconds(links, 0) == pytest.approx(CONTROL_SECONDS + 0.1)
    assert commit_seconds(links, 1) == pytest.approx(CONTROL_SECONDS + 0.9)
    assert commit_seconds(links, None) == pytest.approx(CONTROL_SECONDS + 0.9)


# ---------------------------------------------------------------- shares

rates = st.lists(st.floats(1e4, 1e8), min_size=2, max_size=6)


@settings(max_examples=60)
@given(rates, st.randoms(use_true_random=False))
def test_shares_are_no_worse_than_equal_ones_nor_than_random_ones(uplinks: list[float], draw) -> None:  # type: ignore[no-untyped-def]
    size = len(uplinks)
    links = table(size)
    rate = np.minimum.outer(np.array(uplinks), np.array(uplinks))
    np.fill_diagonal(rate, np.inf)
    rtt = np.array([[0.0 if a == b else draw.choice([0.01, 0.1, 0.25]) for b in range(size)] for a in range(size)])
    links = LinkTable(rate, rtt, 0)

    def seconds(fractions: list[float]) -> float:
        """t1 + t2 as the linear program has them."""
        part = np.array(fractions) / sum(fractions)
        off = ~np.eye(size, dtype=bool)
        inward = (part[None, :] * VOLUME.payload_bytes / rate + rtt / 2)[off].max()
        return float(inward + (part[:, None] * VOLUME.answer_bytes / rate + rtt / 2)[off].max())

    best = seconds(best_fractions(links, VOLUME).tolist())
    assert best <= seconds([1.0] * size) * (1 + 1e-6)
    for _ in range(20):
        assert best <= seconds([draw.uniform(0.0, 1.0) + 1e-9 for _ in range(size)]) * (1 + 1e-6)


def test_equal_links_give_equal_shares_and_a_slow_pair_smaller_ones() -> None:
    assert best_fractions(table(5), VOLUME) == pytest.approx([0.2] * 5, abs=1e-6)
    slow = best_fractions(changed(table(4), [(0, 1), (1, 0)], 2e5), VOLUME)
    assert max(slow[:2]) < 0.25 < min(slow[2:])


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9).filter(any), st.integers(1, 3_000_000))
@example([1.0, 0.0, 0.0], 5)
def test_cuts_cover_the_vector_in_whole_bytes_of_signs(fractions: list[float], parameters: int) -> None:
    shares = cut(fractions, parameters)
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == parameters
    assert all(share.start <= share.stop for share in shares)
    assert all(share.start % 8 == 0 for share in shares if share), "an empty share may stand at the vector's end"
    assert len(shares) == len(fractions)


def test_cuts_of_large_models_are_multiples_of_4096() -> None:
    assert all(share.start % 4096 == 0 for share in cut([0.3, 0.5, 0.2], 3_000_001))


# ---------------------------------------------------------------- the choice


def test_the_faster_topology_is_taken() -> None:
    few = choose_exchange(table(2), VOLUME, 0)
    assert (few.topology, few.shares) == ("gather", ())
    assert few.other_seconds is not None
    assert few.seconds < few.other_seconds
    many = choose_exchange(table(8, rate=1e5), VOLUME, 0)
    assert many.topology == "reduce"
    assert many.other_seconds is not None
    assert many.seconds < many.other_seconds
    assert choose_exchange(table(8, rate=1e9, rtt=0.25), VOLUME, 0).topology == "gather"  # only latency counts


def test_a_topology_named_is_taken_and_alone_there_is_nothing_to_exchange() -> None:
    assert choose_exchange(table(8, rate=1e5), VOLUME, 0, "gather").topology == "gather"
    assert choose_exchange(table(2), VOLUME, 0, "reduce").topology == "reduce"
    assert choose_exchange(table(1), VOLUME, 0, "reduce").topology == "gather"
    assert equal_exchange(table(1), VOLUME, 0, "reduce").topology == "gather"


def test_a_topology_stays_for_a_gain_of_less_than_the_margin() -> None:
    shares = equal_exchange(table(3), VOLUME, 0, "reduce").shares
    crossing = [rate for rate in np.geomspace(1e5, 1e7, 200) if _near(table(3, rate=float(rate)))]
    assert crossing
    for rate in crossing:
        links = table(3, rate=float(rate))
        assert choose_exchange(links, VOLUME, 0, last=("gather", ()), margin=0.1).topology == "gather"
        assert choose_exchange(links, VOLUME, 0, last=("reduce", shares), margin=0.1).topology == "reduce"
        assert choose_exchange(links, VOLUME, 0, margin=0.1).topology == "gather"


def _near(links: LinkTable) -> bool:
    """Whether both topologies take the same time within 5%."""
    free = choose_exchange(links, VOLUME, 0)
    return free.other_seconds is not None and free.other_seconds < 1.05 * free.seconds
