"""Inner steps: this peer's own optimizer on its own ranges, between two exchanges."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from geomesh_p2p.config import InnerSection
from geomesh_p2p.core.log import first_positions
from geomesh_p2p.core.observations import TrainingProgress
from geomesh_p2p.core.ports import InnerResult
from geomesh_p2p.core.types import Assignment, Plan
from geomesh_p2p.engine.device import Pacer
from geomesh_p2p.engine.feed import Feed, Starved
from geomesh_p2p.engine.model import FlatModel
from geomesh_p2p.engine.ranks import Ranks
from geomesh_p2p.errors import DataError, TrainingDivergedError

LION_CHUNK = 1 << 22
REPORT_SECONDS = 0.5
Ids = npt.NDArray[np.int64]


def learning_rate(settings: InnerSection, tokens: float) -> float:
    """The rate at `tokens` global tokens: linear warm-up, then a cosine down to min_learning_rate_share at total_tokens."""
    if tokens < settings.warmup_tokens:
        return settings.learning_rate * tokens / settings.warmup_tokens
    span = max(1, settings.total_tokens - settings.warmup_tokens)
    done = min(1.0, (tokens - settings.warmup_tokens) / span)
    low = settings.min_learning_rate_share
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum is the step."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                parts = zip(
                    *(tensor.split(LION_CHUNK) for tensor in (parameter, parameter.grad, state["exp_avg"])), strict=True
                )
                for weights, grad, momentum in parts:
                    direction = torch.lerp(momentum, grad, 1 - first).sign_()
                    weights.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
                    momentum.lerp_(grad, 1 - second)


class InnerLoop:
    """One optimizer on one flat model. The optimizer's moments stay here from round to round; weights come and go."""

    def __init__(
        self, model: FlatModel, settings: InnerSection, bf16: bool = False, ranks: Ranks | None = None
    ) -> None:
        self.model = model
        self.ranks = ranks or Ranks(model, ())
        self.settings = settings
        self.bf16 = bf16
        self.skipped_in_a_row = 0
        self.steps = 0  # tried so far
        self._parts = [torch.nn.Parameter(model.flat[start:stop]) for start, stop, _ in model.segments]
        for part, (start, stop, _) in zip(self._parts, model.segments, strict=True):
            part.grad = model.grad[start:stop]
        decaying, others = (
            [part for part, (_, _, decays) in zip(self._parts, model.segments, strict=True) if decays is wanted]
            for wanted in (True, False)
        )
        groups = [
            {"params": decaying, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
            if settings.optimizer == "adamw"
            else Lion(groups, lr=settings.learning_rate, betas=settings.betas)
        )

    def step(self, ids: Ids, rate: float) -> tuple[float, bool]:
        """One optimizer step on (batch, length + 1) ids. Returns the mean loss in nats and whether the step was taken:
        a gradient that is not finite leaves weights and moments as they were."""
        model = self.model
        self.steps += 1
        loss = self.ranks.gradient(self._gradient, torch.from_numpy(ids))
        norm = float(torch.linalg.vector_norm(model.grad))
        if not math.isfinite(norm):
            self.skipped_in_a_row += 1
            return float(loss), False
        self.skipped_in_a_row = 0
        if self.settings.clip_norm is not None and norm > self.settings.clip_norm:
            model.grad.mul_(self.settings.clip_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return float(loss), True

    def _gradient(self, model: FlatModel, ids: torch.Tensor, batch: int) -> torch.Tensor:
        tokens = ids.to(model.device, non_blocking=True)
        loss = torch.zeros((), device=model.device)
        for part in tokens.split(self.settings.micro_batch or max(1, len(tokens))):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=self.bf16):
                logits = model.training_logits(part[:, :-1])
                mean = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            share = mean * (len(part) / batch)
            share.backward()
            loss += share.detach()
        return loss

    def give_up_if_hopeless(self, loss: float, rate: float) -> None:
        """Raises TrainingDivergedError after inner.max_skipped_steps steps in a row without a finite gradient."""
        if self.skipped_in_a_row >= self.settings.max_skipped_steps:
            raise TrainingDivergedError(self.settings.max_skipped_steps, loss, rate)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors by name (not copies); empty before the first step."""
        return {
            f"{index}.{key}": value
            for index, part in enumerate(self._parts)
            for key, value in self.optimizer.state[part].items()
        }

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a state() of the same model and optimizer; raises DataError if the tensors do not fit."""
        wanted = {"exp_avg", "exp_avg_sq", "step"} if self.settings.optimizer == "adamw" else {"exp_avg"}
        expected = {f"{index}.{key}" for index in range(len(self._parts)) for key in wanted}
        if tensors and set(tensors) != expected:
            raise DataError(
                f"inner state: it is not one of {self.settings.optimizer} on this model; start this site's inner state anew"
            )
        self.optimizer.state.clear()
        for name, tensor in tensors.items():
            index, key = name.split(".", 1)
            part = self._parts[int(index)]
            if key != "step" and tensor.shape != part.shape:
                raise DataError(
                    f"inner state: {name} has {tensor.numel():,} numbers, the model {part.numel():,}; it is of another model"
                )
            self.optimizer.state[part][key] = tensor.to(part.device).clone()


# ---------------------------------------------------------------- one round


def run_round(
    loop: InnerLoop,
    feed: Feed,
    assignment: Assignment,
    plan: Plan,
    should_close: Callable[[], bool],
    pacer: Pacer | None = None,
    report: Callable[[TrainingProgress], None] | None = None,
) -> InnerResult:
    """The inner steps of `assignment`, its ranges read in order; stops at a step boundary once `should_close()`, or if no
    data comes.

    The result's ranges are exactly the positions trained. If not one step could be taken (no time, no data, no finite
    gradient) it has no tokens and no ranges, and says why. Raises TrainingDivergedError once too many steps in a row had
    no finite gradient, whatever rounds they were in.
    """
    clock = time.perf_counter
    begun = ended = reported = clock()
    last = assignment.inner_steps - 1
    sizes = [assignment.batch if index < last else assignment.last_batch for index in range(assignment.inner_steps)]
    supply = feed.supply(assignment.ranges, sizes)
    step_seconds: list[float] = []
    losses = waited = rate = 0.0
    sequences = taken_sequences = skipped = 0
    stopped = ""
    loop.model.module.train()

    for index, size in enumerate(sizes):
        if should_close():
            stopped = "closed before the first inner step was done"
            break
        asked = clock()
        ids = supply.next(should_close)
        waited += clock() - asked
        if isinstance(ids, Starved):
            stopped = ids.reason
            break
        sequence_length = ids.shape[1] - 1

        # The schedule follows the whole run's tokens: those committed, and this round's so far if all keep the plan.
        tokens = plan.committed_tokens + (index + 1) / assignment.inner_steps * plan.planned_tokens
        rate = learning_rate(loop.settings, tokens) * assignment.lr_scale
        loss, taken = loop.step(ids, rate)
        sequences += size
        if taken:
            taken_sequences += size
            losses += loss * size
        else:
            skipped += 1
            loop.give_up_if_hopeless(loss, rate)

        if pacer is not None:
            pacer.wait(size)
        now = clock()
        step_seconds.append(now - ended)
        ended = now
        if report is not None and now - reported >= REPORT_SECONDS:
            reported = now
            speed = sequences * sequence_length / (now - begun)
            report(TrainingProgress(plan.round, index + 1, assignment.inner_steps, speed, loss))

    if not taken_sequences and skipped:
        stopped = f"none of {skipped} inner steps had a finite gradient"
    return InnerResult(
        tokens=sequences * sequence_length if taken_sequences else 0,
        ranges=first_positions(assignment.ranges, sequences) if taken_sequences else (),
        steps=len(step_seconds),
        loss=losses / taken_sequences if taken_sequences else 0.0,
        seconds=ended - begun,
        data_wait_seconds=waited,
        step_seconds=tuple(step_seconds),
        skipped_steps=skipped,
        overrun_seconds=max(0.0, pacer.overrun_seconds) if pacer is not None else 0.0,
        learning_rate=rate,
        stopped=stopped,
    )
