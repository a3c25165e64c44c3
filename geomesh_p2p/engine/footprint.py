"""What a model takes: parameters, memory and disk, by part, before anything is built. Estimates name their parts.

P parameters take 4 P bytes a copy in fp32. Copies of a peer that trains: weights, gradients, the inner optimizer's moments
(two for AdamW, one for Lion), the anchor, the outer momentum. On top come what measuring or joining holds for a while, the
activations of as many sequences as a forward pass may get, the exchange's bits, the corpus, and the process itself.

What is kept for the backward pass was measured (VmHWM, fp32, 64 to 512 tokens a sequence, 2 to 24 layers, 128 to 512 wide): 16
numbers of the model's width and 5 of the feed-forward's for each token and layer, attention being made without its matrix;
with checkpoints 8 of the width, and 1.4 layers at work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geomesh_p2p.config import CodecSection, ModelSection, RunConfig, SiteConfig
from geomesh_p2p.core.retention import above_limit, fullest
from geomesh_p2p.core.section import part_width, payload_width
from geomesh_p2p.jsonlines import PART_BYTES

RUNTIME_BYTES = 480 * 10**6
"""A peer without a model: interpreter, torch on a CPU, transformers, hivemind, the libp2p daemon."""
CUDA_RUNTIME_BYTES = 1_500 * 10**6
"""What CUDA's libraries take besides, in this host's memory."""
CUDA_CONTEXT_BYTES = 600 * 10**6
"""And in the GPU's."""
PACKED_TEXT = 4
"""Bytes of text in a byte of .gz or .zst."""
NOTES_A_MEMBER_BYTES, NOTES_PACKED = 2500, 7
"""Of metrics.jsonl and history.jsonl together, in a round; and how many times smaller a packed part is, at least."""


@dataclass(frozen=True)
class Part:
    what: str
    size_bytes: int
    on_device: bool = False
    """Lies with the weights, in a GPU's memory if the device is one."""
    certain: bool = False
    """Held for as long as the peer trains, and of known size; the others are estimates."""


def llama_parameters(section: ModelSection, vocabulary: int) -> int:
    """Trainable parameters of the Llama that a run file's fields describe, without torch."""
    width, inner = section.hidden_size, section.intermediate_size
    kv_width = width // section.heads * section.kv_heads
    layer = 2 * width * width + 2 * width * kv_width + 3 * width * inner + 2 * width
    embeddings = vocabulary * width * (1 if section.tie_embeddings else 2)
    return embeddings + section.layers * layer + width


@dataclass(frozen=True)
class Shape:
    """What activations depend on. For models that transformers loads, as far as their configuration says."""

    parameters: int
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int


def llama_shape(section: ModelSection, vocabulary: int) -> Shape:
    parameters = llama_parameters(section, vocabulary)
    return Shape(parameters, vocabulary, section.hidden_size, section.intermediate_size, section.layers, section.heads)


def memory_parts(run: RunConfig, site: SiteConfig, shape: Shape, peers: int, corpus_bytes: int, cuda: bool) -> list[Part]:
    copy = 4 * shape.parameters
    moments = copy * (2 if run.inner.optimizer == "adamw" else 1)
    measures = site.emulation is None and not site.device.profile
    payload, update = payload_bytes(run.codec, shape.parameters), update_bytes(run, shape.parameters, peers)
    sequences = forward_sequences(run, site) * (1 if cuda else site.device.ranks)
    parts = [
        Part("weights", copy, on_device=True, certain=True),
        Part("gradients", copy, on_device=True, certain=True),
        Part(f"moments of {run.inner.optimizer}", moments, on_device=True, certain=True),
        Part("anchor", copy, certain=True),
        Part("outer momentum", copy, certain=True),
        Part(f"activations of {sequences} sequences", sequences * activation_bytes(run.model, shape), on_device=True),
        Part("copies while measuring" if measures else "copies while joining", copy + moments if measures else 2 * copy),
        Part(f"exchange among {peers}, while the one before is sent out", 2 * update + 6 * payload),
        Part("corpus", corpus_bytes),
        Part("libraries and the daemon", RUNTIME_BYTES + (CUDA_RUNTIME_BYTES if cuda else 0)),
    ]
    if run.codec.residual:
        parts.append(Part("residual", 2 * copy))
    if run.planner.overlap != "none":
        parts.append(Part("weights that were sent", 2 * copy))
    if cuda:
        parts.append(Part("CUDA's context", CUDA_CONTEXT_BYTES, on_device=True))
    return parts


def activation_bytes(section: ModelSection, shape: Shape) -> int:
    """Of one sequence in fp32: what the backward pass keeps, and the logits with their gradient."""
    length = section.sequence_length
    layer = length * (16 * shape.width + 5 * shape.inner)
    kept = shape.layers * length * 8 * shape.width + 1.4 * layer if section.gradient_checkpointing else shape.layers * layer
    return int(4 * (kept + 4 * length * shape.vocabulary))


def forward_sequences(run: RunConfig, site: SiteConfig) -> int:
    """The most sequences that one device of the site gets in a forward pass: inner.micro_batch, or its share of the largest
    batch that the planner may give."""
    batch = -(-largest_batch(run, site) // max(1, site.device.ranks))
    return min(batch, run.inner.micro_batch or batch)


def largest_batch(run: RunConfig, site: SiteConfig) -> int:
    """The largest step of this peer: the limit of its device, which is tried at the start whatever is planned later, or what
    the planner's mode says. Without either nobody knows before it is measured: then as much as one member can use for a
    round by itself (measuring goes on beyond that only while twice as much is free)."""
    planner = run.planner
    limits = [site.device.max_batch, site.emulation.max_batch if site.emulation else _largest_in(site.device.profile)]
    known = min((limit for limit in limits if limit), default=None)
    if planner.mode == "planned" or (known is not None and not site.device.profile):
        return known or max(1, -(-planner.round_tokens // (planner.min_steps * run.model.sequence_length)))
    given = planner.fixed.get(site.site.name, (planner.batch, 0))[0] if planner.mode == "fixed" else planner.batch
    return min(given, known or given)


def _largest_in(profile: str) -> int | None:
    """Of a profile file; None without one, or if it cannot be read (which the engine says)."""
    try:
        return int(json.loads(Path(profile).read_text())["curve"][-1][0]) if profile else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def payload_bytes(codec: CodecSection, parameters: int) -> int:
    """Of one contribution, magnitudes left out."""
    return -(-parameters * payload_width(codec) // 8)


def update_bytes(run: RunConfig, parameters: int, peers: int) -> int:
    """Of one update, magnitudes left out: what all contributed or, if that is more and a reduce may be chosen, its answers."""
    answers = -(-parameters * part_width(run.codec) // 8) if run.planner.topology != "gather" else 0
    return max(peers * payload_bytes(run.codec, parameters), answers)


def _kept_sizes(run: RunConfig, parameters: int, peers: int) -> tuple[int, int]:
    """Bytes of (a snapshot, an update)."""
    copy = 4 * parameters
    moments = copy * (2 if run.inner.optimizer == "adamw" else 1)
    return 2 * copy + moments + (copy if run.codec.residual else 0), update_bytes(run, parameters, peers)


def disk_parts(run: RunConfig, parameters: int, peers: int) -> list[Part]:
    """The most that a peer's folder grows to: snapshots (one more while it is written), updates, the held record, notes."""
    snapshot, update = _kept_sizes(run, parameters, peers)
    most = fullest(run.save, snapshot, update)
    more = most.number - 1
    parts = [Part(f"{more} more snapshots", more * snapshot), Part(f"{most.updates} updates", most.updates * update)]
    if (rest := most.size_bytes - snapshot) < sum(part.size_bytes for part in parts):
        parts = [Part("more snapshots and updates, by save.keep_bytes", rest)]
    return [
        Part("one snapshot", snapshot, certain=True),
        *parts,
        Part("a held record", update),
        Part(f"notes of {run.run.rounds:,} rounds", notes_bytes(run.run.rounds, peers)),
    ]


def notes_bytes(rounds: int, members: int) -> int:
    """What metrics.jsonl and history.jsonl take after so many rounds: the newest part of each as it is, the rest packed."""
    written = rounds * members * NOTES_A_MEMBER_BYTES
    plain = min(written, 2 * PART_BYTES)
    return plain + (written - plain) // NOTES_PACKED


def keep_bytes_fault(run: RunConfig, parameters: int, peers: int) -> tuple[str, str] | None:
    """Why save.keep_bytes cannot be held to, and what to do; None if it can, or is not set."""
    most, limit = fullest(run.save, *_kept_sizes(run, parameters, peers)), run.save.keep_bytes
    return above_limit(limit, most) if limit is not None and limit < most.least_bytes else None


def corpus_bytes(paths: Sequence[str], bytes_a_token: int, tokens_a_byte: float) -> int:
    """The tokens of these files in memory: as they are read, and once more as they are packed."""
    size = 0
    for path in paths:
        try:
            size += os.path.getsize(path) * (PACKED_TEXT if path.endswith((".gz", ".zst")) else 1)
        except OSError:
            continue
    return int(2 * size * bytes_a_token * tokens_a_byte)


# ---------------------------------------------------------------- what there is


def cgroup_room(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's control groups (v2 or v1, and those around them) still allow; None without a limit."""
    room: int | None = None
    for folder, limit_name, used_name in _cgroups(proc, root):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            if limit_text == "max" or int(limit_text) >= 1 << 60:
                continue
            here = int(limit_text) - int((folder / used_name).read_text()) + _file_cache(folder)
        except (OSError, ValueError):
            continue
        room = here if room is None else min(room, here)
    return room


def _cgroups(proc: Path, root: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, names = [root, root / "unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            tops, names = [root / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for top in tops:
            folder = top / path.strip("/")
            while True:                                           # a container may show its own group as the root
                found.append((folder, *names))
                if folder == top:
                    break
                folder = folder.parent
    return found


def _file_cache(folder: Path) -> int:
    """What the kernel gives back before it ends a process."""
    try:
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return 0
    prefix = "total_" if "total_inactive_file" in values else ""
    return values.get(f"{prefix}inactive_file", 0) + values.get(f"{prefix}active_file", 0)
