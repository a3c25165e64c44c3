"""Meeting the others: seeds are dialled and greeted until they are heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.messages import Hello, Refused
from geomesh_p2p.core.types import Founding
from geomesh_p2p.errors import NotListedError, RefusedError
from geomesh_p2p.swarm import joining
from geomesh_p2p.swarm.acquaintances import Acquaintances
from geomesh_p2p.swarm.membership import Admission, Membership, Self

SEED = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
NET = NetSection(seeds=(f"/ip4/127.0.0.1/tcp/4100/p2p/{SEED}",))


class Host:
    """A transport whose seed cannot be reached at first, and which then loses the first greetings."""

    def __init__(self, unreachable: int = 0) -> None:
        self.unreachable = unreachable
        self.warned: list[bool] = []
        self.asked: list[tuple[str, ...]] = []
        self.learnt: dict[str, tuple[str, ...]] = {}
        self.greeted = 0
        self.moved: dict[str, str] = {}

    @property
    def seeds(self) -> Host:
        return self

    async def newest(self, seeds: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.moved.get(seed, seed) for seed in seeds)

    def addresses(self) -> tuple[str, ...]:
        return ("/ip4/127.0.0.1/tcp/4101/p2p/me",)

    async def connect(self, seeds: Sequence[str], required: bool, warn: bool) -> tuple[str, ...]:
        if not seeds:
            return ()
        self.asked.append(tuple(seeds))
        self.warned.append(warn)
        self.unreachable -= 1
        return () if self.unreachable >= 0 else (SEED,)

    def send(self, to: str, message: Any) -> None:
        assert type(message) is Hello
        self.greeted += to == SEED

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        self.learnt[peer] = tuple(addresses)


async def nobody() -> list[Any]:
    return []


async def announced(record: Any) -> bool:
    return False


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(joining, "EAGER_DIRECTORY_SECONDS", 0.01)
    founding = Founding(b"f" * 32, b"nonce", 0, b"w" * 32, "founder")

    def begin(
        host: Host, net: NetSection = NET, records: Callable[[], Any] = nobody
    ) -> tuple[Membership, asyncio.Task[None]]:
        directory = SimpleNamespace(announce=announced, peers=records)
        known = Acquaintances(tmp_path / "acquaintances.json")
        me = Self("me", "site-me", True, founding.fingerprint, {}, founding)
        membership = Membership(me, Admission(), host.send, 5.0)
        membership_greet = membership.greet
        membership.greet = lambda peer, now, again_seconds=0.0: membership_greet(peer, now, again_seconds)  # type: ignore[method-assign]
        return membership, asyncio.create_task(joining.keep_meeting(host, membership, net, directory, known))  # type: ignore[arg-type]

    return begin


async def until(condition: Any) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def hello_of_the_seed(membership: Membership, host: Host) -> Hello:
    me = membership.me
    return Membership(Self(SEED, "site-seed", True, me.fingerprint, {}, me.founding), Admission(), host.send, 5.0).hello("me")


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_seed_is_dialled_and_greeted_until_it_is_heard_and_warned_of_once(meeting: Any) -> None:
    host = Host(unreachable=3)
    membership, task = meeting(host)
    await until(lambda: host.greeted >= 3)
    assert host.warned[0] is True
    assert not any(host.warned[1:])
    membership.on_hello(SEED, hello_of_the_seed(membership, host), asyncio.get_running_loop().time())
    await asyncio.sleep(0.1)
    greeted = host.greeted
    await asyncio.sleep(0.1)
    assert host.greeted == greeted, "who is heard is left in peace"
    await ended(task)


async def test_a_final_refusal_by_a_seed_ends_it(meeting: Any) -> None:
    host = Host()
    membership, task = meeting(host)
    await until(lambda: host.greeted)
    membership.on_refused(SEED, Refused("another run has this name", True))
    with pytest.raises(RefusedError, match="another run has this name"):
        await asyncio.wait_for(task, 10.0)


@pytest.mark.case("C003")
@pytest.mark.case("C044")
async def test_a_peer_with_no_live_seed_goes_back_to_whom_it_knew(meeting: Any, tmp_path: Path) -> None:
    """The run it was in lists an ordinary peer; started again without seeds, it dials that one until it is heard."""
    address = f"/ip4/127.0.0.1/tcp/4100/p2p/{SEED}"
    record = SimpleNamespace(peer=SEED, addresses=(address,))

    async def records() -> list[Any]:
        return [record]

    host = Host()
    membership, task = meeting(host, NetSection(), records)
    membership.on_hello(SEED, hello_of_the_seed(membership, host), asyncio.get_running_loop().time())
    await until(lambda: (tmp_path / "acquaintances.json").exists())
    assert host.learnt == {SEED: (address,)}
    assert host.asked == [], "nobody is dialled while somebody is heard"
    await ended(task)

    host = Host()
    membership, task = meeting(host, NetSection())
    await until(lambda: host.greeted)
    assert set(host.asked) == {(address,)}
    assert not any(host.warned)
    membership.on_hello(SEED, hello_of_the_seed(membership, host), asyncio.get_running_loop().time())
    await asyncio.sleep(0.05)
    asked = len(host.asked)
    await asyncio.sleep(0.05)
    assert len(host.asked) == asked
    await ended(task)


@pytest.mark.case("C060")
async def test_the_newest_address_of_a_peer_replaces_the_old_one(meeting: Any, tmp_path: Path) -> None:
    host, at = Host(), [f"/ip4/127.0.0.1/tcp/4100/p2p/{SEED}"]

    async def records() -> list[Any]:
        return [SimpleNamespace(peer=SEED, addresses=tuple(at))]

    membership, task = meeting(host, NetSection(), records)
    membership.on_hello(SEED, hello_of_the_seed(membership, host), asyncio.get_running_loop().time())
    await until(lambda: host.learnt == {SEED: tuple(at)})
    at[:] = [f"/ip4/127.0.0.1/tcp/4200/p2p/{SEED}"]
    await until(lambda: host.learnt == {SEED: tuple(at)})
    await until(lambda: Acquaintances(tmp_path / "acquaintances.json").addresses() == tuple(at))
    await ended(task)


async def test_a_seed_without_this_peers_join_secret_is_told_at_once(tmp_path: Path) -> None:
    """The run is open, or has another secret, while this site names one: the seed says yes, this peer cannot."""
    fingerprint, sent = b"f" * 32, list[Any]()
    me = Self("me", "site-me", True, fingerprint, {})
    membership = Membership(me, Admission(secret=b"secret"), lambda to, message: sent.append(message), 5.0)
    open_seed = Membership(Self(SEED, "site-seed", True, fingerprint, {}), Admission(), lambda *_: None, 5.0)

    async def connect(seeds: Sequence[str]) -> tuple[str, ...]:
        return (SEED,)

    transport: Any = SimpleNamespace(seeds=SimpleNamespace(connect=connect, newest=Host().newest))
    joining_it = asyncio.create_task(joining.join(transport, membership, NET, b"w" * 32))
    await until(lambda: any(isinstance(message, Hello) for message in sent))
    assert not joining_it.done()
    membership.on_hello(SEED, open_seed.hello("me"), asyncio.get_running_loop().time())
    with pytest.raises(RefusedError, match=r"the join secret was not proved \(net.join_secret_file\)"):
        await asyncio.wait_for(joining_it, 10.0)


async def test_who_waits_for_a_founder_follows_it_to_another_address_and_another_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The founder was there when it was dialled, and starts anew elsewhere, under another id, before it has answered."""
    monkeypatch.setattr(joining, "LOOK_SECONDS", 0.01)
    other = "12D3KooWN3KhwZA84KG8Q9JGqrUWdacwffsYMNYbs72cCUgPHxXq"
    moved = f"/ip4/127.0.0.1/tcp/4200/p2p/{other}"
    founding, host, connected, sent = Founding(b"f" * 32, b"nonce", 0, b"w" * 32, other), Host(), list[bool](), list[str]()
    membership = Membership(Self("me", "site-me", True, b"f" * 32, {}), Admission(), lambda to, _: sent.append(to), 5.0)

    async def connect(seeds: Sequence[str], required: bool = True, warn: bool = True) -> tuple[str, ...]:
        connected.append(required)
        return (other,) if host.moved else (SEED,)

    transport: Any = SimpleNamespace(seeds=SimpleNamespace(connect=connect, newest=host.newest))
    joining_it = asyncio.create_task(joining.join(transport, membership, NET, b"w" * 32))
    await until(lambda: SEED in sent)
    host.moved = {NET.seeds[0]: moved}
    await until(lambda: other in sent)
    assert connected == [True, False]
    founder = Membership(Self(other, "site-a", True, b"f" * 32, {}, founding), Admission(), lambda *_: None, 5.0)
    membership.on_hello(other, founder.hello("me"), asyncio.get_running_loop().time())
    assert await asyncio.wait_for(joining_it, 10.0) == founding


async def test_a_member_dials_a_seed_where_its_file_says_that_it_is_now(meeting: Any) -> None:
    host, moved = Host(unreachable=10_000), f"/ip4/127.0.0.1/tcp/4200/p2p/{SEED}"
    _, task = meeting(host)
    await until(lambda: host.asked == [NET.seeds])
    host.moved = {NET.seeds[0]: moved}
    await until(lambda: host.asked[-1] == (moved,))
    await ended(task)


@pytest.mark.parametrize(("allow", "secret"), [(True, False), (False, True), (True, True)])
async def test_a_stranger_is_told_what_to_ask_for_and_those_in_the_run_what_others_need(allow: bool, secret: bool) -> None:
    admission = Admission(frozenset({SEED} if allow else ()), b"secret" if secret else b"")
    told, said = list[Any](), list[str]()
    me = Self(SEED, "site-seed", True, b"f" * 32, {})
    membership = Membership(me, admission, lambda _, message: told.append(message), 5.0, lambda *words: said.append(words[-1]))
    stranger = Membership(Self("me", "site-me", True, b"f" * 32, {}), Admission(), lambda *_: None, 5.0)
    membership.on_hello("me", stranger.hello(SEED), 0.0)
    (refused,), (line,) = told, said
    words = str(joining.refusal(refused))
    assert isinstance(joining.refusal(refused), NotListedError) is allow
    assert "the run refuses this peer: " in words
    assert ["add this peer id to net.allow" in words, "secret that net.join_secret_file" in words] == [allow, secret]
    assert "ask those who run its peers" not in line, "that is who reads it"
    assert ["net.allow" in admission.needs, "same net.join_secret_file" in admission.needs] == [allow, secret]
    assert (Admission().needs, Admission().closed) == ("", False)
