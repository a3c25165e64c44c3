"""python -m tests.fuzz --frames 1000000 --seed 1

Throws random and damaged frames of every type at the reader, at a replica and (a tenth of them) at a mesh that trains. Ends
with figures, or with the traceback of what went wrong and the seed that shows it again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.targets import Figures, fuzz_frames, fuzz_live, memory_mib


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory-mib", type=float, default=1024.0, help="the most that the process may come to")
    chosen = parser.parse_args()
    figures, begun = Figures(chosen.seed), time.monotonic()
    print(f"seed {chosen.seed}, {chosen.frames} frames", flush=True)
    live = chosen.frames // 10
    fuzz_frames(chosen.seed, chosen.frames - live, figures, lambda done: print(f"{done} frames", flush=True))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fuzz_live(Path(folder), chosen.seed, live, figures))
    seconds, memory = time.monotonic() - begun, memory_mib()
    print(f"made {dict(figures.made)}; at the mesh {figures.live_frames}, of which over budget {figures.live_refused}")
    print(f"outcomes {dict(figures.outcomes)}")
    print(f"understood {dict(sorted(figures.heard.items()))}")
    print(f"replica halted in words {figures.halts} times; the mesh committed {figures.rounds} rounds meanwhile")
    print(f"{figures.frames + figures.live_frames} frames in {seconds:.0f} s, at most {memory:.0f} MiB")
    return 0 if memory <= chosen.memory_mib else 1


if __name__ == "__main__":
    sys.exit(main())
