"""Dialling back: what is asked, what is answered and to whom, and what a peer is told that others cannot dial."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.addresses import parse
from geomesh_p2p.swarm.reachability import DialBack, DialsBack, Report, SelfCheck, Verdict, judge, read_answer

ANNOUNCED = parse("/ip4/45.10.3.2/tcp/4100", "net.announce")
ASK = Fetch("dial-back", 0, b"", 4100, 0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in this loop's other tasks
            await asyncio.sleep(0)


class Dialled:
    """The dialling of an answering peer, and its clock."""

    def __init__(self) -> None:
        self.at: list[tuple[str, ...]] = []
        self.why = ""
        self.now = 100.0
        self.held: asyncio.Event | None = None

    async def dial(self, addresses: Sequence[str], _limit_seconds: float) -> str:
        self.at.append(tuple(addresses))
        if self.held is not None:
            await self.held.wait()
        return self.why

    def answering(self, seen: str = "/ip4/45.10.3.2/tcp/50123", admitted: bool = True) -> DialsBack:
        return DialsBack(lambda peer: seen, lambda peer: admitted, lambda: self.now, self.dial)


async def test_only_the_address_that_the_question_came_from_is_dialled_at_the_port_it_names() -> None:
    dialled = Dialled()
    answers = dialled.answering()
    assert read_answer(await answers.answer("a", ASK)) == DialBack("45.10.3.2", "")
    dialled.why = "no answer within 5 s"
    assert read_answer(await answers.answer("b", ASK)) == DialBack("45.10.3.2", "no answer within 5 s")
    assert dialled.at == [("/ip4/45.10.3.2/tcp/4100",)] * 2


async def test_strangers_bad_ports_and_relayed_questions_are_declined_without_a_dial() -> None:
    dialled = Dialled()
    relay = "/ip4/45.10.1.2/tcp/4100/p2p/12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq/p2p-circuit"
    for answers in (dialled.answering(admitted=False), dialled.answering(relay), dialled.answering(""), dialled.answering("?")):
        assert read_answer(await answers.answer("a", ASK)) is None
    for port in (0, -1, 65536):
        assert read_answer(await dialled.answering().answer("a", Fetch("dial-back", 0, b"", port, 0))) is None
    assert dialled.at == []


async def test_one_at_a_time_and_each_peer_now_and_then() -> None:
    dialled = Dialled()
    dialled.held = asyncio.Event()
    answers = dialled.answering()
    first = asyncio.create_task(answers.answer("a", ASK))
    await until(lambda: dialled.at)
    busy = await answers.answer("b", ASK)
    assert not busy.found
    assert busy.hint >= 1
    dialled.held.set()
    assert (await first).found
    again = await answers.answer("a", ASK)
    assert not again.found
    assert again.hint == 20, "seconds to wait"
    dialled.now += 20.0
    assert (await answers.answer("a", ASK)).found
    assert (await answers.answer("b", ASK)).found
    assert len(dialled.at) == 3


def test_the_question_and_the_answer_pass_the_wire() -> None:
    assert wire.decode(wire.encode_bytes(ASK, b"", 1)[wire.LENGTH_BYTES :]).message == ASK
    assert read_answer(Fetched(True, b"nonsense", 0, 0, b"", 0)) is None
    assert read_answer(Fetched(True, b"\x00" * 2000, 0, 0, b"", 0)) is None


# ---------------------------------------------------------------- what is made of the answers


def report(site: str, why: str = "", host: str = "45.10.3.2") -> Report:
    return Report(site, DialBack(host, why))


def test_one_peer_that_can_dial_back_is_enough() -> None:
    verdict = judge(ANNOUNCED, [report("paris", "no answer within 5 s"), report("oslo")], relay=False)
    assert verdict == Verdict(True, "reachable: oslo dialled this peer back on port 4100")
    assert judge(ANNOUNCED, [], relay=False) is None


def test_an_announced_address_that_others_do_not_see_is_named() -> None:
    verdict = judge(parse("/ip4/10.0.0.5/tcp/4100", ""), [report("oslo")], relay=False)
    assert verdict is not None
    assert verdict.words.endswith("(at 45.10.3.2; net.announce says 10.0.0.5)")


@pytest.mark.case("C007")
def test_a_peer_that_nobody_can_dial_is_told_who_tried_where_and_what_to_do() -> None:
    verdict = judge(ANNOUNCED, [report("paris", "no answer within 5 s"), report("oslo", "no answer within 5 s")], relay=False)
    assert verdict is not None
    assert not verdict.reachable
    assert verdict.words.startswith("not reachable from oslo, paris on port 4100 (no answer within 5 s; ")
    for step in ("open TCP port 4100", 'net.announce = "/ip4/45.10.3.2/tcp/4100"', "net.relay = true"):
        assert step in verdict.words
    assert "\n" not in verdict.words
    relayed = judge(ANNOUNCED, [report("oslo", "refused")], relay=True)
    assert relayed is not None
    assert "a place at a relay is looked for" in relayed.words


async def test_a_peer_asks_until_somebody_can_say_and_tells_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geomesh_p2p.swarm.reachability.CHECK_SECONDS", 0.0)
    monkeypatch.setattr("geomesh_p2p.swarm.reachability.RECHECK_SECONDS", 0.0)
    answers: dict[str, Any] = {}
    asked: list[str] = []

    async def request(peer: str, fetch: Fetch, _timeout: float) -> Fetched:
        asked.append(peer)
        assert fetch == ASK
        if peer not in answers:
            raise Unreachable("gone")
        dialled = Dialled()
        dialled.why = answers[peer]
        return await dialled.answering().answer("me", fetch)

    others: list[tuple[str, str]] = []
    told: list[bool] = []
    check = SelfCheck(ANNOUNCED, request, lambda: others, relay=False)
    task = asyncio.create_task(check.keep(lambda verdict: told.append(verdict.reachable)))

    for _ in range(20):
        await asyncio.sleep(0)
    assert asked == told == []
    others += [(f"peer-{n}", f"site-{n}") for n in range(5)]
    await until(lambda: len(asked) >= 6)
    assert set(asked) == {"peer-0", "peer-1", "peer-2"}, "at most three are asked"
    answers["peer-1"] = "no answer"
    await until(lambda: told == [False])
    answers["peer-2"] = ""
    await until(lambda: told == [False, True])
    for _ in range(20):
        await asyncio.sleep(0)
    assert told == [False, True], "told once"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
