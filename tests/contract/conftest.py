from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transport_sites import Libp2pMesh, MemoryMesh, Mesh


@pytest.fixture(params=[MemoryMesh, Libp2pMesh], ids=["memory", "libp2p"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    made = request.param(tmp_path)
    yield made
    await made.stop()
