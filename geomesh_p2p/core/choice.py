"""Continuation choice: which of four continuations does a passage of unseen text have?

An item is a passage and four continuations of one length, of which one is the true one and three stand elsewhere in the
same held-out text. A model chooses the continuation with the highest mean log-likelihood per token given the passage; all
four have the same number of tokens, so the sum chooses the same one. One that knows nothing is right in a quarter.

Wrong continuations are true ones of other items' kind, so that a model which heeds the continuation alone knows nothing.

Windows (passage and true continuation) are spread evenly over the text, as far apart as their number allows: windows may
overlap, true continuations never do. With the 64 validation sequences that are the default, data.py holds out 2% of all
documents in full, and items come from all of that. Held-out documents may still repeat trained ones (licences, tables of
codecs: of Python's own sources in bytes, seed 0, 28% of 128-token windows stand word for word in the training text). Such
windows give no items.

Everything here is a function of its arguments: no clock, no generator but one seeded by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.canonical import digest, digest_bytes
from geomesh_p2p.core.ngrams import occurs_in

OPTIONS = 4
CHANCE = 1 / OPTIONS
LONGEST_WINDOW = 128
"""Tokens of passage and continuation. Longer ones would make items fewer and dearer, and hardly another question."""
NORMAL_95 = 1.959963984540054
_MOST_DRAWS = 200

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """`passages` (n, p) and `continuations` (n, 4, c) token ids, and which of the four follows: `answers` (n,)."""

    passages: Ints
    continuations: Ints
    answers: Ints

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def digest(self) -> str:
        """The same for the same items, whoever made them."""
        parts = (np.ascontiguousarray(part, "<i8") for part in (self.passages, self.continuations, self.answers))
        return digest_bytes(repr((self.passages.shape, self.continuations.shape)).encode(), *parts).hex()[:32]

    def chosen(self, keep: npt.NDArray[np.bool_]) -> Items:
        """Only those items that `keep` (n,) marks."""
        return Items(self.passages[keep], self.continuations[keep], self.answers[keep])


def lengths(sequence_length: int) -> tuple[int, int]:
    """Tokens of (passage, continuation) for a model of this sequence length: three quarters and one of 128, or of all it has.

    Raises ValueError below 4 tokens.
    """
    if sequence_length < 4:
        raise ValueError(f"sequence_length is {sequence_length}: continuation choice needs at least 4 tokens")
    continuation = min(sequence_length, LONGEST_WINDOW) // 4
    return 3 * continuation, continuation


def documents_of(tokens: npt.NDArray[np.integer], end_of_document: int | None) -> list[npt.NDArray[np.integer]]:
    """The documents that lie one after the other in `tokens`, without the ids that end them."""
    if end_of_document is None:
        return [tokens]
    ends = np.flatnonzero(tokens == end_of_document)
    return [part for part in (tokens[a:b] for a, b in zip([0, *(ends + 1)], [*ends, len(tokens)], strict=True)) if len(part)]


def make_items(
    texts: npt.NDArray[np.integer] | Iterable[npt.NDArray[np.integer]],
    count: int,
    seed: int,
    passage: int = 96,
    continuation: int = 32,
    trained: npt.NDArray[np.integer] | None = None,
) -> Items:
    """`count` items from `texts`: the tokens of one text, or one such array a text; no window crosses from one to the next.

    Give whole texts (`Corpus.held_out`, split by `documents_of`), not the short rows of `Corpus.validation()`. With the
    tokens that models were trained on in `trained`, no item's true continuation stands there behind the same tokens (as many
    as it has itself). The items are in the order of the text, and on every machine the same for one seed. The three wrong
    continuations are true ones of other windows, of the same or other texts, outside the item's own window; all four are
    different. Raises TooFewItems if the text gives less, ValueError if its continuations are too much alike.
    """
    parts = [np.asarray(text, np.int64) for text in ([texts] if isinstance(texts, np.ndarray) and texts.ndim == 1 else texts)]
    tokens = np.concatenate([np.empty(0, np.int64), *parts])
    starts = _starts(parts, passage + continuation)
    if trained is not None and len(starts):
        known = min(passage, continuation)
        starts = starts[~occurs_in(tokens, known + continuation, trained)[starts + passage - known]]
    if not 0 < count <= len(starts) // continuation:
        raise TooFewItems(count, len(starts) // continuation)
    draws = _Draws(digest("choice", seed))
    # Evenly over all possible starts, from a random offset on: neighbours are at least `continuation` apart.
    here = starts[(np.arange(count) * len(starts) + draws.below(len(starts), (1,))) // count]
    answers = draws.below(OPTIONS, (count,))
    options = np.insert(_elsewhere(tokens, here, starts, passage, continuation, draws), 0, here, axis=1) + passage
    order = (np.arange(OPTIONS)[None, :] - answers[:, None]) % OPTIONS  # the true one, column 0, comes to column `answer`
    options = np.take_along_axis(options, order, axis=1)
    return Items(
        tokens[here[:, None] + np.arange(passage)],
        tokens[options[:, :, None] + np.arange(continuation)],
        answers,
    )


class TooFewItems(ValueError):
    """`most`: how many items there could be."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(f"{count} items: the text gives 1 to {most}")
        self.most = most


def _starts(parts: Sequence[Ints], length: int) -> Ints:
    """Where a run of `length` tokens can begin in the parts laid one after the other, without leaving its part."""
    begins = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    room = (max(0, len(part) - length + 1) for part in parts)
    found = (begin + np.arange(starts) for begin, starts in zip(begins, room, strict=True))
    return np.concatenate([np.empty(0, np.int64), *found])


class _Draws:
    """Whole numbers from a generator's raw stream, which is the same in every version of NumPy."""

    def __init__(self, seed: bytes) -> None:
        self._generator = np.random.PCG64(int.from_bytes(seed, "little"))

    def below(self, limit: int, shape: tuple[int, ...]) -> Ints:
        raw = self._generator.random_raw(math.prod(shape)).reshape(shape)
        return (raw % np.uint64(limit)).astype(np.int64)  # uneven by less than limit / 2**64


def _elsewhere(tokens: Ints, here: Ints, starts: Ints, passage: int, continuation: int, draws: _Draws) -> Ints:
    """(n, 3) starts of windows whose continuations differ from each other and the true one, none of which touches the item's
    own window."""
    window = passage + continuation
    true = tokens[here[:, None] + passage + np.arange(continuation)]
    others = starts[draws.below(len(starts), (len(here), OPTIONS - 1))]
    for _ in range(_MOST_DRAWS):
        texts = np.concatenate([true[:, None], tokens[others[:, :, None] + passage + np.arange(continuation)]], axis=1)
        same = (texts[:, :, None] == texts[:, None, :]).all(axis=-1)
        bad = np.tril(same, -1).any(axis=-1)[:, 1:]
        bad |= (others > here[:, None] - window) & (others + passage < here[:, None] + window)
        if not bad.any():
            return others
        others[bad] = starts[draws.below(len(starts), (int(bad.sum()),))]
    raise ValueError(f"the text has too few different continuations of {continuation} tokens: give more text")


# ---------------------------------------------------------------- what came out, and which of two models is better


@dataclass(frozen=True)
class Outcome:
    """Which items a model got right, (n,) bits in the items' order, and the digest of those items."""

    items: str
    right: npt.NDArray[np.bool_]

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def stderr(self) -> float:
        """sqrt(p (1 - p) / n)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / len(self.right))

    @property
    def bits(self) -> str:
        """The outcomes as hexadecimal digits, first item in the highest bit; `outcome_of_bits` reads it."""
        return np.packbits(self.right).tobytes().hex()


def outcome_of_bits(items: str, bits: str, count: int) -> Outcome:
    """The outcome over `count` items that `Outcome.bits` wrote. Raises ValueError if the digits are not that many items'."""
    packed = np.frombuffer(bytes.fromhex(bits), np.uint8)
    if len(packed) != -(-count // 8):
        raise ValueError(f"bits: {len(packed)} bytes for {count} items")
    return Outcome(items, np.unpackbits(packed, count=count).astype(bool))


def outcome_of(items: Items, scores: npt.NDArray[np.floating]) -> Outcome:
    """What (n, 4) `scores` choose: the highest, the first of equal ones. A score that is no number is never right."""
    known = ~np.isnan(scores)
    chosen = np.where(known, scores, -np.inf).argmax(axis=1)
    return Outcome(items.digest, (chosen == items.answers) & known[np.arange(len(items)), items.answers])


@dataclass(frozen=True)
class Difference:
    """Accuracy of the first models minus that of the second ones, as shares (0.01 is one point).

    `low` to `high` is the 95% interval with items as what was sampled: it speaks of these very trainings, on other text. The
    one over seeds is Student's, with one difference a seed: it speaks of other trainings as well, and is wide for few seeds;
    None for one seed.
    """

    difference: float
    stderr: float
    by_seed: tuple[float, ...]
    low_over_seeds: float | None
    high_over_seeds: float | None

    @property
    def low(self) -> float:
        return self.difference - NORMAL_95 * self.stderr

    @property
    def high(self) -> float:
        return self.difference + NORMAL_95 * self.stderr


def paired_difference(first: Sequence[Outcome], second: Sequence[Outcome]) -> Difference:
    """Compare two methods seed by seed and item by item: `first[s]` and `second[s]` are outcomes on the same items.

    Seeds that share their items are averaged item by item before the spread over items is taken, since their outcomes on one
    item go together; seeds with items of their own add up as independent. Each seed counts the same. Raises ValueError:
    nothing to compare, different items within a pair, or fewer than two items.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} outcomes against {len(second)}: give one of each for every seed")
    groups: dict[str, list[npt.NDArray[np.float64]]] = {}
    for one, other in zip(first, second, strict=True):
        if one.items != other.items or one.right.shape != other.right.shape:
            raise ValueError("the two models answered different items")
        if len(one.right) < 2:
            raise ValueError(f"{len(one.right)} items: a spread needs at least 2")
        groups.setdefault(one.items, []).append(one.right.astype(np.float64) - other.right)
    seeds = len(first)
    by_seed = tuple(one.accuracy - other.accuracy for one, other in zip(first, second, strict=True))
    variance = 0.0
    for group in groups.values():
        each = np.mean(group, axis=0)
        variance += (len(group) / seeds) ** 2 * float(each.var(ddof=1)) / len(each)
    low, high = _student(by_seed)
    return Difference(math.fsum(by_seed) / seeds, math.sqrt(variance), by_seed, low, high)


def _student(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95% interval of the mean of `values`."""
    if len(values) < 2:
        return None, None
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = math.fsum(values) / len(values)
    return mean - half, mean + half
