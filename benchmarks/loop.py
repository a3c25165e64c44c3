"""Our inner loop against a bare PyTorch loop over the same steps: prints one JSON object with the ratio of their times.

Both train a Llama on the standard library's source text with clipping, fused AdamW and a cosine schedule, in turns, so
that noise of the machine meets both. `ratio` is the median over all turns of ours / bare in wall time; the aim is at most
1.02. `cpu_ratio` is the same in processor time, which other programs on the machine disturb less.

    python benchmarks/loop.py [--turns 30] [--steps 5] [--batch 8] [--hidden-size 192] [--layers 2] [--device cpu]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

from geomesh_p2p.config import DatasetSection, InnerSection, ModelSection
from geomesh_p2p.core.types import Assignment, Plan, Range, Term
from geomesh_p2p.engine.data import Corpus, load_corpus
from geomesh_p2p.engine.device import choose_device, wants_bf16
from geomesh_p2p.engine.feed import Feed
from geomesh_p2p.engine.inner import InnerLoop, run_round
from geomesh_p2p.engine.model import build
from geomesh_p2p.engine.tokenizer import load_tokenizer


class BareLoop:
    """What one would write by hand."""

    def __init__(self, module: torch.nn.Module, corpus: Corpus, settings: InnerSection, bf16: bool) -> None:
        self.module, self.settings, self.bf16 = module, settings, bf16
        self.device = next(module.parameters()).device
        self.tokens, self.length = corpus.tokens, corpus.sequence_length
        groups = [
            {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
        self.random = np.random.default_rng(0)

    def run(self, steps: int, batch: int) -> None:
        total = 0.0
        for step in range(steps):
            starts = self.random.integers(0, len(self.tokens) - self.length - 1, batch)
            rows = np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)
            ids = torch.from_numpy(rows).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                logits = self.module(input_ids=ids[:, :-1], use_cache=False).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if self.settings.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip_norm)
            rate = self.settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            total += loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    section = ModelSection(
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        layers=options.layers,
        heads=max(1, options.hidden_size // 64),
        kv_heads=max(1, options.hidden_size // 64),
        sequence_length=options.sequence_length,
    )
    tokenizer = load_tokenizer("bytes")
    corpus = load_corpus(DatasetSection(), tokenizer, options.sequence_length, seed=0)
    model = build(section, tokenizer.highest_id + 1, seed=0, device=device)
    settings, bf16 = InnerSection(), wants_bf16("auto", device)
    module = copy.deepcopy(model.module)
    module.zero_grad(set_to_none=True)
    bare, ours = BareLoop(module, corpus, settings, bf16), InnerLoop(model, settings, bf16)

    feed = Feed(corpus)
    sequences = options.steps * options.batch
    position = 0

    def run_ours() -> None:
        nonlocal position
        mine = Assignment(
            peer="", site="", batch=options.batch, inner_steps=options.steps, last_batch=options.batch,
            ranges=(Range(position, position + sequences),), lr_scale=1.0, finish_seconds=1.0,
        )  # fmt: skip
        plan = Plan(
            run=b"", round=1, term=Term(1, ""), attempt=1, base=b"", members=(mine,), topology="gather", shares=(),
            committed_tokens=0, planned_tokens=sequences * options.sequence_length, train_seconds=1.0, exchange_seconds=1.0,
            grace_seconds=1.0, may_close=True,
        )  # fmt: skip
        run_round(ours, feed, mine, plan, should_close=lambda: False)
        position += sequences

    loops = {"ours": run_ours, "bare": lambda: bare.run(options.steps, options.batch)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(options.turns + 1):
        for name in list(loops) if turn % 2 else reversed(loops):
            begun, cpu_begun = time.perf_counter(), time.process_time()
            loops[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first turn warms up
                seconds[name].append((time.perf_counter() - begun) / options.steps)
                cpu_seconds[name].append((time.process_time() - cpu_begun) / options.steps)
    ratios, cpu_ratios = (
        [ours / bare for ours, bare in zip(found["ours"], found["bare"], strict=True)] for found in (seconds, cpu_seconds)
    )
    print(
        json.dumps(
            {
                "benchmark": "loop",
                "parameters": model.layout.parameters,
                "batch": options.batch,
                "threads": options.threads,
                "device": str(device),
                "ours_step_seconds": statistics.median(seconds["ours"]),
                "bare_step_seconds": statistics.median(seconds["bare"]),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                "cpu_ratio": statistics.median(cpu_ratios),
                "cpu_ratio_quartiles": statistics.quantiles(cpu_ratios, n=4)[::2],
                "limit": 1.02,
            }
        )
    )


if __name__ == "__main__":
    main()
