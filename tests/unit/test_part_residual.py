"""A reducer's residual: advances with a commit only, and follows its share."""

from __future__ import annotations

import numpy as np

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core import codec
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec
from geomesh_p2p.swarm.part_residual import PartResidual

CODEC = ExchangeCodec(Layout((Tensor("w", 64, 1),)), CodecSection(residual=True))
SHARE = Range(16, 48)
MEAN = np.linspace(-1, 2, len(SHARE)).astype(np.float32)


def answered(residual: PartResidual, body: bytes) -> np.ndarray:
    part = CODEC.encode_part(MEAN, SHARE, residual.of(SHARE), 1)
    residual.answered(body, SHARE, MEAN, part)
    return part


def test_it_advances_with_the_commit_of_its_own_answer_alone() -> None:
    residual = PartResidual(CODEC)
    answered(residual, b"lost attempt")
    part = answered(residual, b"this one")
    assert not residual.of(SHARE).any()
    residual.committed(b"another update")
    assert not residual.of(SHARE).any()
    answered(residual, b"this one")
    residual.committed(b"this one")
    said = codec.decode_part(CODEC.layout, CODEC.settings, part, SHARE.start, SHARE.stop, np.empty(len(SHARE), np.float32))
    np.testing.assert_allclose(residual.of(SHARE), MEAN - said, rtol=1e-6)


def test_it_follows_its_share() -> None:
    residual = PartResidual(CODEC)
    answered(residual, b"b")
    residual.committed(b"b")
    whole = residual.of(SHARE)
    moved = residual.of(Range(32, 64))
    np.testing.assert_array_equal(moved[:16], whole[16:])
    assert not moved[16:].any()

def test_a_snapshot_keeps_it_as_of_the_last_commit() -> None:
    residual = PartResidual(CODEC)
    assert residual.committed_values() is None
    answered(residual, b"b")
    residual.committed(b"b")
    kept = residual.committed_values()
    assert kept is not None
    before = kept[1].copy()
    answered(residual, b"c")
    residual.committed(b"c")
    np.testing.assert_array_equal(kept[1], before)
    np.testing.assert_array_equal(PartResidual(CODEC, kept).of(SHARE), before)
