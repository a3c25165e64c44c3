import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from geomesh_p2p.config import InnerSection, ModelSection
from geomesh_p2p.core.log import first_positions
from geomesh_p2p.core.types import Assignment, Plan, Range, Term
from geomesh_p2p.engine import inner
from geomesh_p2p.engine import model as models
from geomesh_p2p.engine.data import Corpus, DataManifest
from geomesh_p2p.engine.feed import Feed
from geomesh_p2p.engine.inner import InnerLoop, learning_rate, run_round
from geomesh_p2p.errors import ConfigError, DataError

VOCABULARY, LENGTH = 40, 12
MODEL = ModelSection(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=2, sequence_length=LENGTH)


def build():
    return models.build(MODEL, VOCABULARY, seed=3)


def ids(seed=0, batch=6):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, LENGTH + 1))


class RecordingCorpus(Corpus):
    """Remembers which positions were read."""

    def batch(self, positions):
        positions = list(positions)
        self.manifest.fields.append(positions)
        return super().batch(positions)

    @property
    def read(self):
        return self.manifest.fields


@pytest.fixture
def corpus():
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 64 * LENGTH + 1).astype(np.uint8)
    return RecordingCorpus(tokens, tokens, LENGTH, 4, 0, True, DataManifest([]))


def assignment_of(batch, steps, last, *ranges, lr_scale=1.0):
    return Assignment("peer", "site", batch, steps, last, tuple(Range(*r) for r in ranges), lr_scale, 1.0)


def plan_of(assignment, committed=0):
    return Plan(
        run=b"", round=1, term=Term(1, "peer"), attempt=1, base=b"", members=(assignment,), topology="gather", shares=(),
        committed_tokens=committed, planned_tokens=assignment.sequences * LENGTH, train_seconds=1.0, exchange_seconds=1.0,
        grace_seconds=1.0, may_close=True,
    )  # fmt: skip


def go(loop, corpus, assignment, committed=0, should_close=lambda: False, **more):
    return run_round(loop, Feed(corpus), assignment, plan_of(assignment, committed), should_close, **more)


# ---------------------------------------------------------------- the schedule


def test_the_schedule_warms_up_and_ends_at_its_share():
    settings = InnerSection(learning_rate=0.4, warmup_tokens=100, total_tokens=1100, min_learning_rate_share=0.1)
    assert learning_rate(settings, 25) == pytest.approx(0.1)
    assert learning_rate(settings, 100) == pytest.approx(0.4)
    assert learning_rate(settings, 600) == pytest.approx(0.22)  # half-way between 0.4 and 0.04
    assert learning_rate(settings, 1100) == learning_rate(settings, 9e9) == pytest.approx(0.04)


def test_the_rate_follows_the_whole_runs_tokens_within_a_round(corpus):
    settings = InnerSection(learning_rate=1e-3, total_tokens=1000)
    rates = []
    loop = InnerLoop(build(), settings)
    step = loop.step
    loop.step = lambda ids, rate: (rates.append(rate), step(ids, rate))[1]
    assignment = assignment_of(2, 4, 1, (0, 7), lr_scale=0.5)
    result = go(loop, corpus, assignment, committed=300)
    expected = [0.5 * learning_rate(settings, 300 + k / 4 * 7 * LENGTH) for k in (1, 2, 3, 4)]
    assert rates == expected
    assert result.learning_rate == expected[-1]


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_step_is_the_one_of_a_plain_loop(clip_norm):
    model = build()
    plain = copy.deepcopy(model.module)
    settings = InnerSection(weight_decay=0.2, clip_norm=clip_norm, betas=(0.8, 0.9))
    loop = InnerLoop(model, settings)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}], betas=(0.8, 0.9)
    )
    for number, rate in enumerate((1e-2, 5e-3, 2e-3)):
        batch = ids(number)
        loss, taken = loop.step(batch, rate)
        tokens = torch.from_numpy(batch)
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        expected.backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert taken
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


def test_micro_batches_add_up_to_the_batch():
    whole, parts = build(), build()
    InnerLoop(whole, InnerSection(clip_norm=None)).step(ids(), 0.0)
    loss, _ = InnerLoop(parts, InnerSection(clip_norm=None, micro_batch=4)).step(ids(), 0.0)  # 4 and 2 of 6
    torch.testing.assert_close(whole.grad, parts.grad, rtol=1e-4, atol=1e-7)
    assert loss == pytest.approx(InnerLoop(whole, InnerSection()).step(ids(), 0.0)[0], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer):
    model = build()
    loop = InnerLoop(model, InnerSection(optimizer=optimizer))
    loop.step(ids(), 1e-3)
    weights = model.flat.clone()
    state = {name: tensor.clone() for name, tensor in loop.state().items()}
    weights[model.layout.parameters - 1] = model.flat[-1] = math.nan  # the last norm
    loss, taken = loop.step(ids(), 1e-3)
    assert not taken
    assert math.isnan(loss)
    assert torch.equal(weights.nan_to_num(9.0), model.flat.nan_to_num(9.0))
    assert all(torch.equal(tensor, loop.state()[name]) for name, tensor in state.items())


def test_lion_steps_by_the_sign_of_its_momentum(monkeypatch):
    monkeypatch.setattr(inner, "LION_CHUNK", 3)
    start = torch.tensor([1.0, -2.0, 3.0, 0.5, -0.25])
    weights = torch.nn.Parameter(start.clone())
    lion = inner.Lion([{"params": [weights], "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.99))
    momentum, expected = torch.zeros(5), start.clone()
    for grad in (torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5]), torch.tensor([-20.0, -1.0, 1.0, -0.1, 0.0])):
        weights.grad = grad
        lion.step()
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.99 * momentum + 0.01 * grad
        torch.testing.assert_close(weights.detach(), expected)


def test_bf16_autocast_keeps_fp32_weights_and_about_the_same_loss():
    exact, fast = InnerLoop(build(), InnerSection()), InnerLoop(build(), InnerSection(), bf16=True)
    expected, loss = exact.step(ids(), 1e-3)[0], fast.step(ids(), 1e-3)[0]
    assert loss == pytest.approx(expected, rel=0.02)
    assert loss != expected
    assert fast.model.flat.dtype == torch.float32


def test_a_compiled_step_of_any_batch_is_the_same_step():
    plain, compiled = InnerLoop(build(), InnerSection()), InnerLoop(build().for_training(compile=True), InnerSection())
    for batch in (4, 7, 1):
        expected, found = plain.step(ids(batch), 1e-3)[0], compiled.step(ids(batch), 1e-3)[0]
        assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(compiled.model.flat, plain.model.flat, rtol=0, atol=1e-4)
    assert compiled.model.compiled is not None


def test_what_cannot_be_compiled_says_what_to_do(monkeypatch):
    def without_a_compiler(_):
        def fail(_):
            raise torch._dynamo.exc.BackendCompilerFailed(None, RuntimeError("no compiler"), None)

        return fail

    monkeypatch.setattr(torch, "compile", without_a_compiler)
    with pytest.raises(ConfigError, match=r"model.compile: .*C\+\+ compiler.*false"):
        InnerLoop(build().for_training(compile=True), InnerSection()).step(ids(), 1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_training_lowers_the_loss(optimizer):
    tokens = (np.arange(64 * LENGTH + 1) * 7 % VOCABULARY).astype(np.uint8)  # each token tells the next
    corpus = Corpus(tokens, tokens, LENGTH, 4, 0, True, DataManifest(()))
    loop = InnerLoop(build(), InnerSection(optimizer=optimizer, learning_rate=3e-3 if optimizer == "adamw" else 3e-4))
    before = go(loop, corpus, assignment_of(8, 8, 8, (0, 64))).loss
    go(loop, corpus, assignment_of(8, 24, 8, (64, 256)))
    assert go(loop, corpus, assignment_of(8, 8, 8, (256, 320))).loss < before - 0.3


# ---------------------------------------------------------------- one round


def test_ranges_are_read_in_order_and_the_last_step_is_smaller(corpus):
    result = go(InnerLoop(build(), InnerSection()), corpus, assignment_of(4, 3, 2, (10, 15), (40, 45)))
    assert corpus.read == [[10, 11, 12, 13], [14, 40, 41, 42], [43, 44]]
    assert result.ranges == (Range(10, 15), Range(40, 45))
    assert (result.tokens, result.steps, result.skipped_steps) == (10 * LENGTH, 3, 0)
    assert len(result.step_seconds) == 3
    assert 0 <= result.data_wait_seconds <= result.seconds == pytest.approx(sum(result.step_seconds))


@pytest.mark.case("C029")
def test_a_round_that_is_closed_has_exactly_what_it_trained(corpus):
    done = []
    loop = InnerLoop(build(), InnerSection())
    step = loop.step
    loop.step = lambda *given: (done.append(1), step(*given))[1]
    result = go(loop, corpus, assignment_of(4, 3, 2, (10, 15), (40, 45)), should_close=lambda: len(done) == 2)
    assert result.ranges == (Range(10, 15), Range(40, 43))
    assert result.tokens == 8 * LENGTH
    nothing = go(loop, corpus, assignment_of(4, 3, 2, (10, 20)), should_close=lambda: True)
    assert (nothing.tokens, nothing.ranges, nothing.steps, nothing.step_seconds) == (0, (), 0, ())


def test_a_round_without_one_good_step_has_no_tokens(corpus):
    model = build()
    model.flat.fill_(math.nan)
    result = go(InnerLoop(model, InnerSection()), corpus, assignment_of(4, 2, 4, (0, 8)))
    assert (result.tokens, result.ranges, result.skipped_steps, result.loss) == (0, (), 2, 0.0)


def test_the_rounds_loss_is_the_mean_over_its_sequences(corpus):
    loop = InnerLoop(build(), InnerSection())
    losses = []
    step = loop.step
    loop.step = lambda ids, rate: (losses.append((len(ids), (result := step(ids, rate))[0])), result)[1]
    result = go(loop, corpus, assignment_of(4, 2, 1, (0, 5)))
    assert result.loss == pytest.approx(sum(size * loss for size, loss in losses) / 5)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, ()), (2, (Range(3, 5),)), (3, (Range(3, 5), Range(9, 10))), (9, (Range(3, 5), Range(9, 12)))],
)
def test_first_positions(count, expected):
    assert first_positions((Range(3, 5), Range(7, 7), Range(9, 12)), count) == expected


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_a_state_taken_over_goes_on_bit_for_bit(optimizer):
    settings = InnerSection(optimizer=optimizer)
    first, second = InnerLoop(build(), settings), InnerLoop(build(), settings)
    first.step(ids(0), 1e-3)
    second.model.flat.copy_(first.model.flat)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    for loop in (first, second):
        loop.step(ids(1), 1e-3)
    assert torch.equal(first.model.flat, second.model.flat)
    second.load_state({})
    assert second.state() == {}


def test_a_state_of_another_optimizer_or_model_is_refused():
    adamw, lion = InnerLoop(build(), InnerSection()), InnerLoop(build(), InnerSection(optimizer="lion"))
    for loop in (adamw, lion):
        loop.step(ids(), 1e-3)
    with pytest.raises(DataError, match="not one of lion"):
        lion.load_state(adamw.state())
    other = InnerLoop(models.build(MODEL.model_copy(update={"hidden_size": 16}), VOCABULARY, 0), InnerSection())
    with pytest.raises(DataError, match="of another model"):
        other.load_state(adamw.state())
