"""Text to token ids: bytes (built in) or any Hugging Face tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.canonical import digest_bytes
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
    path = os.path.expanduser(name)
    if os.path.isdir(path) and os.path.isfile(os.path.join(path, "tokenizer.json")):
        return _from_json(os.path.join(path, "tokenizer.json"))
    if os.path.isfile(path):
        return _from_json(path)
    if not os.path.exists(path) and (
        name.startswith((".", "/", "~")) or name.endswith(".json") or not re.match(r"^[\w.-]+(/[\w.-]+)?$", name)
    ):
        raise DataError(
            f"dataset.tokenizer: no such file or folder: {name!r}; give `bytes`, a tokenizer.json, its folder or a hub id"
        )
    return _from_transformers(path if os.path.isdir(path) else name)


def _bytes(text: str) -> npt.NDArray[np.integer]:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def _from_json(path: str) -> Tokenizer:
    import tokenizers

    try:
        fast = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(
            f"dataset.tokenizer: {path}: not a tokenizer.json ({_first_line(error)}); give one that `tokenizers` wrote"
        ) from None
    return _wrap(fast, None)


def _from_transformers(name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # OSError, ValueError, ImportError and the hub's errors, all for a wrong name
        raise DataError(
            f"dataset.tokenizer: {name!r} is no tokenizer folder here, and the hub did not give one ({_first_line(error)}); "
            "give `bytes`, a tokenizer.json or its folder"
        ) from None
    if not getattr(slow, "is_fast", False):
        raise DataError(f"dataset.tokenizer: {name!r} has no fast version; convert it to a tokenizer.json")
    return _wrap(slow.backend_tokenizer, slow.eos_token_id)


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


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
