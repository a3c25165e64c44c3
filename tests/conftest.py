"""Settings of all tests: one torch thread, hypothesis without deadlines (a busy machine is no failure), examples repeatable.

Marks: `case("C001")` a case of docs/faults.md that the test shows; `fault`: it injects faults and proves that they fired;
`long`: too long for `make test`, run by `make test-all`. --without-faults runs the fault tests alone with every injection
switched off, and wants each to say that its fault did not fire.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="geomesh-tests-")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from tests.injection.proof import SWITCH, NotFired

settings.register_profile("geomesh", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("geomesh")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has its background jobs ignore Ctrl-C, and with them all that tests start, which some of them interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-faults", action="store_true", help="switch all injections off: every fault test must fail")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-faults"):
        os.environ[SWITCH] = "1"


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--without-faults"):
        return
    others = [item for item in items if item.get_closest_marker("fault") is None]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.get_closest_marker("fault") is not None]
    for item in items:
        item.add_marker(pytest.mark.xfail(raises=NotFired, strict=True, reason="its fault is switched off"))
