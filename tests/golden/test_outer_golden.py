"""The outer step against values written down: a change of one bit anywhere in codec or outer step fails here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core import codec, outer
from geomesh_p2p.core.canonical import digest
from geomesh_p2p.core.codec import Layout, Tensor
from geomesh_p2p.core.types import Founding, Range

_spec = importlib.util.spec_from_file_location("outer_run", Path(__file__).with_name("outer_run.py"))
outer_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(outer_run)


@pytest.mark.parametrize("setting", outer_run.SETTINGS)
def test_ten_rounds_with_three_unequal_workers(setting: str) -> None:
    expected = json.loads(outer_run.FILE.read_text())[setting]
    found = outer_run.run(setting)
    assert len(expected) == 10
    for round, (line, wanted) in enumerate(zip(found, expected, strict=True), 1):
        assert line == wanted, f"round {round}"


def test_every_setting_goes_its_own_way() -> None:
    written = json.loads(outer_run.FILE.read_text())
    assert len({lines[-1]["anchor"] for lines in written.values()}) == len(outer_run.SETTINGS)


def test_two_rounds_that_can_be_checked_by_hand() -> None:
    """deltas 1, -3, 0, 4 and 2, 2, -2, -2; tokens 3 : 1, so the weights are 0.75 and 0.25.

    magnitudes 2 and 2: c = 1.5 and 0.5; mean = 1.5 + 0.5, -1.5 + 0.5, 1.5 - 0.5, 1.5 - 0.5 = 2, -1, 1, 1
    round 1: momentum = mean;            step = mean + 0.5 momentum = 1.5 mean;    anchor = 10 - 0.5 * 1.5 mean
    round 2: momentum = 1.5 mean;        step = mean + 0.75 mean = 1.75 mean;      anchor = anchor - 0.875 mean
    """
    layout, section, settings = Layout((Tensor("w", 4),)), CodecSection(), OuterSection(learning_rate=0.5, momentum=0.5)
    deltas = [np.array([1, -3, 0, 4], np.float32), np.array([2, 2, -2, -2], np.float32)]
    payloads = [codec.encode(layout, 10 + delta, np.full(4, 10, np.float32), section) for delta in deltas]
    assert payloads[0].tobytes() == np.float32(2).tobytes() + bytes([0b1101])
    assert payloads[1].tobytes() == np.float32(2).tobytes() + bytes([0b0011])
    mean = codec.mean_of(layout, section, payloads, [300, 100], 0, 4, np.empty(4, np.float32))
    assert mean.tolist() == [2, -1, 1, 1]
    state = outer.OuterState.founded(np.full(4, 10, np.float32))
    outer.apply_mean(state, mean, 0, 4, settings)
    assert state.anchor.tolist() == [8.5, 10.75, 9.25, 9.25]
    assert state.momentum.tolist() == [2, -1, 1, 1]
    outer.apply_mean(state, mean, 0, 4, settings)
    assert state.anchor.tolist() == [6.75, 11.625, 8.375, 8.375]
    assert state.momentum.tolist() == [3, -1.5, 1.5, 1.5]


def test_parts_that_can_be_checked_by_hand() -> None:
    layout, mean = Layout((Tensor("w", 4),)), np.array([7, -3.4, 0, 1], np.float32)
    expected = {
        1: (2.85, bytes([0b1101]), [2.85, -2.85, 2.85, 2.85]),        # mean |x| = 11.4 / 4
        2: (1.7784, bytes([0b00001101]), [5.3352, -1.7784, 1.7784, 1.7784]),  # 0.624 * 2.85; 7 alone is above twice that
        4: (1, bytes([0xD7, 0x10]), [7, -3, 0, 1]),                   # step 7 / 7
        8: (7 / 127, bytes([127, 256 - 62, 0, 18]), [7, -62 * 7 / 127, 0, 18 * 7 / 127]),
    }
    for bits, (magnitude, levels, values) in expected.items():
        section = CodecSection(second_phase_bits=bits)
        part = codec.encode_part(layout, section, mean, 0, 4)
        assert part[:4].view("<f4")[0] == pytest.approx(magnitude, rel=1e-6)
        assert part[4:].tobytes() == levels, bits
        assert codec.decode_part(layout, section, part, 0, 4, np.empty(4, np.float32)) == pytest.approx(values, rel=1e-6)


def test_the_first_digests_of_a_run() -> None:
    founding = Founding(b"f" * 32, b"n" * 16, 7, b"w" * 32, "12D3KooWfounder")
    assert digest("round-0", b"f" * 32, b"w" * 32) == founding.base
    assert founding.base.hex() == "562153b21f426c165ece786c90baba2fbc6f955f27a77fab84bfd11d213e2cb1"
    assert founding.run.hex() == "11a6640c73d623198be01df34c61a5cc711b2ba0fd03e43b80cb5a7d0692e4ab"
    assert digest(Range(1, 2)) == digest([1, 2])
