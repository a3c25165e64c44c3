"""Agreement scores: honest, flipped and random signs are told apart, and nobody is judged who cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core import codec
from geomesh_p2p.core.agreement import ROUNDS_TO_JUDGE, Agreement, AgreementBook, agreements
from geomesh_p2p.core.layout import Layout, Tensor

SIZE = 32_768


def terms_of(values: np.ndarray) -> Callable[[int, int], Any]:
    return lambda start, stop: values[:, start:stop]


def signs(honest: int, lie: str, alike: float, seed: int) -> np.ndarray:
    """[member, parameter]: honest members that share a way to the degree `alike`, and one liar."""
    chance = np.random.default_rng(seed)
    way = chance.standard_normal(SIZE)
    values = np.sign(alike * way + chance.standard_normal((honest + 1, SIZE)))
    if lie == "flipped":
        values[-1] *= -1
    elif lie == "random":
        values[-1] = np.sign(chance.standard_normal(SIZE))
    return values.astype(np.float32)


def flagged(honest: int, lie: str, alike: float, rounds: int = 6) -> dict[str, int]:
    """The round in which each was flagged."""
    book, found = AgreementBook(), dict[str, int]()
    names = [f"honest-{n}" for n in range(honest)] + ["liar"]
    for round in range(rounds):
        scores = agreements(terms_of(signs(honest, lie, alike, round)), honest + 1, 0, SIZE, bytes([round]))
        for name in book.add(dict(zip(names, scores, strict=True))):
            found[name] = round
    return found


@pytest.mark.parametrize("alike", [0.3, 1.5])
@pytest.mark.parametrize("honest", [4, 12])
@pytest.mark.case("C119")
def test_liars_are_flagged_as_soon_as_anybody_is_judged_and_nobody_else(honest: int, alike: float) -> None:
    assert flagged(honest, "none", alike) == {}
    for lie in ("flipped", "random"):
        assert flagged(honest, lie, alike) == {"liar": ROUNDS_TO_JUDGE - 1}


def test_without_a_common_way_nobody_is_judged() -> None:
    assert flagged(4, "none", 0.0) == flagged(4, "random", 0.0) == {}


def test_of_three_nobody_is_judged() -> None:
    assert flagged(2, "flipped", 1.0) == {}


def test_the_share_of_signs_that_agree() -> None:
    values = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, -1, -1], [1, 1, 1, 1, -1, -1, -1, -1]], np.float32)
    scores = agreements(terms_of(values), 3, 0, 8, b"")
    assert [score.with_update for score in scores] == [6 / 8, 8 / 8, 6 / 8]
    assert scores[0].with_others == 4 / 6, "where the others are tied they say nothing"
    assert agreements(terms_of(values[:1]), 1, 0, 8, b"") == [Agreement(1.0, 0.5)]
    assert agreements(terms_of(np.zeros((2, 8), np.float32)), 2, 0, 8, b"") == [Agreement(0.5, 0.5)] * 2


@pytest.mark.parametrize("payload", ["sign", "int8", "fp16", "fp32"])
def test_scores_are_read_from_payloads_of_any_width(payload: str) -> None:
    layout = Layout((Tensor("rows", 640, 40), Tensor("matrix", 40_000), Tensor("norm", 37)))
    settings = CodecSection(payload=payload)  # type: ignore[arg-type]
    chance = np.random.default_rng(0)
    way = chance.standard_normal(layout.parameters).astype(np.float32)
    deltas = [way + chance.standard_normal(way.size).astype(np.float32) for _ in range(4)]
    deltas.append(-deltas[0])
    payloads = [codec.encode(layout, delta, np.zeros_like(delta), settings) for delta in deltas]
    terms = codec.Terms(layout, settings, payloads, [100, 100, 200, 50, 100])
    for start, stop in ((0, layout.parameters), (640, 20_000), (40_640, layout.parameters)):
        scores = agreements(terms.read, 5, start, stop, b"seed")
        assert max(scores, key=lambda s: s.with_others) in scores[1:4]
        assert scores[4].with_others < 0.45


def test_flags_pass_with_what_they_were_for_and_the_forgotten_are_forgotten() -> None:
    book = AgreementBook()
    good, bad = Agreement(0.8, 0.7), Agreement(0.4, 0.3)
    names = ["a", "b", "c", "d"]
    for _ in range(10):
        book.add({**dict.fromkeys(names, good), "x": bad})
    for _ in range(30):
        assert book.add(dict.fromkeys([*names, "x"], good)) == {}
    for _ in range(12):
        news = book.add({**dict.fromkeys(names, good), "x": bad})
        if news:
            break
    assert set(news) == {"x"}, "said again after it was well for long"
    book.keep({"a", "b"})
    assert set(book.scores) == {"a", "b"}
