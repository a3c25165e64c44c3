"""Kills its own children in the middle of a piece of work, again and again, and looks at what is left: one JSON line a kill.

    python kill_nursery.py WORK FOLDER TIMES SEED kill|spare

WORK is `snapshots` or `tokens`. It is a process of its own, without threads, so that forking is safe.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from geomesh_p2p.config import DatasetSection
from geomesh_p2p.core.log import LogState
from geomesh_p2p.engine.data import load_corpus
from geomesh_p2p.engine.snapshots import Snapshots
from geomesh_p2p.engine.tokenizer import load_tokenizer

SIZE = 200_003


class SnapshotWork:
    """Saves, and deletes what is beyond `keep`, for ever; round r has the values of r, so that a mixture would show."""

    keep = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.do()

    def values(self, round: int) -> np.ndarray:
        return np.full(SIZE, round, np.float32)

    def do(self) -> None:
        snapshots = Snapshots(self.folder, self.keep)
        snapshots.clean()
        round = max(snapshots.rounds(), default=0) + 1
        state = LogState(b"r" * 32, round, b"d" * 32, ("a",), (), round)
        values = self.values(round)
        snapshots.write(state, values, -values, values, lambda path: Path(path).write_bytes(b"inner" * 1000) and None)
        snapshots.delete_older(round)

    def look(self) -> dict[str, object]:
        snapshots = Snapshots(self.folder, self.keep)
        snapshots.clean()
        newest = snapshots.newest()
        assert newest is not None
        round = newest.manifest.round
        whole = bool((newest.anchor == round).all() and (newest.momentum == -round).all())
        names = sorted(path.name for path in self.folder.iterdir())
        return {"round": round, "whole": whole, "problems": newest.problems, "names": names}


class TokenWork:
    """Prepares the tokens of a corpus, each time under another seed: each time anew."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cache = folder / "tokens"
        text = folder / "text.jsonl"
        text.write_text("".join(f'{{"text": "document {i} of some words"}}\n' for i in range(3000)))
        self.section = DatasetSection(source="jsonl", paths=(str(text),), validation_sequences=2)
        self.seed = 0

    def do(self) -> None:
        for seed in range(self.seed, self.seed + 50):
            load_corpus(self.section, load_tokenizer("bytes"), 16, seed, self.cache)

    def look(self) -> dict[str, object]:
        whole = True
        for seed in range(self.seed, self.seed + 6):
            cached = load_corpus(self.section, load_tokenizer("bytes"), 16, seed, self.cache)
            plain = load_corpus(self.section, load_tokenizer("bytes"), 16, seed)
            whole &= np.array_equal(cached.tokens, plain.tokens) and cached.manifest == plain.manifest
        left = [path.name for path in self.cache.iterdir() if "partial" in path.name]
        self.seed += 50
        return {"whole": bool(whole), "left": left}


def endless(work: Callable[[], None]) -> None:
    while True:
        work()


def main(kind: str, folder: str, times: str, seed: str, what: str) -> None:
    work: SnapshotWork | TokenWork = SnapshotWork(Path(folder)) if kind == "snapshots" else TokenWork(Path(folder))
    begun = time.monotonic()
    work.do()
    took = time.monotonic() - begun
    if isinstance(work, TokenWork):
        took, work.seed = took / 50, 50
    dice = random.Random(int(seed))
    for _ in range(int(times)):
        child = os.fork()
        if child == 0:
            if what == "kill":
                endless(work.do)
            work.do()
            os._exit(0)
        if what == "kill":
            time.sleep(dice.uniform(0, 3 * took))
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, **work.look()}), flush=True)
    work.do()
    print(json.dumps(work.look()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
