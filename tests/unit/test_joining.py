"""Meeting the others: seeds are dialled and greeted until they are heard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.messages import Hello, Refused
from geomesh_p2p.core.types import Founding
from geomesh_p2p.errors import RefusedError
from geomesh_p2p.swarm import joining
from geomesh_p2p.swarm.membership import Admission, Membership, Self

SEED = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
NET = NetSection(seeds=(f"/ip4/127.0.0.1/tcp/4100/p2p/{SEED}",))


class Host:
    """A transport whose seed cannot be reached at first, and which then loses the first greetings."""

    def __init__(self, unreachable: int = 0) -> None:
        self.unreachable = unreachable
        self.warned: list[bool] = []
        self.greeted = 0

    def addresses(self) -> tuple[str, ...]:
        return ("/ip4/127.0.0.1/tcp/4101/p2p/me",)

    async def connect_seeds(self, seeds: Sequence[str], required: bool, warn: bool) -> tuple[str, ...]:
        if not seeds:
            return ()
        self.warned.append(warn)
        self.unreachable -= 1
        return () if self.unreachable >= 0 else (SEED,)

    def send(self, to: str, message: Any) -> None:
        assert (to, type(message)) == (SEED, Hello)
        self.greeted += 1


async def nobody() -> list[Any]:
    return []


async def announced(record: Any) -> bool:
    return False


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(joining, "EAGER_DIRECTORY_SECONDS", 0.01)
    founding = Founding(b"f" * 32, b"nonce", 0, b"w" * 32, "founder")
    directory = SimpleNamespace(announce=announced, peers=nobody)

    def begin(host: Host) -> tuple[Membership, asyncio.Task[None]]:
        me = Self("me", "site-me", True, founding.fingerprint, {}, founding)
        membership = Membership(me, Admission(), host.send, 5.0)
        membership_greet = membership.greet
        membership.greet = lambda peer, now, again_seconds=0.0: membership_greet(peer, now, again_seconds)  # type: ignore[method-assign]
        return membership, asyncio.create_task(joining.keep_meeting(host, membership, NET, directory))  # type: ignore[arg-type]

    return begin


async def until(condition: Any) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_seed_is_dialled_and_greeted_until_it_is_heard_and_warned_of_once(meeting: Any) -> None:
    host = Host(unreachable=3)
    membership, task = meeting(host)
    await until(lambda: host.greeted >= 3)
    assert host.warned[0] is True
    assert not any(host.warned[1:])
    hello = Membership(
        Self(SEED, "site-seed", True, membership.me.fingerprint, {}, membership.me.founding), Admission(), host.send, 5.0
    ).hello("me")
    membership.on_hello(SEED, hello, asyncio.get_running_loop().time())
    await asyncio.sleep(0.1)
    greeted = host.greeted
    await asyncio.sleep(0.1)
    assert host.greeted == greeted, "who is heard is left in peace"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_final_refusal_by_a_seed_ends_it(meeting: Any) -> None:
    host = Host()
    membership, task = meeting(host)
    await until(lambda: host.greeted)
    membership.on_refused(SEED, Refused("another run has this name", True))
    with pytest.raises(RefusedError, match="another run has this name"):
        await asyncio.wait_for(task, 10.0)
