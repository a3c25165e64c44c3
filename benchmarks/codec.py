"""Speed and memory of the codec on one core, as ratios that hold across machines. Prints one JSON object.

    python benchmarks/codec.py [--parameters N] [--repeats R]

encode_to_memcpy   fp32 bytes that encoding reads a second (8 a parameter: anchor and weights) / bytes that memcpy copies a
                   second, both on arrays far beyond the cache; at least 0.35
answer_rate        parameters of a share a second that a reducer of four makes again and packs after the last byte: its mean is
                   decoded twice, so that it is never kept
decode_rate        parameters times contributions that decoding and weighted accumulation handle a second; at least 1.2e9
peak_extra_bytes   most memory beyond anchor, weights and momentum, in bytes a parameter, from encoding over receiving four
                   payloads to the outer step; at most 1.25 (gather; with _reduce: receiving a share, answering, all parts)
Seconds are of this thread alone, repetitions are interleaved and medians taken: the machine may be shared.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.codec import (
    CHUNK,
    Layout,
    Mean,
    PartEncoder,
    encode,
    layout_of,
    part_bytes,
    payload_bytes,
    slice_payload,
)
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.types import Contribution, Range, Update

PEERS = 4
TOKENS = (4000, 2000, 1100, 1000)


def llama_like(parameters: int) -> Layout:
    """An embedding of 32,000 rows and as many 768-wide layers as come to about `parameters`."""
    hidden, inner, vocabulary = 768, 2048, 32_000
    layer: list[tuple[str, tuple[int, ...], bool]] = [
        *((name, (hidden, hidden), False) for name in ("q", "k", "v", "o")),
        *((name, (inner, hidden), False) for name in ("gate", "up")),
        ("down", (hidden, inner), False),
        ("norm1", (hidden,), False),
        ("norm2", (hidden,), False),
    ]
    layers = max(1, round((parameters - hidden * vocabulary) / (4 * hidden * hidden + 3 * hidden * inner)))
    shapes = [("embedding", (vocabulary, hidden), True)]
    shapes += [(f"{i}.{name}", shape, by_row) for i in range(layers) for name, shape, by_row in layer]
    return layout_of([*shapes, ("norm", (hidden,), False)])


def seconds(work: Callable[[], Any]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def update_of(body: bytes | bytearray | np.ndarray) -> Update:
    contributors = tuple(
        Contribution(f"peer-{i}", f"site-{i}", 1, b"", tokens, (), b"", len(body) // PEERS) for i, tokens in enumerate(TOKENS)
    )
    return Update(1, b"", "gather", (), contributors, ("peer-0",), b"", len(body))


def peak_extra_bytes(layout: Layout, state: OuterState, weights: np.ndarray) -> int:
    """Bytes allocated at most while one payload is encoded, four are received and their mean moves the anchor."""
    tracemalloc.start()
    own = encode(layout, state.anchor, weights, CodecSection())
    assert isinstance(own, np.ndarray)
    received = bytearray(PEERS * own.size)
    for i in range(PEERS):
        memoryview(received)[i * own.size : (i + 1) * own.size] = own.data
    apply_update(state, layout, CodecSection(), OuterSection(), update_of(received), received)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def peak_extra_bytes_reduce(layout: Layout, state: OuterState, weights: np.ndarray) -> int:
    """The same in a reduce: this peer averages the first quarter, whole-size buffers stand for the slices it receives."""
    settings, quarter = CodecSection(), layout.parameters // PEERS // 8 * 8
    cuts = [*(i * quarter for i in range(PEERS)), layout.parameters]
    shares = tuple(Range(start, stop) for start, stop in pairwise(cuts))
    tracemalloc.start()
    own = encode(layout, state.anchor, weights, settings)
    assert isinstance(own, np.ndarray)
    payloads = [own, *(np.zeros(own.size, np.uint8) for _ in range(PEERS - 1))]
    for received in payloads[1:]:
        for begin, end in slice_payload(layout, settings, shares[0].start, shares[0].stop):
            received[begin:end] = own[begin:end]
    encoder, mean = PartEncoder(layout, settings, shares[0].start, shares[0].stop), Mean(layout, settings, payloads, TOKENS)
    encoder.feed(shares[0].stop, mean.read)
    encoder.feed_again(shares[0].stop, mean.read)
    parts = [encoder.finish(), *(np.zeros(part_bytes(layout, settings, s.start, s.stop), np.uint8) for s in shares[1:])]
    body = b"".join(part.data for part in parts if isinstance(part, np.ndarray))
    update = replace(update_of(body), topology="reduce", shares=shares)
    apply_update(state, layout, settings, OuterSection(), update, body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=128_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()

    settings, outer = CodecSection(), OuterSection()
    layout = llama_like(arguments.parameters)
    count = layout.parameters
    generator = np.random.default_rng(0)
    anchor = generator.standard_normal(count, dtype=np.float32)
    weights = anchor + np.float32(1e-3) * generator.standard_normal(count, dtype=np.float32)
    state = OuterState(anchor.copy(), np.zeros_like(anchor))

    peak = peak_extra_bytes(layout, state, weights)
    peak_reduce = peak_extra_bytes_reduce(layout, state, weights)
    payload = np.zeros(payload_bytes(layout, settings), np.uint8)
    body = np.tile(payload, PEERS)
    scratch = np.empty(CHUNK, np.float32)
    size = payload.size

    def run_encode() -> None:
        encode(layout, anchor, weights, settings, out=payload)

    def run_decode() -> None:
        mean = Mean(layout, settings, [body[i * size : (i + 1) * size] for i in range(PEERS)], TOKENS)
        for start in range(0, count, CHUNK):
            stop = min(start + CHUNK, count)
            mean.read(start, stop, scratch[: stop - start])

    def run_answer() -> None:
        encoder.done_again = 0  # the pass over the first quarter once more
        encoder.feed_again(quarter, whole_mean.read)

    def run_apply() -> None:
        apply_update(state, layout, settings, outer, update_of(body), body)

    run_encode()
    for i in range(PEERS):
        body[i * size : (i + 1) * size] = payload
    quarter = count // PEERS // 8 * 8
    whole_mean = Mean(layout, settings, [body[i * size : (i + 1) * size] for i in range(PEERS)], TOKENS)
    encoder = PartEncoder(layout, settings, 0, quarter)
    encoder.feed(quarter, whole_mean.read)
    works: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: np.copyto(state.momentum, anchor),
        "encode": run_encode,
        "decode": run_decode,
        "answer": run_answer,
        "apply": run_apply,
        "hash": lambda: digest_bytes(payload),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(arguments.repeats + 1):
        for name, work in works.items():
            taken = seconds(work)
            if repeat:  # the first round warms up
                times[name].append(taken)

    memcpy = [4 * count / taken for taken in times["memcpy"]]
    encode_ratio = [8 * count / taken / rate for taken, rate in zip(times["encode"], memcpy, strict=True)]
    apply_ratio = [16 * count / taken / rate for taken, rate in zip(times["apply"], memcpy, strict=True)]
    report = {
        "parameters": count,
        "repeats": arguments.repeats,
        "memcpy_bytes_per_second": statistics.median(memcpy),
        "encode_to_memcpy": statistics.median(encode_ratio),
        "encode_to_memcpy_min": min(encode_ratio),
        "decode_rate": statistics.median([PEERS * count / taken for taken in times["decode"]]),
        "answer_rate": statistics.median([quarter / taken for taken in times["answer"]]),
        "apply_to_memcpy": statistics.median(apply_ratio),
        "hash_bytes_per_second": statistics.median([size / taken for taken in times["hash"]]),
        "peak_extra_bytes": peak / count,
        "peak_extra_bytes_reduce": peak_reduce / count,
    }
    print(json.dumps({name: round(value, 4) if value < 1000 else round(value) for name, value in report.items()}, indent=1))


if __name__ == "__main__":
    main()
