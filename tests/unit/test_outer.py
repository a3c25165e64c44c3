"""The outer step bit for bit: NumPy and torch, one thread and two, live and replayed, gather and reduce."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core import codec, outer
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.codec import Layout, Tensor
from geomesh_p2p.core.outer import OuterState
from geomesh_p2p.core.types import Contribution, Range, Update
from geomesh_p2p.errors import DataError

LAYOUT = Layout((Tensor("embedding", 70 * 24, 70), Tensor("weight", 50_000), Tensor("norm", 13)))
SIZE = LAYOUT.parameters
TOKENS = (4000, 2100, 900)
SHARES = (Range(0, 1600), Range(1600, 1600), Range(1600, 33_000), Range(33_000, SIZE))

outer_sections = st.sampled_from(
    [OuterSection(), OuterSection(nesterov=False), OuterSection(learning_rate=1.0, momentum=0.0), OuterSection(momentum=1.0)]
)


def normal(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(SIZE) * scale).astype(np.float32)


def founded(seed: int = 0) -> OuterState:
    return OuterState.founded(normal(seed))


def gathered(section: CodecSection, seed: int) -> tuple[Update, bytes]:
    payloads = [codec.encode(LAYOUT, normal(seed + i, 1e-2), np.zeros(SIZE, np.float32), section) for i in range(3)]
    contributors = tuple(
        Contribution(f"peer-{i}", f"site-{i}", 1, b"", tokens, (), digest_bytes(payload), payload.size)
        for i, (tokens, payload) in enumerate(zip(TOKENS, payloads, strict=True))
    )
    body = b"".join(payload.tobytes() for payload in payloads)
    return Update(1, b"", "gather", (), contributors, ("peer-0",), digest_bytes(body), len(body)), body


def reduced(section: CodecSection, seed: int) -> tuple[Update, bytes]:
    update, body = gathered(section, seed)
    size = codec.payload_bytes(LAYOUT, section)
    payloads = [np.frombuffer(body, np.uint8)[i * size : (i + 1) * size] for i in range(3)]
    parts = []
    for share in SHARES:
        if len(share):
            mean = np.empty(len(share), np.float32)
            codec.mean_of(LAYOUT, section, payloads, TOKENS, share.start, share.stop, mean)
            parts.append(codec.encode_part(LAYOUT, section, mean, share.start, share.stop).tobytes())
    body = b"".join(parts)
    return replace(update, topology="reduce", shares=SHARES, body=digest_bytes(body), body_bytes=len(body)), body


def fold(state: OuterState, update: Update, body: bytes, section: CodecSection, settings: OuterSection) -> OuterState:
    outer.apply_update(state, LAYOUT, section, settings, update, body)
    return state


def same(one: OuterState, other: OuterState) -> bool:
    return one.anchor.tobytes() == other.anchor.tobytes() and one.momentum.tobytes() == other.momentum.tobytes()


# ---------------------------------------------------------------- a second implementation, in torch


def torch_mean(body: bytes) -> torch.Tensor:
    lengths = [tensor.size // tensor.rows for tensor in LAYOUT.tensors for _ in range(tensor.rows)]
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    size, head = codec.payload_bytes(LAYOUT, CodecSection()), 4 * LAYOUT.magnitudes
    total = None
    for i, tokens in enumerate(TOKENS):
        payload = torch.frombuffer(bytearray(body[i * size : (i + 1) * size]), dtype=torch.uint8)
        magnitudes = payload[:head].view(torch.float32)
        bits = ((payload[head:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:SIZE].bool()
        coefficients = (torch.tensor(tokens / sum(TOKENS), dtype=torch.float32) * magnitudes)[rows]
        term = torch.where(bits, coefficients, -coefficients)
        total = term if total is None else total + term
    return total


def torch_step(state: OuterState, mean: torch.Tensor, settings: OuterSection) -> OuterState:
    anchor, momentum = torch.from_numpy(state.anchor.copy()), torch.from_numpy(state.momentum.copy())
    momentum = momentum * settings.momentum
    momentum = momentum + mean
    step = momentum
    if settings.nesterov:
        step = momentum * settings.momentum
        step = step + mean
    step = step * settings.learning_rate
    return OuterState((anchor - step).numpy(), momentum.numpy())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nesterov", [True, False])
def test_numpy_and_torch_move_the_anchor_to_the_same_bytes(threads: int, nesterov: bool) -> None:
    settings, section = OuterSection(nesterov=nesterov), CodecSection()
    ours = theirs = founded()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in (10, 20, 30):
            update, body = gathered(section, seed)
            theirs = torch_step(theirs, torch_mean(body), settings)
            ours = fold(OuterState(ours.anchor.copy(), ours.momentum.copy()), update, body, section, settings)
            assert same(ours, theirs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("settings", [OuterSection(), OuterSection(nesterov=False), OuterSection(learning_rate=1, momentum=0)])
def test_the_step_is_that_of_torchs_sgd(settings: OuterSection) -> None:
    state = founded()
    parameter = torch.nn.Parameter(torch.from_numpy(state.anchor.copy()))
    nesterov = settings.nesterov and settings.momentum > 0
    sgd = torch.optim.SGD([parameter], lr=settings.learning_rate, momentum=settings.momentum, nesterov=nesterov)
    for seed in range(4):
        mean = normal(seed, 1e-2)
        outer.apply_mean(state, mean, 0, SIZE, settings)
        parameter.grad = torch.from_numpy(mean)
        sgd.step()
    np.testing.assert_allclose(state.anchor, parameter.detach().numpy(), atol=1e-6)


# ---------------------------------------------------------------- one result, however it is come by


@given(outer_sections, st.integers(0, 1000))
def test_two_threads_on_halves_give_the_same_bytes(settings: OuterSection, seed: int) -> None:
    section = CodecSection()
    update, body = gathered(section, seed)
    size = codec.payload_bytes(LAYOUT, section)
    mean = codec.Mean(LAYOUT, section, [body[i * size : (i + 1) * size] for i in range(3)], TOKENS)
    halved, middle = founded(seed), 8 * (SIZE // 17)

    def move(bounds: tuple[int, int]) -> None:
        start, stop = bounds
        outer.apply_mean(halved, mean.read(start, stop, np.empty(stop - start, np.float32)), start, stop, settings)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(move, [(0, middle), (middle, SIZE)]))
    assert same(halved, fold(founded(seed), update, body, section, settings))


@pytest.mark.parametrize("make", [gathered, reduced])
@pytest.mark.parametrize("kind", ["sign", "fp32", "fp16", "int8"])
def test_replayed_in_other_chunks_from_other_buffers_gives_the_same_bytes(make, kind: str) -> None:  # type: ignore[no-untyped-def]
    section, settings = CodecSection(payload=kind), OuterSection()
    updates = [make(section, seed) for seed in (1, 2, 3)]
    live = founded()
    for update, body in updates:
        fold(live, update, body, section, settings)
    replayed = founded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "CHUNK", 24)
        patch.setattr(outer, "CHUNK", 3 * 1024 + 8)
        for update, body in updates:
            fold(replayed, update, memoryview(bytearray(b"xyz" + body))[3:], section, settings)
    assert same(live, replayed)
    assert not same(live, founded())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_reduce_moves_by_the_decoded_parts(bits: int) -> None:
    section, settings = CodecSection(second_phase_bits=bits), OuterSection(learning_rate=1.0, momentum=0.0)
    update, body = reduced(section, 5)
    state, at = fold(founded(), update, body, section, settings), 0
    for share in SHARES:
        size = codec.part_bytes(LAYOUT, section, share.start, share.stop)
        mean = np.empty(len(share), np.float32)
        codec.decode_part(LAYOUT, section, body[at : at + size], share.start, share.stop, mean)
        assert np.array_equal(state.anchor[share.start : share.stop], founded().anchor[share.start : share.stop] - mean)
        at += size
    assert at == len(body)


# ---------------------------------------------------------------- what moves nothing


@given(outer_sections, st.integers(0, 5))
def test_of_a_single_contributor_the_anchor_is_expected_where_it_comes_to_be(settings: OuterSection, rounds: int) -> None:
    state = founded()
    for number in range(rounds):
        outer.apply_mean(state, normal(number + 1, 1e-2), 0, SIZE, settings)
    before = state.anchor.copy(), state.momentum.copy()
    delta = normal(9, 1e-2)
    weights = state.anchor - delta
    kept = weights.copy()
    expected = outer.expected_anchor(state, weights, 1.0, settings)
    assert all(np.array_equal(*pair) for pair in zip(before, (state.anchor, state.momentum), strict=True)), "nothing has moved"
    assert np.array_equal(weights, kept)
    outer.apply_mean(state, delta, 0, SIZE, settings)
    np.testing.assert_allclose(expected, state.anchor, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_others_are_expected_to_go_on_as_all_did(momentum: float, share: float) -> None:
    """With the same mean in every round the guess is right whatever its maker's share is, and its own weights are far off."""
    settings = OuterSection(learning_rate=0.7, momentum=momentum)
    state, always = founded(), normal(1, 1e-2)
    for _ in range(100):
        outer.apply_mean(state, always, 0, SIZE, settings)
    weights = state.anchor - always
    expected = outer.expected_anchor(state, weights, share, settings)
    outer.apply_mean(state, always, 0, SIZE, settings)
    off = float(np.abs(expected - state.anchor).max())
    assert off < 1e-4
    assert off < 0.01 * float(np.abs(weights - state.anchor).max())


def test_in_the_first_round_a_contributor_expects_its_part_alone() -> None:
    state, settings = founded(), OuterSection(learning_rate=1.0, momentum=0.0)
    weights = state.anchor - normal(1, 1e-2)
    np.testing.assert_allclose(
        outer.expected_anchor(state, weights, 0.25, settings), state.anchor - 0.25 * normal(1, 1e-2), atol=1e-6
    )


def test_an_update_without_contributors_moves_nothing_not_even_by_momentum() -> None:
    state = OuterState(normal(1), normal(2))
    update, body = gathered(CodecSection(), 1)
    fold(state, replace(update, contributors=(), body_bytes=0), b"", CodecSection(), OuterSection())
    assert same(state, OuterState(normal(1), normal(2)))
    with pytest.raises(ValueError, match="no contributors"):
        fold(state, replace(update, contributors=()), body, CodecSection(), OuterSection())


@pytest.mark.parametrize("make", [gathered, reduced])
def test_a_body_that_does_not_fit_is_refused_before_anything_moves(make) -> None:  # type: ignore[no-untyped-def]
    state = founded()
    update, body = make(CodecSection(), 1)
    for wrong in (body[:-1], body + b"x", b""):
        with pytest.raises(ValueError, match=f"{len(wrong)} bytes"):
            fold(state, update, wrong, CodecSection(), OuterSection())
    assert same(state, founded())


@pytest.mark.parametrize("make", [gathered, reduced])
def test_a_body_may_come_as_the_payloads_or_parts_that_it_is_made_of(make) -> None:  # type: ignore[no-untyped-def]
    section = CodecSection()
    update, body = make(section, 1)
    shares = [(share.start, share.stop) for share in update.shares if len(share)]
    sizes = [codec.part_bytes(LAYOUT, section, *share) for share in shares] or [codec.payload_bytes(LAYOUT, section)] * 3
    ends = np.cumsum(sizes)
    pieces = [body[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    assert len(pieces) == 3
    assert b"".join(pieces) == body
    state = founded()
    outer.apply_update(state, LAYOUT, section, OuterSection(), update, pieces)
    assert same(state, fold(founded(), update, body, section, OuterSection()))
    for wrong in (pieces[:-1], [pieces[0], pieces[1] + pieces[2]], [*pieces, b"x"], []):
        with pytest.raises(ValueError, match=f"{sum(map(len, wrong))} bytes in {len(wrong)}"):
            outer.apply_update(founded(), LAYOUT, section, OuterSection(), update, wrong)


def test_arithmetic_that_differs_from_the_others_is_refused() -> None:
    state = founded()
    update, body = gathered(CodecSection(), 1)
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(DataError, match="subnormal"):
            fold(state, update, body, CodecSection(), OuterSection())
    finally:
        torch.set_flush_denormal(False)
    assert same(state, founded())
    fold(state, update, body, CodecSection(), OuterSection())


@pytest.mark.parametrize("shares", [SHARES[1:], SHARES[:-1], (), (SHARES[2], SHARES[0], SHARES[3])])
def test_shares_that_do_not_cover_the_parameters_are_refused(shares: tuple[Range, ...]) -> None:
    state = founded()
    update, body = reduced(CodecSection(), 1)
    with pytest.raises(ValueError, match="cover"):
        fold(state, replace(update, shares=shares), body, CodecSection(), OuterSection())
    assert same(state, founded())


@pytest.mark.case("C067")
@pytest.mark.parametrize("bits", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("workers", [2, 4])
def test_what_has_no_gradient_does_not_move_in_fifty_rounds(bits: int, workers: int) -> None:
    """bits 0: gather. Rows that no batch touched stay bit for bit; zeros within a tensor that does move swing about where
    they are by a few magnitudes and do not drift: were zero always a plus, they would go some three hundred."""
    length, rows, size = 16, 30, 0.01
    count = rows * length
    untouched = slice(20 * length, count)

    def moved(layout: Layout) -> tuple[float, float]:
        state = OuterState.founded(normal(7)[:count].copy())
        began = state.anchor.copy()
        section = CodecSection(second_phase_bits=bits or 1)  # type: ignore[arg-type]
        farthest = 0.0
        for round in range(1, 51):
            payloads = []
            for worker in range(workers):
                delta = normal(100 * round + worker, size)[:count]
                delta[untouched] = 0
                payloads.append(codec.encode(layout, state.anchor, state.anchor - delta, section, round=round))
            mean = np.empty(count, np.float32)
            codec.mean_of(layout, section, payloads, [500, 300, 200, 100][:workers], 0, mean.size, mean)
            if bits:
                part = codec.encode_part(layout, section, mean, 0, mean.size, round=round)
                codec.decode_part(layout, section, part, 0, mean.size, mean)
            outer.apply_mean(state, mean, 0, mean.size, OuterSection())
            farthest = max(farthest, float(np.abs(state.anchor - began)[untouched].max()))
        assert np.abs(state.anchor - began)[: 20 * length].max() > size
        return farthest, float(np.abs((state.anchor - began)[untouched].mean()))

    assert moved(codec.layout_of([("embedding", (rows, length), True)])) == (0.0, 0.0)
    farthest, mean_shift = moved(codec.layout_of([("embedding", (rows, length), False)]))
    assert farthest < 4 * size
    assert mean_shift < 0.01 * size


@pytest.mark.case("C067")
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("bits", [0, 1])
def test_a_frozen_tensor_and_one_of_opposite_deltas_do_not_move_in_fifty_rounds(workers: int, bits: int) -> None:
    layout = Layout((Tensor("frozen", 320, 20), Tensor("opposed", 400), Tensor("lively", 64)))
    frozen, opposed = slice(0, 320), slice(320, 720)
    state, section = OuterState.founded(normal(5)[: layout.parameters].copy()), CodecSection()
    state.anchor[:3] = 0.0, -0.0, 0.0
    began = state.anchor.copy()
    for round in range(1, 51):
        payloads = []
        for worker in range(workers):
            delta = normal(1000 + round, 1e-2)[: layout.parameters] * (-1) ** worker
            delta[frozen] = 0
            delta[720:] = normal(10 * round + worker, 1e-2)[:64]
            payloads.append(codec.encode(layout, delta, np.zeros_like(delta), section, round=round))
        mean = np.empty(layout.parameters, np.float32)
        codec.mean_of(layout, section, payloads, [512] * workers, 0, mean.size, mean)
        if bits:
            part = codec.encode_part(layout, section, mean, 0, mean.size, round=round)
            codec.decode_part(layout, section, part, 0, mean.size, mean)
        outer.apply_mean(state, mean, 0, mean.size, OuterSection())
    assert state.anchor[frozen].tobytes() == began[frozen].tobytes()
    assert state.anchor[opposed].tobytes() == began[opposed].tobytes()
    assert not np.array_equal(state.anchor[720:], began[720:])


def test_opposite_deltas_of_equal_weight_move_nothing() -> None:
    section, state = CodecSection(), founded()
    delta = normal(3, 1e-2)
    payloads = [codec.encode(LAYOUT, sign * delta, np.zeros(SIZE, np.float32), section) for sign in (1, -1)]
    mean = codec.mean_of(LAYOUT, section, payloads, [512, 512], 0, SIZE, np.empty(SIZE, np.float32))
    outer.apply_mean(state, mean, 0, SIZE, OuterSection())
    assert state.anchor.tobytes() == founded().anchor.tobytes()
