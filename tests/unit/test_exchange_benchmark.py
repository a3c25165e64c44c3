"""benchmarks/exchange_wan.py reads what peers write as they write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.exchange_wan import rounds_of


def test_when_all_hold_an_update_is_found_for_its_own_round(tmp_path: Path) -> None:
    for site, contributed, held in (("a", 10.0, 10.5), ("b", 10.2, 10.7)):
        (tmp_path / site).mkdir()
        told = {"attempt": 1, "leader": "a", "contributors": ["a", "b"], "members": ["a", "b"],
                "times": {"wan_idle": 0.5, "codec": 0.1}}  # fmt: skip
        lines = [
            {"kind": "plan", "plan": {"round": 3}},
            {"kind": "phase", "round": 2, "phase": "training", "time": 9.0},
            {"kind": "phase", "round": 2, "phase": "exchange", "time": contributed},
            {"kind": "phase", "round": 2, "phase": "commit", "time": held},
            {"kind": "round", "round": 3, **told},
            {"kind": "plan", "plan": {"round": 4}},
            {"kind": "phase", "round": 3, "phase": "exchange", "time": contributed + 10},  # overtaken by its commit
            {"kind": "round", "round": 4, **told},
        ]
        (tmp_path / site / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rounds = rounds_of(tmp_path, ("a", "b"))
    assert [(one["round"], one["held"]) for one in rounds] == [(3, pytest.approx(0.5)), (4, None)]
    assert rounds[0]["seconds"] == {"a": 0.6, "b": 0.6}
