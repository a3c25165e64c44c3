"""The codec against a naive one written parameter by parameter, and the promises that the protocol builds on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core import codec, encoding
from geomesh_p2p.core.codec import Layout, NotFinite, Tensor

SIGN = CodecSection()
KINDS = ("sign", "fp32", "fp16", "int8")

layouts = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=5).map(
    lambda shapes: Layout(tuple(Tensor(f"t{i}", rows * length, rows) for i, (rows, length) in enumerate(shapes)))
)
seeds = st.integers(0, 2**31)


def normal(count: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * scale).astype(np.float32)


def encoded(layout: Layout, delta: np.ndarray, section: CodecSection = SIGN, residual: np.ndarray | None = None) -> np.ndarray:
    payload = codec.encode(layout, delta, np.zeros_like(delta), section, residual)
    assert isinstance(payload, np.ndarray)
    assert payload.size == codec.payload_bytes(layout, section)
    return payload


def mean(layout: Layout, section: CodecSection, payloads: list[Any], tokens: list[int]) -> np.ndarray:
    out = np.full(layout.parameters, np.nan, np.float32)
    return codec.mean_of(layout, section, payloads, tokens, 0, layout.parameters, out)


def magnitude_index(layout: Layout) -> np.ndarray:
    """For each parameter the number of its magnitude, the slow way."""
    return np.concatenate(
        [
            np.repeat(np.arange(tensor.rows), tensor.size // tensor.rows) + sum(t.rows for t in layout.tensors[:i])
            for i, tensor in enumerate(layout.tensors)
        ]
    )


def bits_of(layout: Layout, payload: np.ndarray) -> np.ndarray:
    return np.unpackbits(payload[4 * layout.magnitudes :], count=layout.parameters, bitorder="little")


# ---------------------------------------------------------------- layout


@given(layouts, st.data())
def test_pieces_cover_a_stretch_once_with_the_right_magnitudes(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.parameters))
    stop = data.draw(st.integers(start, layout.parameters))
    index, at = magnitude_index(layout), start
    for piece in layout.pieces(start, stop):
        assert piece.start == at < piece.stop
        assert (piece.stop - piece.start) % piece.rows == 0
        expected = np.repeat(np.arange(piece.rows) + piece.magnitude, (piece.stop - piece.start) // piece.rows)
        assert np.array_equal(index[piece.start : piece.stop], expected)
        at = piece.stop
    assert at == stop
    first, last = layout.magnitude_range(start, stop)
    assert list(range(first, last)) == sorted(set(index[start:stop]))


def test_embeddings_have_a_magnitude_per_row_and_others_one_unless_asked() -> None:
    shapes = [("embedding", (10, 4), True), ("weight", (6, 4), False), ("norm", (4,), False)]
    assert [t.rows for t in codec.layout_of(shapes).tensors] == [10, 1, 1]
    assert [t.rows for t in codec.layout_of(shapes, "row").tensors] == [10, 6, 1]
    assert codec.layout_of(shapes).digest != codec.layout_of(shapes, "row").digest


def test_a_tensor_that_does_not_make_equal_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="embedding"):
        Tensor("embedding", 10, 3)


# ---------------------------------------------------------------- one contribution


@given(layouts, seeds, st.sampled_from(["l1", "rms"]))
def test_signs_and_magnitudes_survive_a_round_trip(layout: Layout, seed: int, magnitude: str) -> None:
    anchor, weights = normal(layout.parameters, seed), normal(layout.parameters, seed + 1)
    section = CodecSection(magnitude=magnitude)
    payload = codec.encode(layout, anchor, weights, section)
    delta, index = anchor - weights, magnitude_index(layout)
    assert np.array_equal(bits_of(layout, payload), delta >= 0)
    wide = np.abs(delta.astype(np.float64)) ** (2 if magnitude == "rms" else 1)
    expected = np.array([wide[index == m].mean() for m in range(layout.magnitudes)]) ** (0.5 if magnitude == "rms" else 1)
    magnitudes = payload[: 4 * layout.magnitudes].view("<f4")
    np.testing.assert_allclose(magnitudes, expected, rtol=1e-5)
    signs = np.where(delta >= 0, 1, -1).astype(np.float32)
    assert np.array_equal(mean(layout, section, [payload], [7]), signs * magnitudes[index])


@given(layouts, seeds, st.sampled_from(KINDS))
def test_chunk_size_changes_signs_levels_and_means_in_no_bit(layout: Layout, seed: int, kind: str) -> None:
    section = CodecSection(payload=kind)
    deltas = [normal(layout.parameters, seed + i) for i in range(3)]
    payloads = [encoded(layout, delta, section) for delta in deltas]
    whole = mean(layout, section, payloads, [3, 1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "CHUNK", 16)
        again = [encoded(layout, delta, section) for delta in deltas]
        assert mean(layout, section, payloads, [3, 1, 2]).tobytes() == whole.tobytes()
    for one, other in zip(payloads, again, strict=True):
        head = 4 * layout.magnitudes if kind in ("sign", "int8") else 0
        assert one[head:].tobytes() == other[head:].tobytes()
        np.testing.assert_allclose(one[:head].view("<f4"), other[:head].view("<f4"), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_payloads_keep_the_numbers_to_their_precision(kind: str) -> None:
    layout = Layout((Tensor("a", 60, 4), Tensor("b", 33)))
    section, delta = CodecSection(payload=kind), normal(93, 5, 1e-3)
    error = np.abs(mean(layout, section, [encoded(layout, delta, section)], [1]) - delta)
    tolerance = {"fp32": 0.0, "fp16": 2e-6, "int8": np.abs(delta).max() / 127 * 0.51, "sign": np.inf}[kind]
    assert error.max() <= tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_anything_not_finite_is_named_and_not_encoded(kind: str, bad: float) -> None:
    layout = Layout((Tensor("a", 24), Tensor("b", 40_000, 4), Tensor("c", 9)))
    for name, at in (("a", 23), ("b", 24), ("b", 40_023), ("c", 40_032)):
        delta = normal(layout.parameters, 1)
        delta[at] = bad
        assert codec.encode(layout, delta, np.zeros_like(delta), CodecSection(payload=kind)) == NotFinite(name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_encoding_gives_is_what_others_accept(kind: str) -> None:
    layout, section = Layout((Tensor("a", 16), Tensor("b", 16))), CodecSection(payload=kind)
    for scale in (0, 1e-44, 1e-20, 1e3, 1e5, 2e6, 1e9, 1e20, 3e38):
        delta = np.concatenate([np.ones(16), np.full(16, scale)]).astype(np.float32)
        payload = codec.encode(layout, delta, np.zeros_like(delta), section)
        if scale <= 1e3:
            assert isinstance(payload, np.ndarray)
        if isinstance(payload, NotFinite):
            assert payload.tensor == "b"
        else:
            assert codec.fault_in(layout, section, payload) == ""


def test_a_delta_beyond_fp16_is_not_finite_there() -> None:
    layout, delta = Layout((Tensor("big", 8),)), np.full(8, 1e5, np.float32)
    assert codec.encode(layout, delta, np.zeros_like(delta), CodecSection(payload="fp16")) == NotFinite("big")


def test_encoding_into_a_given_buffer_is_the_same_and_a_wrong_one_is_refused() -> None:
    layout, delta = Layout((Tensor("a", 21),)), normal(21, 3)
    out = np.empty(codec.payload_bytes(layout, SIGN), np.uint8)
    assert codec.encode(layout, delta, np.zeros_like(delta), SIGN, out=out) is out
    assert np.array_equal(out, encoded(layout, delta))
    with pytest.raises(ValueError, match="bytes"):
        codec.encode(layout, delta, np.zeros_like(delta), SIGN, out=out[:-1])


def test_a_demo_model_takes_less_than_a_31st_of_fp32() -> None:
    layout = codec.layout_of([("embedding", (260, 160), True), *[(f"w{i}", (160, 400), False) for i in range(32)]])
    assert layout.parameters > 2_000_000
    assert codec.payload_bytes(layout, SIGN) * 31.5 <= 4 * layout.parameters


# ---------------------------------------------------------------- the mean


@given(layouts, seeds, st.lists(st.integers(1, 10**6), min_size=1, max_size=4))
def test_the_mean_is_added_one_by_one_in_the_order_given(layout: Layout, seed: int, tokens: list[int]) -> None:
    payloads = [encoded(layout, normal(layout.parameters, seed + i)) for i in range(len(tokens))]
    index, total = magnitude_index(layout), None
    for payload, count in zip(payloads, tokens, strict=True):
        weight = np.float32(count / sum(tokens))
        coefficient = weight * payload[: 4 * layout.magnitudes].view("<f4")
        term = np.where(bits_of(layout, payload) == 1, coefficient[index], -coefficient[index])
        total = term if total is None else total + term
    assert mean(layout, SIGN, payloads, tokens).tobytes() == total.tobytes()


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=16))
def test_weights_sum_to_one(tokens: list[int]) -> None:
    weights = codec.weights_of(tokens)
    assert abs(sum(map(float, weights)) - 1) < 1e-6
    assert all(w > 0 for w in weights)


@given(layouts, seeds, st.data(), st.sampled_from(KINDS))
def test_a_slice_of_the_bytes_gives_that_slice_of_the_mean(layout: Layout, seed: int, data: st.DataObject, kind: str) -> None:
    section = CodecSection(payload=kind)
    start = 8 * data.draw(st.integers(0, layout.parameters // 8))
    stop = min(layout.parameters, start + 8 * data.draw(st.integers(1, 12)))
    payloads = [encoded(layout, normal(layout.parameters, seed + i), section) for i in range(2)]
    sliced = []
    for payload in payloads:
        buffer = np.full_like(payload, 0xA5)
        for low, high in codec.slice_payload(layout, section, start, stop):
            buffer[low:high] = payload[low:high]
        sliced.append(buffer)
    out = np.empty(stop - start, np.float32)
    codec.mean_of(layout, section, sliced, [2, 5], start, stop, out)
    assert out.tobytes() == mean(layout, section, payloads, [2, 5])[start:stop].tobytes()


def test_slices_of_shares_leave_no_byte_out_and_share_only_magnitudes() -> None:
    layout = Layout((Tensor("a", 100, 10), Tensor("b", 77)))
    covered = np.zeros(codec.payload_bytes(layout, SIGN), int)
    for start, stop in ((0, 64), (64, 64), (64, 120), (120, 177)):
        for low, high in codec.slice_payload(layout, SIGN, start, stop):
            covered[low:high] += 1
    assert covered.min() == 1
    assert covered[4 * layout.magnitudes :].max() == 1


def test_payloads_at_odd_places_of_a_body_are_read_alike() -> None:
    layout = Layout((Tensor("a", 50, 5), Tensor("b", 31)))
    for kind in KINDS:
        section = CodecSection(payload=kind)
        payloads = [encoded(layout, normal(81, i), section) for i in range(2)]
        body = b"x" + payloads[0].tobytes() + payloads[1].tobytes()
        size = payloads[0].size
        views = [np.frombuffer(body, np.uint8)[1 + i * size : 1 + (i + 1) * size] for i in range(2)]
        assert mean(layout, section, views, [1, 2]).tobytes() == mean(layout, section, payloads, [1, 2]).tobytes()


def test_a_tie_moves_nothing_and_a_zero_tensor_has_no_magnitude() -> None:
    layout = Layout((Tensor("tie", 40), Tensor("zero", 16)))
    delta = np.concatenate([normal(40, 1), np.zeros(16, np.float32)])
    payloads = [encoded(layout, delta), encoded(layout, -delta)]
    assert payloads[0][4:8].view("<f4")[0] == 0
    assert np.array_equal(mean(layout, SIGN, payloads, [5, 5]), np.zeros(56))
    assert not np.array_equal(mean(layout, SIGN, payloads, [5, 4]), np.zeros(56))


@pytest.mark.parametrize("tokens", [[], [1], [1, 0], [2, -1]])
def test_means_need_tokens_from_everyone(tokens: list[int]) -> None:
    layout = Layout((Tensor("a", 8),))
    with pytest.raises(ValueError, match="token"):
        mean(layout, SIGN, [encoded(layout, normal(8, i)) for i in range(2 if tokens else 0)], tokens)


def test_a_slice_must_begin_at_a_whole_byte_and_lie_within() -> None:
    layout, out = Layout((Tensor("a", 30),)), np.empty(8, np.float32)
    payload = encoded(layout, normal(30, 1))
    with pytest.raises(ValueError, match="multiple of 8"):
        codec.mean_of(layout, SIGN, [payload], [1], 4, 12, out)
    with pytest.raises(ValueError, match="not within"):
        codec.mean_of(layout, SIGN, [payload], [1], 24, 32, out)
    with pytest.raises(ValueError, match="bytes"):
        codec.mean_of(layout, SIGN, [payload[:-1]], [1], 0, 8, out)


@pytest.mark.case("C067")
@given(layouts, seeds, st.integers(0, 5), st.sampled_from(["l1", "rms"]))
def test_zeros_of_either_sign_alternate_by_index_and_round(layout: Layout, seed: int, round: int, magnitude: str) -> None:
    section = CodecSection(magnitude=magnitude)  # type: ignore[arg-type]
    delta = normal(layout.parameters, seed)
    delta[::3], delta[1::5] = 0.0, -0.0
    payload = codec.encode(layout, delta, np.zeros_like(delta), section, round=round)
    at = np.arange(layout.parameters)
    assert np.array_equal(bits_of(layout, payload), (delta > 0) | ((delta == 0) & ((at + round) % 2 == 0)))
    for bits in (1, 2):
        section = CodecSection(second_phase_bits=bits)  # type: ignore[arg-type]
        part = codec.encode_part(layout, section, delta, 0, layout.parameters, round=round)
        said = codec.decode_part(layout, section, part, 0, layout.parameters, np.empty_like(delta))
        moves = said != 0  # not a tensor or row of zeros alone
        assert np.array_equal(said[moves] > 0, bits_of(layout, payload)[moves])
        assert np.array_equal(fed(layout, section, delta, 0, layout.parameters, round=round), part)


# ---------------------------------------------------------------- a reducer's answer


@given(layouts, seeds, st.sampled_from([1, 2, 4, 8]), st.data())
def test_parts_decode_within_their_step(layout: Layout, seed: int, bits: int, data: st.DataObject) -> None:
    section = CodecSection(second_phase_bits=bits)
    start = 8 * data.draw(st.integers(0, (layout.parameters - 1) // 8))
    stop = data.draw(st.sampled_from([layout.parameters, min(layout.parameters, start + 40)]))
    values = normal(stop - start, seed)
    values[::3] = 0
    part = codec.encode_part(layout, section, values, start, stop)
    assert part.size == codec.part_bytes(layout, section, start, stop)
    said = codec.decode_part(layout, section, part, start, stop, np.full(stop - start, np.nan, np.float32))
    index = magnitude_index(layout)[start:stop]
    for m in set(index):
        chosen = index == m
        true, got = values[chosen].astype(np.float64), said[chosen].astype(np.float64)
        if bits <= 2:
            least = np.arange(start, stop)[chosen] % 2  # a zero is + at even indices
            signs = np.where((true > 0) | ((true == 0) & (least == 0)), 1, -1)
            mean = np.abs(true).mean()
            levels = 0.624 * mean * np.where(np.abs(true) < 1.248 * mean, 1, 3) if bits == 2 else mean
            np.testing.assert_allclose(got, signs * levels, rtol=1e-5)
        else:
            assert np.all(got[true == 0] == 0)
            assert np.all(got * true >= 0)
        if bits >= 4:
            step = np.abs(true).max() / (2 ** (bits - 1) - 1)
            assert np.abs(got - true).max() <= 0.5001 * step


def test_four_levels_are_as_near_to_normal_numbers_as_even_levels_can_be() -> None:
    layout, section, values = Layout((Tensor("a", 1 << 16),)), CodecSection(second_phase_bits=2), normal(1 << 16, 7)
    part = codec.encode_part(layout, section, values, 0, values.size)
    said = codec.decode_part(layout, section, part, 0, values.size, np.empty_like(values))
    assert np.square(said - values).mean() / np.square(values).mean() == pytest.approx(0.1188, rel=0.02)  # Max 1960, table II


@pytest.mark.parametrize("bits", [1, 2])
def test_ties_cancel_from_round_to_round(bits: int) -> None:
    layout, section = Layout((Tensor("a", 64),)), CodecSection(second_phase_bits=bits)
    values = np.where(np.arange(64) < 32, np.float32(0), np.float32(1))
    parts = [codec.encode_part(layout, section, values, 0, 64, round=round) for round in (1, 2)]
    said = [codec.decode_part(layout, section, part, 0, 64, np.empty(64, np.float32)) for part in parts]
    assert np.all(said[0][:32] != 0)
    assert np.array_equal(said[0][:32], -said[1][:32])
    assert said[0][:32].sum() == 0


def test_more_bits_in_the_second_phase_are_nearer_to_the_mean() -> None:
    layout = Layout((Tensor("a", 4096),))
    payloads = [encoded(layout, normal(4096, i)) for i in range(4)]
    values = mean(layout, SIGN, payloads, [4, 3, 2, 1])
    errors = []
    for bits in (1, 2, 4, 8):
        section = CodecSection(second_phase_bits=bits)
        part = codec.encode_part(layout, section, values, 0, 4096)
        errors.append(np.square(codec.decode_part(layout, section, part, 0, 4096, np.empty(4096, np.float32)) - values).mean())
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 1e-3 * errors[0]


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_plain_payloads_are_answered_in_kind(kind: str) -> None:
    layout, section = Layout((Tensor("a", 64), Tensor("b", 20))), CodecSection(payload=kind)
    values = normal(84, 2, 1e-2)
    part = codec.encode_part(layout, section, values[16:], 16, 84)
    said = codec.decode_part(layout, section, part, 16, 84, np.empty(68, np.float32))
    np.testing.assert_allclose(said, values[16:], atol={"fp32": 0, "fp16": 2e-5, "int8": 2e-4}[kind])


# ---------------------------------------------------------------- residuals


@given(layouts, seeds, st.sampled_from(KINDS), st.sampled_from([1.0, 0.5]))
def test_the_residual_is_what_was_left_unsaid(layout: Layout, seed: int, kind: str, decay: float) -> None:
    section = CodecSection(payload=kind, residual=True, residual_decay=decay)
    anchor, weights, before = (normal(layout.parameters, seed + i) for i in range(3))
    kept = before.copy()
    payload = codec.encode(layout, anchor, weights, section, before)
    after = codec.new_residual(layout, anchor, weights, section, payload, before)
    assert np.array_equal(before, kept), "encoding must not advance the residual: only a commit does"
    expected = np.float32(decay) * ((anchor - weights + before) - mean(layout, section, [payload], [1]))
    assert after.tobytes() == expected.tobytes()


def test_with_residuals_the_sum_of_what_was_said_follows_the_sum_of_deltas() -> None:
    layout, section = Layout((Tensor("a", 256),)), CodecSection(residual=True)
    delta, zeros = normal(256, 9), np.zeros(256, np.float32)
    residual, said, rounds = zeros, np.zeros(256), 60
    for _ in range(rounds):
        payload = encoded(layout, delta, section, residual)
        residual = codec.new_residual(layout, delta, zeros, section, payload, residual)
        said += mean(layout, section, [payload], [1])
    plain = mean(layout, section, [encoded(layout, delta, section)], [1])
    assert np.square(said / rounds - delta).mean() < 0.1 * np.square(plain - delta).mean()


def test_a_part_has_a_residual_of_its_own() -> None:
    layout, section = Layout((Tensor("a", 64),)), CodecSection(residual=True, second_phase_bits=4)
    values, before = normal(40, 1), normal(40, 2, 0.1)
    part = codec.encode_part(layout, section, values, 16, 56, before)
    after = codec.new_part_residual(layout, section, values, 16, 56, part, before)
    said = codec.decode_part(layout, section, part, 16, 56, np.empty(40, np.float32))
    np.testing.assert_allclose(after, values + before - said, atol=1e-6)


# ---------------------------------------------------------------- what is received


@pytest.mark.parametrize("kind", KINDS)
def test_absurd_payloads_are_refused_with_a_reason(kind: str) -> None:
    layout, section = Layout((Tensor("a", 24, 3), Tensor("b", 10))), CodecSection(payload=kind)
    payload = encoded(layout, normal(34, 1), section)
    assert codec.fault_in(layout, section, payload) == ""
    assert "bytes" in codec.fault_in(layout, section, payload[:-1])
    bad_values = [np.nan, np.inf] if kind == "fp16" else [np.nan, np.inf, 1e30]
    for bad in bad_values:
        spoilt = payload.copy()
        spoilt.view("<f2" if kind == "fp16" else np.uint8)[:1] = bad if kind == "fp16" else 0
        if kind != "fp16":
            spoilt[:4].view("<f4")[:] = bad
        assert "magnitudes" in codec.fault_in(layout, section, spoilt)
    if kind in ("sign", "int8"):
        spoilt = payload.copy()
        spoilt[8:12].view("<f4")[:] = -1
        assert "magnitudes" in codec.fault_in(layout, section, spoilt)


def test_an_absurd_part_is_refused_with_a_reason() -> None:
    layout = Layout((Tensor("a", 64),))
    part = codec.encode_part(layout, SIGN, normal(40, 1), 8, 48)
    assert codec.fault_in_part(layout, SIGN, part, 8, 48) == ""
    assert "bytes" in codec.fault_in_part(layout, SIGN, part, 8, 56)
    part[:4].view("<f4")[:] = np.nan
    assert "magnitudes" in codec.fault_in_part(layout, SIGN, part, 8, 48)


# ---------------------------------------------------------------- many rounds


@settings(max_examples=5, deadline=None)
@given(seeds)
def test_large_tensors_cross_many_chunks(seed: int) -> None:
    layout = Layout((Tensor("e", 70_000, 700), Tensor("w", 100_003), Tensor("n", 13)))
    deltas = [normal(layout.parameters, seed + i, 1e-3) for i in range(2)]
    payloads = [encoded(layout, delta) for delta in deltas]
    index = magnitude_index(layout)
    for delta, payload in zip(deltas, payloads, strict=True):
        expected = np.bincount(index, np.abs(delta)) / np.bincount(index)
        np.testing.assert_allclose(payload[: 4 * layout.magnitudes].view("<f4"), expected, rtol=1e-4)
        assert np.array_equal(bits_of(layout, payload), delta >= 0)


def fed(
    layout: Layout, section: CodecSection, mean: np.ndarray, start: int, stop: int, round: int = 0, stops: Sequence[int] = ()
) -> np.ndarray | NotFinite:
    """The part of a PartEncoder that gets `mean` up to each of `stops` (parameters of the share), then all; if asked, again."""

    def fill(begin: int, end: int, out: np.ndarray) -> None:
        out[:] = mean[begin - start : end - start]

    encoder = codec.PartEncoder(layout, section, start, stop, round)
    for feed in (encoder.feed, encoder.feed_again) if encoder.twice else (encoder.feed,):
        for ready in sorted(stops):
            feed(min(start + ready // 8 * 8, stop), fill)
        feed(stop, fill)
    return encoder.finish()


BITS = st.sampled_from([1, 2, 4, 8])


@given(st.lists(st.integers(0, 3 * codec.CHUNK), max_size=6), st.sampled_from(["l1", "rms"]), BITS, st.integers(0, 1))
def test_a_part_fed_bit_by_bit_is_the_part_of_the_whole_mean(stops: list[int], magnitude: str, bits: int, round: int) -> None:
    layout = Layout((Tensor("rows", 64 * 1024, 64), Tensor("rest", 70_000, 1)))
    section = CodecSection(magnitude=magnitude, second_phase_bits=bits)  # type: ignore[arg-type]
    start, stop = 4096, layout.parameters
    mean = np.random.default_rng(1).normal(0, 1e-3, stop - start).astype(np.float32)
    mean[::5] = 0
    part = codec.encode_part(layout, section, mean, start, stop, round=round)
    np.testing.assert_array_equal(fed(layout, section, mean, start, stop, round, stops), part)


@given(layouts, seeds, BITS, st.sampled_from(["tensor", "row"]), st.integers(0, 1), st.data())
def test_any_share_fed_bit_by_bit_is_its_part(
    layout: Layout, seed: int, bits: int, granularity: str, round: int, data: st.DataObject
) -> None:
    """Shares that cut tensors and rows, ties, tensors of zeros, numbers that are not finite."""
    section = CodecSection(second_phase_bits=bits, granularity=granularity)  # type: ignore[arg-type]
    start = 8 * data.draw(st.integers(0, (layout.parameters - 1) // 8))
    stop = data.draw(st.sampled_from([layout.parameters, min(layout.parameters, start + 40)]))
    mean = normal(stop - start, seed)
    mean[:: data.draw(st.integers(1, 4))] = 0.0
    if data.draw(st.booleans()):
        mean[data.draw(st.integers(0, mean.size - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "CHUNK", 16)
        part = codec.encode_part(layout, section, mean, start, stop, round=round)
        found = fed(layout, section, mean, start, stop, round, data.draw(st.lists(st.integers(0, 200), max_size=6)))
    assert isinstance(part, NotFinite) == (not np.abs(mean).max() < 1e30)
    if isinstance(part, NotFinite):
        assert found == part
    else:
        np.testing.assert_array_equal(found, part)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_part_that_was_not_fed_whole_is_no_part(bits: int) -> None:
    layout, section = Layout((Tensor("w", 3 * codec.CHUNK, 1),)), CodecSection(second_phase_bits=bits)  # type: ignore[arg-type]

    def ones(begin: int, end: int, out: np.ndarray) -> None:
        out.fill(1.0)

    encoder = codec.PartEncoder(layout, section, 0, layout.parameters)
    encoder.feed(2 * codec.CHUNK, ones)
    for early in (encoder.finish, lambda: encoder.feed_again(layout.parameters, ones)):
        with pytest.raises(ValueError, match="was fed up to"):
            early()
    encoder.feed(layout.parameters, ones)
    assert encoder.twice == (bits > 1)
    if encoder.twice:
        encoder.feed_again(2 * codec.CHUNK, ones)
        with pytest.raises(ValueError, match="was fed again up to"):
            encoder.finish()
        encoder.feed_again(layout.parameters, ones)
    assert isinstance(encoder.finish(), np.ndarray)


def test_plain_numbers_are_not_fed() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        codec.PartEncoder(Layout((Tensor("w", 8),)), CodecSection(payload="fp16"), 0, 8)
