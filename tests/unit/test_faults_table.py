"""docs/faults.md is true: every case has a row, every test that a row names exists, and carries the case's mark."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The numbers are those of the collection of reports that the table answers; they are not consecutive.
CASES = """
    1-3 5-8 11 12 14 15 17-19 21-23 25-30 32 33 35 37-48 50-53 55 56 58-63 65-67 69-77 79-82 86-104 106 108 110 111 114
    117-121 124-126 128
"""
ROW = re.compile(r"^\| (C\d{3}) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def numbers() -> list[str]:
    cases = []
    for word in CASES.split():
        first, _, last = word.partition("-")
        cases += [f"C{number:03d}" for number in range(int(first), int(last or first) + 1)]
    return cases


@cache
def marks_of(path: str) -> dict[str, set[str]]:
    """The cases that each test of a file is marked with."""
    tree = ast.parse((ROOT / path).read_text())
    everywhere = {
        case
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
        for case in cases_in(node.value)
    }
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            found[node.name] = everywhere | {case for mark in node.decorator_list for case in cases_in(mark)}
    return found


def cases_in(tree: ast.AST) -> set[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case"]
    return {arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)}


def rows() -> list[tuple[str, str, str, str]]:
    return ROW.findall((ROOT / "docs" / "faults.md").read_text())


def test_every_case_has_one_row() -> None:
    assert [case for case, *_ in rows()] == numbers()


def test_at_least_95_cases_are_shown_by_a_test() -> None:
    assert sum(bool(TEST.search(tests)) for *_, tests in rows()) >= 95


def test_every_test_that_a_row_names_exists_and_is_marked_with_its_case() -> None:
    wrong = [
        f"{case}: {path}::{name}"
        for case, _, _, tests in rows()
        for path, name in TEST.findall(tests)
        if not (ROOT / path).exists() or case not in marks_of(path).get(name, set())
    ]
    assert not wrong


def test_every_marked_test_stands_in_its_row() -> None:
    named = {(case, path, name) for case, _, _, tests in rows() for path, name in TEST.findall(tests)}
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    marked = {(case, path, name) for path in files for name, cases in marks_of(path).items() for case in cases}
    assert not sorted(marked - named)


def test_no_two_files_of_tests_have_one_name() -> None:
    """Else they cannot be collected together, as `make test-all` does at its end."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
