"""What a round, a save and a load take beyond the state itself, and which kinds of memory are not used at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_run import LocalRun, engine_of, run_config, write_text

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core import codec
from geomesh_p2p.core.codec import Layout, Tensor
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.types import Contribution, Range, Update
from geomesh_p2p.engine.engine import fingerprint_fields
from geomesh_p2p.engine.snapshots import Manifest, Snapshots
from geomesh_p2p.errors import ConfigError
from tests.injection.proof import fired, inject

PARAMETERS = 4_000_000
MODEL_BYTES = 4 * PARAMETERS


def peak(work: Callable[[], Any]) -> float:
    """Bytes allocated at most during `work`, in model sizes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / MODEL_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.case("C099")
def test_memory_beyond_the_state_is_what_the_modules_promise(tmp_path: Path) -> None:
    """In sizes of the model (4 bytes a parameter), beyond weights, anchor and momentum: a round of four peers 0.3, saving
    and giving a snapshot away almost nothing, receiving one almost nothing, reading one its own 2 (anchor and momentum)."""
    layout, settings = Layout((Tensor("w", PARAMETERS),)), CodecSection()
    anchor = np.linspace(-1, 1, PARAMETERS, dtype=np.float32)
    state, weights = OuterState.founded(anchor), anchor * np.float32(0.99)

    def round() -> None:
        own = codec.encode(layout, state.anchor, weights, settings)
        assert isinstance(own, np.ndarray)
        received = bytearray(4 * own.size)
        for i in range(4):
            memoryview(received)[i * own.size : (i + 1) * own.size] = own.data
        who = tuple(Contribution(f"p{i}", f"s{i}", 1, b"", 10, (Range(i, i + 1),), b"", own.size) for i in range(4))
        update = Update(1, b"", "gather", (), who, ("p0",), b"", len(received))
        apply_update(state, layout, settings, OuterSection(), update, received)

    donor, joiner = Snapshots(tmp_path / "donor"), Snapshots(tmp_path / "joiner")
    log = LogState(b"r" * 32, 1, b"d" * 32, ("p0",), (), 40)
    made: list[Manifest] = []

    def receive() -> None:
        receiver = joiner.receive(made[0])
        for part in receiver.missing():
            receiver.write(part.start, donor.read_chunk(1, part.start, len(part)))
        receiver.finish()

    assert peak(round) < 0.3
    assert peak(lambda: made.append(donor.write(log, state.anchor, state.momentum))) < 0.3
    assert peak(receive) < 0.4
    assert peak(joiner.newest) < 2.3
    taken = joiner.newest()
    assert taken is not None
    assert taken.anchor.tobytes() == state.anchor.tobytes()


# ---------------------------------------------------------------- frozen parameters


@pytest.mark.case("C101")
def test_frozen_parameters_cost_neither_bytes_nor_optimizer_memory_and_never_move(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    wide = {"hidden_size": 64, "intermediate_size": 600}
    whole = engine_of(run_config(path, model=wide))
    thrifty = run_config(path, model={**wide, "freeze": ("*mlp*", "*embed_tokens*")})
    run = LocalRun(thrifty, ["a", "b"])
    engine = run.models["a"].engine
    share = engine.parameters / whole.parameters
    assert share < 0.12
    assert codec.payload_bytes(engine.layout, thrifty.codec) < 0.12 * codec.payload_bytes(whole.layout, thrifty.codec)
    frozen = {name: p.detach().clone() for name, p in engine.model.module.named_parameters() if not p.requires_grad}
    assert frozen
    assert not set(frozen) & {tensor.name for tensor in engine.layout.tensors}
    before = run.anchor().copy()
    for _ in range(3):
        run.round({"a": 3, "b": 3})
    assert not np.array_equal(before, run.anchor())
    for model in run.models.values():
        parameters = dict(model.engine.model.module.named_parameters())
        assert all(bool((parameters[name] == values).all()) for name, values in frozen.items())
        assert all(parameters[name].grad is None for name in frozen)
    moments = sum(tensor.numel() for tensor in engine.loop.state().values())
    assert moments <= 2 * engine.parameters + 10
    state = LogState(b"r" * 32, 1, b"d" * 32, ("a",), (), 0)
    manifest = Snapshots(tmp_path / "snap").write(state, run.anchor(), run.anchor())
    assert manifest.size_bytes == pytest.approx(8 * engine.parameters, abs=400)


@pytest.mark.case("C101")
def test_what_is_frozen_is_part_of_the_fingerprint_with_its_values(tmp_path: Path) -> None:
    path = write_text(tmp_path)

    def fields(*patterns: str, seed: int = 4) -> dict[str, str]:
        run = run_config(path, model={"freeze": patterns}, run={"seed": seed})
        return fingerprint_fields(run, engine_of(run))

    plain, frozen = fields(), fields("*embed_tokens*")
    assert {name for name in plain if plain[name] != frozen[name]} == {"model.freeze", "layout", "weights"}
    assert fields("*embed_tokens*", seed=5)["weights"] != frozen["weights"]
    with pytest.raises(ConfigError, match=r"model\.freeze: 'embed' matches no parameter"):
        fields("embed")


# ---------------------------------------------------------------- memory of other kinds

FRUGAL = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]),) * 2)
sys.path.insert(0, sys.argv[3])
from local_run import LocalRun, engine_of, run_config
run = LocalRun(run_config(sys.argv[1]), ["a"])
run.round({"a": 3})
engine = run.models["a"].engine
engine.save_inner(sys.argv[1] + ".inner")
again = engine_of(run.run, "a")
again.load_inner(sys.argv[1] + ".inner")
run.add("a", again)
local = run.round({"a": 3})["a"]
locked = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck"))
maps = open("/proc/self/maps").read()
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(json.dumps({
    "tokens": local.contribution.tokens, "limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], "locked": int(locked),
    "shm": "/dev/shm" in maps, "children": len(children),
}))
"""


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.case("C100")
@pytest.mark.case("C102")
def test_neither_locked_nor_shared_memory_is_used(tmp_path: Path) -> None:
    """With 64 KiB of memory that may be locked, training, saving and resuming work: nothing is pinned. Nor are there
    loader processes or anything in /dev/shm, whatever its size."""
    path, limit = write_text(tmp_path), inject(lambda: 65536) or 1 << 22
    words = [sys.executable, "-c", FRUGAL, path, str(limit), str(Path(__file__).parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    fired(said["limit"] == 65536, "the process may lock 64 KiB")
    assert said["tokens"] > 0
    assert (said["locked"], said["shm"], said["children"]) == (0, False, 0)
