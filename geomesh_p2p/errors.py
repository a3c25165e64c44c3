"""The error tree.

    GeoMeshError                     exit code
    ├── ConfigError                  2   a run file, site file or flag is wrong
    ├── UnreachableError             3   the run, or every seed, could not be reached
    ├── DataError                    4   data, model, tokenizer or checkpoint cannot be used
    │   └── TrainingDivergedError    4   inner steps come to nothing finite any more
    ├── RefusedError                 5   the run refused this peer (fingerprint, version, admission, name taken)
    │   └── NotListedError           5   by its list of peers (net.allow), which may come to list this one
    ├── DivergedError                4   two different updates were committed for one round
    └── TemporaryError              75   try again later (disk full, port in use, directory locked)

A peer's failure is data (an event), never one of these: exceptions are for bugs and for what a user can mend.
Every message says what is wrong, the value, and what to do next, in one line.
"""

from __future__ import annotations

import errno
import signal


class GeoMeshError(Exception):
    """Base of all errors a user can act on; `exit_code` is what the command returns."""

    exit_code = 1


class ConfigError(GeoMeshError):
    exit_code = 2


class UnreachableError(GeoMeshError):
    exit_code = 3


class DataError(GeoMeshError):
    exit_code = 4


class TrainingDivergedError(DataError):
    def __init__(self, steps: int, loss: float, rate: float) -> None:
        super().__init__(
            f"nothing finite came of {steps} inner steps in a row (inner.max_skipped_steps; loss {loss:g}, learning rate"
            f" {rate:.3g}): the run has diverged, or a document is broken; lower inner.learning_rate or outer.learning_rate,"
            " or raise inner.warmup_tokens, and start a new run"
        )


class DivergedError(GeoMeshError):
    exit_code = 4


class RefusedError(GeoMeshError):
    exit_code = 5


class NotListedError(RefusedError):
    pass


class TemporaryError(GeoMeshError):
    exit_code = 75


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM has ended a verb in good order; `exit_code` is what a shell expects of one that this signal ended."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def of_os_error(error: OSError) -> GeoMeshError | None:
    """What a user can mend: a disk that is full, a place that cannot be written to. None for everything else."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TemporaryError(f"{where}{error.strerror}: free some space and start again")
    places = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
    if error.errno in places and error.filename:
        return ConfigError(f"{where}{error.strerror}: choose another place, or mend its rights")
    return None
