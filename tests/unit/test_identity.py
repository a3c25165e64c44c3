"""Identity keys on disk: kept from start to start, and refused when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from geomesh_p2p.errors import DataError
from geomesh_p2p.swarm.identity import load_identity


def test_an_identity_is_the_same_at_the_next_start(tmp_path: Path) -> None:
    first = load_identity(tmp_path / "identity.key")
    assert load_identity(tmp_path / "identity.key").peer == first.peer


@pytest.mark.parametrize("at", range(68))
def test_a_key_with_a_flipped_bit_is_refused_and_named(tmp_path: Path, at: int) -> None:
    """The daemon takes the public half as it stands in the file: an unnoticed flip would give the peer two ids."""
    path = tmp_path / "identity.key"
    load_identity(path)
    packed = bytearray(path.read_bytes())
    assert len(packed) == 68
    packed[at] ^= 0x40
    path.chmod(0o600)
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"identity\.key .*move it away to get a new identity"):
        load_identity(path)
