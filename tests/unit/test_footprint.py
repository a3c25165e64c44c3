"""What a model takes, against what it really takes; and what a host allows, from files such as the kernel shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from geomesh_p2p.config import CodecSection, ModelSection, RunConfig, SiteConfig
from geomesh_p2p.core.findings import Finding
from geomesh_p2p.engine import footprint, preflight
from geomesh_p2p.engine.footprint import Part
from geomesh_p2p.engine.model import describe, parameter_count

SMALL = ModelSection(hidden_size=64, intermediate_size=160, layers=3, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    "section",
    [
        SMALL,
        SMALL.model_copy(update={"tie_embeddings": False}),
        SMALL.model_copy(update={"kv_heads": 4, "layers": 1, "sequence_length": 16}),
        ModelSection(hidden_size=192, intermediate_size=512, layers=2, heads=3, kv_heads=3),
    ],
)
def test_parameters_are_counted_without_torch_as_with_it(section: ModelSection) -> None:
    assert footprint.llama_parameters(section, 300) == parameter_count(section, 300)
    assert footprint.llama_shape(section, 300) == describe(section, 300)


def run_of(**model: object) -> RunConfig:
    return RunConfig.model_validate({"run": {"id": "x"}, "model": model})


SITE = SiteConfig.model_validate({"site": {"name": "north"}})
EMULATED = SiteConfig.model_validate({
    "site": {"name": "north"},
    "emulation": {"device": "toy", "fixed_seconds": 0.0, "sequence_seconds": 0.1, "max_batch": 1},
})  # fmt: skip

# One step, then what a peer holds besides: the anchor with the outer momentum, and the copies made while measuring.
MEASURED = """
import sys
import numpy as np
from geomesh_p2p.config import *
from geomesh_p2p.engine import footprint
from geomesh_p2p.engine.engine import TorchEngine
run = RunConfig.model_validate_json(sys.argv[1])
site = SiteConfig.model_validate_json(sys.argv[2])
engine = TorchEngine(run, site)
anchor = engine.weights().copy()
momentum = np.ones_like(anchor)
engine.measure()
for _ in range(2):
    engine.loop.step(engine.corpus.batch(range(footprint.largest_batch(run, site))), 1e-3)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024)
"""


@pytest.mark.case("C098")
@pytest.mark.parametrize(
    ("model", "inner", "max_batch"),
    [
        ({"layers": 8, "hidden_size": 512, "intermediate_size": 1408}, {}, 1),
        ({"layers": 4}, {}, 64),
        pytest.param({"layers": 4}, {"micro_batch": 4}, 64, marks=pytest.mark.long),
        pytest.param({"layers": 4, "gradient_checkpointing": True}, {}, 64, marks=pytest.mark.long),
    ],
)
def test_the_estimate_of_memory_is_near_what_a_peer_takes(
    tmp_path: Path, model: dict[str, object], inner: dict[str, object], max_batch: int
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"line {i}: the quick brown fox counts {i * i} sheep\n" for i in range(4000)))
    run = RunConfig.model_validate({
        "run": {"id": "x"},
        "model": {"hidden_size": 128, "intermediate_size": 352, "sequence_length": 64, **model},
        "inner": inner,
        "dataset": {"source": "text", "paths": [str(corpus)], "validation_sequences": 4},
    })  # fmt: skip
    device = {"name": "cpu", "threads": 1, "max_batch": max_batch}
    site = SiteConfig.model_validate({"site": {"name": "north"}, "device": device})
    words = [sys.executable, "-c", MEASURED, run.model_dump_json(), site.model_dump_json()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    shape = footprint.llama_shape(run.model, 256)
    parts = footprint.memory_parts(run, site, shape, 2, footprint.corpus_bytes([str(corpus)], 1, 1.0), cuda=False)
    estimate = sum(part.size_bytes for part in parts)
    assert 0.8 < estimate / int(done.stdout) < 1.35
    assert sum(part.size_bytes for part in parts if part.certain) < int(done.stdout)


def test_the_largest_step_is_what_the_planner_may_give(tmp_path: Path) -> None:
    def site_of(emulated: int = 0, **device: object) -> SiteConfig:
        emulation = {"device": "toy", "fixed_seconds": 0.0, "sequence_seconds": 0.1, "max_batch": emulated}
        found = {"site": {"name": "north"}, "device": device}
        return SiteConfig.model_validate(found | ({"emulation": emulation} if emulated else {}))

    def largest(planner: dict[str, object], site: SiteConfig, micro: int | None = None) -> tuple[int, int]:
        run = RunConfig.model_validate({
            "run": {"id": "x"}, "model": {"sequence_length": 128}, "planner": planner, "inner": {"micro_batch": micro},
        })  # fmt: skip
        return footprint.largest_batch(run, site), footprint.forward_sequences(run, site)

    profile = tmp_path / "profile.json"
    profile.write_text('{"curve": [[1, 0.1], [24, 1.0]]}')
    planned, uniform, fixed = {"mode": "planned"}, {"mode": "uniform", "batch": 6}, {"mode": "fixed", "batch": 6}
    assert largest(planned, site_of()) == (128, 128), "65,536 tokens in 4 steps of 128 tokens a sequence"
    assert largest(planned, site_of(), micro=8) == (128, 8)
    assert largest(planned, site_of(max_batch=16, ranks=2)) == (16, 8)
    assert largest(planned, site_of(emulated=10, max_batch=16)) == (10, 10)
    assert largest(planned, site_of(profile=str(profile))) == (24, 24)
    assert largest(planned, site_of(profile=str(profile), max_batch=12)) == (12, 12)
    assert largest(planned, site_of(profile=str(tmp_path / "none"), max_batch=12)) == (12, 12)
    assert largest(uniform, site_of()) == (6, 6)
    assert largest(uniform, site_of(max_batch=16)) == (16, 16), "it is measured up to there at the start"
    assert largest(uniform, site_of(profile=str(profile))) == (6, 6)
    assert largest({**fixed, "fixed": {"north": (9, 4)}}, site_of()) == (9, 9)
    assert largest({**fixed, "fixed": {"south": (9, 4)}}, site_of()) == (6, 6)


def test_the_parts_follow_the_settings() -> None:
    shape = footprint.llama_shape(SMALL, 256)

    def parts(run: RunConfig, site: SiteConfig = SITE, cuda: bool = False) -> dict[str, Part]:
        return {part.what: part for part in footprint.memory_parts(run, site, shape, 8, 0, cuda)}

    run = run_of()
    copy = 4 * shape.parameters
    assert parts(run)["moments of adamw"].size_bytes == 2 * copy
    lion = run.model_copy(update={"inner": run.inner.model_copy(update={"optimizer": "lion"})})
    assert parts(lion)["moments of lion"].size_bytes == copy
    assert "copies while measuring" in parts(run)
    assert "copies while joining" in parts(run, EMULATED)
    exchanges = next(part for what, part in parts(run).items() if what.startswith("exchange among 8"))
    assert exchanges.size_bytes > 2 * 8 * shape.parameters / 8  # what eight sent, twice: the round before is still being served
    wide = run.model_copy(update={"codec": CodecSection(second_phase_bits=8)})
    answers = footprint.update_bytes(wide, shape.parameters, 2)
    assert answers == shape.parameters > footprint.update_bytes(run, shape.parameters, 2), "a byte for each parameter"
    gathered = wide.model_copy(update={"planner": wide.planner.model_copy(update={"topology": "gather"})})
    assert footprint.update_bytes(gathered, shape.parameters, 2) == footprint.update_bytes(run, shape.parameters, 2)
    assert footprint.update_bytes(wide, shape.parameters, 16) == 2 * answers, "sixteen contributions are more than that"
    assert "residual" not in parts(run)
    residual = run.model_copy(update={"codec": CodecSection(residual=True)})
    assert parts(residual)["residual"].size_bytes == 2 * copy
    on_gpu = {name for name, part in parts(run, cuda=True).items() if part.on_device}
    assert {"weights", "gradients", "moments of adamw", "activations of 128 sequences", "CUDA's context"} == on_gpu
    checkpointed = SMALL.model_copy(update={"gradient_checkpointing": True, "layers": 24})
    deep = footprint.llama_shape(checkpointed, 256)
    plain = footprint.activation_bytes(checkpointed.model_copy(update={"gradient_checkpointing": False}), deep)
    assert footprint.activation_bytes(checkpointed, deep) < plain / 2.5


@pytest.mark.case("C098")
def test_at_four_fifths_of_the_need_it_is_said_and_below_what_is_certain_it_is_refused() -> None:
    parts = [Part("weights", 400 * 10**6, certain=True), Part("libraries and the daemon", 600 * 10**6)]
    assert preflight.memory("memory", parts, 1000 * 10**6).level == "ok"
    warned = preflight.memory("memory", parts, 800 * 10**6)
    assert warned.level == "warning"
    for word in ("about 1,000 MB", "weights 400", "800 MB may be used", "signal 9"):
        assert word in warned.line
    refused = preflight.memory("memory", parts, 399 * 10**6)
    assert (refused.level, refused.exit_code) == ("fatal", 75)


@pytest.mark.case("C098")
def test_the_need_is_compared_with_free_memory_or_what_the_control_group_leaves_if_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"line {i}: the quick brown fox counts {i * i} sheep\n" for i in range(400)))
    run = RunConfig.model_validate({
        "run": {"id": "x"}, "model": {"hidden_size": 512, "intermediate_size": 1408},
        "dataset": {"source": "text", "paths": [str(corpus)], "validation_sequences": 4},
    })  # fmt: skip
    site = SiteConfig.model_validate({"site": {"name": "north"}, "device": {"name": "cpu"}})
    parts: list[Part] = []
    own, judge = 50 * 10**6, preflight.memory

    def memory(check: str, needed: list[Part], room_bytes: int) -> Finding:
        parts[:] = needed
        return judge(check, needed, room_bytes)

    monkeypatch.setattr(preflight, "memory", memory)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=own)))

    def found(free: int, grouped: int | None) -> Finding:
        """With so many bytes beyond what this process has already."""
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        monkeypatch.setattr(footprint, "cgroup_room", lambda: grouped)
        (one,) = (each for each in preflight.check_host(run, site, tmp_path / "runs", 2) if each.check == "memory")
        return one

    plenty = 10**12
    assert found(plenty, None).level == "ok"
    need, certain = sum(part.size_bytes for part in parts), sum(part.size_bytes for part in parts if part.certain)
    assert own < certain < need * 4 // 5
    for room, level, code in ((need, "ok", 0), (need * 4 // 5, "warning", 0), (certain - 1, "fatal", 75)):
        for free, grouped in ((room - own, None), (room - own, plenty), (plenty, room - own)):
            finding = found(free, grouped)
            assert (finding.level, finding.exit_code) == (level, code), (free, grouped)


@pytest.mark.case("C090")
def test_disk_for_snapshots_and_updates_is_counted_with_what_the_folder_has(tmp_path: Path) -> None:
    run = run_of()
    folder = tmp_path / "runs" / "x" / "north"
    parts = footprint.disk_parts(run, 10**6, 8)
    assert parts[0] == Part("one snapshot", 16 * 10**6, certain=True)
    need = sum(part.size_bytes for part in parts)
    assert need == 3 * 16 * 10**6 + (50 + 2 * 5 + 1) * 8 * 125_000 + footprint.notes_bytes(run.run.rounds, 8)

    def level(free: int) -> Finding:
        return preflight.disk(folder, parts, free)

    assert level(need).level == "ok"
    assert level(need - 1).level == "warning"
    assert level(16 * 10**6 - 1).exit_code == 75
    for word in ("one snapshot 16", "2 more snapshots 32", "60 updates 60", "save.keep_updates"):
        assert word in level(need - 1).line
    folder.mkdir(parents=True)
    (folder / "snapshot").write_bytes(bytes(1000))
    assert level(need - 1000).level == "ok"


# ---------------------------------------------------------------- control groups


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.case("C098")
def test_room_is_what_the_narrowest_control_group_leaves(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    assert footprint.cgroup_room(proc, root) is None
    put(proc / "self/cgroup", "0::/outer/inner\n")
    put(root / "outer/inner/memory.max", "max\n")
    put(root / "outer/inner/memory.current", "5\n")
    assert footprint.cgroup_room(proc, root) is None
    put(root / "outer/memory.max", "1000\n")
    put(root / "outer/memory.current", "700\n")
    assert footprint.cgroup_room(proc, root) == 300
    put(root / "outer/memory.stat", "anon 1\ninactive_file 150\nactive_file 50\n")
    assert footprint.cgroup_room(proc, root) == 500
    put(root / "memory.max", "450\n")  # a container that sees its own group as the root
    put(root / "memory.current", "50\n")
    assert footprint.cgroup_room(proc, root) == 400


def test_room_of_control_groups_of_the_first_version(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    put(proc / "self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    put(root / "memory/job/memory.limit_in_bytes", "1000\n")
    put(root / "memory/job/memory.usage_in_bytes", "900\n")
    put(root / "memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20\n")
    put(root / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(root / "memory/memory.usage_in_bytes", "0\n")
    assert footprint.cgroup_room(proc, root) == 220
