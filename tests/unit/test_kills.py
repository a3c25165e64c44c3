"""kill -9 at random moments of saving, of deleting what is old, and of preparing tokens: the next start works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.config import SaveSection
from tests.injection.proof import fired, inject

NURSERY = Path(__file__).with_name("kill_nursery.py")


def killed(kind: str, folder: Path, times: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What was left after each of `times` kills, and after one more piece of work that nobody disturbed."""
    words = [sys.executable, str(NURSERY), kind, str(folder), str(times), "7", inject(lambda: "kill") or "spare"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    *left, last = (json.loads(line) for line in done.stdout.splitlines())
    return left, last


@pytest.mark.fault
@pytest.mark.case("C089")
@pytest.mark.case("C092")
def test_thirty_kills_around_saves_and_deletions_always_leave_a_whole_snapshot(tmp_path: Path) -> None:
    """Even with one kept: an old one goes only after the new one has been read back."""
    left, last = killed("snapshots", tmp_path / "site", 30)
    fired([one["status"] for one in left] == [-9] * 30, "thirty processes ended by signal 9")
    assert all(one["whole"] and not one["problems"] for one in left)
    rounds = [one["round"] for one in left]
    assert rounds == sorted(rounds), "never back behind what had been saved"
    assert rounds[-1] > rounds[0]
    assert last["names"] == [f"snapshot-{last['round']}"], "what the killed ones left is gone with the next save"


@pytest.mark.fault
@pytest.mark.case("C082")
def test_ten_kills_while_tokens_are_prepared_leave_no_trap(tmp_path: Path) -> None:
    """No half-made folder is taken for a whole one or left lying, and a dead process's lock is no lock: waiting for it would
    take twenty minutes."""
    left, last = killed("tokens", tmp_path, 10)
    fired([one["status"] for one in left] == [-9] * 10, "ten processes ended by signal 9")
    assert all(one["whole"] for one in left)
    assert all(one["left"] == [] for one in [*left, last])


@pytest.mark.case("C092")
def test_two_snapshots_are_kept_by_default_and_fewer_are_refused() -> None:
    assert SaveSection().keep_snapshots == 2
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        SaveSection(keep_snapshots=1)
