"""`geomesh mesh`: all sites of a run on this machine, one process each, on real sockets; a table, a report, an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.emulation import time_scale_for
from geomesh_p2p.engine.files import Made, require_space
from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.lab.control import Child
from geomesh_p2p.lab.figures import Credits, perplexity_before, read_peer, summarise_round
from geomesh_p2p.lab.report import headline, write_report
from geomesh_p2p.lab.table import SiteView, round_line, table, title
from geomesh_p2p.loading import SiteFile

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
GEOMESH = (sys.executable, "-m", "geomesh_p2p.cli")


@dataclass(frozen=True)
class Limits:
    """Nothing in a mesh waits without one of these."""

    calibrate_seconds: float = 300.0  # from the start until every emulated peer has measured its steps
    finish_seconds: float = 120.0  # for those still at work when others are done and nothing is committed any more
    stall_seconds: float = 600.0  # without a committed round, once a peer has died
    grace_seconds: float = 30.0  # from SIGTERM to SIGKILL
    check_seconds: float = 0.5


@dataclass
class MeshState:
    """runs/ID/mesh.json: what a resumed run must do as before."""

    time_scale: float | None = None
    tokens_per_second: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path) -> MeshState:
        try:
            found = json.loads((folder / "mesh.json").read_text())
            return MeshState(found["time_scale"], dict(found["tokens_per_second"]))
        except (OSError, ValueError, KeyError, TypeError):
            return MeshState()

    def save(self, folder: Path) -> None:
        aside = folder / "mesh.json.new"
        aside.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        os.replace(aside, folder / "mesh.json")


def run_mesh(
    run_path: Path,
    run: RunConfig,
    sites: Sequence[SiteFile],
    overrides: Mapping[str, str],
    log_format: str = "console",
    limits: Limits = Limits(),
    geomesh: Sequence[str] = GEOMESH,
) -> int:
    """Run all `sites` to the end of the run. Returns 0 if every peer reached run.rounds, else the worst child's code;
    130 or 143 after a stop by SIGINT or SIGTERM; 75 if the rest had to be stopped. Writes report.json and report.md below
    the run's folder. Of a new run in which a peer could not start, only the logs are left.

    Raises TemporaryError if another mesh is at work on this run, or if there is hardly any space left.
    """
    folder = Path(run.run.folder) / run.run.id
    require_space(folder, 0)
    with _only_one(folder):
        if run.run.fresh:
            aside = move_aside(folder)
            if aside is not None:
                print(f"geomesh: the old run was moved to {aside}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not any((folder / site.name / "founding.record").exists() for site in sites)
        made = [Made(folder / site.name) for site in sites]
        commands = peer_commands(run_path, folder, sites, overrides, log_format, geomesh)
        mesh = _Mesh(run, folder, sites, limits)
        code = asyncio.run(mesh.run(commands))
        if mesh.failed_to_start:
            if is_new:
                (folder / "mesh.json").unlink(missing_ok=True)
                for files in made:
                    files.undo(keep="peer.log")
            print(f"geomesh: {mesh.failed_to_start}", file=sys.stderr)
            return code
        report = write_report(folder, run, [site.name for site in sites], mesh.state.time_scale)
    print(headline(report), flush=True)
    print(f"geomesh: report in {folder / 'report.md'}", file=sys.stderr)
    return code


def peer_commands(
    run_path: Path,
    folder: Path,
    sites: Sequence[SiteFile],
    overrides: Mapping[str, str],
    log_format: str,
    geomesh: Sequence[str] = GEOMESH,
) -> dict[str, list[str]]:
    """The command of each site's peer. One is met by all others: the first by name that has been in this run before; in a
    new run the first trainer by name, which founds it. It writes its address to a file for which the others wait."""
    known = [site.name for site in sites if (folder / site.name / "founding.record").exists()]
    first = known[0] if known else min(site.name for site in sites if site.config.site.trains)
    address = folder / first / "address"
    address.unlink(missing_ok=True)
    commands = {}
    for site in sites:
        command = [*geomesh, "peer", str(run_path), "--site", str(site.path), "--log-format", log_format]
        if site.name == first:
            command += ["--address-file", str(address), *([] if known else ["--first"])]
        else:
            command += ["--bootstrap", f"@{address}"]
        for key, value in {**overrides, "run.fresh": "false"}.items():
            command += [f"--{key}={value}"]
        commands[site.name] = command
    return commands


def time_scale(sites: Sequence[SiteFile], sequence_length: int, tokens_per_second: Mapping[str, float]) -> float:
    """The time scale of the emulated sites in `tokens_per_second`: what each did while all ran real steps together."""
    measured = [site.config for site in sites if site.name in tokens_per_second]
    emulations = [config.emulation for config in measured if config.emulation is not None]
    return time_scale_for(sum(tokens_per_second.values()), emulations, sequence_length)


def move_aside(folder: Path) -> Path | None:
    """Rename the folder to a name with the time in it; None if there was nothing (but a lock) in it."""
    if not any(entry.name != "mesh.lock" for entry in folder.iterdir()):
        return None
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}-{number}")
    aside.mkdir()
    for entry in list(folder.iterdir()):
        if entry.name != "mesh.lock":
            entry.rename(aside / entry.name)
    return aside


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[IO[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "mesh.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TemporaryError(f"{folder} is in use by another mesh: wait for it, or give this run another run.id") from None
        yield lock


class _Mesh:
    """The children of one mesh, what they have said, and when to stop them."""

    def __init__(self, run: RunConfig, folder: Path, sites: Sequence[SiteFile], limits: Limits) -> None:
        self.run_config = run
        self.folder = folder
        self.sites = sites
        self.limits = limits
        self.state = MeshState.load(folder)
        self.views = {site.name: SiteView(site.name, read_peer(folder / site.name, site.name)) for site in sites}
        self.credits = Credits(view.record for view in self.views.values())
        self.children = {site.name: Child(site.name, folder / site.name / "peer.log") for site in sites}
        self.trainers = {site.name for site in sites if site.config.site.trains}
        self.to_calibrate = {
            site.name for site in sites if site.config.emulation is not None and site.config.emulation.time_scale is None
        }
        self.asked_to_calibrate: set[str] = set()
        self.measured: dict[str, float] = {}
        self.last_committed_at = time.monotonic()
        self.printed_round = max((number for view in self.views.values() for number in view.record.rounds), default=0)
        self.said: set[str] = set()
        self.stop_signal: signal.Signals | None = None
        self.killing = False
        self.stopping_since: float | None = None
        self.failed_to_start = ""
        self.failure_code = 0
        self.gave_up = False
        self.console = Console(stderr=False)
        self.live: Live | None = None

    # ------------------------------------------------------------ life

    async def run(self, commands: Mapping[str, Sequence[str]]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        shown = Live(self._table(), console=self.console, refresh_per_second=2) if self.console.is_terminal else None
        try:
            with shown or contextlib.nullcontext() as self.live:
                async with asyncio.TaskGroup() as group:
                    for name, child in self.children.items():
                        await child.start(commands[name])
                        group.create_task(self._follow(child))
                    group.create_task(self._watch())
        finally:
            for child in self.children.values():
                child.signal(signal.SIGKILL)
        return self._exit_code()

    async def _follow(self, child: Child) -> None:
        async for event in child.events():
            try:
                self._on_event(child, event)
            except (KeyError, TypeError, ValueError) as error:  # a line that is not understood is no reason to stop training
                self._say(f"geomesh: {child.site} said {str(event)[:200]}: not understood ({error!r})")
        self._on_end(child)

    async def _watch(self) -> None:
        """Deadlines, and the end of those that do not end by themselves."""
        started = time.monotonic()
        while self._running():
            await asyncio.sleep(self.limits.check_seconds)
            now = time.monotonic()
            if self.live is not None:
                self.live.update(self._table())
            if self.stopping_since is not None:
                if self.killing or now - self.stopping_since > self.limits.grace_seconds:
                    self._signal_all(signal.SIGKILL)
                continue
            waiting = self.to_calibrate - set(self.measured)
            if waiting and self.state.time_scale is None and now - started > self.limits.calibrate_seconds:
                self._give_up(f"{_names(waiting)} had not measured its speed after {self.limits.calibrate_seconds:.0f} s")
            quiet = now - self.last_committed_at
            if self._ended() & self._finished() and quiet > self.limits.finish_seconds:
                self._give_up(f"{_names(self._running())} did not finish within {quiet:.0f} s of the others")
            elif self._ended() and quiet > self._stall_limit():
                self._give_up(f"no round was committed for {quiet:.0f} s after {_names(self._ended())} had ended")

    def _stall_limit(self) -> float:
        longest = max((view.longest_round_seconds for view in self.views.values()), default=0.0)
        return max(self.limits.stall_seconds, 10 * longest)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stop_signal is not None:
            self.killing = True  # asked twice
            return
        self.stop_signal = number
        self._stop("stopping: every peer saves and leaves (once more: kill them)")

    def _give_up(self, why: str) -> None:
        self.gave_up = True
        self._stop(why)

    def _stop(self, why: str) -> None:
        if self.stopping_since is None:
            self._say(f"geomesh: {why}")
            self.stopping_since = time.monotonic()
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self.children.values():
            child.signal(number)

    def _running(self) -> set[str]:
        return {name for name, child in self.children.items() if child.code is None}

    def _ended(self) -> set[str]:
        return {name for name, child in self.children.items() if child.code is not None}

    def _finished(self) -> set[str]:
        return {name for name, view in self.views.items() if view.round >= self.run_config.run.rounds}

    # ------------------------------------------------------------ what children say

    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        self.views[child.site].take(event)
        match event["event"]:
            case "ready_to_calibrate":
                self.asked_to_calibrate.add(child.site)
                self._calibrate()
            case "calibration":
                self.measured[child.site] = float(event["tokens_per_second"])
                self._calibrate()
            case "round":
                self.credits.take(child.site, event)
                self.last_committed_at = time.monotonic()
                self._print_rounds()
            case "discarded":
                text = f"round {event['round']}, attempt {event['attempt']} given up: {event['reason']}"
                if text not in self.said:  # every member says so
                    self.said.add(text)
                    self._say(text)
            case "warned":
                self._say(f"{child.site}: {event.get('text', '')}")

    def _calibrate(self) -> None:
        if self.state.time_scale is not None:
            for name in self.asked_to_calibrate:
                if name not in self.measured:
                    self.children[name].tell(calibrate=False)
                self.children[name].tell(time_scale=self.state.time_scale)
            self.asked_to_calibrate.clear()
        elif self.measured and set(self.measured) == self.to_calibrate:
            length = self.run_config.model.sequence_length
            self.state = MeshState(time_scale(self.sites, length, self.measured), dict(self.measured))
            self.state.save(self.folder)
            total = sum(self.measured.values())
            self._say(f"geomesh: {total:,.0f} tokens/s together; emulated step times are scaled by {self.state.time_scale:.4g}")
            self._calibrate()
        elif not self.measured and self.asked_to_calibrate == self.to_calibrate:
            for name in self.asked_to_calibrate:
                self.children[name].tell(calibrate=True)

    def _on_end(self, child: Child) -> None:
        code, view = child.code or 0, self.views[child.site]
        if not view.state.startswith("ended"):
            view.state = f"ended ({code})"
        self._print_rounds()
        if code == 0 or self.stopping_since is not None:
            return
        lines = child.last_lines()
        reason = lines[-1].removeprefix("geomesh: ") if lines and lines[-1].startswith("geomesh: ") else _killed(child.ended_by)
        ended = f"by signal {child.ended_by}" if child.ended_by else f"with code {code}"
        at_start = not any(view.newest_told for view in self.views.values())
        if reason and not at_start:
            self._say(f"geomesh: {child.site} ended {ended} in round {view.round + 1}: {reason}")
        elif not reason:
            self._say(f"geomesh: {child.site} ended {ended} in round {view.round + 1}; the end of {child.log}:")
            for line in lines:
                self._say(f"    {line}")
        if at_start:
            self.failed_to_start = f"{child.site} could not start: {reason or f'code {code}'} (its log: {child.log})"
            self.failure_code = code
            self._stop(f"{child.site} could not start: the others are stopped")

    def _exit_code(self) -> int:
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        if self.failed_to_start:
            return self.failure_code
        if len(self._finished()) == len(self.sites):
            return 0
        worst = max((code for child in self.children.values() if (code := child.code or 0) not in STOPPED), default=0)
        return worst or (TemporaryError.exit_code if self.gave_up else 0)

    # ------------------------------------------------------------ what a person sees

    def _print_rounds(self) -> None:
        """Say a round once all who are at work have reported it, or the next one is there."""
        if self.live is not None:
            self.live.update(self._table())
            return
        at_work = [self.views[name] for name in self._running() & self.trainers]
        newest = max((view.newest_told for view in self.views.values()), default=0)
        complete = max(newest - 1, min((view.newest_told for view in at_work), default=newest))
        for number in range(self.printed_round + 1, complete + 1):
            records = [view.record for view in self.views.values()]
            if any(number in record.rounds for record in records):
                self._say(round_line(summarise_round(number, records, self.credits), perplexity_before(number, records)))
            self.printed_round = number

    def _table(self) -> Any:
        newest = max((view.round for view in self.views.values()), default=0)
        run, views = self.run_config.run, self.views.values()
        return table(title(run.id, newest, run.rounds, views, self.credits), views, self.console.width)

    def _say(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def _names(sites: set[str]) -> str:
    return ", ".join(sorted(sites))


def _killed(by_signal: int) -> str:
    """What an end by SIGKILL, which leaves no word behind, is likely to mean."""
    if by_signal != signal.SIGKILL:
        return ""
    return "the kernel ends processes so when memory is short: see what `geomesh doctor` says of this model's need"
