"""Continuation choice: items, what models choose, and which of two is better."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geomesh_p2p.config import DatasetSection, ModelSection
from geomesh_p2p.core.choice import (
    CHANCE,
    Items,
    Outcome,
    TooFewItems,
    documents_of,
    lengths,
    make_items,
    outcome_of,
    outcome_of_bits,
    paired_difference,
)
from geomesh_p2p.core.ngrams import occurs_in
from geomesh_p2p.engine.choice import held_out_items, likelihoods, score
from geomesh_p2p.engine.data import corpus_of, load_corpus
from geomesh_p2p.engine.model import FlatModel, build
from geomesh_p2p.engine.tokenizer import load_tokenizer
from geomesh_p2p.errors import ConfigError

TINY = ModelSection(hidden_size=16, intermediate_size=32, layers=1, heads=2, kv_heads=2, sequence_length=128)


def text(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, size)


def is_in(parts: list[np.ndarray], wanted: np.ndarray) -> bool:
    return any(wanted.astype(np.uint8).tobytes() in part.astype(np.uint8).tobytes() for part in parts)


# ---------------------------------------------------------------- items


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 60), st.integers(0, 2**63), st.integers(1, 20))
def test_items_are_windows_of_the_text_and_others_from_elsewhere(sizes: list[int], count: int, seed: int, passage: int) -> None:
    continuation = 6
    parts = [text(size, place) for place, size in enumerate(sizes)]
    most = sum(max(0, size - passage - continuation + 1) for size in sizes) // continuation
    if count > most:
        with pytest.raises(TooFewItems, match=f"the text gives 1 to {most}"):
            make_items(parts, count, seed, passage, continuation)
        return
    try:
        items = make_items(parts, count, seed, passage, continuation)
    except ValueError:                                            # all the other windows touch an item's own
        assert sum(sizes) < 6 * (passage + 2 * continuation), "there is room for others"
        return
    assert items.passages.shape == (count, passage)
    assert items.continuations.shape == (count, 4, continuation)
    for before, options, answer in zip(items.passages, items.continuations, items.answers, strict=True):
        assert is_in(parts, np.concatenate([before, options[answer]]))
        assert all(is_in(parts, option) for option in options)
        assert len({option.tobytes() for option in options}) == 4
        for place in {0, 1, 2, 3} - {int(answer)}:
            assert not is_in([np.concatenate([before, options[answer]])], options[place])


def test_true_continuations_never_overlap_and_are_spread_over_the_whole_text() -> None:
    tokens = np.arange(10_000)                                    # each token says where it stands
    most = (10_000 - 127) // 32
    items = make_items(tokens, most, seed=3)
    starts = items.continuations[np.arange(most), items.answers][:, 0]
    assert (np.diff(starts) >= 32).all()
    few = make_items(tokens, 50, seed=3)
    assert (np.diff(few.passages[:, 0]) >= 128).all(), "windows overlap although there is room"
    assert few.passages[0, 0] < 200
    assert few.passages[-1, 0] > 9_400


def test_what_was_trained_on_word_for_word_is_not_asked() -> None:
    tokens = text(12_000)
    trained = np.concatenate([text(500, 1), tokens[3_000:9_000], text(500, 2)])
    items = make_items(tokens, 150, seed=1, trained=trained)
    true = np.concatenate([items.passages[:, -32:], items.continuations[np.arange(150), items.answers]], axis=1)
    assert not any(is_in([trained], window) for window in true)
    assert any(is_in([trained], items.passages[item, :40]) for item in range(150)), "only what lies at the answer counts"
    with pytest.raises(TooFewItems):
        make_items(tokens, 200, seed=1, trained=trained)
    with pytest.raises(TooFewItems, match="1 to 0"):
        make_items(tokens, 1, seed=1, trained=tokens)


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80), st.integers(1, 8))
def test_runs_of_tokens_are_found_in_another_text(one: list[int], other: list[int], length: int) -> None:
    runs = [one[place : place + length] for place in range(len(one) - length + 1)]
    expected = [any(other[at : at + length] == run for at in range(len(other) - length + 1)) for run in runs]
    assert occurs_in(np.array(one, np.uint8), length, np.array(other, np.uint16)).tolist() == expected


def test_runs_are_found_across_the_pieces_in_which_a_long_text_is_read() -> None:
    other = np.random.default_rng(0).integers(0, 250, 2**20 + 5000).astype(np.uint8)
    for start in (0, 2**20 - 40, 2**20 - 1, 2**20, len(other) - 64):
        assert occurs_in(other[start : start + 64], 64, other).tolist() == [True]
        assert occurs_in(other[start : start + 64][::-1], 64, other).tolist() == [False]


def test_items_follow_from_the_seed_alone() -> None:
    tokens = text(20_000)
    assert make_items(tokens, 100, 1).digest == make_items(tokens, 100, 1).digest == make_items(iter([tokens]), 100, 1).digest
    assert make_items(tokens, 100, 1).digest != make_items(tokens, 100, 2).digest
    counts = np.bincount(make_items(tokens, 600, 1).answers, minlength=4)
    assert (abs(counts - 150) < 4 * math.sqrt(600 * 0.25 * 0.75)).all()


def test_these_are_the_items_on_every_machine() -> None:
    items = make_items(np.arange(5000) * 31 % 251 * 7 % 256, 40, 7)
    assert items.digest == "4dffb27399fe9112467432b37793c4dc"


def test_a_text_that_repeats_itself_has_no_items() -> None:
    with pytest.raises(ValueError, match="too few different continuations"):
        make_items(np.zeros(1000), 3, 0)
    with pytest.raises(ValueError, match="the text gives 1 to 27"):
        make_items(np.zeros(1000), 28, 0)


def test_documents_are_told_apart_by_the_id_that_ends_them() -> None:
    tokens = np.array([255, 1, 2, 255, 3, 255, 255, 4])
    assert [part.tolist() for part in documents_of(tokens, 255)] == [[1, 2], [3], [4]]
    assert [part.tolist() for part in documents_of(tokens, None)] == [tokens.tolist()]


def test_windows_are_no_longer_than_the_model_reads() -> None:
    assert lengths(128) == lengths(4096) == (96, 32)
    assert lengths(16) == (12, 4)
    with pytest.raises(ValueError, match="at least 4"):
        lengths(3)


def test_the_held_out_part_of_pythons_sources_gives_thousands_of_items() -> None:
    """In bytes, sequences of 128, and the 64 validation sequences that are the default; nothing of it is trained on."""
    corpus = load_corpus(DatasetSection(), load_tokenizer("bytes"), 128, seed=0)
    items = held_out_items(corpus, 255, 2000, seed=0)
    windows = np.concatenate([items.passages, items.continuations[np.arange(2000), items.answers]], axis=1).astype(np.uint8)
    trained = corpus.tokens.tobytes()
    assert not any(window[64:].tobytes() in trained for window in windows[::40])
    starts = [corpus.held_out.tobytes().index(window.tobytes()) for window in windows]
    assert len(set(starts)) > 1990
    held = corpus.held_out.tobytes()
    assert all(window.tobytes() in held for window in windows)
    assert not (items.passages == 255).any()
    assert not (items.continuations == 255).any()


def test_more_items_than_the_held_out_text_gives_are_refused() -> None:
    section = DatasetSection(validation_sequences=3)
    corpus = corpus_of([f"document {n} says {n * n}" for n in range(300)], section, load_tokenizer("bytes"), 16, 0)
    with pytest.raises(ConfigError, match="gives 4: ask for that many or fewer"):
        held_out_items(corpus, 255, 2000, 0)


# ---------------------------------------------------------------- models


def tiny() -> FlatModel:
    return build(TINY, 256, seed=5)


def test_an_untrained_model_chooses_by_chance() -> None:
    items = make_items(text(60_000), 600, seed=1)
    outcome = score(tiny(), items)
    assert outcome.accuracy == pytest.approx(CHANCE, abs=4 * math.sqrt(CHANCE * (1 - CHANCE) / 600))
    assert 0 < outcome.stderr < 0.02
    assert outcome.stderr == pytest.approx(math.sqrt(outcome.accuracy * (1 - outcome.accuracy) / 600))


def test_a_model_that_knows_the_text_by_heart_is_always_right() -> None:
    tokens = text(4_000)
    items = make_items(tokens, 100, seed=1, passage=6, continuation=4)

    class Memory:
        """Of three tokens in a row it knows the next."""

        def __init__(self) -> None:
            self.next = {tuple(tokens[place : place + 3].tolist()): int(tokens[place + 3]) for place in range(len(tokens) - 3)}

        def logits(self, inputs: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(*inputs.shape, 256)
            for row, ids in enumerate(inputs.tolist()):
                for place in range(2, len(ids)):
                    known = self.next.get(tuple(ids[place - 2 : place + 1]))
                    if known is not None:
                        out[row, place, known] = 9.0
            return out

    outcome = score(Memory(), items)
    assert outcome.accuracy == 1.0
    assert outcome.stderr == 0.0


def test_a_model_that_has_been_trained_on_the_text_chooses_the_true_continuation() -> None:
    tokens = text(150, seed=4)
    items = make_items(tokens, 16, seed=2, passage=12, continuation=4)
    model = build(ModelSection(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=2, sequence_length=16), 256, 1)
    optimizer = torch.optim.AdamW([model.flat], lr=1e-2)
    ids = torch.from_numpy(np.lib.stride_tricks.sliding_window_view(tokens, 17).copy())
    before = score(model, items).accuracy
    for step in range(100):
        batch = ids[step % 2 :: 2]
        loss = torch.nn.functional.cross_entropy(model.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        model.grad.zero_()
        loss.backward()
        model.flat.grad = model.grad
        optimizer.step()
    assert before < 0.8
    assert score(model, items).accuracy == 1.0


def test_likelihoods_are_the_mean_log_probabilities_of_the_continuations_tokens_alone() -> None:
    model = tiny()
    model.module.train()
    items = make_items(text(3_000), 20, seed=1)
    found = likelihoods(model, items)
    assert model.module.training, "left as it was"
    for item, option in ((0, 0), (7, 3), (19, 2)):
        ids = torch.from_numpy(np.concatenate([items.passages[item], items.continuations[item, option]]))
        with torch.inference_mode():
            logs = model.logits(ids[None, :-1])[0].log_softmax(-1)
        expected = np.mean([float(logs[place - 1, ids[place]]) for place in range(96, 128)])
        assert found[item, option] == pytest.approx(expected, abs=1e-5)


def test_a_model_whose_logits_are_no_numbers_is_never_right() -> None:
    items = make_items(text(3_000), 20, seed=1)
    assert outcome_of(items, np.full((20, 4), np.nan)).accuracy == 0.0
    scores = np.full((20, 4), np.nan)
    scores[np.arange(20), items.answers] = -3.0
    assert outcome_of(items, scores).accuracy == 1.0


# ---------------------------------------------------------------- statistics


def outcome(bits: str, items: str = "a") -> Outcome:
    return Outcome(items, np.array([bit == "1" for bit in bits]))


def test_outcomes_of_one_item_each_by_hand() -> None:
    items = Items(np.zeros((3, 2), int), np.zeros((3, 4, 2), int), np.array([0, 3, 1]))
    found = outcome_of(items, np.array([[2.0, 1, 1, 1], [0, 0, 9, 8], [5, 5, 0, 0]]))
    assert found.right.tolist() == [True, False, False]
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.stderr == pytest.approx(math.sqrt(2 / 27))


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_outcomes_survive_as_digits(right: list[bool]) -> None:
    given = Outcome("x", np.array(right))
    again = outcome_of_bits("x", given.bits, len(right))
    assert again.right.tolist() == right
    with pytest.raises(ValueError, match="bytes for"):
        outcome_of_bits("x", given.bits + "00", len(right))


def test_a_paired_difference_by_hand() -> None:
    """Differences 1, 1, -1, 0: mean 1/4, variance (2 (3/4)^2 + (5/4)^2 + (1/4)^2) / 3 = 11/12, error sqrt(11/48)."""
    found = paired_difference([outcome("1101")], [outcome("0011")])
    assert found.difference == pytest.approx(0.25)
    assert found.stderr == pytest.approx(math.sqrt(11 / 48))
    assert (found.low, found.high) == pytest.approx((0.25 - 1.95996 * 0.478714, 0.25 + 1.95996 * 0.478714), abs=1e-5)
    assert found.by_seed == (0.25,)
    assert found.low_over_seeds is None


def test_seeds_on_items_of_their_own_add_up_as_independent() -> None:
    """Errors of the means sqrt(11/48) and, from differences 1, 0, 0, 0, 1/4: together sqrt(11/48 + 1/16) / 2 = sqrt(14/192)."""
    found = paired_difference([outcome("1101"), outcome("1000", "b")], [outcome("0011"), outcome("0000", "b")])
    assert found.by_seed == (0.25, 0.25)
    assert found.stderr == pytest.approx(math.sqrt(14 / 192))


def test_seeds_on_the_same_items_are_averaged_item_by_item() -> None:
    """Twice the same outcomes say no more than once. And 1, 1, -1, 0 with 1, 0, 0, 0 is 1, 1/2, -1/2, 0: variance 5/12."""
    once = paired_difference([outcome("1101")], [outcome("0011")])
    assert paired_difference([outcome("1101")] * 2, [outcome("0011")] * 2).stderr == pytest.approx(once.stderr)
    found = paired_difference([outcome("1101"), outcome("1000")], [outcome("0011"), outcome("0000")])
    assert found.stderr == pytest.approx(math.sqrt(5 / 48))


def test_the_interval_over_seeds_is_students() -> None:
    """Differences 0, 1/4, 1/2: mean 1/4, error (1/4) / sqrt(3), and 4.30265 of those for two degrees of freedom."""
    first = [outcome("1000"), outcome("1000", "b"), outcome("1100", "c")]
    second = [outcome("0001"), outcome("0000", "b"), outcome("0000", "c")]
    found = paired_difference(first, second)
    assert found.by_seed == (0, 0.25, 0.5)
    assert found.low_over_seeds == pytest.approx(0.25 - 4.30265 * 0.25 / math.sqrt(3), abs=1e-5)
    assert found.high_over_seeds == pytest.approx(0.25 + 4.30265 * 0.25 / math.sqrt(3), abs=1e-5)


def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        hard = draws.random(500)                                  # what both find hard is the same
        first = Outcome("a", hard + draws.normal(0, 0.2, 500) > 0.40)
        second = Outcome("a", hard + draws.normal(0, 0.2, 500) > 0.40)
        found = paired_difference([first], [second])
        held += found.low <= 0 <= found.high
    assert 0.92 < held / 400 < 0.98


def test_only_outcomes_on_the_same_items_are_compared() -> None:
    for first, second in (([outcome("11")], [outcome("11", "b")]), ([outcome("11")], [outcome("111")])):
        with pytest.raises(ValueError, match="different items"):
            paired_difference(first, second)
    with pytest.raises(ValueError, match="for every seed"):
        paired_difference([outcome("11")], [])
    with pytest.raises(ValueError, match="at least 2"):
        paired_difference([outcome("1")], [outcome("1")])
