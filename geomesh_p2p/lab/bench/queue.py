"""Trainings side by side, each worker a process of its own: what fails is told at once and the others go on.

The command alone decides when all ends. Ctrl-C reaches every process of a terminal, so workers have SIGINT blocked and are told
by the command, which lets them save what they have. A worker hears at once, by the end of its connection, that the command is
gone, however that ended. SIGTERM to one worker ends that one in the same good order.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from tqdm import tqdm

from geomesh_p2p.errors import GeoMeshError, Interrupted, TemporaryError, of_os_error
from geomesh_p2p.lab.bench.stopping import Stop, Stopped

LIMIT_SECONDS = 60.0
"""From the wish to stop until what has not ended by itself is killed. A save is whole or not at all, so this is safe."""
AGAIN = "the same command goes on from what was saved"


class Task(Protocol):
    """What a worker plays."""

    @property
    def label(self) -> str: ...

    def play(self, store: Path, *, stop: Stop) -> Any: ...


@dataclass(frozen=True)
class Failure:
    """`index` is the task's. `exit_code` as in errors.py, 1 for a bug, of which `text` is the traceback."""

    index: int
    exit_code: int
    text: str


@dataclass
class Played:
    """By the index of each task: what it came to, or why not."""

    found: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    index: int | None = None    # of the task that it is at


class Trainings:
    """All tasks in the order given, `processes` at a time. `came_to(index, outcome, done)` hears of each that succeeded, `tell`
    of each that failed; `prepare` is called first in each worker."""

    def __init__(
        self,
        tasks: Sequence[Task],
        store: Path,
        processes: int,
        came_to: Callable[[int, Any, int], None],
        tell: Callable[[str], None],
        prepare: Callable[[], None],
    ) -> None:
        self._tasks, self._came_to, self._tell = tasks, came_to, tell
        self._arguments = store, prepare
        self._most = max(1, processes)
        self._left = deque(range(len(tasks)))
        self._workers: dict[Connection, _Worker] = {}
        self._played = Played()
        self._signal: int | None = None
        self._ends_at: float | None = None

    def play(self) -> Played:
        """Raises Interrupted after SIGINT or SIGTERM."""
        with _signals() as signals:
            try:
                while not self._done():
                    self._staff()
                    left = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
                    ready = wait([*self._workers, signals], left)
                    if not ready or (signals in ready and self._stop(os.read(signals, 1)[0])):
                        break
                    for connection in ready:
                        if isinstance(connection, Connection):
                            self._hear(self._workers[connection])
            finally:
                for worker in self._workers.values():  # idle, or not to be waited for
                    worker.process.kill()
                    worker.process.join()
                    worker.connection.close()
        if self._signal is not None:
            raise Interrupted(self._signal)
        return self._played

    def _done(self) -> bool:
        return not self._left and all(worker.index is None for worker in self._workers.values())

    def _staff(self) -> None:
        """Whoever has nothing to do gets the next task; whoever is missing is started."""
        idle = [worker for worker in self._workers.values() if worker.index is None]
        while self._left and (idle or len(self._workers) < self._most):
            worker = idle.pop() if idle else self._start()
            worker.index = self._left.popleft()
            with contextlib.suppress(OSError):  # one that is dead is heard of
                worker.connection.send(self._tasks[worker.index])

    def _start(self) -> _Worker:
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        with _sigint_blocked():
            process.start()
        theirs.close()
        worker = self._workers[mine] = _Worker(process, mine)
        return worker

    def _hear(self, worker: _Worker) -> None:
        index, worker.index = worker.index, None
        try:
            kind, what = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            worker.connection.close()
            del self._workers[worker.connection]
            if index is not None and self._signal is None:
                self._failed(index, TemporaryError.exit_code, _ended(worker.process.exitcode))
            return
        if index is None:
            return
        if kind == "done":
            self._played.found[index] = what
            self._came_to(index, what, len(self._played.found))
        elif kind == "failed":
            self._failed(index, *what)
        elif self._signal is None:
            self._failed(index, TemporaryError.exit_code, f"its process was told to end: {AGAIN}")

    def _failed(self, index: int, exit_code: int, text: str) -> None:
        self._played.failures.append(Failure(index, exit_code, text))
        self._tell(f"{self._tasks[index].label}: {text}")

    def _stop(self, number: int) -> bool:
        """The first time asks all to end, and says so; True if everything is to end at once."""
        if self._signal is not None:
            return True
        self._signal = number
        self._ends_at = time.monotonic() + LIMIT_SECONDS
        self._left.clear()
        self._tell(f"stopping, and saving what is trained: {AGAIN} (Ctrl-C again: without saving)")
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.connection.send(None)
        return False


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            memory = ", perhaps for lack of memory (then give fewer --processes)" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{memory}: {AGAIN}"
    return f"its process ended with exit code {code}: {AGAIN}"


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that has the number of each SIGINT and SIGTERM to read, as a byte. Elsewhere than in the main thread none
    comes."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as for a job that a shell put in the background
                    before[number] = signal.signal(number, lambda number, _frame: _note(write, number))
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _note(descriptor: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, bytes([number]))


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """What is started in between has SIGINT blocked for ever."""
    resource_tracker.ensure_running()  # its start would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------- in a worker


def _serve(connection: Connection, store: Path, prepare: Callable[[], None]) -> None:
    stop, tasks = Stop(), SimpleQueue[Task | None]()

    def end(*_: object) -> None:
        stop.ask()
        tasks.put(None)

    def listen() -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while (task := connection.recv()) is not None:
                    tasks.put(task)
        finally:
            end()
        time.sleep(LIMIT_SECONDS)
        os._exit(1)

    # torch.compile shows its progress: a lock to share with other processes would be left behind as this one ends.
    tqdm.set_lock(threading.RLock())
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=listen, daemon=True).start()
    prepare()
    with contextlib.suppress(OSError):  # nobody is there any more to hear it
        while (task := tasks.get()) is not None and not stop.asked:
            connection.send(_played(task, store, stop))
    sys.stderr.flush()
    os._exit(0)


def _played(task: Task, store: Path, stop: Stop) -> tuple[str, Any]:
    try:
        return "done", task.play(store, stop=stop)
    except Stopped:
        return "stopped", None
    except GeoMeshError as error:
        return "failed", (error.exit_code, str(error))
    except OSError as error:
        if (known := of_os_error(error)) is not None:
            return "failed", (known.exit_code, str(known))
        return "failed", (1, traceback.format_exc())
    except Exception:
        return "failed", (1, traceback.format_exc())
