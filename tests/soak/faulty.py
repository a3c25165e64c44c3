"""Hundreds of rounds in each of which something goes wrong, on five real peers: random faults, one or two at a time, and now
and then an operator who orders a rollback in the middle of it.

Each fault is chosen, done and undone by a driver that watches the peers' processes and histories. What counts as a finding:
an exit of a process that was not killed (or told to go, or out of disk), a mesh that commits nothing for PROGRESS_SECONDS
though a quorum is well, peers that are not all together again in the end, and whatever the independent checker finds.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geomesh_p2p.lab.verify import main as verify
from tests.injection.process import Faults, ProcessFault, kill, state, wake
from tests.injection.proxy import ANYBODY, Network, Rule
from tests.injection.script import LAST, MIDDLE, At, Fault
from tests.process.sites import GEOMESH, LIGHT, Site, Sites, complaints, until
from tests.soak.measure import keep_logs

SITES = ("a", "b", "c", "d", "e")
AT_ONCE = 2                 # sites in trouble at the same time: a quorum stays well
PROGRESS_SECONDS = 90.0     # heartbeat limit, election, exchange deadlines and reach_seconds, with room for a busy machine
UNCLAIMED_SECONDS = 8.0
OUT_OF_DISK, LEFT = 75, 0

PHASES: tuple[tuple[str, int | None], ...] = (
    ("before_plan", None), ("after_plan", None), ("training", None), ("exchange", 0), ("exchange", MIDDLE), ("exchange", LAST),
    ("before_held", None), ("before_commit", None), ("in_commit", 1), ("in_commit", 2), ("saving", None),
)  # fmt: skip
MENU = {
    "kill": 8, "pause": 4, "leave": 2, "half_open": 3, "cut": 3, "one_way": 3, "slow": 2, "late": 2, "reset": 3, "full_disk": 2,
    "clock_jump": 1, "bad_bytes": 2, "nan": 2, "helper_killed": 2, "hold_gil": 2, "stall": 1, "slow_donor": 1, "split": 1,
    "all_killed": 1, "rollback": 3,
}  # fmt: skip


@dataclass
class Outcome:
    struck: set[int] = field(default_factory=set)      # rounds in which a fault was done
    counts: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)   # seconds from a kill to the next commit of the others
    committed: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.struck)

    def figures(self) -> dict[str, Any]:
        worst = sorted(self.recoveries)
        return {
            "faults": dict(sorted(self.counts.items())),
            "committed": self.committed,
            "kill_to_commit_seconds": {"median": worst[len(worst) // 2], "worst": worst[-1]} if worst else {},
        }


class Driver:
    def __init__(self, mesh: Sites, network: Network, faults: Faults, seed: int) -> None:
        self.mesh, self.network, self.faults = mesh, network, faults
        self.rng, self.outcome = random.Random(seed), Outcome()
        self.busy: dict[str, str] = {}                         # sites in trouble, and why
        self.exits: dict[str, set[int]] = {}                   # how a site may end
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self.armed: tuple[Path, str, float, At] | None = None
        self.orders: list[subprocess.Popen[bytes]] = []
        self.reached, self.moved_at, self.killed_at = 0, time.monotonic(), 0.0

    # ---------------------------------------------------------------- the loop

    def play(self, rounds: int) -> None:
        while self.outcome.rounds < rounds:
            time.sleep(0.03)
            now = time.monotonic()
            due = [timer for timer in self.timers if timer[0] <= now]
            self.timers = [timer for timer in self.timers if timer[0] > now]
            for _, work in due:
                work()
            self.watch_processes()
            self.watch_progress(now)
            self.watch_claims(now)
            if self.armed is None and len(self.busy) < AT_ONCE and self.mesh_is_up():
                self.strike()

    def mesh_is_up(self) -> bool:
        return all(site.alive for site in self.mesh if site.name not in self.busy)

    def watch_processes(self) -> None:
        for site in self.mesh:
            if site.process is None or (code := site.process.poll()) is None:
                continue
            site.process = None
            self.watch_claims(time.monotonic())  # the claim was there before the exit
            if code not in self.exits.pop(site.name, set()):
                self.outcome.wrong.append(f"{site.name} ended with {code}: {site.log().splitlines()[-1:]}")
            if code == -signal.SIGKILL:
                self.killed_at = time.time()
            self.after(self.rng.uniform(0, 2.5), lambda site=site: self.back(site))  # type: ignore[misc]

    def back(self, site: Site) -> None:
        starts = len(site.history("start"))
        site.start()
        self.after(4.0, lambda: self.up(site, starts))

    def up(self, site: Site, starts: int) -> None:
        """Out of trouble once it has begun: before that, SIGTERM ends a process without more ado."""
        if site.process is not None and len(site.history("start")) == starts:
            self.after(0.5, lambda: self.up(site, starts))
        else:
            self.busy.pop(site.name, None)

    def watch_progress(self, now: float) -> None:
        reached = max(site.round for site in self.mesh)
        if reached > self.reached:
            if self.killed_at:
                self.outcome.recoveries.append(time.time() - self.killed_at)
                self.killed_at = 0.0
            self.reached, self.moved_at = reached, now
        elif now - self.moved_at > PROGRESS_SECONDS:
            states = {site.name: (site.round, site.process and state(site.process.pid)) for site in self.mesh}
            since = f"for {PROGRESS_SECONDS:g} s after round {reached}"
            raise AssertionError(f"nothing was committed {since}: {states} {self.busy}")

    def watch_claims(self, now: float) -> None:
        if self.armed is None:
            return
        row, kind, since, _ = self.armed
        claim = self.faults.claim(row)
        if claim is None:
            if now - since > UNCLAIMED_SECONDS and self.faults.disarm(row):
                self.armed = None
            return
        self.armed = None
        self.hit(kind, claim["round"])
        self.busy[claim["site"]] = kind
        site = self.mesh[claim["site"]]
        match kind:
            case "kill":
                self.exits[site.name] = {-signal.SIGKILL}
            case "full_disk":
                self.exits[site.name] = {OUT_OF_DISK}
            case "pause":
                self.after(self.rng.uniform(0.5, 8.0), lambda: self.end_pause(site))
            case _:
                self.after(5.0, lambda: self.busy.pop(site.name, None))

    def hit(self, kind: str, round: int) -> None:
        self.outcome.counts[kind] += 1
        self.outcome.struck.add(round)

    def after(self, seconds: float, work: Callable[[], object]) -> None:
        self.timers.append((time.monotonic() + seconds, work))

    # ---------------------------------------------------------------- faults

    def strike(self) -> None:
        kind = self.rng.choices(list(MENU), list(MENU.values()))[0]
        if kind in ("split", "all_killed") and self.busy:
            return
        well = [site for site in self.mesh if site.name not in self.busy]
        site, seconds, round = self.rng.choice(well), self.rng.uniform(0.5, 8.0), self.reached + 1
        phase, step = self.rng.choice(PHASES)
        who = self.rng.choice(["leader", "member", site.name])
        match kind:
            case "rollback":
                self.order_rollback(site)
            case "kill":
                self.arm(kind, At(who, phase, 0, step), Fault("kill"))  # type: ignore[arg-type]
            case "pause":
                self.arm(kind, At(who, phase, 0, step), Fault("pause"))  # type: ignore[arg-type]
            case "full_disk":
                self.arm(kind, At(site.name, self.rng.choice(("after_plan", "before_held"))), Fault("full_disk"))
            case "clock_jump":
                self.arm(kind, At(who, "after_plan"), Fault(kind, amount=self.rng.choice([-3600.0, -7.0, 11.0, 3600.0])))
            case "bad_bytes":
                self.arm(kind, At(who, "training"), Fault(kind, amount=self.rng.randint(1, 3)))
            case "nan":
                self.arm(kind, At(who, "training"), Fault(kind))
            case "helper_killed":
                self.arm(kind, At(who, phase, 0, step), Fault(kind))  # type: ignore[arg-type]
            case "hold_gil":
                self.arm(kind, At(who, "training"), ProcessFault(kind, seconds=self.rng.uniform(0.5, 5.0)))
            case "stall":
                self.arm(kind, At(who, "saving"), ProcessFault(kind, seconds=self.rng.uniform(0.5, 5.0)))
            case "slow_donor":
                self.arm(kind, At(who, "after_plan"), Fault(kind, seconds=10.0, amount=2.0))
            case "leave":
                self.trouble(site, kind, round)
                self.exits[site.name] = {LEFT}
                assert site.process is not None
                site.process.terminate()
            case "all_killed":
                for one in self.mesh:
                    self.trouble(one, kind, round)
                    if one.process is not None:
                        code = kill(one)
                        if code != -signal.SIGKILL:
                            self.outcome.wrong.append(f"{one.name} had ended with {code}")
                        self.after(self.rng.uniform(0, 2.0), lambda one=one: self.back(one))  # type: ignore[misc]
            case "split":
                names = list(SITES)
                self.rng.shuffle(names)
                size = self.rng.choice([1, 2])
                self.network.partition(names[:size], names[size:])
                for name in names:
                    self.trouble(self.mesh[name], kind, round)
                self.after(seconds, lambda: self.heal(*names))
            case _:
                self.links(kind, site, seconds, round)

    def order_rollback(self, site: Site) -> None:
        """Whether it is done depends on what else goes wrong; `run` counts those that were."""
        to_round = max(0, self.reached - self.rng.randint(1, 4))
        address = site.address_file.read_text().strip()
        command = [*GEOMESH, "rollback", address, "--to-round", str(to_round), "--yes"]
        self.orders.append(subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.mesh.folder, env=self.mesh.environment
        ))  # fmt: skip

    def end_orders(self) -> None:
        for order in self.orders:
            order.kill()
            order.wait()

    def links(self, kind: str, site: Site, seconds: float, round: int) -> None:
        self.trouble(site, kind, round)
        rules = {
            "half_open": Rule(freeze=True), "cut": Rule(cut=True), "slow": Rule(bytes_per_second=40_000.0),
            "late": Rule(delay_seconds=1.0, jitter_seconds=0.5),
            "reset": Rule(reset_after_bytes=self.rng.randint(1000, 60_000)),
        }  # fmt: skip
        if kind == "one_way":
            self.network.rule(*self.rng.choice([(site.name, ANYBODY), (ANYBODY, site.name)]), Rule(freeze=True))
        else:
            self.network.around(site.name, rules[kind])
        self.after(seconds, lambda: self.heal(site.name))

    def arm(self, kind: str, at: At, fault: Fault | ProcessFault) -> None:
        self.armed = (self.faults.arm(at, fault), kind, time.monotonic(), at)

    def trouble(self, site: Site, kind: str, round: int) -> None:
        self.hit(kind, round)
        self.busy[site.name] = kind

    def end_pause(self, site: Site) -> None:
        if site.process is not None:
            if state(site.process.pid) != "T":
                self.outcome.wrong.append(f"{site.name} was not paused")
            wake(site)
        self.after(3.0, lambda: self.busy.pop(site.name, None))

    def heal(self, *names: str) -> None:
        self.network.heal(*names)
        for name in names:
            self.after(3.0, lambda name=name: self.busy.pop(name, None))  # type: ignore[misc]

    # ---------------------------------------------------------------- the end

    def settle(self) -> None:
        """Everything that was broken is mended: all must be together again."""
        if self.armed is not None and not self.faults.disarm(self.armed[0]):
            row = self.armed[0]
            until(lambda: self.faults.claim(row), "the claim of a row that is taken", 10.0)
            self.watch_claims(time.monotonic())
        self.armed = None
        deadline = time.monotonic() + PROGRESS_SECONDS
        while (self.timers or self.exits or not all(site.alive for site in self.mesh)) and time.monotonic() < deadline:
            self.watch_processes()
            now = time.monotonic()
            due, self.timers = [t for t in self.timers if t[0] <= now], [t for t in self.timers if t[0] > now]
            for _, work in due:
                work()
            time.sleep(0.05)
        self.network.heal()
        self.mesh.together(PROGRESS_SECONDS)


def run(folder: Path, rounds: int, seed: int) -> Outcome:
    with Network(seed) as network:
        mesh = Sites(folder, list(SITES), rounds=10**8, command=LIGHT, network=network)
        mesh.environment |= {"LIGHT_TRAIN_SECONDS": "0.15", "LIGHT_PARAMETERS": "300000"}
        for site in mesh:
            site.extra = ["--net.chunk_bytes", "8192"]
        driver = Driver(mesh, network, Faults(mesh), seed)
        outcome = driver.outcome
        try:
            mesh.start()
            mesh.together()
            driver.moved_at = time.monotonic()
            driver.play(rounds)
            driver.settle()
            mesh.terminate()
            if any(mesh.exit_codes(PROGRESS_SECONDS)):
                outcome.wrong.append("not all ended with 0 in the end")
        except AssertionError as error:
            outcome.wrong.append(str(error))
        finally:
            driver.end_orders()
            mesh.stop()
        rollbacks = {note["round"] for site in mesh for note in site.history("commit") if "rollback" in note}
        outcome.counts["rolled back"] = len(rollbacks)
        outcome.committed = max(site.round for site in mesh)
        digests = mesh.digests()
        if len(digests) != len({round for round, _ in digests}):
            outcome.wrong.append("two digests of one round")
        if verify([str(mesh.folder / "runs" / "tiny")]) != 0:
            outcome.wrong.append("the checker found violations")
        outcome.wrong += [line for line in complaints(mesh) if "cannot be written" not in line]
        if outcome.wrong:
            keep_logs(mesh)
        return outcome
