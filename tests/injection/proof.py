"""Every fault goes through `inject`, and every test of one proves with `fired` that it took place.

A run of pytest with --without-faults switches all injections off: each test marked `fault` then has to fail in `fired`, by
NotFired and nothing else. So a fault test cannot pass because its fault never happened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

SWITCH = "GEOMESH_TEST_WITHOUT_FAULTS"

T = TypeVar("T")


class NotFired(AssertionError):
    """A fault that a test relies on did not take place."""


def injecting() -> bool:
    """Whether faults are injected in this process. Child processes inherit it."""
    return os.environ.get(SWITCH) != "1"


def inject(fault: Callable[[], T]) -> T | None:
    """Do `fault`, unless all injections are switched off."""
    return fault() if injecting() else None


def fired(evidence: object, what: str) -> None:
    """Raises NotFired unless there is evidence, seen apart from the injection itself, that `what` took place."""
    if not evidence:
        raise NotFired(f"did not take place: {what}")
