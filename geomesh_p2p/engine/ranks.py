"""Several devices behind one peer: each has a replica and a part of every batch, and gradients are summed before the one
optimizer's step. Outside, and in everything that is saved or sent, there is one model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from geomesh_p2p.engine.model import FlatModel, flatten

Gradient = Callable[[FlatModel, torch.Tensor, int], torch.Tensor]
"""gradient(model, ids, batch): adds the gradient of `ids`, a part of a batch of so many, to model.grad; gives its loss."""


class Ranks:
    """Replicas of `model` on `devices`, beside the model itself."""

    def __init__(
        self, model: FlatModel, devices: Sequence[torch.device], in_each_thread: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        self.replicas = [_replica(model, device) for device in devices]
        self._pool = ThreadPoolExecutor(max(1, len(devices)), thread_name_prefix="rank", initializer=in_each_thread)

    def gradient(self, of: Gradient, ids: torch.Tensor) -> torch.Tensor:
        """The whole batch's gradient in model.grad, and its loss; summed in the order of the ranks."""
        own, *others = torch.tensor_split(ids, 1 + len(self.replicas))
        given = [(replica, part) for replica, part in zip(self.replicas, others, strict=True) if len(part)]
        running = [self._pool.submit(self._of_replica, of, replica, part, len(ids)) for replica, part in given]
        self.model.grad.zero_()
        loss = of(self.model, own, len(ids))
        for (replica, _), future in zip(given, running, strict=True):
            loss = loss + future.result().to(loss.device)
            self.model.grad.add_(replica.grad.to(self.model.device))
        return loss

    def _of_replica(self, of: Gradient, replica: FlatModel, part: torch.Tensor, batch: int) -> torch.Tensor:
        replica.flat.copy_(self.model.flat)
        replica.grad.zero_()
        return of(replica, part, batch)


def _replica(model: FlatModel, device: torch.device) -> FlatModel:
    module = copy.deepcopy(model.module)
    module.zero_grad(set_to_none=True)
    return flatten(module.to(device).train(), model.vocabulary).for_training(model.compiled is not None)
