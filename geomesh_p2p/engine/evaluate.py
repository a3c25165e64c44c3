"""Validation: sums of token losses, so that shares measured by several peers add up to one number."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from geomesh_p2p.engine.model import FlatModel

LOGITS_AT_ONCE = 1 << 26
"""Most logits held at a time; bounds the memory of a large vocabulary."""


@torch.inference_mode()
def token_losses(
    model: FlatModel, ids: npt.NDArray[np.int64], should_close: Callable[[], bool] | None = None
) -> tuple[float, int]:
    """(sum of losses in nats, tokens) of (n, length + 1) ids under the current weights; float64 sums, fp32 forward pass.
    Once `should_close()`, of those that are done: others wait for this peer."""
    if not len(ids):
        return 0.0, 0
    length = ids.shape[1] - 1
    at_once = max(1, min(32, LOGITS_AT_ONCE // (length * model.vocabulary)))
    nats, done = 0.0, 0
    was_training = model.module.training
    model.module.eval()
    try:
        for part in torch.from_numpy(ids).split(at_once):
            if should_close is not None and should_close():
                break
            part = part.to(model.device)
            losses = F.cross_entropy(model.logits(part[:, :-1]).float().flatten(0, 1), part[:, 1:].flatten(), reduction="none")
            nats += float(losses.double().cpu().sum())
            done += len(part)
    finally:
        model.module.train(was_training)
    return nats, done * length


def perplexity(nats: float, tokens: int) -> float:
    """exp(mean loss); infinite where it would overflow. Raises ValueError without tokens."""
    if tokens <= 0:
        raise ValueError("perplexity of no tokens")
    return math.exp(min(nats / tokens, 700.0)) if math.isfinite(nats) else math.inf
