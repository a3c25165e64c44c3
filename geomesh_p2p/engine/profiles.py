"""Profile files: what `geomesh profile` writes, and a peer's step times, measured once and used again at its next start.

profile.json in the peer's folder holds them together with what they depend on: device, threads, model, optimizer, software.
They are used again only if nothing of that has changed and a few steps of the largest batch still fit and take as long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from geomesh_p2p.core.ports import LocalEngine
from geomesh_p2p.core.types import BatchTime
from geomesh_p2p.errors import ConfigError, DataError

MOST_NAMED = 3


def step_times(engine: LocalEngine, sequence_length: int, path: Path, say: Callable[[str], None]) -> tuple[BatchTime, ...]:
    """The engine's curve, from `path` if that holds, else measured and kept there. `say` hears which, and why."""
    depends_on = engine.speed_depends_on
    if depends_on:
        known, why = recall(path, engine.parameters, sequence_length, depends_on)
        why = engine.disagreement(known) if known else why
        if known and not why:
            say(f"step times measured before on {engine.device_label} are used again ({path}; remove it to measure anew)")
            return known
        reason = f"{why}; " if why else ""
        say(f"measuring step times on {engine.device_label} ({reason}device.profile, made by `geomesh profile`, saves that)")
    curve = engine.measure()
    write_profile(path, engine.device_label, engine.parameters, sequence_length, curve, depends_on)
    return curve


def recall(
    path: Path, parameters: int, sequence_length: int, depends_on: Mapping[str, str]
) -> tuple[tuple[BatchTime, ...], str]:
    """The curve in `path`, or none and why it cannot be used ("" if there is just no file)."""
    if not path.exists():
        return (), ""
    try:
        then = json.loads(path.read_text())["measured_with"]
        if not then:
            return (), f"those in {path.name} were not measured"
        differ = [
            f"{name} was {then.get(name, 'not there')}, is {depends_on.get(name, 'not there')}"
            for name in sorted({*then, *depends_on})
            if then.get(name) != depends_on.get(name)
        ]
        if differ:
            more = f" and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
            return (), f"those in {path.name} no longer hold: {', '.join(differ[:MOST_NAMED])}{more}"
        return read_profile(path, parameters, sequence_length), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError, ConfigError):
        return (), f"{path.name} cannot be used"


# ---------------------------------------------------------------- the file


def write_profile(
    path: Path,
    label: str,
    parameters: int,
    sequence_length: int,
    curve: Sequence[BatchTime],
    measured_with: Mapping[str, str] | None = None,
) -> None:
    """Writes aside and renames. The file is JSON: device, parameters, sequence_length, curve of [batch, seconds], and, for the
    peer that measured it, what it depends on (step_times)."""
    text = json.dumps(
        {
            "device": label,
            "parameters": parameters,
            "sequence_length": sequence_length,
            "curve": [[point.batch, point.seconds] for point in curve],
            "measured_with": dict(measured_with or {}),
        },
        indent=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    aside.write_text(text + "\n")
    aside.replace(path)


def read_profile(path: Path, parameters: int, sequence_length: int) -> tuple[BatchTime, ...]:
    """The curve of a profile file. Raises DataError if it cannot be used, ConfigError if it is of another model."""
    try:
        content = json.loads(path.read_text())
        curve = tuple(BatchTime(int(batch), float(seconds)) for batch, seconds in content["curve"])
        measured = (int(content["parameters"]), int(content["sequence_length"]))
    except OSError as error:
        raise DataError(f"device.profile: {path}: {error.strerror}; write one with `geomesh profile`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"device.profile: {path} is no profile ({error}); write it anew with `geomesh profile`") from None
    if measured != (parameters, sequence_length):
        raise ConfigError(
            f"device.profile: {path} is of {measured[0]:,} parameters and sequences of {measured[1]}, "
            f"the run has {parameters:,} and {sequence_length}; write it anew with `geomesh profile`"
        )
    if not curve or any(a.batch >= b.batch for a, b in pairwise(curve)) or min(point.seconds for point in curve) <= 0:
        raise DataError(f"device.profile: {path}: the curve must ascend in batch, with seconds above 0; write it anew")
    return curve
