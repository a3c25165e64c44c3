"""Ten rounds with three unequal workers, built so that they come out the same on every machine.

Deltas are multiples of 2^-12 drawn from a hash, rows are powers of two long and no longer than 128, weights are 1/2 and 1/4:
every sum behind a magnitude is exact, whatever order a library adds in. All that follows is what IEEE 754 fixes.

    python tests/golden/outer_run.py        writes outer_run.json anew: only when the format of a run changes on purpose
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core import codec, outer
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.codec import Layout, Tensor
from geomesh_p2p.core.types import Contribution, Founding, Range, Update

FILE = Path(__file__).with_suffix(".json")
ROUNDS = 10
LAYOUT = Layout((Tensor("embedding", 256, 16), Tensor("weight", 128), Tensor("norm", 16), Tensor("head", 128)))
SITES = {"frankfurt": 2, "oregon": 1, "tokyo": 1}
SHARES = (Range(0, 264), Range(264, 392), Range(392, LAYOUT.parameters))
SETTINGS = {
    "gather": (CodecSection(), OuterSection()),
    "gather-rms-plain-momentum": (CodecSection(magnitude="rms"), OuterSection(learning_rate=1.0, nesterov=False)),
    "reduce-1-bit": (CodecSection(second_phase_bits=1), OuterSection()),
    "reduce-2-bit": (CodecSection(second_phase_bits=2), OuterSection()),
    "reduce-8-bit": (CodecSection(second_phase_bits=8), OuterSection()),
}


def drawn(*name: Any) -> np.ndarray:
    """Multiples of 2^-12 within ±127 · 2^-12, from a hash of `name`."""
    raw = hashlib.shake_256(repr(name).encode()).digest(LAYOUT.parameters)
    return np.frombuffer(raw, np.int8).clip(-127, 127).astype(np.float32) * np.float32(2**-12)


def run(setting: str) -> list[dict[str, str]]:
    """One line a round: the digests of the round, of the anchor and of the momentum."""
    section, settings = SETTINGS[setting]
    founding = Founding(digest_bytes(setting.encode()), b"nonce", 0, digest_bytes(drawn("anchor")), "peer")
    state, base, lines = outer.OuterState.founded(drawn("anchor").copy()), founding.base, []
    zeros = np.zeros(LAYOUT.parameters, np.float32)
    for round in range(1, ROUNDS + 1):
        payloads, contributors = [], []
        for number, (site, share) in enumerate(SITES.items()):
            tokens = 1000 * share
            payload = codec.encode(LAYOUT, drawn(site, round), zeros, section, round=round)
            assert not isinstance(payload, codec.NotFinite)
            first = 100 * round + 10 * number
            ranges = (Range(first, first + 10),)
            payloads.append(payload)
            contributors.append(
                Contribution(f"id-{site}", site, round, base, tokens, ranges, digest_bytes(payload), payload.size)
            )
        reduce = setting.startswith("reduce")
        body = _parts(section, payloads, contributors, round) if reduce else b"".join(p.tobytes() for p in payloads)
        shares = SHARES if reduce else ()
        update = Update(
            round, base, "reduce" if reduce else "gather", shares, tuple(contributors), ("id",), digest_bytes(body), len(body)
        )
        outer.apply_update(state, LAYOUT, section, settings, update, body)
        base = update.digest
        lines.append(
            {
                "round": base.hex(),
                "anchor": digest_bytes(state.anchor.astype("<f4")).hex(),
                "momentum": digest_bytes(state.momentum.astype("<f4")).hex(),
            }
        )
    return lines


def _parts(section: CodecSection, payloads: list[np.ndarray], contributors: list[Contribution], round: int) -> bytes:
    parts = []
    for share in SHARES:
        mean = np.empty(len(share), np.float32)
        codec.mean_of(LAYOUT, section, payloads, [c.tokens for c in contributors], share.start, share.stop, mean)
        part = codec.encode_part(LAYOUT, section, mean, share.start, share.stop, round=round)
        assert not isinstance(part, codec.NotFinite)
        parts.append(part.tobytes())
    return b"".join(parts)


if __name__ == "__main__":
    FILE.write_text(json.dumps({setting: run(setting) for setting in SETTINGS}, indent=1) + "\n")
