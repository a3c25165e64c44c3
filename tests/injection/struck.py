"""The parts of a peer that come to grief as they are told: at each Moment (script.py) they look into the folder of rows that
process.py writes, claim those that fit, and do them to their own process. Run by peer.py."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.light_peer import LightEngine
from geomesh_p2p import peer as peers
from geomesh_p2p.cli import main
from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as msg
from geomesh_p2p.core.ports import InnerResult
from geomesh_p2p.core.types import Assignment, Plan
from geomesh_p2p.engine.checkpoint import Snapshots
from geomesh_p2p.swarm.directory import Directory
from geomesh_p2p.swarm.session import Session
from geomesh_p2p.swarm.transport import Libp2pTransport
from tests.injection import clock
from tests.injection.process import ASKED_FOR, ROWS, TELL_SIZES, Row, waiting_rows
from tests.injection.script import Moment

FLUSH_SECONDS = 0.1  # so that what was sent before a moment has left the process


class Hooks:
    """This process's faults. Everything may be called from any thread."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.session: Session | None = None
        self.transport: Libp2pTransport | None = None
        self.directory: Directory | None = None
        self.flips = 0                  # bulk chunks yet to be damaged
        self.answers_late = 0.0
        self.nan = False
        self.sent = 0                   # bulk chunks of this exchange
        self.exchange = b""
        self.requests = 0

    def fitting(self, phase: str, round: int, step: int = 0, steps: int = 0) -> list[Row]:
        """Rows that are due at this moment."""
        session = self.session
        if self.folder is None or session is None:
            return []
        rows = waiting_rows(self.folder)
        if not rows:
            return []
        replica = session.replica
        roles = ("leader" if replica.is_leader else "member", "voter" if replica.s.me in replica.view else "joiner")
        moment = Moment(replica.s.site, roles, round, phase, step, steps)
        return [row for row in rows if row.at.fits(moment)]

    def at(self, phase: str, round: int, step: int = 0, steps: int = 0) -> None:
        for row in self.fitting(phase, round, step, steps):
            self.claim(row, round)

    async def reach(self, phase: str, round: int, step: int = 0, steps: int = 0) -> None:
        rows = self.fitting(phase, round, step, steps)
        if rows:
            await asyncio.sleep(FLUSH_SECONDS)
        for row in rows:
            self.claim(row, round)

    def claim(self, row: Row, round: int) -> None:
        assert self.session is not None
        if row.claim(self.session.replica.s.site, round, clock.real()):
            self.do(row)

    # ---------------------------------------------------------------- what goes wrong

    def do(self, row: Row) -> None:
        fault = row.fault
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # it is on its way
            case "pause":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "crash":
                raise RuntimeError(ASKED_FOR)
            case "full_disk":
                self.speak_through_a_pipe()
                self.limit_files(0)
                self.later(fault.seconds, lambda: self.limit_files(resource.RLIM_INFINITY))
            case "clock_jump":
                clock.jump(fault.amount)
            case "bad_bytes":
                self.flips += int(fault.amount)
            case "nan":
                self.nan = True
            case "slow_donor":
                self.answers_late = fault.amount
                self.later(fault.seconds, self.answer_soon)
            case "helper_killed":
                assert self.transport is not None
                assert self.transport.daemon is not None
                os.kill(self.transport.daemon.process_id, signal.SIGKILL)
            case "hold_gil":
                ctypes.PyDLL(None).usleep(int(fault.seconds * 1e6))  # PyDLL does not let go of it
            case "stall":
                time.sleep(fault.seconds)
            case _:
                pass  # of the network: done by whoever wrote the row

    def speak_through_a_pipe(self) -> None:
        """What this process says on stderr does not depend on its file limit any more."""
        speaker = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=2)
        assert speaker.stdin is not None
        os.dup2(speaker.stdin.fileno(), 2)
        speaker.stdin.close()

    def limit_files(self, size: int) -> None:
        """No file can grow beyond `size`: the kernel refuses such a write with EFBIG, as a full disk does with ENOSPC."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def answer_soon(self) -> None:
        self.answers_late = 0.0

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        if seconds > 0:
            timer = threading.Timer(seconds, work)
            timer.daemon = True
            timer.start()


hooks = Hooks()


class StruckEngine(LightEngine):
    def train(self, assignment: Assignment, plan: Plan, should_close: Callable[[], bool], started: float) -> InnerResult:
        hooks.at("training", plan.round)
        result = super().train(assignment, plan, should_close, started)
        hooks.at("training", plan.round, assignment.inner_steps)
        if hooks.nan:
            hooks.nan = False
            self._weights[0] = np.nan
        return result


class StruckSession(Session):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        hooks.session = self

    async def _do(self, action: ev.Action) -> None:
        round, sent = self.replica.round + 1, 0
        match action:
            case ev.NeedPlan():
                await hooks.reach("before_plan", action.round)
            case ev.Train(plan):
                await hooks.reach("after_plan", plan.round)
            case ev.SaveHeld(held):
                await hooks.reach("before_held", held.update.round)
            case ev.Send(_, msg.Commit(_, update)) if self.replica.is_leader:
                sent = self._commits.get(update.round, 0)
                self._commits = {update.round: sent + 1}
                if sent == 0:
                    await hooks.reach("before_commit", update.round)
                await hooks.reach("in_commit", update.round, sent, len(self.replica.view) - 1)
            case ev.AppendCommit(update) if not self.replica.is_leader:
                await hooks.reach("before_commit", update.round)
            case ev.CatchUp():
                hooks.requests = 0
                phase = "catching_up" if self.profile.peer in self.replica.view else "joining"
                await hooks.reach(phase, round)
        await super()._do(action)

    _commits: dict[int, int] = {}

    async def answer(self, sender: str, fetch: msg.Fetch) -> Any:
        if hooks.answers_late:
            await asyncio.sleep(hooks.answers_late)
        return await super().answer(sender, fetch)


    async def run(self) -> None:
        telling = asyncio.ensure_future(tell_sizes())
        try:
            await super().run()
        finally:
            telling.cancel()


class StruckDirectory(Directory):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        hooks.directory = self


# What might grow: name, and where it is found from the hooks. What is not there (any more) is not told.
SIZES = {
    "known": "session.around.membership.known",
    "greeted": "session.around.membership._greeted",
    "refused": "session.around.membership.refused",
    "replica_peers": "session.replica.s.peers",
    "remotes": "transport._remotes",
    "met": "transport._met_peers",
    "incoming_peers": "transport._incoming",
    "links_rtt": "transport.links._rtt",
    "links_rate": "transport.links._rate",
    "bodies": "session.desk._bodies",
    "session_tasks": "session._tasks",
    "transport_tasks": "transport._tasks",
    "directory_seen": "directory._seen",
    "directory_introduced": "directory._introduced",
    "log_rounds": "session.replica.log.state",
}


async def tell_sizes(seconds: float = 2.0) -> None:
    """Writes the sizes of this peer's tables beside its history, if it is asked to."""
    if os.environ.get(TELL_SIZES) != "1":
        return
    assert hooks.session is not None
    path = Path(hooks.session.around.store.folder) / "sizes.json"  # type: ignore[attr-defined]
    while True:
        gc.collect()
        # Not gc.get_objects(): it also hands out a tuple that another thread is still making, which then fails there.
        sizes = {"tasks": len(asyncio.all_tasks()), "blocks_thousand": sys.getallocatedblocks() / 1000}
        for name, where in SIZES.items():
            found: Any = hooks
            for part in where.split("."):
                found = getattr(found, part, None)
            if hasattr(found, "__len__"):
                sizes[name] = len(found)
        transport: Any = hooks.transport
        remotes = list(transport._remotes.items())
        sizes["remotes_in_use"] = sum(remote.in_use for _, remote in remotes)
        sizes["remotes_heard"] = sum(peer in transport._incoming for peer, _ in remotes)
        sizes["remotes_admitted"] = sum(transport.budgets.admitted(peer) for peer, _ in remotes)
        node = getattr(hooks.directory, "_node", None)
        if node is not None:
            records = [entry for _, entry in node.protocol.storage.items()]
            sizes["directory_records"] = sum(len(getattr(entry.value, "data", [0])) for entry in records)
            sizes["directory_nodes"] = len(node.protocol.routing_table.peer_id_to_uid)
        path.with_suffix(".new").write_text(json.dumps(sizes))
        os.replace(path.with_suffix(".new"), path)
        await asyncio.sleep(seconds)


class StruckTransport(Libp2pTransport):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        hooks.transport = self

    async def send_bulk(self, to: str, chunk: msg.Chunk) -> None:
        session = hooks.session
        if session is not None and session.desk._current is not None:
            plan = session.desk._current.plan
            if plan.digest != hooks.exchange:
                hooks.exchange, hooks.sent = plan.digest, 0
            per_stream = -(-chunk.total // self.net.chunk_bytes)
            steps = per_stream * (len(plan.members) - 1) * (1 if plan.topology == "gather" else 2)
            step, hooks.sent = hooks.sent, hooks.sent + 1
            await hooks.reach("exchange", plan.round, step, steps)
        if hooks.flips > 0 and chunk.data:
            hooks.flips -= 1
            data = bytearray(chunk.data)
            data[0] ^= 1
            chunk = replace(chunk, data=bytes(data))
        await super().send_bulk(to, chunk)

    async def request(self, to: str, fetch: msg.Fetch, timeout_seconds: float) -> msg.Fetched:
        session = hooks.session
        if session is not None:
            phase = "catching_up" if self.peer in session.replica.view else "joining"
            hooks.requests += 1
            await hooks.reach(phase, session.replica.round + 1, hooks.requests)
        return await super().request(to, fetch, timeout_seconds)


class StruckSnapshots(Snapshots):
    def write(self, *args: Any, **more: Any) -> Any:
        if hooks.session is not None:
            hooks.at("saving", hooks.session.replica.round)
        return super().write(*args, **more)


def light_engine(run: RunConfig, site: SiteConfig, report: Callable[[Any], None]) -> LightEngine:
    seconds = float(os.environ.get("LIGHT_TRAIN_SECONDS", "0.1"))
    parameters, each = int(os.environ.get("LIGHT_PARAMETERS", "100000")), os.environ.get("LIGHT_SEQUENCE_SECONDS")
    return StruckEngine(parameters, run.model.sequence_length, seconds, None if each is None else float(each))


def run() -> int:
    for part in (StruckSession, StruckTransport, StruckSnapshots, StruckDirectory):
        setattr(peers, part.__mro__[1].__name__, part)  # in place of what it is made of
    if ROWS in os.environ:
        hooks.folder = Path(os.environ[ROWS])
    return main(sys.argv[1:], make_engine=light_engine)
