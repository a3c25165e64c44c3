"""Real peers as real processes: tiny model, quick timing, real libp2p. What they did is read from their own files.

With `command=LIGHT` the peers have no torch: a vector is their model, and they start in about a second. With `network=` each
peer announces a proxy of that network (tests/injection/proxy.py) in front of the port that it listens on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.injection import zygote
from tests.injection.ports import free_port
from tests.injection.process import ASKED_FOR
from tests.injection.proxy import Network

ROOT = Path(__file__).parents[2]
GEOMESH = (sys.executable, "-m", "geomesh_p2p.cli")
LIGHT = (sys.executable, "-m", "tests.injection.peer")

RUN = """
[run]
id = "tiny"
rounds = {rounds}
min_peers = 2
[model]
hidden_size = 16
intermediate_size = 32
layers = 1
heads = 2
kv_heads = 2
sequence_length = 32
[dataset]
source = "text"
paths = ["{corpus}"]
validation_sequences = 4
[planner]
mode = "fixed"
batch = 2
inner_steps = {inner_steps}
[net]
heartbeat_seconds = 0.3
heartbeat_limit_seconds = 3.0
election_seconds = 1.0
settle_seconds = 1.0
[save]
snapshot_every_rounds = 3
"""

# Each inner step takes half a second of emulated time, so that there is a middle of a round to be killed in.
SITE = """
[site]
name = "{name}"
[device]
name = "cpu"
threads = 1
[emulation]
device = "toy"
fixed_seconds = 0.0
sequence_seconds = {sequence_seconds}
max_batch = 4
time_scale = 1.0
"""


PROXIED = """
[net]
listen = "/ip4/127.0.0.1/tcp/{port}"
announce = "/ip4/127.0.0.1/tcp/{proxy}"
"""


def until(condition: Callable[[], Any], what: str, limit_seconds: float = 240.0) -> Any:
    """The first true value of `condition`; fails, saying what was waited for, at the limit."""
    deadline = time.monotonic() + limit_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_seconds:g} s in vain for {what}"
        time.sleep(0.05)
    return value


@dataclass
class Site:
    """One peer's process, which may come and go."""

    mesh: "Sites"
    name: str
    process: subprocess.Popen[bytes] | zygote.Child | None = None
    starts: int = 0
    extra: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)     # in front of its command, such as: ip netns exec NAME
    _read_bytes: int = 0
    _notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.mesh.folder / "runs" / "tiny" / self.name

    def start(self, first: bool = False, seeds: Sequence[str] = ()) -> None:
        """Start (again), with these seeds or all that there are. The address file is there once the peer listens."""
        self.starts += 1
        address_file = self.address_file
        others = [site.address_file for site in self.mesh.sites if site is not self]
        seeds = seeds or [file.read_text().strip() for file in others if file.exists()]
        arguments = ["--first"] if first else [a for seed in seeds for a in ("--bootstrap", seed)]
        command = [
            *(*self.mesh.command, "peer", str(self.mesh.run_file)),
            *("--site", str(self.mesh.folder / f"{self.name}.toml"), "--address-file", str(address_file)),
            *arguments,
            *self.extra,
        ]
        environment, log_file = {**self.mesh.environment, **self.environment}, self.mesh.folder / f"{self.name}.log"
        if self.mesh.command == LIGHT and not self.prefix:
            self.process = zygote.start(command[len(LIGHT) :], environment, self.mesh.folder, log_file)
        else:
            with log_file.open("ab") as log:
                command = [*self.prefix, *command]
                self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.mesh.folder, env=environment)
        if self.mesh.network is not None:
            self.mesh.network.process(self.name, self.process.pid)

    @property
    def address_file(self) -> Path:
        return self.mesh.folder / f"{self.name}.address"

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def history(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All notes so far; only what is new is read."""
        with suppress(FileNotFoundError), (self.folder / "history.jsonl").open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # the rest is being written
            self._read_bytes += len(whole)
            self._notes += [json.loads(line) for line in whole.splitlines()]
        return [note for note in self._notes if kind is None or note["kind"] == kind]

    def begin_anew(self) -> None:
        """Its folder is another one from its next start on."""
        self._read_bytes, self._notes = 0, []

    def knows(self) -> set[str]:
        """The addresses at which it remembers others."""
        path = self.folder / "acquaintances.json"
        entries = json.loads(path.read_text()) if path.exists() else []
        return {address for entry in entries for address in entry["addresses"]}

    @property
    def peer(self) -> str:
        """Its peer id, "" before its first start."""
        return next((note["peer"] for note in self.history("start")), "")

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def commits(self) -> dict[int, dict[str, Any]]:
        return {note["round"]: note for note in self.history("commit")}

    @property
    def round(self) -> int:
        return max(self.commits(), default=0)

    def log(self) -> str:
        return (self.mesh.folder / f"{self.name}.log").read_text()

    def sizes(self) -> dict[str, float]:
        """What it tells of its tables, if it is asked to (process.TELL_SIZES)."""
        try:
            return dict(json.loads((self.folder / "sizes.json").read_text()))
        except (OSError, ValueError):
            return {}

    def metrics(self) -> str:
        """The page of its metrics port; "" if that is not there."""
        ports = re.findall(r"metrics on http://127\.0\.0\.1:(\d+)/", self.log())
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/metrics", timeout=10) as page:
                return str(page.read().decode())
        except (OSError, IndexError):
            return ""

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its series with these labels; 0 if there is none."""
        total = 0.0
        for line in self.metrics().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items()):
                total += float(value)
        return total


def met_anew(site: Site, address: str, former: str) -> None:
    """Wait, a few periods of records at most, until `site` remembers a peer at `address` and no longer at `former`."""
    what = f"{site.name} to remember {address} instead of {former}"
    until(lambda: address in site.knows() and former not in site.knows(), what, 60.0)


COMPLAINTS = re.compile(r"\b(ERROR|CRITICAL)\b|error:|Traceback|never retrieved|never awaited|Task was destroyed|exception was")


ENTRY = re.compile(r"^(?=\d\d:\d\d:\d\d |geomesh: )", re.MULTILINE)


def complaints(mesh: Sites) -> list[str]:
    """Entries of the peers' logs that speak of a bug, with their tracebacks. Crashes that a test asked for are none."""
    entries = ((site.name, entry) for site in mesh for entry in ENTRY.split(site.log()))
    return [f"{name}: {entry}" for name, entry in entries if COMPLAINTS.search(entry) and ASKED_FOR not in entry]


class Sites:
    """Some sites in one folder; the first founds the run."""

    def __init__(
        self,
        folder: Path,
        names: list[str],
        rounds: int,
        inner_steps: int = 3,
        sequence_seconds: float = 0.1,
        command: Sequence[str] = GEOMESH,
        network: Network | None = None,
    ) -> None:
        self.folder = folder
        self.command = command
        self.network = network
        corpus = folder / "corpus.txt"
        corpus.write_text("".join(f"line {i}: the quick brown fox counts {i * i} sheep\n" for i in range(6000)))
        self.run_file = folder / "run.toml"
        self.run_file.write_text(RUN.format(rounds=rounds, corpus=corpus, inner_steps=inner_steps))
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        self.sequence_seconds = sequence_seconds
        self.sites: list[Site] = []
        for name in names:
            self.add(name)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def add(self, name: str) -> Site:
        """One more site, not started."""
        text = SITE.format(name=name, sequence_seconds=self.sequence_seconds)
        if self.network is not None:
            port = free_port()
            text += PROXIED.format(port=port, proxy=self.network.front(name, port).port)
        (self.folder / f"{name}.toml").write_text(text)
        site = Site(self, name)
        self.sites.append(site)
        return site

    def move(self, site: Site) -> None:
        """From its next start on, `site` listens on and announces another port."""
        assert self.network is not None
        port = free_port()
        text = SITE.format(name=site.name, sequence_seconds=self.sequence_seconds)
        text += PROXIED.format(port=port, proxy=self.network.front(site.name, port).port)
        (self.folder / f"{site.name}.toml").write_text(text)

    def __getitem__(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def start(self) -> None:
        self.sites[0].start(first=True)
        until(lambda: self.sites[0].address_file.exists(), "the founder's address")
        for site in self.sites[1:]:
            site.start()

    @property
    def leader(self) -> Site | None:
        """Whoever led the newest commit that anybody knows of; None before the first."""
        led = [note for site in self.sites for note in site.history("commit")[-3:] if note["term"] is not None]
        if not led:
            return None
        newest = max(led, key=lambda note: (note["round"], note["term"]))
        return next((site for site in self.sites if site.peer == newest["term"][1]), None)

    def advance(self, rounds: int, sites: Iterable[Site] | None = None, limit_seconds: float = 150.0) -> float:
        """Wait until these sites (all) have committed so many rounds more than anybody has now; how long that took."""
        begun = time.monotonic()
        chosen = self.sites if sites is None else list(sites)
        goal = max(site.round for site in self.sites) + rounds
        names = ", ".join(site.name for site in chosen)
        until(lambda: all(site.round >= goal for site in chosen), f"{names} to reach round {goal}", limit_seconds)
        return time.monotonic() - begun

    def together(self, limit_seconds: float = 240.0) -> None:
        """Wait until every site is a voter again and contributes, to updates newer than any that there is now."""
        names, since = {site.name for site in self.sites}, max(site.round for site in self.sites)

        def whole() -> bool:
            last = [note for site in self.sites for note in site.history("commit")[-1:]]
            return len(last) == len(names) and all(
                note["round"] > since
                and {c["site"] for c in note["contributors"]} == names
                and len(note["view"]) == len(names)
                for note in last
            )

        until(whole, "all to contribute to one round", limit_seconds)

    def terminate(self) -> None:
        """SIGTERM to all, as an operator stops a run."""
        for site in self.sites:
            if site.process is not None:
                site.process.terminate()

    def stop(self) -> None:
        """Whatever the state: no process is left."""
        for site in self.sites:
            if site.process is not None and site.process.poll() is None:
                site.process.kill()
        for site in self.sites:
            if site.process is not None:
                site.process.wait()

    def exit_codes(self, limit_seconds: float = 300.0) -> list[int]:
        deadline = time.monotonic() + limit_seconds
        return [site.process.wait(max(0.1, deadline - time.monotonic())) for site in self.sites if site.process is not None]

    def digests(self) -> set[tuple[int, str]]:
        return {(round, note["digest"]) for site in self.sites for round, note in site.commits().items()}
