"""Text to token ids: bytes (built in) or any Hugging Face tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.engine import hub
from geomesh_p2p.errors import DataError

END_OF_DOCUMENT_BYTE = 0xFF
"""Never occurs in UTF-8, so bytes need no 257th id and the vocabulary stays at 256."""
_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")


@dataclass(frozen=True)
class Tokenizer:
    """`encode` turns a document into ids without special tokens; `end_of_document` follows each document (None: nothing).

    `identity` is the same for two tokenizers that give the same ids: it is part of the run's fingerprint.
    """

    identity: str
    highest_id: int
    end_of_document: int | None
    encode: Callable[[str], npt.NDArray[np.integer]]

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        return np.uint8 if self.highest_id < 1 << 8 else np.uint16 if self.highest_id < 1 << 16 else np.uint32


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a folder, a tokenizer.json or a hub id. Raises DataError in one line."""
    if name == "bytes":
        return Tokenizer("bytes", 255, END_OF_DOCUMENT_BYTE, _bytes)
    return hub.load(name, "dataset.tokenizer", _from_path)


def _bytes(text: str) -> npt.NDArray[np.integer]:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def _from_path(path: str) -> Tokenizer:
    import tokenizers

    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if os.path.isfile(file):
        return _wrap(tokenizers.Tokenizer.from_file(file), None)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path)
    if not getattr(loaded, "is_fast", False):
        raise DataError(f"dataset.tokenizer: {path!r} has no fast version; convert it to a tokenizer.json")
    return _wrap(loaded.backend_tokenizer, loaded.eos_token_id)


def _wrap(fast: object, end_of_document: int | None) -> Tokenizer:
    vocabulary: dict[str, int] = fast.get_vocab(with_added_tokens=True)  # type: ignore[attr-defined]
    if not vocabulary:
        raise DataError("dataset.tokenizer: the tokenizer has an empty vocabulary; train it first")
    fast.no_truncation()  # type: ignore[attr-defined]
    fast.no_padding()  # type: ignore[attr-defined]
    if end_of_document is None:
        end_of_document = next((vocabulary[token] for token in _END_TOKENS if token in vocabulary), None)
    identity = digest_bytes(fast.to_str(pretty=False).encode()).hex()  # type: ignore[attr-defined]

    def encode(text: str) -> npt.NDArray[np.integer]:
        return np.asarray(fast.encode(text, add_special_tokens=False).ids, dtype=np.int64)  # type: ignore[attr-defined]

    return Tokenizer(f"{identity[:32]} end={end_of_document}", max(vocabulary.values()), end_of_document, encode)
