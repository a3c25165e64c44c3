"""Starts light peers by fork from one process that has imported everything: in milliseconds instead of seconds each.

    child = start(arguments, environment, folder, log_path)    # in place of subprocess.Popen, whose methods it has

A child is a process of its own from then on: its arguments, environment, working folder, output, signals, exit code and end
are those of `python -m tests.injection.peer`. When the process that asked goes, the zygote and its children go too.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Child:
    """A process that the zygote has forked. Like subprocess.Popen, as far as tests need it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"light peer {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class Zygote:
    """This process's side."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, "-m", "tests.injection.zygote"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._children: dict[int, Child] = {}
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._started: list[Child] = []
        threading.Thread(target=self._listen, name="zygote", daemon=True).start()
        atexit.register(self._process.terminate)

    def start(self, arguments: Sequence[str], environment: dict[str, str], folder: Path, log: Path) -> Child:
        asked = {"arguments": list(arguments), "environment": environment, "folder": str(folder), "log": str(log)}
        with self._lock, self._changed:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            if not self._changed.wait_for(lambda: self._started, timeout=120.0):
                raise TimeoutError("the zygote of the light peers does not answer")
            return self._started.pop()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            with self._changed:
                if "started" in told:
                    child = self._children[told["started"]] = Child(told["started"])
                    self._started.append(child)
                    self._changed.notify_all()
                else:
                    self._children.pop(told["ended"]).ended(told["code"])


_zygote: Zygote | None = None


def start(arguments: Sequence[str], environment: dict[str, str], folder: Path, log: Path) -> Child:
    global _zygote
    if _zygote is None:
        _zygote = Zygote()
    return _zygote.start(arguments, environment, folder, log)


# ---------------------------------------------------------------- the zygote itself


def serve() -> None:
    from tests.injection import clock

    clock.install()  # before anybody keeps a reference to the real one
    from tests.injection.struck import run

    children: set[int] = set()
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    rest = b""
    while True:
        for source in select.select([0, woken], [], [])[0]:
            data = os.read(source, 65536)
            if source == woken:
                continue
            if not data:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (woken, waker):
                        os.close(end)
                    become(json.loads(line), run)
                children.add(pid)
                tell(started=pid)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.discard(pid)
            tell(ended=pid, code=os.waitstatus_to_exitcode(status))


def tell(**told: int) -> None:
    os.write(1, json.dumps(told).encode() + b"\n")


def become(asked: dict[str, Any], run: Any) -> None:
    """Never returns."""
    from tests.injection import clock

    code = 1
    try:
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd, end in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(fd, end)
        os.close(nothing)
        os.close(log)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        clock.set_skew()
        sys.argv = ["geomesh", *asked["arguments"]]
        code = run()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
