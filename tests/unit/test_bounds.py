"""What a member may say: figures, contributions, plans and terms out of bounds are refused and named; honest ones never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomesh_p2p.config import CodecSection, InnerSection, PlannerSection
from geomesh_p2p.core import bounds, codec
from geomesh_p2p.core.canonical import RecordError, pack, unpack
from geomesh_p2p.core.forecast import Volume
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.messages import Heartbeat
from geomesh_p2p.core.plan import PlanInputs, Sites, Slot, WorkLeft, plan_round
from geomesh_p2p.core.types import (
    NO_TERM,
    Assignment,
    BatchTime,
    Contribution,
    Link,
    Plan,
    Profile,
    Range,
    StepReport,
    Term,
)
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec

RUN, BASE = b"r" * 32, b"b" * 32
LENGTH = 16


def plan(**changes: Any) -> Plan:
    members = tuple(
        Assignment(f"peer-{s}", s, 2, 4, 2, (Range(8 * i, 8 * i + 8),), 1.0, 10.0) for i, s in enumerate(("a", "b", "c"))
    )
    made = Plan(RUN, 3, Term(1, "peer-a"), 1, BASE, members, "gather", (), 0, 24 * LENGTH, 10.0, 1.0, 2.0, True)
    return replace(made, **changes)


def contribution(**changes: Any) -> Contribution:
    return replace(Contribution("peer-b", "b", 3, BASE, 8 * LENGTH, (Range(8, 16),), b"p" * 32, 100, 2.0, 10), **changes)


def test_an_honest_contribution_passes() -> None:
    for good in (
        contribution(),
        contribution(tokens=3 * LENGTH, ranges=(Range(8, 11),)),
        contribution(tokens=4 * LENGTH, ranges=(Range(12, 14), Range(8, 10))),
        contribution(tokens=0, ranges=(), payload=b"", payload_bytes=0, reason="NaN"),
        contribution(validation_nats=float("inf")),
        contribution(validation_nats=float("nan")),
    ):
        assert bounds.contribution_fault(plan(), "peer-b", good) == ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": -1}, "-1 tokens"),
        ({"tokens": 8 * LENGTH + 1}, "129 tokens in 8 sequences, which hold 128"),
        ({"tokens": 2**60}, "tokens in 8 sequences"),
        ({"tokens": 100, "ranges": ()}, "tokens in 0 sequences"),
        ({"ranges": (Range(0, 8),)}, "does not give it"),
        ({"ranges": (Range(8, 17),)}, "does not give it"),
        ({"ranges": (Range(-4, 4),)}, "does not give it"),
        ({"ranges": (Range(12, 10),)}, "does not give it"),
        ({"ranges": (Range(8, 16), Range(8, 16))}, "counts twice"),
        ({"ranges": (Range(8, 16), Range(15, 16))}, "counts twice"),
        ({"tokens": 0}, "without tokens"),
        ({"peer": "peer-a"}, "another's name"),
        ({"site": "a"}, "another's name"),
        ({"round": 4}, "round 4"),
        ({"base": RUN}, "round 3"),
        ({"payload_bytes": -5}, "-5 bytes"),
        ({"validation_tokens": -1}, "-1 tokens"),
        ({"validation_tokens": 2**50}, "nats over"),
        ({"validation_nats": -3.0}, "-3 nats"),
        ({"reason": "x" * 501}, "contribution of"),
    ],
)
def test_a_contribution_out_of_bounds_is_refused(changes: dict[str, Any], says: str) -> None:
    assert says in bounds.contribution_fault(plan(), "peer-b", contribution(**changes))
    assert bounds.contribution_fault(plan(), "stranger", contribution())


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 0},
        {"planned_tokens": -1},
        {"train_seconds": -1.0},
        {"train_seconds": 1e12},
        {"members": ()},
        {"members": plan().members[::-1]},
        {"members": (plan().members[0], plan().members[0])},
        {"members": (replace(plan().members[0], batch=0, last_batch=0),)},
        {"members": (replace(plan().members[0], inner_steps=10**9),)},
        {"members": (replace(plan().members[0], lr_scale=1e30),)},
        {"members": (replace(plan().members[0], finish_seconds=1e30),)},
        {"members": (replace(plan().members[0], ranges=(Range(5, 4),)),)},
        {"members": (plan().members[0], replace(plan().members[1], ranges=(Range(0, 8),)))},
        {"topology": "reduce"},
        {"shares": (Range(0, 8),)},
        {"topology": "reduce", "shares": (Range(0, 8),)},
    ],
)
def test_a_plan_that_nobody_can_carry_out_is_refused(changes: dict[str, Any]) -> None:
    assert bounds.plan_fault(plan()) == ""
    assert bounds.plan_fault(plan(**changes))


def test_terms_do_not_jump() -> None:
    assert bounds.term_fits(Term(2**32, "x"), NO_TERM)
    assert not bounds.term_fits(Term(2**63, "x"), Term(1000, "y"))
    assert not bounds.term_fits(Term(-1, "x"), NO_TERM)


# ---------------------------------------------------------------- heartbeats and the planner


def beat(curve: tuple[BatchTime, ...] = (BatchTime(1, 0.1), BatchTime(4, 0.3)), **changes: Any) -> Heartbeat:
    profile = Profile("p", "s", "cpu", curve)
    links = (Link("p", "q", 0.1, 1e6),)
    return replace(Heartbeat("s", NO_TERM, "", 0, b"", "idle", True, True, False, profile, 4, 0.3, links, 0, 1.0), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"curve": (BatchTime(1, 1e-30),)},
        {"curve": (BatchTime(1, 1e30),)},
        {"curve": (BatchTime(1, -1.0),)},
        {"curve": (BatchTime(0, 1.0),)},
        {"curve": (BatchTime(2**40, 1.0),)},
        {"curve": ()},
        {"curve": (BatchTime(4, 1.0), BatchTime(4, 2.0))},
        {"curve": tuple(BatchTime(n + 1, 1.0) for n in range(300))},
        {"profile": Profile("another", "s", "cpu", (BatchTime(1, 1.0),))},
        {"profile": Profile("p", "another", "cpu", (BatchTime(1, 1.0),))},
        {"step_seconds": 1e-30},
        {"step_seconds": 1e30},
        {"step_batch": -4},
        {"step_batch": 2**40},
        {"links": (Link("q", "p", 0.1, 1e6),)},
        {"links": (Link("p", "q", -1.0, 1e6),)},
        {"links": (Link("p", "q", 1e30, 1e6),)},
        {"links": (Link("p", "q", 0.1, -1.0),)},
        {"links": (Link("p", "q", 0.1, 1e-9),)},
        {"links": (Link("p", "q", 0.1, 1e30),)},
    ],
)
def test_figures_that_cannot_be_are_left_out(changes: dict[str, Any]) -> None:
    assert bounds.figures_fault("p", beat()) == ""
    absurd = beat(**changes)
    assert bounds.figures_fault("p", absurd)
    clean = bounds.plausible("p", absurd)
    assert bounds.figures_fault("p", clean) == ""
    assert (clean.profile is None, clean.step_batch == 0, clean.links == ()).count(True) == 1, "the rest stays"


def test_a_way_whose_rate_nobody_has_measured_yet_is_no_fault() -> None:
    new = beat(links=(Link("p", "q", 0.1, 0.0),))
    assert bounds.figures_fault("p", new) == ""
    assert bounds.plausible("p", new) == new


def test_what_is_not_a_number_does_not_even_arrive() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(RecordError, match="finite"):
            unpack(Heartbeat, pack(beat(step_seconds=bad)))


FIGURES = st.floats(*bounds.SECONDS_A_STEP)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4096), FIGURES), min_size=1, max_size=5),
    FIGURES,
    st.floats(*bounds.BYTES_A_SECOND),
    st.floats(0, bounds.LONGEST_RTT_SECONDS),
)
def test_no_liar_within_bounds_breaks_the_planner(
    points: list[tuple[int, float]], seconds: float, rate: float, rtt: float
) -> None:
    """Three honest sites and one that says anything the rules let pass: there is a plan, and it fits its own rules."""
    curve = tuple(BatchTime(batch, took) for batch, took in sorted(dict(points).items()))
    honest = [Profile(f"p{i}", f"s{i}", "cpu", (BatchTime(1, 0.1 + 0.1 * i), BatchTime(8, 0.5 + 0.5 * i))) for i in range(3)]
    liar = Profile("q", "z", "cpu", curve)
    everybody = [*honest, liar]
    links = tuple(
        Link(a.peer, b.peer, rtt if liar in (a, b) else 0.05, rate if liar in (a, b) else 1e7)
        for a in everybody
        for b in everybody
        if a is not b
    )
    inputs = PlanInputs(
        Slot(RUN, 1, Term(1, "p0"), 1, BASE),
        Sites(tuple(everybody), links, (StepReport("q", curve[0].batch, seconds),), tuple(p.peer for p in everybody), 2),
        WorkLeft(Volume(1_000_000, 125_000, 125_000), 128, (Range(0, 2**40),)),
    )
    made = plan_round(inputs, PlannerSection(), InnerSection())
    assert bounds.plan_fault(made) == ""


# ---------------------------------------------------------------- magnitudes


LAYOUT = Layout((Tensor("embedding", 640, 40), Tensor("matrix", 4000), Tensor("norm", 37)))
PAYLOADS = get_args(CodecSection.model_fields["payload"].annotation)


def delta(seed: int, scale: float = 1.0, norm: float = 1.0) -> Any:
    values = np.random.default_rng(seed).standard_normal(LAYOUT.parameters).astype(np.float32) * np.float32(scale)
    values[-37:] *= np.float32(norm)
    return values


def payload(values: Any, settings: CodecSection) -> Any:
    return codec.encode(LAYOUT, values, np.zeros_like(values), settings)


def exchange_codec(kind: str, **changes: Any) -> ExchangeCodec:
    return ExchangeCodec(LAYOUT, CodecSection.model_validate({"payload": kind, **changes}))


@pytest.mark.case("C119")
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("kind", PAYLOADS)
def test_sizes_are_compared_tensor_by_tensor_whatever_a_contribution_carries(kind: str, granularity: str) -> None:
    of = exchange_codec(kind, granularity=granularity)
    honest = [payload(delta(seed, scale), of.settings) for seed, scale in enumerate((0.05, 1.0, 2.0, 40.0))]
    liar = payload(delta(9, norm=1e4), of.settings)
    for share in (None, Range(0, LAYOUT.parameters), Range(4640, LAYOUT.parameters), Range(320, LAYOUT.parameters)):
        assert of.odd_ones(honest, share) == {}
        (said,) = of.odd_ones([*honest, liar], share).items()
        assert said[0] == 4
        assert "times the others' magnitude" in said[1]
    assert "in tensor 2" in of.odd_ones([*honest, liar], None)[4]
    assert of.odd_ones([*honest, liar], Range(0, 4640)) == {}, "what lies in another's share is for that one to judge"
    assert of.odd_ones([honest[1], liar], None) == {}, "of two nobody can say who is odd"


@pytest.mark.parametrize("kind", [kind for kind in PAYLOADS if kind != "sign"])
def test_one_number_that_is_too_large_is_found_where_each_has_its_own(kind: str) -> None:
    of = exchange_codec(kind)
    honest = [payload(delta(seed), of.settings) for seed in range(3)]
    spike = delta(9)
    spike[1000] = 1e3
    assert 3 in of.odd_ones([*honest, payload(spike, of.settings)], None)


@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_number_beyond_all_measure_is_refused_in_any_kind(kind: str) -> None:
    of = exchange_codec(kind)
    for absurd in (float("nan"), float("inf"), 2e6, -2e6):
        data = payload(delta(1), of.settings).copy()
        numbers = data.view("<f2" if kind == "fp16" else "<f4") if kind.startswith("fp") else data[: 4 * 42].view("<f4")
        with np.errstate(over="ignore"):
            numbers[1] = absurd
        assert "finite" in of.fault_in_payload(data)
    assert of.fault_in_payload(payload(delta(1), of.settings)) == ""


@pytest.mark.parametrize(("kind", "bits"), [*(("sign", bits) for bits in (1, 2, 4, 8)), *((k, 1) for k in PAYLOADS[1:])])
def test_a_reducers_answer_is_compared_with_the_receivers_own_delta(kind: str, bits: int) -> None:
    of, span = exchange_codec(kind, second_phase_bits=bits), Range(640, 4640)
    own = payload(delta(1), of.settings)
    for scale, refused in ((1.0, False), (50.0, False), (1e-6, False), (5e3, True)):
        part = codec.encode_part(LAYOUT, of.settings, delta(2, scale)[640:4640], 640, 4640)
        assert ("times this peer's own" in of.odd_part(part, span, own)) == refused
    still = payload(np.zeros(LAYOUT.parameters, np.float32), of.settings)
    assert of.odd_part(codec.encode_part(LAYOUT, of.settings, delta(2)[640:4640], 640, 4640), span, still) == ""


def test_a_share_is_judged_by_what_lies_in_it() -> None:
    settings = CodecSection()
    data = payload(delta(1), settings)

    def means(start: int, stop: int) -> list[float]:
        return codec.tensor_sizes(LAYOUT, settings, data, start, stop).means

    whole = means(0, LAYOUT.parameters)
    assert means(640, 4640) == [whole[1]]
    assert means(0, 640) == [whole[0]]
    assert len(means(320, 648)) == 2
    assert means(8, 8) == []
    part = codec.encode_part(LAYOUT, settings, np.full(4000, 0.5, np.float32), 640, 4640)
    assert codec.part_sizes(LAYOUT, settings, part, 640, 4640).means == pytest.approx([0.5])
    assert bounds.part_fault([0.5], [0.8]) == ""
    assert "times this peer's own" in bounds.part_fault([0.5], [1e-5])
    assert bounds.part_fault([0.5], [0.0]) == ""


@pytest.mark.parametrize("kind", PAYLOADS)
def test_sizes_are_those_of_the_numbers_said(kind: str) -> None:
    settings = CodecSection.model_validate({"payload": kind})
    values = delta(3)
    said = codec.tensor_sizes(LAYOUT, settings, payload(values, settings), 0, LAYOUT.parameters)
    pieces = np.split(np.abs(values), [640, 4640])
    assert said.means == pytest.approx([piece.mean() for piece in pieces], rel=0.02)
    if kind != "sign":
        assert said.maxima == pytest.approx([piece.max() for piece in pieces], rel=0.01)
