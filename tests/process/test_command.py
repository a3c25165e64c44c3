"""The installed command and the make verbs, as a shell sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GEOMESH = (sys.executable, "-m", "geomesh_p2p.cli")


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_results_go_to_stdout_and_errors_to_stderr() -> None:
    done = shell(*GEOMESH, "config", "show", "configs/quickstart.toml", "--json", "--run.rounds", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["config"]["run"]["rounds"] == 20
    done = shell(*GEOMESH, "config", "show", "configs/quickstart.toml", "--run.rounds", "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'geomesh: --run.rounds: run.rounds = "none": should be a valid integer\n'


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    words = [*GEOMESH, "config", "show", "configs/quickstart.toml"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.communicate(timeout=60)[1] == ""
