"""What may keep this host from training the run's model, found before anything is built: data, device, memory, disk, folder.

Reads a few documents only, and imports torch only where the device or the model cannot be known without.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core.findings import Finding, fatal, ok, refused, warning
from geomesh_p2p.engine import footprint
from geomesh_p2p.engine.data import corpus_of
from geomesh_p2p.engine.documents import documents, files
from geomesh_p2p.engine.footprint import Part, Shape
from geomesh_p2p.engine.tokenizer import Tokenizer, load_tokenizer
from geomesh_p2p.errors import ConfigError, DataError, GeoMeshError, TemporaryError

DATA = DataError.exit_code
TEMPORARY = TemporaryError.exit_code
MB = 10**6


@dataclass(frozen=True)
class Sample:
    """What a look at the data has shown."""

    findings: list[Finding]
    tokenizer: Tokenizer | None = None
    paths: Sequence[str] = ()
    tokens_a_byte: float = 1.0


def check_host(run: RunConfig, site: SiteConfig, folder: Path, peers: int) -> list[Finding]:
    """All that concerns this host alone. `peers` is the size of the group that is reckoned with."""
    sample = data_sample(run, peers)
    found = [*sample.findings]
    shape = None
    if sample.tokenizer is not None:
        try:
            shape = model_shape(run, sample.tokenizer.highest_id + 1)
            found.append(ok("model", f"{shape.parameters:,} parameters, vocabulary of {shape.vocabulary}"))
        except GeoMeshError as error:
            found.append(refused("model", str(error), error.exit_code))
    gpu_room: int | None = None
    cuda = False
    try:
        cuda, gpu_room, text = device(site.device.name)
        found.append(ok("device", text))
    except GeoMeshError as error:
        found.append(refused("device", str(error), error.exit_code))
    if shape is not None and sample.tokenizer is not None:
        width = np.dtype(sample.tokenizer.dtype).itemsize
        corpus = footprint.corpus_bytes(sample.paths, width, sample.tokens_a_byte)
        parts = footprint.memory_parts(run, site, shape, peers, corpus, cuda)
        found.append(memory("memory", [part for part in parts if not (cuda and part.on_device)], host_room()))
        if cuda and gpu_room is not None:
            found.append(memory("GPU memory", [part for part in parts if part.on_device], gpu_room))
        found.append(disk(folder, footprint.disk_parts(run, shape.parameters, peers)))
        if fault := footprint.keep_bytes_fault(run, shape.parameters, peers):
            found.append(warning("save.keep_bytes", *fault))
    found.append(own_folder(folder))
    return found


# ---------------------------------------------------------------- data and model


def data_sample(run: RunConfig, peers: int) -> Sample:
    """Whether the files are there, a few documents become tokens, and there are enough of them; reads no more than it must."""
    section, length = run.dataset, run.model.sequence_length
    found: list[Finding] = []
    paths: list[str] = []
    missing = False
    if section.source != "python-stdlib":
        try:
            paths = files(section)
            found.append(ok("data files", _files_text(len(paths), peers)))
        except DataError as error:
            missing = True
            found.append(refused("data files", str(error), DATA))
    try:
        tokenizer = load_tokenizer(section.tokenizer)
    except DataError as error:
        return Sample([*found, refused("tokenizer", str(error), DATA)], paths=paths)
    if missing:
        return Sample(found, tokenizer)
    wanted = 2 * (section.validation_sequences * length + 1) + length
    texts: list[str] = []
    tokens = size = highest = 0
    try:
        for text in documents(section):
            ids = tokenizer.encode(text)
            texts.append(text)
            tokens, size = tokens + len(ids), size + len(text.encode())
            highest = max(highest, int(ids.max()) if len(ids) else 0)
            if tokens >= wanted:
                break
        else:                                                     # the whole corpus is in `texts`: is it enough?
            corpus_of(texts, section, tokenizer, length, run.run.seed)
    except DataError as error:
        return Sample([*found, refused("data", str(error), DATA)], tokenizer, paths)
    if highest > tokenizer.highest_id:
        text = f"dataset.tokenizer: it gives the id {highest}, but the highest of its vocabulary is {tokenizer.highest_id}"
        return Sample([*found, fatal("data", text, "choose a whole tokenizer", DATA)], None, paths)
    enough = f"{tokens:,} tokens in the first {len(texts):,} documents, {wanted:,} are enough"
    found.append(ok("data", f"{enough}; ids up to {highest} of {tokenizer.highest_id}"))
    return Sample(found, tokenizer, paths, tokens / max(1, size))


def _files_text(number: int, peers: int) -> str:
    if number >= peers:
        return f"dataset.paths: {number} files"
    return f"dataset.paths: {number} files for {peers} peers, which is no matter: sequences are shared out, not files"


def model_shape(run: RunConfig, vocabulary: int) -> Shape:
    """Raises ConfigError or DataError if the model cannot be had, or does not go with the tokenizer (with both numbers)."""
    if not run.model.path:
        return footprint.llama_shape(run.model, vocabulary)
    from geomesh_p2p.engine.model import describe

    return describe(run.model, vocabulary)


# ---------------------------------------------------------------- memory, disk, folder


def device(name: str) -> tuple[bool, int | None, str]:
    """(is it a GPU, its free bytes, in words). torch is asked only where there may be a GPU. Raises ConfigError."""
    if name == "cpu" or (name == "auto" and not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidia0").exists()):
        return False, None, f"device.name = {name}: this host's processors ({os.cpu_count()})"
    from geomesh_p2p.engine.device import choose_device, device_label, free_memory

    chosen = choose_device(name)
    if chosen.type != "cuda":
        return False, None, f"device.name = {name}: this host's processors ({os.cpu_count()})"
    return True, free_memory(chosen), f"device.name = {name}: {device_label(chosen)}"


def host_room() -> int:
    """Bytes that this process may take: free memory, or what its control group still allows, and what it has already."""
    free = int(psutil.virtual_memory().available)
    grouped = footprint.cgroup_room()
    return int(psutil.Process().memory_info().rss) + (free if grouped is None else min(free, grouped))


def memory(check: str, parts: Iterable[Part], room_bytes: int) -> Finding:
    """Fatal if what is certain does not fit; a warning if the rest, which is estimated, does not."""
    parts = list(parts)
    need, certain = sum(part.size_bytes for part in parts), sum(part.size_bytes for part in parts if part.certain)
    text = f"this model needs about {need / MB:,.0f} MB of {check} ({_listed(parts)}), {room_bytes / MB:,.0f} MB may be used"
    advice = "give this peer more, or take a smaller model, micro_batch or sequence_length"
    if certain > room_bytes:
        return fatal(check, text, f"{advice}: the kernel would end it (signal 9)", TEMPORARY)
    if need > room_bytes:
        return warning(check, text, f"{advice}, else the kernel may end it (signal 9)")
    return ok(check, text)


def disk(folder: Path, parts: Iterable[Part], free_bytes: int | None = None) -> Finding:
    parts = list(parts)
    had = _size(folder)
    if free_bytes is None:
        free_bytes = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    room = free_bytes + had
    need, certain = sum(part.size_bytes for part in parts), sum(part.size_bytes for part in parts if part.certain)
    text = f"{folder} grows to {need / MB:,.0f} MB ({_listed(parts)}), {room / MB:,.0f} MB are free there or used by it"
    less = "lower save.keep_snapshots or save.keep_updates, or set save.keep_bytes"
    advice = f"free some space, or {less}, or set run.folder elsewhere"
    if certain > room:
        return fatal("disk", text, advice, TEMPORARY)
    if need > room:
        return warning("disk", text, advice)
    return ok("disk", text)


def own_folder(folder: Path) -> Finding:
    """Whether another process is at work in `folder`. Leaves no trace."""
    lock = folder / ".lock"
    if not folder.exists():
        return ok("folder", f"{folder} will be made")
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = -1
    except OSError as error:
        return fatal("folder", f"{lock}: {error.strerror}", "see to its rights", ConfigError.exit_code)
    if not os.access(folder, os.W_OK):
        return fatal("folder", f"{folder}: cannot be written to", "see to its rights", ConfigError.exit_code)
    if descriptor < 0:
        return ok("folder", f"{folder} is free")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        if owner == str(os.getpid()):
            return ok("folder", f"{folder} is this peer's")
        text = f"{folder} is in use by process {owner}"
        return fatal("folder", text, "stop it, or give this peer another site.name", TEMPORARY)
    finally:
        os.close(descriptor)
    return ok("folder", f"{folder} is free")


def _listed(parts: Iterable[Part]) -> str:
    return ", ".join(f"{part.what} {part.size_bytes / MB:,.0f}" for part in parts if part.size_bytes >= MB) or "next to nothing"


def _size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with suppress(OSError):
            size += path.lstat().st_size
    return size
