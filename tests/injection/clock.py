"""A time of day that is wrong: `time.time` of this process, some seconds off; it may jump. The monotonic clock is untouched."""

from __future__ import annotations

import os
import time

SKEW = "GEOMESH_TEST_CLOCK_SKEW"
real = time.time
_off_by = [0.0]


def install() -> None:
    """From here on time.time() is off by as many seconds as the environment says."""
    set_skew()
    time.time = lambda: real() + _off_by[0]


def set_skew() -> None:
    _off_by[0] = float(os.environ.get(SKEW, "0"))


def jump(seconds: float) -> None:
    _off_by[0] += seconds
