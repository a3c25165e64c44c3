import math
import random
import time

import numpy as np
import pytest
import torch

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core.ports import Engine
from geomesh_p2p.core.types import Assignment, BatchTime, Plan, Range, Term
from geomesh_p2p.engine import device as devices
from geomesh_p2p.engine import engine as engines
from geomesh_p2p.engine import profiles
from geomesh_p2p.engine.engine import TorchEngine, fingerprint_fields
from geomesh_p2p.engine.evaluate import perplexity
from geomesh_p2p.engine.inner import InnerLoop
from geomesh_p2p.errors import ConfigError, DataError

LENGTH = 16
WORDS = ["the", "mesh", "trains", "one", "model", "over", "many", "sites", "and", "every", "replica", "equal"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    rng = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "{" ".join(rng.choices(WORDS, k=12))}"}}\n' for _ in range(120)))
    return str(path)


@pytest.fixture
def make(text_file):
    def build(site=None, **sections):
        run = {
            "run": {"id": "test", "seed": 4},
            "model": {
                "hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 2, "sequence_length": LENGTH
            },
            "dataset": {"source": "jsonl", "paths": (text_file,), "validation_sequences": 7},
            "inner": {"learning_rate": 3e-3, "total_tokens": 10_000},
        }  # fmt: skip
        for name, values in sections.items():
            run[name] = run.get(name, {}) | values
        where = {"site": {"name": "here"}, "device": {"name": "cpu", "threads": 1}} | (site or {})
        return TorchEngine(RunConfig.model_validate(run), SiteConfig.model_validate(where))

    return build


def train(engine: Engine, start: int, stop: int, batch: int = 4):
    """Half of the committed round's ranges are this peer's."""
    size = stop - start
    steps = -(-size // batch)
    mine = Assignment("peer", "here", batch, steps, size - batch * (steps - 1), (Range(start, stop),), 1.0, 1.0)
    plan = Plan(b"", 1, Term(1, "peer"), 1, b"", (mine,), "gather", (), start * LENGTH, size * LENGTH, 1.0, 1.0, 1.0, True)
    return engine.train(mine, plan, lambda: False, time.monotonic())


def moments(engine):
    return {name: tensor.clone() for name, tensor in engine.loop.state().items()}


def test_the_same_configuration_gives_the_same_bits(make):
    first, second = make(), make()
    assert first.weights_digest == second.weights_digest
    torch.manual_seed(99)
    results = [train(engine, 0, 30) for engine in (first, second)]
    assert results[0].loss == results[1].loss
    assert np.array_equal(first.weights(), second.weights())
    assert first.weights_digest == second.weights_digest != first.model.weights_digest  # it names the initial weights


def test_training_lowers_the_perplexity(make):
    engine = make()
    before = perplexity(*engine.validate(0, 1))
    train(engine, 0, 400, batch=8)
    assert perplexity(*engine.validate(0, 1)) < before / 3


def test_validation_shares_add_up_and_leave_no_trace(make):
    engine = make()
    weights = engine.weights().copy()
    nats, tokens = engine.validate(0, 1)
    shares = [engine.validate(share, 3) for share in range(3)]
    assert tokens == 7 * LENGTH == sum(tokens for _, tokens in shares)
    assert nats == pytest.approx(sum(nats for nats, _ in shares), rel=1e-6)
    assert 1.5 * math.log(2) < nats / tokens < math.log(256) + 1
    assert np.array_equal(weights, engine.weights())
    assert engine.model.module.training
    assert engine.validate(7, 8) == (0.0, 0)


def test_weights_are_a_view_and_an_anchor_can_be_set(make):
    engine = make()
    anchor = engine.weights().copy()
    train(engine, 0, 8)
    assert not np.array_equal(anchor, engine.weights())
    assert np.shares_memory(engine.weights(), engine.weights())
    engine.set_weights(anchor)
    assert np.array_equal(anchor, engine.weights())


# ---------------------------------------------------------------- inner state


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_a_restart_goes_on_bit_for_bit(make, tmp_path, optimizer):
    through = make(inner={"optimizer": optimizer})
    train(through, 0, 12)
    through.save_inner(str(tmp_path / "inner.safetensors"))
    anchor = through.weights().copy()
    train(through, 12, 24)

    restarted = make(inner={"optimizer": optimizer})
    restarted.set_weights(anchor)
    restarted.load_inner(str(tmp_path / "inner.safetensors"))
    train(restarted, 12, 24)
    assert np.array_equal(through.weights(), restarted.weights())


def test_random_state_is_part_of_the_inner_state(make, tmp_path):
    engine = make()
    engine.save_inner(str(tmp_path / "inner"))  # before the first step: nothing but random state
    drawn = torch.rand(3)
    train(engine, 0, 4)
    engine.load_inner(str(tmp_path / "inner"))
    assert engine.loop.state() == {}
    assert torch.equal(torch.rand(3), drawn)


def test_inner_state_that_cannot_be_used_is_refused(make, tmp_path):
    engine, other = make(), make(model={"hidden_size": 16})
    with pytest.raises(DataError, match="no usable inner state"):
        engine.load_inner(str(tmp_path / "missing"))
    path = tmp_path / "inner"
    train(engine, 0, 4)
    engine.save_inner(str(path))
    with pytest.raises(DataError, match="another model"):
        other.load_inner(str(path))
    with pytest.raises(DataError, match="not one of lion"):
        make(inner={"optimizer": "lion"}).load_inner(str(path))
    path.write_bytes(path.read_bytes()[:-100])
    before = moments(engine)
    with pytest.raises(DataError, match="no usable inner state"):
        engine.load_inner(str(path))
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.loop.state().items())


def test_a_save_that_fails_leaves_the_older_one(make, tmp_path, monkeypatch):
    engine, path = make(), tmp_path / "inner"
    engine.save_inner(str(path))
    older = path.read_bytes()

    def half(tensors, filename, metadata):
        filename.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engines.safetensors.torch, "save_file", half)
    with pytest.raises(OSError, match="No space"):
        engine.save_inner(str(path))
    assert path.read_bytes() == older
    assert [entry.name for entry in tmp_path.iterdir()] == ["inner"]


# ---------------------------------------------------------------- speed


def test_measuring_leaves_no_trace(make):
    engine = make(site={"device": {"name": "cpu", "threads": 1, "max_batch": 2}})
    untouched = engine.weights().copy()
    assert [point.batch for point in engine.measure()] == [1, 2]
    assert np.array_equal(untouched, engine.weights())
    assert engine.loop.state() == {}

    train(engine, 0, 8)
    weights, state, drawn = engine.weights().copy(), moments(engine), torch.get_rng_state()
    assert engine.measure_rate(seconds=0.0) > 0
    assert np.array_equal(weights, engine.weights())
    assert all(torch.equal(tensor, state[name]) for name, tensor in engine.loop.state().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_profile_file_is_used_instead_of_measuring(make, tmp_path):
    path = tmp_path / "profile.json"
    curve = (BatchTime(1, 0.5), BatchTime(4, 1.0), BatchTime(9, 2.0))
    profiles.write_profile(path, "a GPU", make().parameters, LENGTH, curve)
    assert make(site={"device": {"name": "cpu", "profile": str(path)}}).measure() == curve
    assert make(site={"device": {"name": "cpu", "profile": str(path), "max_batch": 5}}).measure() == curve[:2]
    with pytest.raises(ConfigError, match="is of"):
        make(site={"device": {"name": "cpu", "profile": str(path)}}, model={"hidden_size": 16}).measure()


def test_measured_step_times_are_agreed_with_while_they_hold(make):
    engine = make(site={"device": {"name": "cpu", "threads": 1, "max_batch": 2}})
    untouched = engine.weights().copy()
    curve = engine.measure()
    assert "now takes" in engine.disagreement((BatchTime(1, 1e-3), BatchTime(2, 60.0)))
    assert np.array_equal(untouched, engine.weights())
    assert engine.loop.state() == {}
    depends_on = engine.speed_depends_on
    assert depends_on == make(site={"device": {"name": "cpu", "threads": 1, "max_batch": 2}}).speed_depends_on
    for other in (
        make(site={"device": {"name": "cpu", "threads": 1, "max_batch": 3}}),
        make(model={"gradient_checkpointing": True}),
        make(model={"attention": "eager"}),
        make(model={"compile": True}),
        make(inner={"micro_batch": 1}),
    ):
        assert other.speed_depends_on != depends_on
    assert make(site={"emulation": EMULATION}).speed_depends_on == {}, "nothing is measured"
    assert len(curve) == 2


EMULATION = {"device": "H100", "fixed_seconds": 0.5, "sequence_seconds": 0.25, "max_batch": 4, "time_scale": 0.01}


def test_steps_are_compiled_before_the_first_round(make, monkeypatch):
    emulated = {"emulation": {**EMULATION, "max_batch": 5}}
    tried, done = [], InnerLoop.step
    monkeypatch.setattr(InnerLoop, "step", lambda loop, ids, rate: (tried.append(len(ids)), done(loop, ids, rate))[1])
    make(site=emulated).measure()
    assert tried == [], "nothing is compiled, so there is nothing to try"

    monkeypatch.setattr(torch, "compile", lambda function: function)
    engine = make(model={"compile": True}, site=emulated)
    untouched = engine.weights().copy()
    curve = engine.measure()
    assert tried == [1, 2, 4, 5]
    assert np.array_equal(untouched, engine.weights())
    assert engine.loop.state() == {}
    tried.clear()
    engine.disagreement(curve[:2])
    assert tried[:2] == [1, 2], "also where step times measured before are used again"


def test_an_emulated_device_has_its_described_curve_and_pace(make, monkeypatch):
    engine = make(site={"emulation": EMULATION})
    assert engine.device_label == "H100"
    assert [(point.batch, point.seconds) for point in engine.measure()] == [
        (1, pytest.approx(0.0075)), (2, pytest.approx(0.01)), (4, pytest.approx(0.015)),
    ]  # fmt: skip
    paced = []
    monkeypatch.setattr(devices.Pacer, "wait", lambda pacer, batch: paced.append((batch, pacer.seconds_of(batch))))
    train(engine, 0, 10)
    assert paced == [(4, pytest.approx(0.015)), (4, pytest.approx(0.015)), (2, pytest.approx(0.01))]


def test_overrun_of_the_emulation_is_reported(make):
    engine = make(site={"emulation": EMULATION | {"time_scale": 1e-9}})
    result = train(engine, 0, 8)
    assert result.overrun_seconds > 0.5 * result.seconds  # all of it but what the clock reads in between


def test_a_time_scale_is_found_where_none_is_given(make, monkeypatch):
    engine = make(site={"emulation": {key: value for key, value in EMULATION.items() if key != "time_scale"}})
    monkeypatch.setattr(engine, "measure_rate", lambda: 1000.0)
    # Alone on its host: 0.8 of the measured rate at the largest batch.
    assert engine.measure()[-1].seconds == pytest.approx(4 * LENGTH / 800.0)
    engine.time_scale = 3.0
    assert engine.measure()[-1].seconds == pytest.approx(3 * 1.5)


# ---------------------------------------------------------------- what a run has in common


def test_a_fingerprint_names_the_field_that_differs(make):
    base = make()
    fields = fingerprint_fields(base.run, base)
    assert all(isinstance(value, str) for value in fields.values())

    def differing(**sections):
        other = make(**sections)
        found = fingerprint_fields(other.run, other)
        assert set(found) == set(fields)
        return {name for name in fields if fields[name] != found[name]}

    assert differing() == set()
    assert differing(inner={"learning_rate": 1e-4}) == {"inner.learning_rate"}
    assert differing(outer={"momentum": 0.5}) == {"outer.momentum"}
    assert differing(codec={"magnitude": "rms"}) == {"codec.magnitude"}
    assert differing(model={"autocast": "bf16"}) == {"model.autocast"}
    assert differing(model={"intermediate_size": 32}) == {"model.intermediate_size", "layout", "weights"}
    assert {"seed", "weights", "data.validation"} <= differing(run={"seed": 5})
    assert "data.shuffle" in differing(dataset={"shuffle": False})
    # What each site may choose for itself does not count.
    own = {"gradient_checkpointing": True, "compile": True, "attention": "eager"}
    assert differing(inner={"micro_batch": 2}, model=own, net={"streams": 2}) == set()


def test_gradient_checkpointing_computes_the_same(make):
    plain, thrifty = make(), make(model={"gradient_checkpointing": True})
    for engine in (plain, thrifty):
        train(engine, 0, 8)
    assert np.array_equal(plain.weights(), thrifty.weights())


def test_attention_computes_the_same_either_way(make):
    fused, plain = make(model={"attention": "sdpa"}), make(model={"attention": "eager"})
    assert fused.model.module.config._attn_implementation != plain.model.module.config._attn_implementation
    for engine in (fused, plain):
        train(engine, 0, 8)
    np.testing.assert_allclose(fused.weights(), plain.weights(), rtol=0, atol=1e-4)


def test_mistakes_are_refused_before_anything_is_built(make):
    with pytest.raises(ConfigError, match="device"):
        make(site={"device": {"name": "cuda:99"}})
    with pytest.raises(DataError, match="no file matches"):
        make(dataset={"paths": ("/no/such/file",)})


def test_a_perplexity_needs_tokens():
    assert perplexity(math.log(8) * 5, 5) == pytest.approx(8)
    assert perplexity(math.nan, 5) == math.inf
    with pytest.raises(ValueError, match="no tokens"):
        perplexity(0.0, 0)
