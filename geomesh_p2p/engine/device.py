"""Devices: which one, how fast it is, and how a slower one is emulated.

A profile is step_seconds(batch) on the real model with the real optimizer. An emulated device takes its profile from its
description instead, and every real step then waits until its emulated time has passed.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import torch

from geomesh_p2p import __version__
from geomesh_p2p.config import DeviceSection, EmulationSection
from geomesh_p2p.core.emulation import emulated_seconds
from geomesh_p2p.core.types import BatchTime
from geomesh_p2p.errors import ConfigError

FREE_SHARE = 0.1
"""Share of a GPU's memory that a step leaves free."""
SAME_PACE = 1.25
"""Step times within this factor of each other are called the same."""


def choose_device(name: str, file: str = "", setting: str = "device.name") -> torch.device:
    """The torch device for `device.name` (in `file`, or another `setting`, for the error). Raises ConfigError if it is not
    there."""
    where = f"{file}: {setting}" if file else setting
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"{where} is {name!r}: give auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(f"{where} is {name!r}, but this host has {count} CUDA devices; give cpu, auto or an existing one")
    return torch.device("cuda", int(index or 0))


def other_ranks(device: torch.device, ranks: int) -> list[torch.device]:
    """The devices that share a peer's batches with `device`: those after it, or more replicas on the CPU.
    Raises ConfigError if there are not so many."""
    if device.type == "cpu":
        return [device] * (ranks - 1)
    first, count = device.index or 0, torch.cuda.device_count()
    if first + ranks > count:
        raise ConfigError(f"device.ranks is {ranks} from cuda:{first} on, but this host has {count} CUDA devices; give fewer")
    return [torch.device("cuda", first + rank) for rank in range(1, ranks)]


def device_label(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine() or "cpu"


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody holds."""
    return int(torch.cuda.mem_get_info(device)[0])


def wants_bf16(autocast: str, device: torch.device) -> bool:
    """Whether inner steps run under bf16 autocast. auto: on GPUs that have it natively; a CPU stays exact and repeatable."""
    if autocast == "auto":
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return autocast == "bf16"


def set_threads(section: DeviceSection, emulated: bool) -> None:
    """torch's threads in this process. Emulated peers share a host, so each takes one unless told otherwise."""
    threads = section.threads or (1 if emulated else None)
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- the real device


def batches_up_to(limit: int | None) -> Callable[[int], int | None]:
    """The next batch to try after one that fitted: twice as many, ending exactly at `limit`."""

    def following(batch: int) -> int | None:
        if limit is not None and batch >= limit:
            return None
        return 2 * batch if limit is None else min(2 * batch, limit)

    return following


def profile(
    step: Callable[[int], None],
    device: torch.device,
    max_batch: int | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seconds_per_batch: float = 0.5,
    saturated_gain: float = 1.03,
    longest_step_seconds: float = 5.0,
) -> tuple[BatchTime, ...]:
    """Times `step(batch)` for 1, 2, 4, ... sequences up to the largest that fits.

    `step` runs one whole inner step and waits for it. A GPU is tried until its memory (less FREE_SHARE) is full, with the
    batch half-way to the first failure tried too; a CPU until its memory would not hold the next batch, until two
    doublings in a row have brought less than `saturated_gain` in sequences a second, or until a step takes longer than
    `longest_step_seconds`.
    Raises ConfigError if not even one sequence fits.
    """
    curve: list[BatchTime] = []
    following = batches_up_to(max_batch)
    batch: int | None = 1
    small_gains = 0
    while batch is not None:
        seconds = _time_batch(step, batch, device, clock, seconds_per_batch)
        if seconds is None:
            if curve and (between := (curve[-1].batch + batch) // 2) > curve[-1].batch:
                seconds = _time_batch(step, between, device, clock, seconds_per_batch)
                if seconds is not None:
                    curve.append(BatchTime(between, seconds))
            break
        if device.type == "cpu" and curve:
            gain = (batch / seconds) / (curve[-1].batch / curve[-1].seconds)
            small_gains = small_gains + 1 if gain < saturated_gain else 0
        curve.append(BatchTime(batch, seconds))
        if device.type == "cpu" and (small_gains >= 2 or seconds > longest_step_seconds or not _host_has_room(batch)):
            break
        batch = following(batch)
    if not curve:
        raise ConfigError("device: one sequence does not fit; lower model.sequence_length or set model.gradient_checkpointing")
    return tuple(curve)


def _time_batch(
    step: Callable[[int], None], batch: int, device: torch.device, clock: Callable[[], float], budget: float
) -> float | None:
    """Median seconds of a step, None if it does not fit."""
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step(batch)  # buffers, kernels and caches are set up here
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if torch.cuda.max_memory_reserved(device) > (1 - FREE_SHARE) * total:
                torch.cuda.empty_cache()
                return None
        times: list[float] = []
        while len(times) < 3 or (sum(times) < budget and len(times) < 20):
            begun = clock()
            step(batch)
            times.append(clock() - begun)
            if sum(times) > 10 * budget:
                break
        return statistics.median(times)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def disagreement(
    step: Callable[[int], None],
    device: torch.device,
    curve: Sequence[BatchTime],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Why `curve`, measured earlier, is no longer the device's; "" if a few steps of its largest batch fit and take as long."""
    then = curve[-1]
    seconds = _time_batch(step, then.batch, device, clock, 0.05)
    if seconds is None:
        return f"a step of {then.batch} sequences no longer fits"
    if not 1 / SAME_PACE < seconds / then.seconds < SAME_PACE:
        return f"a step of {then.batch} sequences took {then.seconds:.3g} s and now takes {seconds:.3g} s"
    return ""


def speed_depends_on(device: torch.device, section: DeviceSection) -> dict[str, str]:
    """What of this host and its software step times depend on, by name."""
    found = {
        "device": device_label(device),
        "processor": _processor(),
        "processors": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "device.ranks": str(section.ranks),
        "device.max_batch": str(section.max_batch),
        "geomesh": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["memory"] = str(total)
        found["free memory, in eighths"] = str(8 * free // total)  # with more of it, larger batches fit
    return found


def _processor() -> str:
    """Its model, as far as the host tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _host_has_room(batch: int) -> bool:
    """Whether twice the batch would surely fit: what this process uses now, once more, within half of what is free."""
    return batch < 4096 and psutil.Process().memory_info().rss < psutil.virtual_memory().available / 2


# ---------------------------------------------------------------- emulated devices


def emulated_curve(emulation: EmulationSection, time_scale: float, max_batch: int | None = None) -> tuple[BatchTime, ...]:
    limit = min(emulation.max_batch, max_batch or emulation.max_batch)
    following = batches_up_to(limit)
    curve: list[BatchTime] = []
    batch: int | None = 1
    while batch is not None:
        curve.append(BatchTime(batch, emulated_seconds(emulation, time_scale, batch)))
        batch = following(batch)
    return tuple(curve)


@dataclass
class Pacer:
    """Makes steps take their emulated time, against absolute deadlines: one late step is caught up by those after it.

    `seconds_of(batch)` is a step's emulated time; the first one's begins to run at `started`, by `clock`.
    """

    seconds_of: Callable[[int], float]
    started: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    overrun_seconds: float = field(default=0.0, init=False)
    """How much later than emulated the newest step ended, after all catching up."""
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = self.started

    def wait(self, batch: int) -> None:
        """Call after each step of `batch` sequences; returns at its deadline, or at once if that has passed."""
        self._deadline += self.seconds_of(batch)
        while (left := self._deadline - self.clock()) > 0:
            self.sleep(left)
        self.overrun_seconds = -left
