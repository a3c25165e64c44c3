"""A small setting, model and corpus for the tests of the benchmark."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.lab.bench.settings import Setting

SEQUENCE_LENGTH = 16


def setting(**changes: Any) -> Setting:
    """Two unequal sites; a reference round is 16 sequences, two steps of four at each site."""
    fields: dict[str, Any] = {
        "name": "small",
        "about": "two sites",
        "reference_round_sequences": 16,
        "reference_batch": 4,
        "stands_for_parameters": 1e6,
        "sites": [place("far", 0.4), place("near", 0.1)],
        "links": {"pairs": [{"between": ["far", "near"], "mbps": 8, "rtt_ms": 100}]},
    }
    return Setting.model_validate({**fields, **changes})


def place(name: str, sequence_seconds: float, **changes: Any) -> dict[str, Any]:
    return {"name": name, "device": f"device of {name}", "fixed_seconds": 0.0, "sequence_seconds": sequence_seconds,
            "max_batch": 8, **changes}  # fmt: skip


def run_config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """A model of a few thousand parameters on random words."""
    text = folder / "text.txt"
    if not text.exists():
        rng = random.Random(0)
        words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 5))) for _ in range(50)]
        text.write_text("\n".join(" ".join(rng.choice(words) for _ in range(40)) for _ in range(2000)))
    fields: dict[str, dict[str, Any]] = {
        "run": {"id": "bench", "seed": 3, "folder": str(folder / "runs")},
        "model": {"hidden_size": 16, "intermediate_size": 32, "layers": 1, "heads": 2, "kv_heads": 2,
                  "sequence_length": SEQUENCE_LENGTH},
        "dataset": {"source": "text", "paths": (str(text),), "validation_sequences": 16, "keep_tokens": False},
        "inner": {"learning_rate": 3e-3, "warmup_tokens": 0},
        "planner": {"min_steps": 1, "grace_seconds": 0.1},
    }  # fmt: skip
    for name, values in sections.items():
        fields[name] = {**fields.get(name, {}), **values}
    return RunConfig.model_validate(fields)
