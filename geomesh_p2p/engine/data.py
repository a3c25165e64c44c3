"""The training stream: documents packed into sequences, every position addressable, a part held out for validation.

Tokens of all training documents lie one after the other, each document followed by the end-of-document id. Sequence `i`
is the sequence_length tokens from i * sequence_length on, and its targets are the same shifted by one. Position `p` of
the endless stream is the sequence at `(epoch, place) = divmod(p, sequences)`, mapped through the epoch's permutation: a
function of (seed, epoch), so a resume seeks and a joiner starts anywhere at no cost.
"""

from __future__ import annotations

import json
import os
import platform
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.config import DatasetSection
from geomesh_p2p.core.canonical import DIGEST_BYTES, Digest, digest, digest_bytes
from geomesh_p2p.core.types import Range
from geomesh_p2p.engine.documents import documents, stamps
from geomesh_p2p.engine.reading import Reading, read_watched
from geomesh_p2p.engine.token_cache import Prepared, Tokens, kept
from geomesh_p2p.engine.tokenizer import Tokenizer
from geomesh_p2p.errors import DataError

HELD_OUT_SHARE = 0.02
"""Documents are held out until they are this share of all tokens (or enough for the validation sequences)."""
LARGEST_HELD_OUT_SHARE = 0.5
PREPARING_READS = 20
"""Another process that prepares the same tokens is waited for this many times dataset.read_seconds."""


@dataclass(frozen=True)
class DataManifest:
    """What two peers must agree on to mean the same tokens by the same position. `fields` are for a refusal's text."""

    fields: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> Digest:
        return digest("data", self.fields)


@dataclass(frozen=True)
class Corpus:
    """`tokens` of the training stream, `held_out` tokens of the documents kept apart; `permute` orders an epoch."""

    tokens: Tokens
    held_out: Tokens
    sequence_length: int
    validation_sequences: int
    seed: int
    shuffle: bool
    manifest: DataManifest

    @property
    def sequences(self) -> int:
        """Sequences in one epoch."""
        return (len(self.tokens) - 1) // self.sequence_length

    def places(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Index of the sequence at each position."""
        epochs, places = np.divmod(positions, self.sequences)
        if not self.shuffle:
            return places
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = permuted(places[here], self.sequences, self.seed, int(epoch))
        return found

    def batch(self, positions: Iterable[int] | Range) -> npt.NDArray[np.int64]:
        """(batch, sequence_length + 1) ids of the sequences at `positions`: inputs are [:, :-1], targets [:, 1:]."""
        wanted = range(positions.start, positions.stop) if isinstance(positions, Range) else positions
        return self._cut(self.tokens, self.places(np.fromiter(wanted, dtype=np.int64)) * self.sequence_length)

    def validation(self, share: int = 0, of: int = 1) -> npt.NDArray[np.int64]:
        """(n, sequence_length + 1) ids: every `of`-th validation sequence from `share` on; n may be 0."""
        available = (len(self.held_out) - 1) // self.sequence_length
        chosen = np.arange(self.validation_sequences, dtype=np.int64) * available // self.validation_sequences  # spread evenly
        return self._cut(self.held_out, chosen[share::of] * self.sequence_length)

    def _cut(self, tokens: Tokens, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if tokens is self.tokens and isinstance(tokens, np.memmap):
            return read_rows(self._descriptor, tokens, starts, self.sequence_length + 1)
        return tokens[starts[:, None] + np.arange(self.sequence_length + 1)].astype(np.int64)


    @cached_property
    def _descriptor(self) -> int:
        """The tokens' file, held open: it may be deleted meanwhile."""
        mapped: Any = self.tokens
        descriptor = os.open(mapped.filename, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor


def read_rows(
    descriptor: int, tokens: Tokens, starts: npt.NDArray[np.int64], length: int
) -> npt.NDArray[np.int64]:
    """`length` tokens of a mapped file from each of `starts`, by read and not through the mapping: while a file system
    stalls, a read lets the process's other threads run, a page fault under the interpreter's lock does not."""
    mapped: Any = tokens
    rows = np.empty((len(starts), length), tokens.dtype)
    for row, start in zip(rows, starts.tolist(), strict=True):
        if os.preadv(descriptor, [row.data], mapped.offset + start * tokens.itemsize) != row.nbytes:
            raise OSError(f"{mapped.filename}: cut short")
    return rows.astype(np.int64)


# ---------------------------------------------------------------- the order of an epoch


def permuted(places: npt.NDArray[np.int64], size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where a permutation of range(size), chosen by (seed, epoch), sends each of `places`.

    A balanced Feistel network over the next even power of two, walked until the value is below `size` (format-preserving
    encryption, Black and Rogaway 2002): O(1) memory for any size, integers only, the same on every machine.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.frombuffer(digest("epoch", seed, epoch), dtype="<u8")[:4]
    values = places.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> np.uint64(half), values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = left << np.uint64(half) | right
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# ---------------------------------------------------------------- from documents to a corpus


def load_corpus(
    section: DatasetSection, tokenizer: Tokenizer, sequence_length: int, seed: int, cache: Path | None = None
) -> Corpus:
    """Read, tokenise, pack and split. With `cache`, tokens are kept there and read from there, text only if it has changed.

    Raises DataError: a file that cannot be used, or too little text, with the numbers; TemporaryError: no text came for
    dataset.read_seconds.
    """

    def prepare() -> Prepared:
        def read(reading: Reading) -> Prepared:
            return _prepare(documents(section), section, tokenizer, sequence_length, seed, reading)

        return read_watched(read, section.read_seconds)

    if cache is None:
        made = prepare()
    else:
        # What the tokens are made of, without reading it; two peers compare contents, by the manifest.
        settings = (tokenizer.identity, section.source, section.field, section.validation_sequences, seed, sequence_length)
        key = digest("tokens-1", platform.python_version(), json.dumps([settings, stamps(section)]))
        made = kept(cache, key.hex()[:32], prepare, PREPARING_READS * section.read_seconds)
    return _corpus(made, section, tokenizer, sequence_length, seed)


def corpus_of(texts: Iterable[str], section: DatasetSection, tokenizer: Tokenizer, sequence_length: int, seed: int) -> Corpus:
    """The corpus that `texts` make. Raises DataError as load_corpus does."""
    made = _prepare(texts, section, tokenizer, sequence_length, seed, Reading())
    return _corpus(made, section, tokenizer, sequence_length, seed)


def _prepare(
    texts: Iterable[str], section: DatasetSection, tokenizer: Tokenizer, sequence_length: int, seed: int, reading: Reading
) -> Prepared:
    hashes, parts = _tokenise(iter(texts), tokenizer, reading)
    train, held_out = _split(hashes, parts, section, sequence_length, seed)
    return Prepared(train, held_out, len(hashes), digest_bytes(*hashes).hex()[:16])


def _corpus(made: Prepared, section: DatasetSection, tokenizer: Tokenizer, sequence_length: int, seed: int) -> Corpus:
    fields = {
        "source": section.source,
        "documents": f"{made.documents} documents, {made.documents_hash}",
        "tokenizer": tokenizer.identity,
        "sequence_length": str(sequence_length),
        "train_tokens": str(len(made.train)),
        "validation": f"{section.validation_sequences} sequences of {len(made.held_out)} held-out tokens, seed {seed}",
        "shuffle": str(section.shuffle),
    }
    if section.source == "python-stdlib":
        fields["python"] = platform.python_version()
    manifest = DataManifest(tuple(sorted(fields.items())))
    return Corpus(made.train, made.held_out, sequence_length, section.validation_sequences, seed, section.shuffle, manifest)


def _hash(text: str) -> Digest:
    return digest_bytes(text.encode("utf-8"))


def _tokenise(texts: Iterator[str], tokenizer: Tokenizer, reading: Reading) -> tuple[list[Digest], list[Tokens]]:
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    hashes: list[Digest] = []
    parts: list[Tokens] = []
    for text in texts:
        ids = tokenizer.encode(text)
        hashes.append(_hash(text))
        parts.append(np.concatenate([ids, np.asarray(end, dtype=ids.dtype)]).astype(tokenizer.dtype))
        reading.documents += 1
        reading.tokens += len(parts[-1])
    return hashes, parts


def _split(
    hashes: Sequence[Digest], parts: Sequence[Tokens], section: DatasetSection, sequence_length: int, seed: int
) -> tuple[Tokens, Tokens]:
    """Tokens to train on and tokens held out, both in document order. Which documents are held out depends on the seed."""
    total = sum(len(part) for part in parts)
    needed = section.validation_sequences * sequence_length + 1
    wanted = max(needed, int(total * HELD_OUT_SHARE))
    order = sorted(range(len(parts)), key=lambda index: digest_bytes(seed.to_bytes(16, "little", signed=True), hashes[index]))
    held: set[int] = set()
    size = 0
    for index in order:
        if size >= wanted:
            break
        held.add(index)
        size += len(parts[index])
    if size < needed or size > total * LARGEST_HELD_OUT_SHARE:
        raise DataError(
            f"dataset: the corpus has {total:,} tokens in {len(parts):,} documents; validation needs {needed:,} "
            f"in whole documents, which would hold out {size:,}. Give more text, "
            "or lower dataset.validation_sequences or model.sequence_length"
        )
    train = [part for index, part in enumerate(parts) if index not in held]
    return np.concatenate(train), np.concatenate([parts[index] for index in sorted(held)])


assert DIGEST_BYTES >= 32, "an epoch's order takes four 64-bit keys from one digest"
