"""kill -9 of one peer of four after another, the leader too, at random moments of a round.

    python -m tests.process.kills [--times 20] [--seed 0] [--light]

Prints a line per kill: how long the others took to their next commit, in seconds and beyond heartbeat limit + one round,
and how many rounds after the one in which it had started again the victim was in a plan (1: the very next plan). Exit 1 if
a limit was broken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from geomesh_p2p.lab.verify import main as verify
from tests.process.sites import GEOMESH, LIGHT, Site, Sites, until

HEARTBEAT_SECONDS, HEARTBEAT_LIMIT_SECONDS = 0.3, 3.0
MARGIN_SECONDS = 2.0          # election and scheduling on a busy machine


@dataclass(frozen=True)
class Outcome:
    victim: str
    led: bool
    next_commit_seconds: float
    round_seconds: float
    rounds_until_planned: int
    same_place: bool

    @property
    def in_time(self) -> bool:
        return self.next_commit_seconds <= HEARTBEAT_LIMIT_SECONDS + self.round_seconds + MARGIN_SECONDS

    @property
    def good(self) -> bool:
        return self.in_time and self.rounds_until_planned <= 2 and self.same_place


def first_commit_after(site: Site, moment: float) -> dict[str, Any] | None:
    """The first commit that follows a hold begun after `moment`: one that the victim had no part in deciding."""
    return next((note for note in site.history("commit") if note["time"] > moment), None)


def kill_and_return(mesh: Sites, victim: Site, rng: random.Random) -> Outcome:
    others = [site for site in mesh if site is not victim]
    peer, address = victim.history("start")[0]["peer"], victim.address_file.read_text()
    commits = others[0].history("commit")
    led = commits[-1]["committed_by"] != "catch_up" and commits[-1]["term"][1] == peer
    times = [note["time"] for note in commits[-6:]]
    round_seconds = statistics.median(b - a for a, b in pairwise(times))
    time.sleep(rng.uniform(0, round_seconds))  # anywhere in a round
    moment = time.time()
    victim.kill()
    noticed = [until(lambda site=site: first_commit_after(site, moment), f"{site.name} to commit") for site in others]
    victim.start()
    until(lambda: victim.starts == len(victim.history("start")), "the victim to be up")
    begun = victim.history("start")[-1]["time"]
    back = until(lambda: [note for note in victim.history("accept") if note["time"] > begun], "a plan with the victim")
    running = 1 + max((n["round"] for site in others for n in site.history("commit") if n["time"] <= begun), default=0)
    return Outcome(
        victim.name,
        led,
        max(note["time"] for note in noticed) - moment,
        round_seconds,
        back[0]["round"] - running,
        victim.address_file.read_text() == address and victim.history("start")[-1]["peer"] == peer,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--light", action="store_true", help="peers without torch")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        command = LIGHT if arguments.light else GEOMESH
        mesh = Sites(Path(folder), ["a", "b", "c", "d"], rounds=100_000, sequence_seconds=0.25, command=command)
        mesh.environment["LIGHT_TRAIN_SECONDS"] = "1.5"
        try:
            mesh.start()
            until(lambda: all(site.round >= 8 for site in mesh), "the first rounds")
            for number in range(arguments.times):
                outcome = kill_and_return(mesh, rng.choice(mesh.sites), rng)
                outcomes.append(outcome)
                print(number + 1, outcome, "" if outcome.good else "LIMIT BROKEN", flush=True)
                reached = max(site.round for site in mesh)
                until(lambda r=reached: all(site.round >= r + 3 for site in mesh), "three rounds of all four")  # type: ignore[misc]
            mesh.terminate()
            codes = mesh.exit_codes()
        finally:
            mesh.stop()
        digests = mesh.digests()
        broken = verify([str(mesh.folder / "runs" / "tiny")])
    rounds = {round for round, _ in digests}
    print(f"{len(outcomes)} kills, {sum(o.led for o in outcomes)} of leaders; {len(rounds)} rounds, {len(digests)} digests")
    seconds = [o.next_commit_seconds for o in outcomes]
    in_rounds = [o.next_commit_seconds / o.round_seconds for o in outcomes]
    for name, pick in (("median", statistics.median), ("worst", max)):
        beats = pick(seconds) / HEARTBEAT_SECONDS
        print(f"next commit, {name}: {pick(seconds):.1f} s, {beats:.0f} heartbeats, {pick(in_rounds):.1f} rounds")
    print(f"exit codes {codes}")
    return int(broken or len(digests) != len(rounds) or not all(o.good for o in outcomes) or codes != [0, 0, 0, 0])


if __name__ == "__main__":
    sys.exit(main())
