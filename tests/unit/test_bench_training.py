"""Training of a timeline: kept by what it depends on, resumed, closed where the timeline closes, equal to other ways to the
same weights."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.core import codec
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.ports import Vector
from geomesh_p2p.errors import ConfigError, TemporaryError, of_os_error
from geomesh_p2p.lab.bench import command, trajectory
from geomesh_p2p.lab.bench.command import Request, TrainingsFailed, bench
from geomesh_p2p.lab.bench.methods import METHODS, Method
from geomesh_p2p.lab.bench.quality import check_items
from geomesh_p2p.lab.bench.results import Outcome, summary
from geomesh_p2p.lab.bench.runner import Failed, Job, jobs
from geomesh_p2p.lab.bench.settings import Setting
from geomesh_p2p.lab.bench.stopping import GRACE_SECONDS, Stop, Stopped
from geomesh_p2p.lab.bench.timeline import Round
from geomesh_p2p.lab.bench.trajectory import Point, Workers, read
from tests.unit.benching import SEQUENCE_LENGTH, place, run_config, setting

BUDGET = 6 * 16 * SEQUENCE_LENGTH


def job(name: str, folder: Path, where: Setting | None = None, budget: int = BUDGET, **sections: dict[str, Any]) -> Job:
    (found,) = jobs(run_config(folder, **sections), where or setting(), [METHODS[name]], [1], budget)
    return found


@pytest.mark.parametrize("name", ["diloco", "geomesh", "geomesh-delayed", "ddp", "async"])
def test_perplexity_falls_and_a_second_time_nothing_is_trained(name: str, tmp_path: Path) -> None:
    told: list[Point] = []
    first = job(name, tmp_path).play(tmp_path / "store", told.append)
    assert told
    assert first.curve.val_ppl[-1] < 0.9 * first.curve.val_ppl[0]
    assert first.curve.seconds[0] == 0
    assert list(first.curve.seconds) == sorted(first.curve.seconds)
    again: list[Point] = []
    assert job(name, tmp_path).play(tmp_path / "store", again.append) == first
    assert again == []


def test_what_two_ask_for_at_once_is_trained_once(tmp_path: Path) -> None:
    asked = [job("diloco", tmp_path), job("diloco", tmp_path)]
    told: list[Point] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda one: one.play(tmp_path / "store", told.append), asked)
    assert len(told) == first.figures["rounds_committed"]
    assert first.curve == second.curve


def test_other_links_are_priced_and_not_trained_again(tmp_path: Path) -> None:
    slow = setting(links={"pairs": [{"between": ["far", "near"], "mbps": 1, "rtt_ms": 900}]})
    fast = job("diloco", tmp_path).play(tmp_path / "store")
    told: list[Point] = []
    other = job("diloco", tmp_path, slow).play(tmp_path / "store", told.append)
    assert told == []
    assert (other.key, other.curve.val_ppl) == (fast.key, fast.curve.val_ppl)
    assert other.curve.seconds[-1] > fast.curve.seconds[-1]


@pytest.mark.parametrize(
    "sections",
    [{"run": {"seed": 4}}, {"outer": {"momentum": 0.5}}, {"inner": {"learning_rate": 1e-3}}, {"codec": {"magnitude": "rms"}}],
    ids=lambda sections: next(iter(sections)),
)
def test_whatever_training_depends_on_is_in_its_key(sections: dict[str, Any], tmp_path: Path) -> None:
    base, where = run_config(tmp_path), setting()
    keys = []
    for run in (base, run_config(tmp_path, **sections)):
        config = Method("plain", "nothing of its own").run_config(run, where, BUDGET)
        workers = trajectory.Workers(config, ["far"])
        keys.append(trajectory.key_of(workers.fingerprint, [], 1))
    assert keys[0] != keys[1]


def test_work_is_in_its_key(tmp_path: Path) -> None:
    played = job("diloco", tmp_path).stages()
    fewer = [replace(one, parts=(replace(one.parts[0], steps=1), *one.parts[1:])) for one in played]
    assert trajectory.key_of(b"", played, 1) != trajectory.key_of(b"", fewer, 1)  # type: ignore[arg-type]
    assert trajectory.key_of(b"", played, 1) != trajectory.key_of(b"", played[:-1], 1)  # type: ignore[arg-type]
    ahead = job("geomesh-delayed", tmp_path).stages()
    less = [replace(one, parts=(replace(one.parts[0], ahead_steps=0), *one.parts[1:])) for one in ahead]
    assert trajectory.key_of(b"", ahead, 1) != trajectory.key_of(b"", less, 1)  # type: ignore[arg-type]


def test_steps_done_before_the_update_are_trained_before_it(tmp_path: Path) -> None:
    """As many tokens, none twice, from other weights than without overlap."""
    where = setting(
        sites=[place("far", 0.2), place("near", 0.1)], reference_round_sequences=64,
        links={"pairs": [{"between": ["far", "near"], "mbps": 2, "rtt_ms": 100}]},
    )  # fmt: skip
    methods = [replace(METHODS[name], length=1.0, longest=None) for name in ("geomesh", "geomesh-delayed")]
    plain, delayed = jobs(run_config(tmp_path), where, methods, [1], 4 * BUDGET)
    assert sum(part.ahead_steps for one in delayed.stages() for part in one.parts) > 0  # type: ignore[attr-defined]
    outcomes = [one.play(tmp_path / "store") for one in (plain, delayed)]
    assert outcomes[0].curve.tokens[-1] == outcomes[1].curve.tokens[-1]
    assert outcomes[0].curve.val_ppl[-1] != outcomes[1].curve.val_ppl[-1]
    assert outcomes[0].curve.val_ppl[-1] == pytest.approx(outcomes[1].curve.val_ppl[-1], rel=0.05)


def test_what_a_reducer_leaves_unsaid_it_says_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job("diloco-1bit", tmp_path, codec={"residual": True}, planner={"topology": "reduce"})
    means, said = list[dict[int, Vector]](), list[dict[int, Vector]]()
    encode_part = codec.encode_part

    def recorded(layout: Layout, settings: Any, mean: Vector, start: int, stop: int, *rest: Any) -> Any:
        part = encode_part(layout, settings, mean, start, stop, *rest)
        means.append({start: mean.copy()})
        said.append({start: codec.decode_part(layout, settings, part, start, stop, np.empty(stop - start, np.float32))})
        return part

    monkeypatch.setattr(codec, "encode_part", recorded)
    workers = Workers(one.run, ["far", "near"])
    played = [stage for stage in one.stages() if isinstance(stage, Round)]
    for stage in played:
        workers.round(stage)
    assert len(means) == 2 * len(played) > 6
    for residual in workers.part_residuals.values():
        share, unsaid = residual.committed_values() or pytest.fail("nothing is unsaid")
        whole = sum(mean[share.start] for mean in means if share.start in mean)
        heard = sum(part[share.start] for part in said if share.start in part)
        np.testing.assert_allclose(whole, heard + unsaid, atol=1e-5)
        assert np.abs(whole - heard).max() > 1e-4


@pytest.mark.parametrize(
    ("name", "residual", "topology"),
    [("geomesh", False, "auto"), ("geomesh", True, "gather"), ("geomesh", True, "reduce"), ("geomesh-delayed", True, "auto")],
)
def test_one_that_was_stopped_goes_on_to_the_same_bits(
    name: str, residual: bool, topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"codec": {"residual": residual}, "planner": {"topology": topology}}
    whole = job(name, tmp_path, **sections).play(tmp_path / "whole")
    monkeypatch.setattr(trajectory, "SAVE_SECONDS", 0.0)

    class Stopped(Exception):
        pass

    def stop(point: Point) -> None:
        if point.rounds == 3:
            raise Stopped

    with pytest.raises(Stopped):
        job(name, tmp_path, **sections).play(tmp_path / "stopped", stop)
    told: list[Point] = []
    resumed = job(name, tmp_path, **sections).play(tmp_path / "stopped", told.append)
    assert told[0].rounds == 3, "it began anew"
    assert resumed.curve == whole.curve
    anchors = [read(tmp_path / store / whole.key).anchor() for store in ("whole", "stopped")]
    assert np.array_equal(*anchors)
    assert sorted(path.name for path in (tmp_path / "stopped" / whole.key).iterdir()) == ["anchor.safetensors", "done.json"]


def test_a_site_that_the_timeline_closes_trains_as_many_steps_as_it_says(tmp_path: Path) -> None:
    where = setting(changes=[{"site": "near", "speed": 0.25, "begins_share": 0.3, "ends_share": 0.7}])
    closing = job("geomesh", tmp_path, where)
    played = closing.stages()
    rounds = [one for one in played if isinstance(one, Round)]
    assert any(one.steps(member.site) < member.inner_steps for one in rounds for member in one.plan.members)
    found = closing.play(tmp_path / "store")
    assert found.curve.tokens[-1] == sum(stage.tokens for stage in played)


def test_alone_the_asynchronous_site_trains_what_the_synchronous_one_does(tmp_path: Path) -> None:
    """With one site nothing is stale: both are SGD with Nesterov momentum on the same deltas."""
    where = setting(sites=[place("only", 0.1)], links={}, reference_round_sequences=8)
    plain = {"outer": {"momentum": 0.5}}
    tokens = 6 * 8 * SEQUENCE_LENGTH
    both = [job(name, tmp_path, where, tokens, **plain).play(tmp_path / "store") for name in ("diloco", "async")]
    assert both[0].curve.tokens == both[1].curve.tokens
    # The learning rate is that of the tokens so far, which a round knows only in part.
    assert both[0].curve.val_ppl == pytest.approx(both[1].curve.val_ppl, rel=0.02)


def test_a_report_has_medians_and_spreads_and_says_what_was_not_reached(tmp_path: Path) -> None:
    queue = jobs(run_config(tmp_path), setting(), [METHODS["diloco"]], [1, 2, 3], BUDGET)
    outcomes: list[Outcome] = [one.play(tmp_path / "store") for one in queue]
    finals = sorted(one.figures["final_ppl"] for one in outcomes)  # type: ignore[type-var]
    report = summary(setting(), [1, 2, 3], dict.fromkeys([1, 2, 3], 1.0), outcomes, {})
    table = report["methods"]["diloco"]
    assert [table["final_ppl_min"], table["final_ppl"], table["final_ppl_max"]] == finals
    assert table["time_to_target_seconds"] is None
    easy = summary(setting(), [1, 2, 3], dict.fromkeys([1, 2, 3], 1e9), outcomes, {})["methods"]["diloco"]
    assert (easy["time_to_target_seconds"], easy["rounds_to_target"], easy["tokens_to_target"]) == (0, 0, 0)


def test_each_seed_has_a_target_of_its_own(tmp_path: Path) -> None:
    queue = jobs(run_config(tmp_path), setting(), [METHODS["diloco"]], [1, 2, 3], BUDGET)
    outcomes = [one.play(tmp_path / "store") for one in queue]
    last = {one.seed: one.curve.val_ppl[-1] for one in outcomes}
    assert len(set(last.values())) == 3

    def reached(targets: dict[int, float]) -> int:
        report = summary(setting(), [1, 2, 3], targets, outcomes, {})
        assert report["target_ppl_by_seed"] == list(targets.values())
        return sum(one.curve.reached(targets[one.seed]) is not None for one in outcomes)

    assert reached(last) == 3
    hardest = min(last.values())
    assert reached(dict.fromkeys(last, hardest)) < 3
    assert summary(setting(), [1, 2, 3], last, outcomes, {})["methods"]["diloco"]["time_to_target_seconds"] is not None


# ---------------------------------------------------------------- stopped, damaged, without room


def test_asked_to_stop_it_saves_and_goes_on_from_there(tmp_path: Path) -> None:
    whole = job("geomesh", tmp_path).play(tmp_path / "whole")
    stop, told = Stop(), list[Point]()
    with pytest.raises(Stopped):
        job("geomesh", tmp_path).play(tmp_path / "store", lambda point: stop.ask() if point.rounds == 2 else None, stop)
    assert sorted(path.name for path in (tmp_path / "store" / whole.key).iterdir()) == ["points.json", "round-2"]
    with pytest.raises(Stopped):  # before it went on
        job("geomesh", tmp_path).play(tmp_path / "store", told.append, stop)
    assert told == []
    assert job("geomesh", tmp_path).play(tmp_path / "store", told.append).curve == whole.curve
    assert told[0].rounds == 3


def test_asked_to_stop_a_long_round_is_left_between_two_steps_and_so_is_the_asynchronous_one(tmp_path: Path) -> None:
    now = 0.0
    stop = Stop(lambda: now)
    one = job("geomesh", tmp_path)
    workers = Workers(one.run, one.world.setting.names, stop=stop)
    (played, *_) = (stage for stage in one.stages() if isinstance(stage, Round))
    workers.round(played)
    stop.ask()
    now += GRACE_SECONDS
    with pytest.raises(Stopped):
        workers.round(played)
    with pytest.raises(Stopped):
        job("async", tmp_path).play(tmp_path / "store", stop=stop)


def test_of_the_saves_on_the_way_only_the_newest_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory, "SAVE_SECONDS", 0.0)
    seen: list[list[str]] = []

    def look(_point: Point) -> None:
        seen.append([path.name for path in (tmp_path / "store").glob("*/round-*")])

    job("geomesh", tmp_path).play(tmp_path / "store", look)
    assert seen[:3] == [[], ["round-1"], ["round-2"]]


@pytest.mark.parametrize("content", ["", "{}", '{"points": [{', '{"points": [], "digest": ""}'])
@pytest.mark.parametrize("name", ["done.json", "anchor.safetensors"])
def test_a_result_that_is_damaged_is_told_and_trained_anew(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = job("diloco", tmp_path, budget=BUDGET // 3).play(tmp_path / "store")
    (tmp_path / "store" / first.key / name).write_text(content)
    told: list[Point] = []
    assert job("diloco", tmp_path, budget=BUDGET // 3).play(tmp_path / "store", told.append) == first
    assert told
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'store' / first.key} is damaged" in line
    assert (tmp_path / "store" / f"{first.key}.damaged" / name).read_text() == content


@pytest.mark.parametrize("name", ["points.json", "round-2/state.safetensors", "round-2/inner-far.safetensors", "round-2"])
def test_a_save_that_is_damaged_is_told_and_training_begins_anew(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stop = job("geomesh", tmp_path).play(tmp_path / "whole"), Stop()
    with pytest.raises(Stopped):
        job("geomesh", tmp_path).play(tmp_path / "store", lambda point: stop.ask() if point.rounds == 2 else None, stop)
    path = tmp_path / "store" / whole.key / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    told: list[Point] = []
    assert job("geomesh", tmp_path).play(tmp_path / "store", told.append).curve == whole.curve
    assert told[0].rounds == 1
    assert f"{tmp_path / 'store' / whole.key} is damaged" in capsys.readouterr().err


def test_answers_that_are_damaged_are_asked_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(job("diloco", tmp_path, budget=BUDGET // 3), choice_items=8)
    first = one.play(tmp_path / "store")
    path = tmp_path / "store" / first.key / "choice-8.json"
    kept = path.read_text()
    for content in ("{}", kept[: len(kept) // 2], '{"items": "x", "bits": "ffffff"}'):
        path.write_text(content)
        one.play(tmp_path / "store")
        assert path.read_text() == kept
        assert f"{path} is damaged" in capsys.readouterr().err


def test_more_items_than_there_are_is_found_before_training(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    check_items([run, run], 8)
    with pytest.raises(ConfigError, match="10,000,000 items, but the held-out text gives"):
        check_items([run], 10_000_000)


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path: Path) -> None:
    engine = Workers(job("diloco", tmp_path).run, ["far"]).engines["far"]
    with no_room(), pytest.raises(OSError, match=r"state\.new") as error:
        trajectory._write(tmp_path / "state.safetensors", {"anchor": np.zeros(10**6, np.float32)})
    assert isinstance(of_os_error(error.value), TemporaryError)
    with no_room(), pytest.raises(OSError, match="inner") as error:
        engine.save_inner(str(tmp_path / "inner"))
    assert isinstance(of_os_error(error.value), TemporaryError)
    assert not {"state.safetensors", "inner"} & {path.name for path in tmp_path.iterdir()}


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process can become longer than so."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------- the command


@pytest.fixture
def request_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    monkeypatch.setattr(command, "load_setting", lambda _name: setting())
    monkeypatch.setattr(command, "write", lambda *_: None)
    return Request(methods=("diloco", "geomesh", "ddp"), tokens=BUDGET // 3, out=tmp_path / "out")


def failing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def play_all(queue: Sequence[Job], store: Path, *_: object) -> tuple[list[Outcome], list[Failed]]:
        return [one.play(store) for one in queue if one.method.name != name], [Failed(name, 1, 4, "round 1: diverged")]

    monkeypatch.setattr(command, "play_all", play_all)


def test_the_report_is_of_the_methods_that_did_not_fail(
    tmp_path: Path, request_here: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("ddp", monkeypatch)
    report = bench(run_config(tmp_path), request_here)
    assert list(report["methods"]) == ["diloco", "geomesh"]
    assert report["failed"] == [{"method": "ddp", "seed": 1, "exit_code": 4, "error": "round 1: diverged"}]


def test_what_the_setting_leaves_to_a_default_is_said_before_training(
    tmp_path: Path, request_here: Request, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = [place("far", 0.4, max_batch=2), place("near", 0.1)]
    monkeypatch.setattr(command, "load_setting", lambda _name: setting(sites=sites))
    with pytest.raises(ConfigError, match="continuation choice"):
        bench(run_config(tmp_path), replace(request_here, choice=10**7))
    assert "geomesh: note: reference_batch = 4 is more than max_batch = 2 of far" in capsys.readouterr().err


def test_without_the_reference_there_is_no_report(
    tmp_path: Path, request_here: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("diloco", monkeypatch)
    with pytest.raises(TrainingsFailed, match="1 of 3 trainings failed, of diloco: no report") as error:
        bench(run_config(tmp_path), request_here)
    assert error.value.exit_code == 4


@pytest.mark.parametrize("below", [False, True])
def test_a_folder_that_is_a_file_is_found_before_training(tmp_path: Path, request_here: Request, below: bool) -> None:
    request_here.out.write_text("")
    out = request_here.out / "deeper" if below else request_here.out
    with pytest.raises(ConfigError, match=f"--out {out}"):
        bench(run_config(tmp_path), replace(request_here, out=out))


def test_too_many_items_are_refused_by_the_command_before_training(tmp_path: Path, request_here: Request) -> None:
    with pytest.raises(ConfigError, match="continuation choice"):
        bench(run_config(tmp_path), replace(request_here, choice=10**7))
    assert not list((tmp_path / "out" / "trajectories").iterdir())
