"""What members that lie about their signs do to a run, and whether they are found: prints one JSON object.

Five sites train a tiny Llama for --rounds rounds in one process, with the real engine, codec and outer optimizer, each on its
own data. Then again with one that flips all its signs, and with one that sends random ones, either with the magnitudes it
should send. For each: the final validation loss, the smoothed agreement of the honest and of the liar, and the first round
in which it is flagged.

    python benchmarks/poison.py [--rounds 100] [--sites 5] [--topology gather|reduce] [--seed 0] [--learning-rate 5e-4]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from geomesh_p2p.config import CodecSection, OuterSection, RunConfig, SiteConfig
from geomesh_p2p.core import codec
from geomesh_p2p.core.agreement import AgreementBook, agreements
from geomesh_p2p.core.outer import OuterState, apply_mean
from geomesh_p2p.core.types import Assignment, Plan, Range, Term
from geomesh_p2p.engine.engine import TorchEngine

Lie = Literal["none", "flipped", "random"]
LENGTH, BATCH, STEPS = 32, 4, 4


@dataclass
class Outcome:
    lie: str
    first_loss: float
    final_loss: float
    honest_with_update: float
    honest_with_others: float
    liar_with_update: float
    liar_with_others: float
    flagged: dict[str, int]          # site -> the round in which it was first flagged


def corpus(folder: Path, seed: int) -> Path:
    """Sentences of a small grammar, so that there is something to learn."""
    chance = random.Random(seed)
    who, does = ("the fox", "a bear", "my friend", "one peer"), ("counts", "sees", "sends", "loses")
    what = ("sheep", "bits", "rounds")
    path = folder / "corpus.txt"
    lines = (f"{chance.choice(who)} {chance.choice(does)} {n} {chance.choice(what)}\n" for n in range(20_000))
    path.write_text("".join(lines))
    return path


def engine(path: Path, site: str, rounds: int, sites: int, rate: float) -> TorchEngine:
    run: dict[str, Any] = {
        "run": {"id": "poison", "seed": 1},
        "model": {
            "hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "sequence_length": LENGTH
        },
        "dataset": {"source": "text", "paths": (str(path),), "validation_sequences": 64},
        "inner": {"learning_rate": rate, "total_tokens": rounds * sites * BATCH * STEPS * LENGTH},
    }  # fmt: skip
    where = {"site": {"name": site}, "device": {"name": "cpu", "threads": 1}}
    return TorchEngine(RunConfig.model_validate(run), SiteConfig.model_validate(where))


def sent(lie: Lie, payload: Any, head: int, chance: np.random.Generator) -> Any:
    """What the liar sends instead: the same magnitudes, other signs."""
    if lie == "none":
        return payload
    lied = payload.copy()
    lied[head:] = ~lied[head:] if lie == "flipped" else chance.integers(0, 256, lied.size - head, dtype=np.uint8)
    return lied


def play(lie: Lie, rounds: int, sites: int, topology: str, seed: int, rate: float, folder: Path) -> Outcome:
    path, settings, outer = corpus(folder, seed), CodecSection(), OuterSection()
    names = [f"site-{number}" for number in range(sites)]
    engines = [engine(path, name, rounds, sites, rate) for name in names]
    layout, liar = engines[0].layout, names[-1]
    state = OuterState.founded(engines[0].weights().copy())
    chance, book, flagged = np.random.default_rng(seed), AgreementBook(), dict[str, int]()
    mean, head, position = np.empty(layout.parameters, np.float32), 4 * layout.magnitudes, 0
    tokens = [BATCH * STEPS * LENGTH] * sites

    def loss() -> float:
        engines[0].set_weights(state.anchor)
        nats, count = engines[0].validate(0, 1)
        return nats / count

    first = loss()
    for round in range(1, rounds + 1):
        payloads = []
        for name, each in zip(names, engines, strict=True):
            mine = Assignment(name, name, BATCH, STEPS, BATCH, (Range(position, position + BATCH * STEPS),), 1.0, 1.0)
            position += BATCH * STEPS
            done = sum(tokens) * (round - 1)
            plan = Plan(b"", round, Term(1, name), 1, b"", (mine,), "gather", (), done, sum(tokens), 1.0, 1.0, 1.0, True)
            each.set_weights(state.anchor)
            each.train(mine, plan, lambda: False, time.monotonic())
            payload = codec.encode(layout, state.anchor, each.weights(), settings)
            assert not isinstance(payload, codec.NotFinite)
            payloads.append(sent(lie, payload, head, chance) if name == liar else payload)
        scores = agreements(
            codec.Terms(layout, settings, payloads, tokens).read, sites, 0, layout.parameters, round.to_bytes(4, "big")
        )
        for name in book.add(dict(zip(names, scores, strict=True))):
            flagged[name] = round
        codec.mean_of(layout, settings, payloads, tokens, 0, layout.parameters, mean)
        if topology == "reduce":
            part = codec.encode_part(layout, settings, mean, 0, layout.parameters)
            codec.decode_part(layout, settings, part, 0, layout.parameters, mean)
        apply_mean(state, mean, 0, layout.parameters, outer)
    honest = [book.scores[name] for name in names if name != liar]
    return Outcome(
        lie,
        first,
        loss(),
        sum(s.with_update for s in honest) / len(honest),
        sum(s.with_others for s in honest) / len(honest),
        book.scores[liar].with_update,
        book.scores[liar].with_others,
        flagged,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--topology", choices=("gather", "reduce"), default="gather")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of the inner optimizer")
    chosen = parser.parse_args()
    lies: tuple[Lie, ...] = ("none", "flipped", "random")
    with tempfile.TemporaryDirectory() as folder:
        settings = (chosen.rounds, chosen.sites, chosen.topology, chosen.seed, chosen.learning_rate, Path(folder))
        found = {lie: vars(play(lie, *settings)) for lie in lies}
    print(json.dumps({**vars(chosen), "outcomes": found}, indent=1))


if __name__ == "__main__":
    main()
