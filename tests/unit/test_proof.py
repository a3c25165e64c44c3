"""The switch of the fault tests: with it, a test whose fault is not needed for its passing is found."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

HONEST = """
import pytest
from tests.injection.proof import fired, inject

@pytest.mark.fault
def test_honest():
    seen = []
    inject(lambda: seen.append(1))
    fired(seen, "something was seen")
"""
BLIND = """
import pytest
from tests.injection.proof import inject

@pytest.mark.fault
def test_blind():
    inject(lambda: None)
"""
OTHERWISE = """
import pytest

@pytest.mark.fault
def test_otherwise():
    raise ValueError("something else")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.delenv("GEOMESH_TEST_WITHOUT_FAULTS", raising=False)
    pytester.makeini('[pytest]\nmarkers =\n    fault: injects faults\n    case: a case\n    long: long\n')
    pytester.makeconftest((root / "tests" / "conftest.py").read_text())
    return pytester


@pytest.mark.parametrize(
    ("text", "with_faults", "without"),
    [(HONEST, {"passed": 1}, {"xfailed": 1}), (BLIND, {"passed": 1}, {"failed": 1}), (OTHERWISE, {"failed": 1}, {"failed": 1})],
)
def test_a_fault_test_has_to_notice_that_its_fault_is_missing(
    suite: pytest.Pytester, text: str, with_faults: dict[str, int], without: dict[str, int]
) -> None:
    suite.makepyfile(test_it=text)
    suite.runpytest_subprocess().assert_outcomes(**with_faults)
    suite.runpytest_subprocess("--without-faults").assert_outcomes(**without)


def test_tests_without_faults_are_left_out(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_it="def test_other():\n    pass\n")
    suite.runpytest_subprocess("--without-faults").assert_outcomes(deselected=1)
