"""A node of the directory that is asked before it is ready."""

from __future__ import annotations

import logging

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.proto import dht_pb2

from geomesh_p2p.swarm import directory


async def test_a_ping_that_comes_before_the_node_is_ready_is_answered_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """hivemind serves pings before it has set who it is; the answer then names nobody, and is asked for again later."""
    assert directory
    early = DHTProtocol(_initialized_with_create=True)
    with caplog.at_level(logging.ERROR):
        answer = await early.rpc_ping(dht_pb2.PingRequest(), None)
    assert answer.peer.node_id == b""
    assert caplog.records == []
