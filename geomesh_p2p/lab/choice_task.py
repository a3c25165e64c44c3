"""Continuation choice as a local task of lm-evaluation-harness: a folder with items.jsonl and the task's YAML.

The harness knows text alone: it encodes passage and continuation together, and takes white space at the passage's end for
the continuation's. Items are written only where that leads to their very tokens; the share of white space is then the same in
all four continuations of an item, so its sums of log-likelihoods choose what ours do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.choice import Items

TASK = "continuation_choice"
ITEMS_FILE = "items.jsonl"


def write_task(folder: Path, items: Items, tokenizer: Any) -> npt.NDArray[np.bool_]:
    """Writes the task to `folder`, for models that are exported with this `tokenizer` of transformers. Which of `items` are
    in it: (n,). The task names the place of its items: write it anew rather than moving it."""
    texts = [_texts(tokenizer, *item) for item in zip(items.passages.tolist(), items.continuations.tolist(), strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ITEMS_FILE).resolve()
    with file.open("w", encoding="utf-8") as out:
        for number, (text, answer) in enumerate(zip(texts, items.answers.tolist(), strict=True)):
            if text is not None:
                passage, continuations = text
                line = {"item": number, "passage": passage, "continuations": continuations, "answer": answer}
                out.write(json.dumps(line) + "\n")
    (folder / f"{TASK}.yaml").write_text(_yaml(file, items.digest), encoding="utf-8")
    return np.asarray([text is not None for text in texts], bool)


def _texts(tokenizer: Any, passage: list[int], continuations: list[list[int]]) -> tuple[str, list[str]] | None:
    """Passage and continuations as text, None if that does not lead back to their tokens."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before = tokenizer.decode(passage)
    stripped = ids(before.rstrip())
    if not stripped or passage[: len(stripped)] != stripped or ids(before) != passage:
        return None
    found = []
    for continuation in continuations:
        whole = tokenizer.decode(passage + continuation)
        if not whole.startswith(before) or ids(whole) != passage + continuation:
            return None
        found.append(whole[len(before) :])
    return before, found


def _yaml(file: Path, digest: str) -> str:
    # JSON is YAML, and quotes whatever a path may hold.
    lines: dict[str, Any] = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "passage",
        "doc_to_choice": "continuations",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1, "items": digest},
    }
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items())
