"""Continuation choice for what a benchmark trained; kept beside each trajectory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.choice import Items, Outcome, outcome_of_bits, paired_difference
from geomesh_p2p.engine.choice import held_out_items, score
from geomesh_p2p.engine.data import load_corpus
from geomesh_p2p.engine.model import build
from geomesh_p2p.engine.tokenizer import load_tokenizer
from geomesh_p2p.lab.bench.stopping import to_stderr
from geomesh_p2p.lab.bench.trajectory import Trajectory


def choice(run: RunConfig, trained: Trajectory, count: int) -> Outcome:
    """What the final anchor chooses in `count` items. All methods of a seed answer the same ones."""
    path = trained.folder / f"choice-{count}.json"
    if (known := _kept(path, count)) is not None:
        return known
    tokenizer = load_tokenizer(run.dataset.tokenizer)
    model = build(run.model, tokenizer.highest_id + 1, run.run.seed, "cpu", run.codec.granularity)
    model.set_weights(trained.anchor())
    outcome = score(model, _items(run, count))
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps({"items": outcome.items, "bits": outcome.bits}))
    os.replace(aside, path)
    return outcome


def _kept(path: Path, count: int) -> Outcome | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        return outcome_of_bits(found["items"], found["bits"], count)
    except (ValueError, LookupError, TypeError) as error:
        to_stderr(f"{path} is damaged ({type(error).__name__}: {error}): the items are asked anew")
        return None


def _items(run: RunConfig, count: int) -> Items:
    tokenizer = load_tokenizer(run.dataset.tokenizer)
    corpus = load_corpus(run.dataset, tokenizer, run.model.sequence_length, run.run.seed)
    return held_out_items(corpus, tokenizer.end_of_document, count, run.run.seed)


def check_items(runs: Iterable[RunConfig], count: int) -> None:
    """Raises ConfigError if the held-out text of one of them gives fewer than `count` items."""
    seen = {(run.dataset.model_dump_json(), run.model.sequence_length, run.run.seed): run for run in runs}
    for run in seen.values():
        _items(run, count)


def against(mine: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, Any]:
    """The paired difference for report.json, in shares; the intervals are of 95%."""
    found = paired_difference(mine, reference)
    return {
        "difference": found.difference,
        "stderr": found.stderr,
        "low": found.low,
        "high": found.high,
        "by_seed": list(found.by_seed),
        "low_over_seeds": found.low_over_seeds,
        "high_over_seeds": found.high_over_seeds,
    }
