"""Budgets: what a remote may cost, before and after it is admitted, and that all of it is given back and forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from geomesh_p2p import PROTOCOL_VERSION
from geomesh_p2p.config import NetSection
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.types import GENESIS_ROUND
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.budgets import ALL_STRANGERS, LINES_AT_ONCE, MEMBER, REMEMBERED_STRANGERS, STRANGER, Budgets, OverBudget
from geomesh_p2p.swarm.membership import MOST_MEMBERS, REMEMBERED, Admission, Membership, Self
from geomesh_p2p.swarm.wire import KIB, MIB, FrameReader

RUN = bytes(32)


class World:
    def __init__(self, *members: str) -> None:
        self.now, self.members, self.lines = 100.0, set(members), list[tuple[str, str]]()
        self.budgets = Budgets(self.members.__contains__, lambda *line: self.lines.append(line), lambda: self.now)

    def many(self, peer: str, kind: type, length: int) -> list[bool]:
        return [self.budgets.begin_frame(peer, kind, length) for _ in range(100)]


def nothing() -> None: ...


def test_a_stranger_is_heard_only_in_greetings_and_a_few_questions() -> None:
    world = World()
    begin = world.budgets.begin_frame
    assert begin("s", m.Hello, 500)
    assert begin("s", m.Refused, 500)
    assert begin("s", m.Fetch, 100)
    for kind in (m.Chunk, m.PlanOffer, m.VoteRequest, m.Vote, m.Commit, m.HoldAgain, m.Finished, m.Leave, m.ChunkWanted):
        assert not begin("s", kind, 100)
    assert world.budgets.usage("s").held_bytes == 1100
    for length in (500, 500, 100):
        world.budgets.end_frame("s", length)
    assert world.budgets.usage("s").idle
    assert world.lines == []


def test_a_stranger_that_greets_without_end_is_left_unread_and_costs_one_line() -> None:
    world = World()
    read = sum(world.budgets.begin_frame("s", m.Hello, 100) for _ in range(10_000))
    assert read == STRANGER.frames
    assert len(world.lines) == 1
    world.now += 10
    assert sum(world.budgets.begin_frame("s", m.Hello, 100) for _ in range(10_000)) == 10 * STRANGER.frames_per_second
    assert len(world.lines) == 1


def test_a_stranger_that_may_be_a_member_of_before_is_heard_when_it_greets_whatever_else_it_sends() -> None:
    """A peer that has just started knows nobody, and the others go on sending heartbeats, echoes and chunks to it."""
    world = World()
    beats = 0
    for _ in range(200):
        world.now += 0.1
        beats += world.budgets.begin_frame("s", m.Heartbeat, 300)
        world.budgets.begin_frame("s", m.HeartbeatEcho, 30)
        world.budgets.begin_frame("s", m.Chunk, 1000)
    assert 4 <= beats <= 14
    assert world.budgets.begin_frame("s", m.Hello, 5000)
    assert world.lines == []


def test_bytes_that_a_stranger_has_no_business_to_send_end_its_stream() -> None:
    world = World()
    with pytest.raises(OverBudget):
        world.many("s", m.Chunk, 100 * KIB)
    assert world.budgets.usage("s").held_bytes == 0


def test_a_member_has_enough_for_any_use_and_an_end_too() -> None:
    world = World("m")
    for _ in range(5000):
        assert world.budgets.begin_frame("m", m.Heartbeat, 2000)
        world.budgets.end_frame("m", 2000)
    with pytest.raises(OverBudget, match="begun more than"):
        world.many("m", m.Chunk, MIB)
    assert world.budgets.usage("m").held_bytes <= MEMBER.held_bytes
    world.budgets.end_frame("m", world.budgets.usage("m").held_bytes)
    world.now += 50
    assert sum(world.budgets.begin_frame("m", m.Leave, 10) for _ in range(20_000)) == MEMBER.frames
    assert {reason for reason, _ in world.lines} == {"over_budget"}
    assert len(world.lines) == 1


def test_whoever_is_admitted_gets_a_members_budget_at_once() -> None:
    world = World()
    while world.budgets.begin_frame("x", m.Hello, 1):
        pass
    world.members.add("x")
    assert world.budgets.begin_frame("x", m.PlanOffer, 1000)


def test_a_member_that_is_not_known_yet_may_open_every_stream_it_can_be_set_to() -> None:
    with pytest.raises(ValidationError):
        NetSection(streams=17)
    assert NetSection(streams=16).streams + 1 + STRANGER.requests <= STRANGER.streams


def test_streams_and_requests_are_counted_and_given_back() -> None:
    world = World("m")
    for peer, allowed in (("m", MEMBER), ("s", STRANGER)):
        numbers = [world.budgets.open_stream(peer, nothing) for _ in range(allowed.streams)]
        with pytest.raises(OverBudget, match=f"has {allowed.streams} streams open"):
            world.budgets.open_stream(peer, nothing)
        for number in (*numbers, numbers[0]):  # told twice of one loss
            world.budgets.close_stream(number)
        for _ in range(allowed.requests):
            world.budgets.begin_request(peer)
        with pytest.raises(OverBudget, match="requests unanswered"):
            world.budgets.begin_request(peer)
        for _ in range(allowed.requests):
            world.budgets.end_request(peer)
        assert world.budgets.usage(peer).idle


@pytest.mark.case("C117")
def test_ten_thousand_strangers_are_bounded_together_and_an_honest_newcomer_finds_room() -> None:
    world, ended = World("m"), list[int]()
    world.budgets.open_stream("m", lambda: ended.append(-1))
    for number in range(10_000):
        world.budgets.open_stream(f"s{number}", lambda number=number: ended.append(number))
        if world.budgets.begin_frame(f"s{number}", m.Hello, 100):
            world.budgets.end_frame(f"s{number}", 100)
    assert ended == list(range(10_000 - ALL_STRANGERS.streams)), "the oldest streams of strangers give way, a member's never"
    assert world.budgets.remembered <= REMEMBERED_STRANGERS + 1
    assert world.budgets.usage("m").streams == 1
    assert len(world.lines) <= LINES_AT_ONCE
    world.budgets.open_stream("honest", nothing)
    world.now += 5
    assert world.budgets.begin_frame("honest", m.Hello, 100)


def test_lines_about_strangers_are_few_and_say_how_many_were_left_out() -> None:
    world = World()
    say = world.budgets.complaints.say
    for number in range(1000):
        for _ in range(3):
            say(f"s{number}", False, "refused_peer", f"s{number} is refused")
    assert len(world.lines) == LINES_AT_ONCE
    world.now += 61
    say("late", False, "refused_peer", "late is\nrefused \x1b[31m" + "x" * 5000)
    assert "984 more strangers were refused" not in world.lines[-1][1]  # the long text leaves no room for it
    assert "\n" not in world.lines[-1][1]
    assert "\x1b" not in world.lines[-1][1]
    assert len(world.lines[-1][1]) <= 600
    world.now += 61
    say("later", False, "refused_peer", "later is refused")
    assert len(world.lines) == LINES_AT_ONCE + 2


def test_a_members_fault_is_said_again_after_a_while() -> None:
    world = World("m")
    for seconds in (0, 1, 58, 2, 10):
        world.now += seconds
        world.budgets.complaints.say("m", True, "bad_frame", "m: bad")
        world.budgets.complaints.say("m", True, "over_budget", "m: much")
    assert [reason for reason, _ in world.lines] == ["bad_frame", "over_budget"] * 2


# ---------------------------------------------------------------- the reader asks first


def test_the_reader_skips_what_is_not_wanted_without_buffering_it() -> None:
    asked: list[tuple[type, int]] = []
    ended: list[int] = []
    reader = FrameReader()

    def begin(kind: type, length: int) -> bool:
        asked.append((kind, length))
        return kind is not m.Chunk

    reader.begin, reader.end = begin, ended.append
    chunk = wire.encode_bytes(m.Chunk(RUN, "part", "p", RUN, 0, 0, 1, bytes(900 * KIB)), RUN)
    leave = wire.encode_bytes(m.Leave("x" * 10_000), RUN)
    stream = leave + chunk + leave + chunk + chunk + leave
    for size in (1, 7, 1000, 65_536, len(stream)):
        asked.clear()
        ended.clear()
        bodies = []
        for at in range(0, len(stream), size):
            bodies += reader.feed(stream[at : at + size])
            assert reader._body is None
            if size == 1 and at > 20_000:
                break
        if size > 1:
            assert [wire.decode(body).message for body in bodies] == [m.Leave("x" * 10_000)] * 3
            assert [kind for kind, _ in asked] == [m.Leave, m.Chunk, m.Leave, m.Chunk, m.Chunk, m.Leave]
            assert sum(ended) == 3 * (len(leave) - 4)
        else:
            reader = FrameReader()
            reader.begin, reader.end = begin, ended.append


def test_a_frame_half_read_is_given_back_when_its_stream_is_lost() -> None:
    world, reader = World("m"), FrameReader()
    reader.begin = lambda kind, length: world.budgets.begin_frame("m", kind, length)
    reader.end = lambda length: world.budgets.end_frame("m", length)
    chunk = wire.encode_bytes(m.Chunk(RUN, "part", "p", RUN, 0, 0, 1, bytes(900 * KIB)), RUN)
    reader.feed(chunk[:100_000])
    assert world.budgets.usage("m").held_bytes == len(chunk) - 4
    reader.abandon()
    assert world.budgets.usage("m").idle
    reader.abandon()
    assert world.budgets.usage("m").idle


# ---------------------------------------------------------------- membership remembers few strangers


def hello(site: str = "x", fingerprint: bytes = RUN, proof: bytes = b"", protocol: int = PROTOCOL_VERSION) -> m.Hello:
    return m.Hello(protocol, b"", fingerprint, "{}", site, True, b"", GENESIS_ROUND, b"", proof)


def membership(admission: Admission | None = None) -> tuple[Membership, list[tuple[str, object]], list[str]]:
    sent: list[tuple[str, object]] = []
    said: list[str] = []
    me = Self("me", "home", True, RUN, {})
    made = Membership(
        me, admission or Admission(), lambda to, message: sent.append((to, message)), 5.0, lambda p, r, text: said.append(text)
    )
    return made, sent, said


def test_refused_strangers_are_forgotten() -> None:
    members, _, said = membership(Admission(secret=b"secret"))
    for number in range(5000):
        assert not members.on_hello(f"s{number}", hello(proof=b"wrong"), 1.0)
        members.greet(f"g{number}", 1.0)
        members.on_refused(f"g{number}", m.Refused("no", True))
        members.on_other_version(f"v{number}", 9, 1.0)
    assert len(members.refused) == len(members.refused_by) == len(members._greeted) == len(members._told_version) == REMEMBERED
    assert members.known == {}
    assert len(said) == 5000  # whoever listens says each once, and few in all
    assert "the join secret was not proved" in said[0]


@pytest.mark.case("C051")
def test_an_open_run_has_room_for_so_many_and_the_silent_give_way() -> None:
    members, sent, _ = membership()
    for number in range(MOST_MEMBERS):
        assert members.on_hello(f"m{number}", hello(f"s{number}"), 1.0)
    assert not members.on_hello("one-more", hello("one-more"), 2.0)
    assert sent[-1][0] == "one-more"
    assert f"net.most_peers is {MOST_MEMBERS}" in sent[-1][1].reason
    assert members.on_hello("m0", hello("s0"), 700.0)
    assert members.on_hello("one-more", hello("one-more"), 700.0)
    assert {"m0", "one-more"} <= set(members.known)
    assert len(members.known) == MOST_MEMBERS


@pytest.mark.parametrize("site", ["", "Upper", "-x", "x" * 33, "a b", "a\nb", "../etc", 'a"} 1\ngeomesh_round'])
def test_a_site_name_that_is_none_is_refused(site: str) -> None:
    members, _, said = membership()
    assert not members.on_hello("s", hello(site), 1.0)
    assert "small letters" in said[0]


@pytest.mark.case("C017")
def test_another_version_is_told_both_numbers_once() -> None:
    members, sent, _ = membership()
    members.greet("other", 1.0)
    for _ in range(50):
        members.on_other_version("other", 99, 2.0)
    told = [message for _, message in sent if isinstance(message, m.Refused)]
    assert len(told) == 1
    assert told[0].final
    assert f"version 99, this peer {PROTOCOL_VERSION}:" in told[0].reason
    assert members.refused_by["other"] == told[0]


def test_a_member_that_comes_back_as_something_else_is_taken_for_that() -> None:
    """Another site name, or an observer now: what it says anew counts, else its heartbeats would be refused for good."""
    members, _, said = membership()
    assert members.on_hello("m", hello("old"), 1.0)
    assert members.on_hello("m", replace(hello("new"), trains=False), 2.0)
    assert (members.site_of("m"), members.known["m"].trains) == ("new", False)
    assert members.on_hello("other", hello("old"), 3.0), "its former name is free"
    assert not said
