"""The round log's bookkeeping, against sets of positions and sets of peers kept the slow way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomesh_p2p.core.canonical import pack, unpack
from geomesh_p2p.core.log import BrokenChain, Credited, LogState, RoundLog, covers, is_quorum, merged, next_voters
from geomesh_p2p.core.types import Contribution, Founding, Range, Update

FOUNDING = Founding(b"f" * 32, b"n" * 16, 0, b"w" * 32, "a")
PEERS = "abcdefghij"

ranges = st.builds(lambda start, length: Range(start, start + length), st.integers(0, 60), st.integers(1, 12))
views = st.lists(st.sampled_from(PEERS), min_size=1, unique=True).map(lambda peers: tuple(sorted(peers)))
some_peers = st.lists(st.sampled_from(PEERS), unique=True).map(lambda peers: tuple(sorted(peers)))


def positions(parts: tuple[Range, ...] | list[Range]) -> set[int]:
    return {p for r in parts for p in range(r.start, r.stop)}


def contribution(log: RoundLog, peer: str, *given_ranges: Range, tokens: int = 100) -> Contribution:
    return Contribution(peer, f"site-{peer}", log.round + 1, log.digest, tokens, given_ranges, b"p" * 32, 3)


def update(log: RoundLog, *contributors: Contribution, voters: tuple[str, ...] = ("a",)) -> Update:
    return Update(log.round + 1, log.digest, "gather", (), contributors, voters, b"b" * 32, 3)


# ---------------------------------------------------------------- ranges


@given(st.lists(ranges, max_size=8))
def test_merged_ranges_hold_the_same_positions_and_do_not_touch(parts: list[Range]) -> None:
    few = merged(parts)
    assert positions(few) == positions(parts)
    assert all(one.stop < other.start for one, other in pairwise(few))


@given(st.lists(ranges, max_size=6), st.lists(ranges, max_size=4))
def test_covers_is_the_subset_relation(outer: list[Range], inner: list[Range]) -> None:
    assert covers(outer, inner) == (positions(inner) <= positions(outer))


@given(st.lists(ranges, max_size=12))
def test_no_position_is_credited_twice(parts: list[Range]) -> None:
    credited, known = Credited(), set()
    for r in parts:
        twice = credited.overlap(r)
        assert (twice is not None) == bool(known & positions([r]))
        if twice is None:
            credited.add(r)
            known |= positions([r])
        else:
            assert positions([twice]) <= known & positions([r])
            with pytest.raises(ValueError, match="already"):
                credited.add(r)
        assert positions(credited.ranges) == known
        assert credited.ranges == merged(credited.ranges)


@pytest.mark.parametrize("bad", [Range(3, 3), Range(5, 2), Range(-1, 4)])
def test_ranges_that_are_none_are_refused(bad: Range) -> None:
    with pytest.raises(ValueError, match="not a range"):
        Credited().add(bad)


@given(st.lists(ranges, max_size=6), st.lists(ranges, max_size=4), st.integers(0, 50))
def test_the_next_ranges_are_the_lowest_free_positions(done: list[Range], taken: list[Range], count: int) -> None:
    log = RoundLog(LogState(b"run", 0, b"base", ("a",), merged(done), 0))
    handed = log.next_ranges(count, taken)
    free = [p for p in range(500) if p not in positions(done) | positions(taken)]
    assert sorted(positions(handed)) == free[:count]
    assert sum(map(len, handed)) == count
    assert handed == merged(handed)


@pytest.mark.case("C039")
def test_a_lost_range_is_handed_out_again_once() -> None:
    log = RoundLog.founded(FOUNDING)
    first, second = log.next_ranges(10), log.next_ranges(6, log.next_ranges(10))
    assert (first, second) == ((Range(0, 10),), (Range(10, 16),))
    log.append(update(log, contribution(log, "b", *second)))  # the peer that had the first range was lost
    assert log.next_ranges(14) == (Range(0, 10), Range(16, 20))
    log.append(update(log, contribution(log, "b", Range(0, 10), Range(16, 20))))
    assert log.next_ranges(3) == (Range(20, 23),)
    assert log.credited == (Range(0, 20),)


# ---------------------------------------------------------------- voters


@given(views, some_peers, some_peers)
def test_two_quorums_of_one_view_share_a_voter(view: tuple[str, ...], one: tuple[str, ...], other: tuple[str, ...]) -> None:
    if is_quorum(one, view) and is_quorum(other, view):
        assert set(one) & set(other) & set(view)


@given(views, some_peers)
def test_either_the_present_or_the_absent_are_a_quorum(view: tuple[str, ...], present: tuple[str, ...]) -> None:
    assert is_quorum(present, view) != is_quorum(set(view) - set(present), view)


def test_exactly_half_counts_with_the_lowest_id() -> None:
    assert is_quorum(["a", "b"], ["a", "b", "c", "d"])
    assert not is_quorum(["c", "d", "x", "y"], ["a", "b", "c", "d"])
    assert is_quorum(["a"], ["b", "a"])
    assert not is_quorum(["b"], ["a", "b"])
    assert not is_quorum(["a"], ["a", "b", "c"])
    assert not is_quorum([], [])


@given(views, views, some_peers, st.integers(1, 3))
def test_newcomers_are_contributors_and_never_more_than_the_voters_before(
    view: tuple[str, ...], members: tuple[str, ...], contributors: tuple[str, ...], round: int
) -> None:
    voters = next_voters(view, members, contributors, round)
    newcomers = [peer for peer in voters if peer not in view]
    assert [peer for peer in voters if peer in view] == [peer for peer in members if peer in view]
    assert set(newcomers) <= set(contributors) & set(members)
    eligible = [peer for peer in members if peer in contributors and peer not in view]
    assert newcomers == (eligible if round == 1 else eligible[: len(view)])
    assert list(voters) == [peer for peer in members if peer in voters]


def test_a_member_that_abstains_keeps_its_vote_and_one_that_left_loses_it() -> None:
    assert next_voters(("a", "b", "c"), ("a", "b"), ("b",), 5) == ("a", "b")


def test_a_crowd_of_newcomers_enters_in_site_order_doubling_at_most() -> None:
    members = ("z", "a", "y", "x", "w")  # ordered by site, not by id
    assert next_voters(("a",), members, members, 7) == ("z", "a")
    assert next_voters(("a",), members, members, 1) == members


# ---------------------------------------------------------------- the chain


def test_a_log_grows_round_by_round_and_remembers() -> None:
    log = RoundLog.founded(FOUNDING)
    assert (log.round, log.digest, log.voters, log.tokens) == (0, FOUNDING.base, ("a",), 0)
    first = update(log, contribution(log, "a", Range(0, 4)), contribution(log, "b", Range(4, 9), tokens=7), voters=("a", "b"))
    log.append(first)
    assert log.sites == {"a": "site-a", "b": "site-b"}
    second = update(log, voters=("b",))
    log.append(second)
    assert (log.round, log.digest, log.voters, log.tokens) == (2, second.digest, ("b",), 107)
    assert [log.digest_of(round) for round in range(4)] == [FOUNDING.base, first.digest, second.digest, None]
    assert log.credited == (Range(0, 9),)


def test_a_log_goes_on_from_its_state_as_if_it_had_never_stopped() -> None:
    log = RoundLog.founded(FOUNDING)
    log.append(update(log, contribution(log, "a", Range(0, 4), Range(8, 12)), voters=("a", "b")))
    restored = RoundLog(unpack(LogState, pack(log.state)))
    assert restored.state == log.state
    assert restored.digest_of(1) == log.digest
    assert restored.digest_of(0) is None
    for each in (log, restored):
        each.append(update(each, contribution(each, "b", Range(4, 8))))
    assert restored.state == log.state
    assert log.credited == (Range(0, 12),)


def broken(log: RoundLog) -> dict[str, tuple[Update, str]]:
    sound = update(log, contribution(log, "a", Range(4, 6)), contribution(log, "b", Range(6, 9)), voters=("a", "b"))
    a, b = sound.contributors
    return {
        "a round skipped": (replace(sound, round=3), "does not follow"),
        "a round again": (replace(sound, round=1), "does not follow"),
        "another base": (replace(sound, base=b"x" * 32), "builds on"),
        "no voters": (replace(sound, voters=()), "voters"),
        "a voter twice": (replace(sound, voters=("a", "a")), "voters"),
        "credited before": (replace(sound, contributors=(replace(a, ranges=(Range(3, 6),)), b)), r"site-a .* \[3, 4\)"),
        "credited twice at once": (replace(sound, contributors=(a, replace(b, ranges=(Range(5, 8),)))), r"site-b .* \[5, 6\)"),
        "not in site order": (replace(sound, contributors=(b, a)), "site order"),
        "a site twice": (replace(sound, contributors=(a, replace(b, site=a.site))), "distinct"),
        "a peer twice": (replace(sound, contributors=(a, replace(b, peer=a.peer))), "distinct"),
        "an abstention": (replace(sound, contributors=(a, replace(b, tokens=0))), "site-b contributes 0 tokens"),
        "a contribution to another round": (replace(sound, contributors=(a, replace(b, round=1))), "for round 1"),
        "a contribution on another base": (replace(sound, contributors=(replace(a, base=b"x"), b)), "site-a"),
        "an empty range": (replace(sound, contributors=(replace(a, ranges=(Range(5, 5),)), b)), "not a range"),
    }


def started() -> RoundLog:
    log = RoundLog.founded(FOUNDING)
    log.append(update(log, contribution(log, "a", Range(0, 4))))
    return log


@pytest.mark.parametrize("fault", broken(started()))
def test_what_does_not_follow_is_refused_and_changes_nothing(fault: str) -> None:
    log = started()
    before = log.state
    wrong, reason = broken(log)[fault]
    with pytest.raises(BrokenChain, match=reason):
        log.append(wrong)
    assert log.state == before
    assert log.digest_of(2) is None
    log.append(update(log, contribution(log, "a", Range(4, 6))))
    assert log.round == 2


def test_digests_depend_on_content_alone() -> None:
    log = started()
    one = update(log, contribution(log, "a", Range(4, 6)))
    renamed = replace(one, contributors=(replace(one.contributors[0], peer="z", validation_nats=3.0),), voters=("z",))
    assert renamed.digest == one.digest
    assert renamed.seal != one.seal
    for changed in (replace(one.contributors[0], tokens=101), replace(one.contributors[0], ranges=(Range(4, 7),))):
        assert replace(one, contributors=(changed,)).digest != one.digest


def test_a_log_remembers_the_newest_rounds_and_guests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weeks of rounds and thousands of guests leave no trace but the state."""
    monkeypatch.setattr("geomesh_p2p.core.log.REMEMBERED_ROUNDS", 8)
    monkeypatch.setattr("geomesh_p2p.core.log.REMEMBERED_SITES", 3)
    log, digests = RoundLog.founded(FOUNDING), {}
    for round in range(1, 31):
        peers = ("a", f"g{round:02}")
        mine, guest = (contribution(log, peer, Range(2 * round + k, 2 * round + k + 1)) for k, peer in enumerate(peers))
        log.append(update(log, mine, guest))
        digests[round] = log.digest
    assert [round for round in range(31) if log.digest_of(round) is not None] == list(range(23, 31))
    assert all(log.digest_of(round) == digests[round] for round in range(23, 31))
    assert set(log.sites) == {"a", "g29", "g30"}
