"""Folders of sockets: one a process, swept when its owner is dead."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from geomesh_p2p.swarm.sockets import PREFIX, SocketFolder, sweep
from tests.injection.proof import fired, inject

OWNER = """
import sys
from geomesh_p2p.swarm.sockets import SocketFolder
folder = SocketFolder(sys.argv[1])
open(folder.path + "/accept.sock", "w").close()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_its_owners_while_that_lives(tmp_path: Path) -> None:
    one, other = SocketFolder(str(tmp_path)), SocketFolder(str(tmp_path))
    assert sweep(str(tmp_path)) == 0
    assert Path(one.path).stat().st_mode & 0o777 == 0o700
    one.remove()
    assert [str(path) for path in tmp_path.iterdir()] == [other.path]
    other.remove()


@pytest.mark.fault
@pytest.mark.case("C015")
def test_what_a_killed_process_leaves_is_swept_by_the_next_start(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert sweep(str(tmp_path)) == 0
        inject(owner.kill)
        if owner.stdin is not None:
            owner.stdin.close()
        fired(owner.wait() == -signal.SIGKILL, "the owner is killed")
    assert left.exists()
    folder = SocketFolder(str(tmp_path))
    assert [str(path) for path in tmp_path.iterdir()] == [folder.path]
    folder.remove()


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    """A folder with that name and something of the user's in it stays, as does what only looks like one."""
    theirs = tmp_path / f"{PREFIX}notes"
    theirs.mkdir()
    (theirs / "plan.txt").write_text("mine")
    (tmp_path / f"{PREFIX}file").write_text("a file")
    (tmp_path / f"{PREFIX}link").symlink_to(theirs)
    SocketFolder(str(tmp_path)).remove()
    assert (theirs / "plan.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3
