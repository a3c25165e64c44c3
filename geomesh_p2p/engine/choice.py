"""Continuation choice (core/choice.py) put to a model: items from a run's held-out text, likelihoods, the outcome."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from geomesh_p2p.core.choice import OPTIONS, Items, Outcome, TooFewItems, documents_of, lengths, make_items, outcome_of
from geomesh_p2p.engine.data import Corpus
from geomesh_p2p.engine.evaluate import LOGITS_AT_ONCE
from geomesh_p2p.errors import ConfigError

SEQUENCES_AT_ONCE = 64


class Scores(Protocol):
    """A FlatModel, or anything else with logits. Where there are `device` and `module`, they are heeded."""

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, length) token ids -> (batch, length, vocabulary)."""
        ...


def held_out_items(corpus: Corpus, end_of_document: int | None, count: int, seed: int) -> Items:
    """`count` items from documents that the run never trains on, and that do not repeat such (one pass over all tokens);
    `end_of_document` is the tokenizer's. Raises ConfigError: more than the held-out text gives."""
    texts = documents_of(np.asarray(corpus.held_out), end_of_document)
    try:
        return make_items(texts, count, seed, *lengths(corpus.sequence_length), corpus.tokens)
    except TooFewItems as error:
        raise ConfigError(
            f"continuation choice: {count:,} items, but the held-out text gives {error.most:,}: ask for that many or fewer, "
            "or give a new run more text or more dataset.validation_sequences"
        ) from None
    except ValueError as error:
        raise ConfigError(f"continuation choice: {error}") from None


@torch.inference_mode()
def likelihoods(model: Scores, items: Items) -> npt.NDArray[np.float64]:
    """(n, 4) mean log-likelihood per token, in nats, of each continuation given the passage; fp32 forward pass."""
    passage, continuation = items.passages.shape[1], items.continuations.shape[2]
    passages = np.repeat(items.passages[:, None], OPTIONS, axis=1)
    rows = np.concatenate([passages, items.continuations], axis=2).reshape(-1, passage + continuation)
    found = np.empty(len(rows))
    device = getattr(model, "device", torch.device("cpu"))
    module = getattr(model, "module", None)
    was_training = module is not None and module.training
    if module is not None:
        module.eval()
    try:
        done, at_once = 0, 1
        while done < len(rows):
            part = torch.from_numpy(rows[done : done + at_once]).to(device)
            logits = model.logits(part[:, :-1])
            means = logits[:, passage - 1 :].float().log_softmax(-1).gather(-1, part[:, passage:, None]).double().mean((1, 2))
            found[done : done + len(part)] = means.cpu().numpy()
            done += len(part)
            at_once = max(1, min(SEQUENCES_AT_ONCE, LOGITS_AT_ONCE // logits[0].numel()))
    finally:
        if module is not None:
            module.train(was_training)
    return found.reshape(len(items), OPTIONS)


def score(model: Scores, items: Items) -> Outcome:
    """Which items `model` gets right."""
    return outcome_of(items, likelihoods(model, items))
