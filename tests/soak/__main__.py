"""make soak: everything that takes hours. Five stages, each of which can be done alone and goes on where it was stopped.

    python -m tests.soak [--stage NAME ...] [--state FILE] [--seed N] [--rounds N] [--faulty-rounds N] [--schedules N] ...

    faulty      real peers, a random fault in every round: no violation, no exit but of those killed, no wait without an end
    plain       real peers, joins and leaves for thousands of rounds: no growth of memory, descriptors, threads, tables, labels
    schedules   random schedules in virtual time, three faults at least in each, read by the independent checker
    fire        whole peers (all but sockets) under random fault scripts in virtual time
    frames      random and mutated frames of every type of message

What was done is written to the state file after each part of a stage (a part has a seed of its own, which is printed), and
not done again: remove the file to begin anew. Exit 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak import faulty, plain

STAGES = ("faulty", "plain", "schedules", "fire", "frames")


@dataclass
class State:
    """What was done: by stage, the parts so far."""

    path: Path
    seed: int

    def parts(self, stage: str) -> list[dict[str, Any]]:
        return list(self._read().get(stage, []))

    def done(self, stage: str, part: dict[str, Any]) -> None:
        kept = self._read()
        kept.setdefault(stage, []).append(part)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(kept, indent=1))
        aside.replace(self.path)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.path.read_text()))
        except FileNotFoundError:
            return {}


def in_parts(state: State, stage: str, goal: int, size: int, play: Callable[[int, int], dict[str, Any]]) -> bool:
    """Plays parts of at most `size`, each with the next seed, until `goal` are done; whether all was well."""
    while (so_far := sum(part["done"] for part in state.parts(stage))) < goal:
        seed = state.seed + len(state.parts(stage))
        count = min(size, goal - so_far)
        print(f"== {stage}: {so_far} of {goal} done; seed {seed}, {count} more", flush=True)
        begun = time.monotonic()
        part = {"seed": seed, **play(count, seed), "seconds": round(time.monotonic() - begun, 1)}
        state.done(stage, part)
        print(json.dumps(part), flush=True)
    wrong = [text for part in state.parts(stage) for text in part["wrong"]]
    for text in wrong:
        print(f"!! {stage}: {text}")
    print(f"== {stage}: {so_far} done, {len(wrong)} findings", flush=True)
    return not wrong


def plain_part(rounds: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        outcome = plain.run(Path(folder), rounds, seed)
    for one in outcome.slopes:
        print(f"   {one}   per 1,000 rounds")
    counts = {"joins": outcome.joins, "leaves": outcome.leaves, "kills": outcome.kills}
    return {"done": outcome.rounds, **counts, "slopes": [str(one) for one in outcome.slopes], "wrong": outcome.wrong}


def faulty_part(rounds: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        outcome = faulty.run(Path(folder), rounds, seed)
    return {"done": outcome.rounds, **outcome.figures(), "wrong": outcome.wrong}


def command_part(*words: str) -> Callable[[int, int], dict[str, Any]]:
    """A part done by a command that takes a count and a seed and ends with 0 if all was well."""

    def play(count: int, seed: int) -> dict[str, Any]:
        command = [sys.executable, "-m", *words, str(count), "--seed", str(seed * count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        return {"done": count, "said": done.stdout.splitlines(), "wrong": [done.stdout[-4000:]] if done.returncode else []}

    return play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="append", choices=STAGES, help="all of them, if none is given")
    parser.add_argument("--state", type=Path, default=Path("runs/soak/state.json"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3000, help="of the stage plain")
    parser.add_argument("--faulty-rounds", type=int, default=500)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--scripts", type=int, default=500, help="of the stage fire")
    parser.add_argument("--frames", type=int, default=1_000_000)
    arguments = parser.parse_args()
    state = State(arguments.state, arguments.seed)
    stages: dict[str, Callable[[], bool]] = {
        "faulty": lambda: in_parts(state, "faulty", arguments.faulty_rounds, 100, faulty_part),
        "plain": lambda: in_parts(state, "plain", arguments.rounds, 3000, plain_part),
        "schedules": lambda: in_parts(
            state, "schedules", arguments.schedules, 1000, command_part("tests.mesh.simulator", "--faults", "3", "--schedules")
        ),
        "fire": lambda: in_parts(
            state, "fire", arguments.scripts, 100, command_part("tests.mesh.fire", "--faults", "3", "--schedules")
        ),
        "frames": lambda: in_parts(state, "frames", arguments.frames, 100_000, command_part("tests.fuzz", "--frames")),
    }
    well = [stages[name]() for name in arguments.stage or STAGES]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
