import json

import pytest
import torch

from geomesh_p2p.config import EmulationSection
from geomesh_p2p.core.emulation import emulated_seconds, time_scale_for
from geomesh_p2p.core.types import BatchTime
from geomesh_p2p.engine import device as devices
from geomesh_p2p.engine import profiles
from geomesh_p2p.errors import ConfigError, DataError

CPU = torch.device("cpu")
H100 = EmulationSection(device="H100", fixed_seconds=0.005, sequence_seconds=0.01, max_batch=16)
L40S = EmulationSection(device="L40S", fixed_seconds=0.02, sequence_seconds=0.04, max_batch=10)


class FakeTime:
    """A clock that moves only when somebody sleeps or works."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


# ---------------------------------------------------------------- choice


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:", "cpu:0"])
def test_an_unknown_device_is_named(name):
    with pytest.raises(ConfigError, match=name):
        devices.choose_device(name)


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.choose_device("auto") == devices.choose_device("cuda") == torch.device("cuda:0")
    assert devices.choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"'cuda:2', but this host has 2 CUDA devices"):
        devices.choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto") == devices.choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="has 0 CUDA devices"):
        devices.choose_device("cuda")


def test_autocast_is_automatic_on_gpus_alone(monkeypatch):
    assert not devices.wants_bf16("auto", CPU)
    assert devices.wants_bf16("bf16", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert devices.wants_bf16("auto", torch.device("cuda:0"))
    assert not devices.wants_bf16("off", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not devices.wants_bf16("auto", torch.device("cuda:0"))


# ---------------------------------------------------------------- profiling


def profile(seconds_of, max_batch=None, limit=None):
    """The curve of a device that needs `seconds_of(batch)` and has room for `limit` sequences, by a fake clock."""
    clock, tried = FakeTime(), []

    def step(batch):
        tried.append(batch)
        if limit is not None and batch > limit:
            raise torch.OutOfMemoryError
        clock.pass_by(seconds_of(batch))

    return devices.profile(step, CPU, max_batch, clock=clock), tried


def test_a_profile_ends_where_larger_batches_bring_nothing():
    curve, _ = profile(lambda batch: 0.01 * max(batch, 8))
    assert [point.batch for point in curve] == [1, 2, 4, 8, 16, 32]  # two doublings without gain
    assert [point.seconds for point in curve] == pytest.approx([0.08, 0.08, 0.08, 0.08, 0.16, 0.32])


def test_profiling_on_a_cpu_ends_with_the_first_slow_step():
    curve, tried = profile(lambda batch: 1.0 * batch**0.9)
    assert [point.batch for point in curve] == [1, 2, 4, 8]
    assert max(tried) == 8


def test_a_profile_ends_exactly_at_the_limit_given():
    curve, tried = profile(lambda batch: 0.01 + 0.001 * batch, max_batch=12)
    assert [point.batch for point in curve] == [1, 2, 4, 8, 12]
    assert max(tried) == 12


def test_a_profile_ends_at_the_largest_batch_that_fits():
    curve, _ = profile(lambda batch: 0.01 + 0.001 * batch, limit=13)
    assert [point.batch for point in curve] == [1, 2, 4, 8, 12]
    curve, _ = profile(lambda batch: 0.01 + 0.001 * batch, limit=9)
    assert [point.batch for point in curve] == [1, 2, 4, 8]
    with pytest.raises(ConfigError, match="one sequence does not fit"):
        profile(lambda batch: 0.01, limit=0)


def test_a_step_is_timed_by_its_median():
    times = iter([9.0, 0.1, 0.1, 5.0, 0.1, 0.1])
    curve, _ = profile(lambda batch: next(times, 0.1), max_batch=1)
    assert curve == (BatchTime(1, pytest.approx(0.1)),)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, ""),
        (0.45, ""),
        (0.8, "a step of 8 sequences took 0.4 s and now takes 0.8 s"),
        (0.2, "a step of 8 sequences took 0.4 s and now takes 0.2 s"),
        (None, "a step of 8 sequences no longer fits"),
    ],
)
def test_measured_times_hold_while_the_largest_batch_fits_and_keeps_its_pace(seconds, said):
    clock, tried = FakeTime(), []

    def step(batch):
        tried.append(batch)
        if seconds is None:
            raise torch.OutOfMemoryError
        clock.pass_by(seconds if len(tried) > 1 else 9.0)  # the first one sets things up

    assert devices.disagreement(step, CPU, (BatchTime(1, 0.1), BatchTime(8, 0.4)), clock=clock) == said
    assert set(tried) == {8}
    assert len(tried) <= 4


def test_profile_files_are_for_one_model(tmp_path):
    path, curve = tmp_path / "deep" / "profile.json", (BatchTime(1, 0.5), BatchTime(3, 0.75))
    profiles.write_profile(path, "a GPU", 1000, 128, curve)
    assert profiles.read_profile(path, 1000, 128) == curve
    assert json.loads(path.read_text())["device"] == "a GPU"
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]
    with pytest.raises(ConfigError, match=r"1,000 parameters and sequences of 128.* 2,000 and 128"):
        profiles.read_profile(path, 2000, 128)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "is no profile"),
        ("[]", "is no profile"),
        ('{"parameters": 1, "sequence_length": 2, "curve": [[2, 0.1], [1, 0.1]]}', "must ascend"),
        ('{"parameters": 1, "sequence_length": 2, "curve": []}', "must ascend"),
        ('{"parameters": 1, "sequence_length": 2, "curve": [[1, 0.0]]}', "must ascend"),
    ],
)
def test_a_profile_file_that_cannot_be_used_is_named(tmp_path, text, said):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        profiles.read_profile(path, 1, 2)
    assert str(path) in str(caught.value)


# ---------------------------------------------------------------- emulation


def test_an_emulated_curve_is_its_description_times_the_scale():
    curve = devices.emulated_curve(L40S, 2.0)
    assert [point.batch for point in curve] == [1, 2, 4, 8, 10]
    assert curve[-1].seconds == pytest.approx(2 * (0.02 + 10 * 0.04))
    assert devices.emulated_curve(L40S, 1.0, max_batch=3)[-1].batch == 3
    assert devices.emulated_curve(L40S, 1.0, max_batch=99)[-1].batch == 10


def test_the_fastest_peer_of_a_host_gets_a_part_of_its_fair_share():
    scale = time_scale_for(10_000.0, [L40S, H100, L40S, L40S], sequence_length=100)
    assert 16 * 100 / emulated_seconds(H100, scale, 16) == pytest.approx(0.8 * 10_000 / 4)
    with pytest.raises(ValueError, match="rate above 0"):
        time_scale_for(0.0, [H100], 100)


def test_a_late_step_is_caught_up():
    time = FakeTime(now=50.0)
    pacer = devices.Pacer(lambda batch: batch * 0.25, started=50.0, clock=time, sleep=time.pass_by)
    ends = []
    for work in (0.5, 1.25, 0.5, 0.5, 0.25):  # against one second of emulated time each
        time.pass_by(work)
        pacer.wait(4)
        ends.append((time.now, max(0.0, pacer.overrun_seconds)))
    assert ends == [(51.0, 0.0), (52.25, 0.25), (53.0, 0.0), (54.0, 0.0), (55.0, 0.0)]


def test_a_device_that_is_too_slow_for_its_emulation_overruns_by_all_of_it():
    time = FakeTime(now=0.0)
    pacer = devices.Pacer(lambda batch: 1.0, started=0.0, clock=time, sleep=time.pass_by)
    for _ in range(4):
        time.pass_by(1.5)
        pacer.wait(1)
    assert pacer.overrun_seconds == pytest.approx(2.0)
