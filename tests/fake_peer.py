"""A stand-in for `geomesh peer` that trains nothing: it speaks the control protocol of a mesh, as its script says.

FAKE_PEER (environment) is JSON: {"folder": where it writes what happened to it, "run": the run's folder, SITE: {...}} with
    rounds           how many rounds it reports (default 3)
    tokens_per_second  it asks to be calibrated and reports this
    fail             exit with this code at once        die_after   exit with 7 after this round
    killed_after     end by SIGKILL after this round
    killed_after     kill -9 after this round
    wall             seconds that each round is said to have taken (default 6)
    silent_after     say nothing more after this round, until told to end
    deaf             SIGTERM does nothing               signal_parent   (round, signal) for the mesh
    once_silent      sites that have fallen silent before that signal is sent
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("run")
    parser.add_argument("--site")
    parser.add_argument("--control-fd-in", type=int)
    parser.add_argument("--control-fd-out", type=int)
    args, _ = parser.parse_known_args()
    site = tomllib.loads(Path(args.site).read_text())["site"]["name"]
    script = json.loads(os.environ["FAKE_PEER"])
    mine: dict[str, Any] = script.get(site, {})
    seen = Path(script["folder"])
    words = os.fdopen(args.control_fd_in, encoding="utf-8")

    def note(name: str, text: str) -> None:
        aside = seen / f"{site}.{name}.new"
        aside.write_text(text)
        aside.rename(seen / f"{site}.{name}")

    def tell(event: str, **fields: Any) -> None:
        os.write(args.control_fd_out, json.dumps({"event": event, **fields}).encode() + b"\n")

    def wait_for_the_end() -> None:
        while words.readline():
            pass

    def terminated(number: int, frame: object) -> None:
        note("terminated", str(number))
        if not mine.get("deaf"):
            sys.exit(0)  # a peer that leaves as it is asked to has done its part

    signal.signal(signal.SIGTERM, terminated)
    note("argv", json.dumps(sys.argv[1:]))
    note("pid", str(os.getpid()))
    print(f"{site} is here", file=sys.stderr, flush=True)
    if "fail" in mine:
        print(f"{site}: cannot go on", file=sys.stderr, flush=True)
        return int(mine["fail"])
    if "tokens_per_second" in mine:
        tell("ready_to_calibrate")
        line = json.loads(words.readline())
        note("told", json.dumps(line))
        if line["calibrate"]:
            tell("calibration", tokens_per_second=mine["tokens_per_second"])
        note("time_scale", str(json.loads(words.readline())["time_scale"]))
    metrics = Path(script["run"]) / site / "metrics.jsonl"
    (metrics.parent / "config.json").write_text(json.dumps({"parameters": 1000}))
    for number in range(1, mine.get("rounds", 3) + 1):
        times = dict.fromkeys(("compute", "data_wait", "straggler_idle", "wan_idle", "codec", "control"), 1.0)
        fields = {
            "round": number, "digest": f"{number:064x}", "members": ["a", "b"], "contributors": ["a", "b"], "batch": 4,
            "inner_steps": 5, "tokens": 100, "loss": 2.5, "validation_ppl": 9.5, "topology": "gather", "term": 1,
            "times": {**times, "wall": mine.get("wall", 6.0)}, "planned_seconds": 6.0, "planned_finish_seconds": 1.0,
            "finish_seconds": 1.0, "payload_sent": {"b": 1000}, "overhead_sent": {"b": 10},
        }  # fmt: skip
        with metrics.open("a") as file:
            file.write(json.dumps({"time": 0.0, "site": site, "kind": "round", **fields}) + "\n")
        tell("round", **fields)
        if mine.get("signal_parent", (0, 0))[0] == number:
            while not all((seen / f"{other}.silent").exists() for other in mine.get("once_silent", ())):
                time.sleep(0.01)
            os.kill(os.getppid(), mine["signal_parent"][1])
            wait_for_the_end()
        if mine.get("killed_after") == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if mine.get("die_after") == number:
            return 7
        if mine.get("killed_after") == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if mine.get("silent_after") == number:
            note("silent", "")
            wait_for_the_end()
            note("orphaned", "")
            return 0
    tell("exit", exit_code=0, reason="all rounds are done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
