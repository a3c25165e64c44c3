"""Lets the n-th call that changes the disk fail, for every n: as a crash (nothing runs after it) or as an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

CALLS = ("open", "write", "pwrite", "fsync", "rename", "unlink", "mkdir", "rmdir", "ftruncate")


class Crash(BaseException):
    """The process dies here: no `except Exception` or `except OSError` may see it."""


def failing_at_every_step(
    prepare: Callable[[], Any], work: Callable[[Any], Any], error: Callable[[], BaseException]
) -> Iterator[Any]:
    """Runs `work(prepare())` with the first, the second, ... disk call failing (a write after half of its bytes), and yields
    what `prepare` gave after each, until `work` gets through."""
    step = 0
    while True:
        step += 1
        prepared = prepare()
        made = 0
        with pytest.MonkeyPatch.context() as patch:

            def failing(real: Callable[..., Any], name: str, at: int) -> Callable[..., Any]:
                def call(*args: Any, **kwargs: Any) -> Any:
                    nonlocal made
                    made += 1
                    if made == at:
                        if name == "write":
                            real(args[0], bytes(args[1])[: len(args[1]) // 2])
                        raise error()
                    return real(*args, **kwargs)

                return call

            for name in CALLS:
                patch.setattr(os, name, failing(getattr(os, name), name, step))
            with suppress(Crash, OSError):
                work(prepared)
        if made < step:
            assert made > 3, "nothing was there to fail"
            return
        yield prepared
