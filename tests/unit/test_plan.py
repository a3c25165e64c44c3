"""Plans: what must hold of each, what a change of speed, links or members does, and that they give their reasons."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomesh_p2p.config import InnerSection, PlannerSection
from geomesh_p2p.core.canonical import pack
from geomesh_p2p.core.forecast import Volume
from geomesh_p2p.core.log import is_quorum, merged
from geomesh_p2p.core.plan import PlanInputs, Sites, Slot, WorkLeft, hand_out, plan_round, replan_attempt, without
from geomesh_p2p.core.reasons import explain
from geomesh_p2p.core.types import BatchTime, Link, Plan, Profile, Range, StepReport, Term

INNER = InnerSection(reference_batch=8)
SEQUENCE_LENGTH = 128
VOLUME = Volume(1_000_000, 125_500, 125_500)
ENDLESS = Range(0, 2**60)


def profile(site: str, fixed: float, each: float, largest: int) -> Profile:
    points = sorted({1, max(1, largest // 2), largest})
    return Profile(f"id-{site}", site, "emulated", tuple(BatchTime(b, fixed + b * each) for b in points))


def paper() -> tuple[Profile, ...]:
    """Speeds 4 : 2 : 1.1 : 1 and unequal batch limits."""
    return tuple(
        profile(site, 0.02 / speed, 0.04 / speed, largest)
        for site, speed, largest in (("h100", 4.0, 32), ("a100", 2.0, 32), ("l40s", 1.1, 20), ("rtx", 1.0, 14))
    )


def full_links(profiles: tuple[Profile, ...], rtt_seconds: float = 0.05, bytes_per_second: float = 5e6) -> tuple[Link, ...]:
    return tuple(Link(a.peer, b.peer, rtt_seconds, bytes_per_second) for a in profiles for b in profiles if a is not b)


def inputs(
    profiles: tuple[Profile, ...],
    previous: Plan | None = None,
    budget_tokens: int | None = None,
    round: int = 7,
    **sites: object,
) -> PlanInputs:
    known = Sites(profiles, **{"links": full_links(profiles), **sites})  # type: ignore[arg-type]
    work = WorkLeft(VOLUME, SEQUENCE_LENGTH, (ENDLESS,), 1000, budget_tokens)
    return PlanInputs(Slot(b"run", round, Term(3, "id-h100"), 1, b"base"), known, work, previous)


def idle(plan: Plan) -> float:
    return sum(plan.train_seconds - a.finish_seconds for a in plan.members) / (plan.train_seconds * len(plan.members))


def reports(plan: Plan, profiles: tuple[Profile, ...], factors: dict[str, float]) -> tuple[StepReport, ...]:
    """What the members report after `plan` if their steps take `factors` times what their profiles say."""
    curves = {p.peer: p.curve for p in profiles}
    found = []
    for a in plan.members:
        low, high = curves[a.peer][0], curves[a.peer][-1]
        each = (high.seconds - low.seconds) / max(1, high.batch - low.batch)
        seconds = low.seconds + (a.batch - low.batch) * each
        found.append(StepReport(a.peer, a.batch, seconds * factors.get(a.site, 1.0)))
    return tuple(found)


def check(plan: Plan, given: PlanInputs, section: PlannerSection) -> None:
    """What holds of every plan."""
    limits = {p.peer: p.max_batch for p in given.sites.profiles}
    assert [a.site for a in plan.members] == sorted(a.site for a in plan.members)
    assert len({a.site for a in plan.members} | {b.site for b in plan.bystanders}) == len(given.sites.profiles)
    for a in plan.members:
        assert 1 <= a.last_batch <= a.batch <= limits[a.peer]
        assert sum(len(r) for r in a.ranges) == a.sequences > 0
        assert 0.5 <= a.lr_scale <= 2.0
        assert 0 < a.finish_seconds <= plan.train_seconds
        assert len(a.reasons) >= 2
        assert all(a.reasons)
    steps = [a.inner_steps for a in plan.members]
    if section.mode == "planned":
        assert section.min_steps <= min(steps)
        assert max(steps) <= min(section.max_steps, section.max_steps_ratio * min(steps))
    ranges = [r for a in plan.members for r in a.ranges]
    assert sum(len(r) for r in merged(ranges)) == sum(len(r) for r in ranges)
    assert plan.planned_tokens == sum(a.sequences for a in plan.members) * given.work.sequence_length
    if plan.topology == "reduce":
        assert len(plan.shares) == len(plan.members)
        assert [s.start for s in plan.shares] == [0, *(s.stop for s in plan.shares[:-1])]
        assert plan.shares[-1].stop == given.work.volume.parameters
        assert all(s.start % 8 == 0 and s.start <= s.stop for s in plan.shares)
    else:
        assert plan.shares == ()
    assert is_quorum(plan.peers, given.sites.view) or not is_quorum(limits, given.sites.view)
    assert plan.grace_seconds == pytest.approx(section.grace_seconds + 0.2 * plan.train_seconds)
    pack(plan)  # plain numbers only


# ---------------------------------------------------------------- acceptance


@pytest.mark.parametrize("round_tokens", [16_384, 32_768, 65_536, 131_072, 1_000_000])
def test_the_papers_speeds_are_evened_out(round_tokens: int) -> None:
    given, section = inputs(paper()), PlannerSection(round_tokens=round_tokens)
    planned = plan_round(given, section, INNER)
    check(planned, given, section)
    assert len(planned.members) == 4
    assert idle(planned) <= 0.005
    assert 0.9 * round_tokens <= planned.planned_tokens <= round_tokens
    uniform = plan_round(given, PlannerSection(mode="uniform"), INNER)
    assert idle(uniform) >= 8 * max(idle(planned), 0.005)


# ---------------------------------------------------------------- every plan

speeds = st.tuples(st.sampled_from([0.0, 0.1, 0.5]), st.floats(0.01, 1.0), st.integers(1, 64))


@settings(max_examples=40)
@given(
    st.lists(speeds, min_size=1, max_size=6),
    st.integers(2, 4000),
    st.integers(1, 10),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.sampled_from(["planned", "uniform", "fixed"]),
    st.sampled_from(["auto", "gather", "reduce"]),
    st.randoms(use_true_random=False),
)
def test_what_holds_of_every_plan(
    sites: list[tuple[float, float, int]],
    sequences: int,
    min_steps: int,
    ratio: float,
    mode: str,
    topology: str,
    draw: random.Random,
) -> None:
    profiles = tuple(profile(f"s{k}", *site) for k, site in enumerate(sites))
    view = tuple(p.peer for p in profiles if draw.random() < 0.7)
    links = tuple(
        replace(link, bytes_per_second=draw.uniform(1e4, 1e8)) for link in full_links(profiles) if draw.random() < 0.8
    )
    given = inputs(profiles, view=view, links=links, min_members=draw.randint(1, len(profiles)))
    section = PlannerSection(
        mode=mode,  # type: ignore[arg-type]
        topology=topology,  # type: ignore[arg-type]
        round_tokens=sequences * SEQUENCE_LENGTH,
        min_steps=min_steps,
        max_steps_ratio=ratio,
    )
    plan = plan_round(given, section, INNER)
    check(plan, given, section)
    assert len(plan.members) >= given.sites.min_members

    shuffled = replace(
        given,
        sites=replace(
            given.sites, profiles=tuple(draw.sample(profiles, len(profiles))), links=tuple(draw.sample(links, len(links)))
        ),
    )
    assert plan_round(shuffled, section, INNER) == plan

    # A member is lost, or somebody joins: the round goes on with the same work.
    later = replace(given, slot=replace(given.slot, attempt=2), previous=plan)
    lost = draw.choice(plan.members).peer
    fewer = (*(p for p in profiles if p.peer != lost), profile("s-new", 0.1, 0.2, 8))
    again = replan_attempt(replace(later, sites=replace(given.sites, profiles=fewer, view=())), section, INNER)
    old = {a.peer: a for a in plan.members}
    assert set(again.peers) == {p.peer for p in fewer}
    for a in again.members:
        if a.peer in old:
            kept = old[a.peer]
            assert (a.batch, a.inner_steps, a.last_batch, a.ranges) == (
                kept.batch,
                kept.inner_steps,
                kept.last_batch,
                kept.ranges,
            )
    ranges = [r for a in again.members for r in a.ranges]
    assert sum(len(r) for r in merged(ranges)) == sum(len(r) for r in ranges)


def test_ranges_are_the_lowest_positions_in_site_order() -> None:
    given = inputs(paper())
    given = replace(given, work=replace(given.work, next_positions=(Range(500, 10_000), Range(10, 30), Range(30, 40))))
    plan = plan_round(given, PlannerSection(), INNER)
    assert plan.members[0].ranges == (Range(10, 40), Range(500, 500 + plan.members[0].sequences - 30))
    for a, b in itertools.pairwise(plan.members):
        assert b.ranges[0].start == a.ranges[-1].stop
    with pytest.raises(ValueError, match="next_positions"):
        plan_round(replace(given, work=replace(given.work, next_positions=(Range(0, 20),))), PlannerSection(), INNER)


def test_positions_are_handed_out_once() -> None:
    assert hand_out([3, 0, 4], [Range(5, 7), Range(0, 1), Range(9, 20)]) == [(Range(0, 1), Range(5, 7)), (), (Range(9, 13),)]
    assert without([Range(0, 10), Range(20, 30)], [Range(2, 4), Range(8, 22), Range(29, 40)]) == (
        Range(0, 2),
        Range(4, 8),
        Range(22, 29),
    )


# ---------------------------------------------------------------- following live figures


@pytest.mark.parametrize("site", ["h100", "a100", "l40s", "rtx"])
def test_a_site_that_halves_its_speed_is_followed_within_one_round(site: str) -> None:
    profiles, section = paper(), PlannerSection()
    before = plan_round(inputs(profiles), section, INNER)
    live = reports(before, profiles, {site: 2.0})
    after = plan_round(inputs(profiles, before, reports=live), section, INNER)
    true = {a.site: a.finish_seconds for a in after.members}
    assert max(true.values()) - min(true.values()) <= 0.02 * after.train_seconds
    assert idle(after) <= 0.005
    old, new = (next(a for a in plan.members if a.site == site) for plan in (before, after))
    assert new.sequences / after.planned_tokens < 0.7 * old.sequences / before.planned_tokens


def test_noise_changes_nothing_and_small_drift_only_the_steps() -> None:
    profiles, section = paper(), PlannerSection(round_tokens=400_000)
    before = plan_round(inputs(profiles), section, INNER)

    def after(factors: dict[str, float]) -> Plan:
        return plan_round(inputs(profiles, before, reports=reports(before, profiles, factors)), section, INNER)

    def work(plan: Plan, *fields: str) -> list[tuple[object, ...]]:
        return [tuple(getattr(a, field) for field in fields) for a in plan.members]

    noisy = after({"h100": 1.004, "rtx": 0.997})
    assert work(noisy, "batch", "inner_steps", "last_batch") == work(before, "batch", "inner_steps", "last_batch")
    assert any("as in the last round" in reason for a in noisy.members for reason in a.reasons)
    drifted = after({"h100": 1.08})
    assert work(drifted, "batch") == work(before, "batch")
    assert work(drifted, "inner_steps", "last_batch") != work(before, "inner_steps", "last_batch")
    assert idle(drifted) <= 0.005


def test_steps_follow_once_the_old_plan_would_leave_a_percent_idle() -> None:
    profiles, section = paper(), PlannerSection(round_tokens=400_000)
    before = plan_round(inputs(profiles), section, INNER)
    for factor in (1.0, 1.005, 1.01, 1.02, 1.05):
        live = reports(before, profiles, {"rtx": factor})
        assert idle(plan_round(inputs(profiles, before, reports=live), section, INNER)) <= 0.01


def test_a_batch_stays_until_its_sites_speed_changes() -> None:
    profiles, section = paper(), PlannerSection(round_tokens=400_000)
    before = plan_round(inputs(profiles), section, INNER)
    l40s = before.members[2]
    steps, rest = divmod(l40s.sequences, 11)
    assert l40s.batch < 11
    assert rest
    seconds = (steps * (0.02 + 11 * 0.04) + 0.02 + rest * 0.04) / 1.1
    odd = replace(l40s, batch=11, inner_steps=steps + 1, last_batch=rest, finish_seconds=seconds)
    before = replace(before, members=(*before.members[:2], odd, before.members[3]))
    for factor, stays in ((1.0, True), (1.1, True), (0.9, True), (1.3, False), (0.8, False)):
        live = reports(before, profiles, {"l40s": factor})
        after = plan_round(inputs(profiles, before, reports=live), section, INNER).members[2]
        assert after.batch == 11 or not stays, factor
        assert any("as in the last round" in reason for reason in after.reasons) == stays, factor


def test_topology_and_shares_stay_unless_the_gain_is_above_a_tenth() -> None:
    profiles, section = paper(), PlannerSection(topology="reduce")
    links = list(full_links(profiles))
    before = plan_round(inputs(profiles, links=tuple(links)), section, INNER)
    links[0] = replace(links[0], bytes_per_second=links[0].bytes_per_second * 0.97)
    assert plan_round(inputs(profiles, before, links=tuple(links)), section, INNER).shares == before.shares
    pair = {"id-rtx", "id-h100"}
    slow = tuple(replace(x, bytes_per_second=x.bytes_per_second / 5) if {x.source, x.target} == pair else x for x in links)
    after = plan_round(inputs(profiles, before, links=slow), section, INNER)
    a100, h100, l40s, rtx = (len(new) - len(old) for new, old in zip(after.shares, before.shares, strict=True))
    assert max(h100, rtx) < 0 < min(a100, l40s)


# ---------------------------------------------------------------- who takes part


def test_a_site_too_slow_for_the_round_follows_and_is_told_why() -> None:
    profiles = (*paper(), profile("snail", 0.0, 40.0, 8))
    plan = plan_round(inputs(profiles), PlannerSection(), INNER)
    assert [b.site for b in plan.bystanders] == ["snail"]
    assert "too slow" in plan.bystanders[0].reason
    assert idle(plan) <= 0.005


def test_a_quorum_is_kept_however_slow() -> None:
    profiles = (*paper()[:2], profile("snail", 0.0, 40.0, 8), profile("snail2", 0.0, 50.0, 8))
    view = tuple(p.peer for p in profiles)
    given, section = inputs(profiles, view=view), PlannerSection()
    plan = plan_round(given, section, INNER)
    check(plan, given, section)
    assert min(view) == "id-a100"
    assert [a.site for a in plan.members] == ["a100", "h100"]  # half of the view, with its lowest id
    view = tuple(peer for peer in view if peer != "id-a100")
    given = inputs(profiles, view=view)
    plan = plan_round(given, section, INNER)
    check(plan, given, section)
    assert [a.site for a in plan.members] == ["a100", "h100", "snail"]
    everybody = plan_round(inputs(profiles, min_members=4), section, INNER)
    assert len(everybody.members) == 4


def test_a_site_whose_links_cost_more_than_its_work_brings_follows() -> None:
    profiles = paper()
    lame = tuple(
        replace(x, bytes_per_second=2e4) if "id-rtx" in (x.source, x.target) else x for x in full_links(profiles)
    )  # 6 s for a contribution; the round takes 3 s
    plan = plan_round(inputs(profiles, links=lame), PlannerSection(), INNER)
    assert [b.site for b in plan.bystanders] == ["rtx"]
    assert "its links" in plan.bystanders[0].reason
    kept = plan_round(inputs(profiles, links=lame, min_members=4), PlannerSection(), INNER)
    assert len(kept.members) == 4
    assert plan.planned_tokens / (plan.train_seconds + plan.exchange_seconds) > kept.planned_tokens / (
        kept.train_seconds + kept.exchange_seconds
    )
    again = inputs(profiles, links=lame)
    again = replace(again, sites=replace(again.sites, try_again=frozenset({"id-rtx"})))
    assert len(plan_round(again, PlannerSection(), INNER).members) == 3, "which would more than double the round"
    longer = PlannerSection(round_tokens=4 * PlannerSection().round_tokens)
    assert len(plan_round(inputs(profiles, links=lame), longer, INNER).members) == 3
    assert len(plan_round(again, longer, INNER).members) == 4
    # In long rounds the same links do not matter.
    assert len(plan_round(inputs(profiles, links=lame), PlannerSection(round_tokens=4_000_000), INNER).members) == 4


# ---------------------------------------------------------------- what cannot be met is said


def reason(plan: Plan, text: str) -> bool:
    return any(text in reason for reason in plan.reasons)


def test_steps_go_before_tokens_a_round() -> None:
    many = plan_round(inputs(paper()), PlannerSection(round_tokens=1024, min_steps=10), INNER)
    steps = {a.site: a.inner_steps for a in many.members}
    assert len(steps) == 4  # nobody is left out because the aim is small
    assert min(steps.values()) == steps["rtx"] == 10
    assert idle(many) <= 0.02
    assert 80 * 128 <= many.planned_tokens <= 100 * 128
    assert reason(many, "more than planner.round_tokens")
    few = plan_round(inputs(paper()), PlannerSection(round_tokens=10_000_000, max_steps=20), INNER)
    assert max(a.inner_steps for a in few.members) <= 20
    assert reason(few, "less than planner.round_tokens")


def test_a_round_is_no_longer_than_its_steps_unless_the_exchange_is_dearer_than_the_waiting() -> None:
    """A fast site with little memory has made all its steps early: without a shorter round it waits for seven eighths of it."""
    sites = (profile("fast", 0.0, 0.01, 2), profile("slow", 0.0, 0.02, 32))
    section = PlannerSection(round_tokens=1_000 * SEQUENCE_LENGTH, max_steps=100)
    given = inputs(sites, links=full_links(sites, 0.0, 1e9))
    plan = plan_round(given, section, INNER)
    check(plan, given, section)
    assert idle(plan) <= 0.005
    assert 0.97 * 300 * SEQUENCE_LENGTH <= plan.planned_tokens <= 300 * SEQUENCE_LENGTH
    assert reason(plan, "shortened to 38,400: a site that has made planner.max_steps 100 would wait")
    following = plan_round(inputs(sites, plan, links=full_links(sites, 0.0, 1e9)), section, INNER)
    assert [a.inner_steps for a in following.members] == [a.inner_steps for a in plan.members]
    # 15 s of exchange a round: better to wait than to pay it after each 2 s of training.
    dear = plan_round(inputs(sites, links=full_links(sites, 10.0, 1e9), min_members=2), section, INNER)
    assert dear.planned_tokens >= 900 * SEQUENCE_LENGTH
    assert reason(dear, "planner.max_steps 100 is one")
    # The last round trains what is left.
    last = plan_round(inputs(sites, budget_tokens=900 * SEQUENCE_LENGTH, links=full_links(sites, 0.0, 1e9)), section, INNER)
    assert last.planned_tokens == 900 * SEQUENCE_LENGTH


def test_a_batch_away_from_the_best_rate_says_which_steps_it_is_for() -> None:
    """The bound on steps, and where it comes from: not the steps that are planned, nor planner.min_steps."""
    sites = (profile("fast", 0.005, 0.01, 8), profile("slow", 0.04, 0.08, 16))
    section = PlannerSection(round_tokens=512 * SEQUENCE_LENGTH, min_steps=4)
    plan = plan_round(inputs(sites, min_members=2), section, INNER)
    fast, slow = plan.members
    smallest = "the smallest with about the best rate"
    assert fast.inner_steps < 60
    assert f"above 6, {smallest}, so that at most 60 steps fill the time" in fast.reasons[0]
    assert slow.inner_steps > 15
    least = "to make at least 15 steps in the time (the most make up to 60: planner.max_steps_ratio)"
    assert f"below 8, {smallest}, {least}" in slow.reasons[0]


def test_a_round_of_one_site_and_of_several_is_said_as_it_is() -> None:
    assert reason(plan_round(inputs((profile("only", 0.0, 0.01, 8),)), PlannerSection(), INNER), "at the speed of 1 site;")
    assert reason(plan_round(inputs(paper()), PlannerSection(), INNER), "at the speed of 4 sites;")


def test_a_dear_exchange_is_named_with_the_round_that_would_pay_it() -> None:
    plan = plan_round(inputs(paper(), links=full_links(paper(), 0.2, 2e5)), PlannerSection(), INNER)
    (text,) = [reason for reason in plan.reasons if "exchange_share" in reason]
    assert text.endswith("(rounds grow up to planner.max_round_tokens alone)")
    tokens = int(text.split("rounds of about ")[1].split(" tokens")[0].replace(",", ""))
    longer = plan_round(inputs(paper(), links=full_links(paper(), 0.2, 2e5)), PlannerSection(round_tokens=tokens), INNER)
    assert longer.exchange_seconds / (longer.exchange_seconds + longer.train_seconds) == pytest.approx(0.05, rel=0.05)


def test_a_round_is_made_longer_until_its_exchange_is_cheap_as_far_as_it_may_be() -> None:
    dear = full_links(paper(), 0.2, 2e5)
    short = plan_round(inputs(paper(), links=dear), PlannerSection(), INNER)
    allowed = PlannerSection(max_round_tokens=10**8)
    plan = plan_round(inputs(paper(), links=dear), allowed, INNER)
    assert plan.planned_tokens > 2 * short.planned_tokens
    share = plan.exchange_seconds / (plan.exchange_seconds + plan.train_seconds)
    assert 0.045 <= share <= 0.0505
    assert reason(plan, "above planner.round_tokens")
    # Links a little faster or slower are no reason for another length.
    again = plan_round(inputs(paper(), links=full_links(paper(), 0.2, 2.04e5), previous=plan), allowed, INNER)
    assert again.planned_tokens == plan.planned_tokens
    capped = plan_round(inputs(paper(), links=dear), PlannerSection(max_round_tokens=100_000), INNER)
    assert 90_000 < capped.planned_tokens <= 100_000
    assert reason(capped, "would meet it, more than planner.max_round_tokens 100,000")
    cheap = inputs(paper(), links=full_links(paper(), 0.0, 1e12))
    assert plan_round(cheap, allowed, INNER) == plan_round(cheap, PlannerSection(), INNER)


@pytest.mark.parametrize("as_guessed", [2.2e5, 2.4e5, 2.6e5, 4e5])
def test_a_round_planned_for_faster_links_than_there_are_is_planned_anew_and_then_stands(as_guessed: float) -> None:
    allowed = PlannerSection(max_round_tokens=10**8)

    def following(previous: Plan | None, bytes_per_second: float) -> Plan:
        return plan_round(inputs(paper(), previous, links=full_links(paper(), 0.2, bytes_per_second)), allowed, INNER)

    plan = following(following(None, as_guessed), 2e5)
    assert plan.exchange_seconds / (plan.exchange_seconds + plan.train_seconds) <= 0.05 * 1.03
    for bytes_per_second in (1.97e5, 2.03e5, 1.96e5, 2.04e5):
        again = following(plan, bytes_per_second)
        assert again.planned_tokens == plan.planned_tokens
        plan = again


def test_the_last_round_trains_what_the_budget_leaves() -> None:
    plan = plan_round(inputs(paper(), budget_tokens=200 * SEQUENCE_LENGTH + 5), PlannerSection(), INNER)
    assert plan.planned_tokens == 200 * SEQUENCE_LENGTH
    uniform = plan_round(inputs(paper(), budget_tokens=200 * SEQUENCE_LENGTH), PlannerSection(mode="uniform"), INNER)
    assert uniform.planned_tokens == 200 * SEQUENCE_LENGTH
    with pytest.raises(ValueError, match="budget"):
        plan_round(inputs(paper(), budget_tokens=0), PlannerSection(), INNER)


def test_every_site_and_aim_is_explained() -> None:
    profiles = (*paper(), profile("snail", 0.0, 40.0, 8))
    lines = explain(plan_round(inputs(profiles), PlannerSection(topology="reduce"), INNER))
    for word in (
        "h100",
        "a100",
        "l40s",
        "rtx",
        "snail",
        "batch",
        "steps of",
        "learning rate",
        "positions",
        "reduces",
        "idle",
        "close",
    ):
        assert any(word in line for line in lines), word


@pytest.mark.parametrize(("batch", "scale"), [(8, 1.0), (2, 0.5), (18, 1.5), (32, 2.0), (40, 2.0), (1, 0.5)])
def test_the_learning_rate_follows_the_root_of_the_batch(batch: int, scale: float) -> None:
    section = PlannerSection(mode="fixed", fixed={"h100": (batch, 5)})
    profiles = (profile("h100", 0.0, 0.1, 64),)
    assert plan_round(inputs(profiles), section, INNER).members[0].lr_scale == scale
    as_given = INNER.model_copy(update={"scale_learning_rate": "none"})
    assert plan_round(inputs(profiles), section, as_given).members[0].lr_scale == 1.0


# ---------------------------------------------------------------- modes that depend on the configuration alone


@pytest.mark.parametrize("topology", ["auto", "gather", "reduce"])
@pytest.mark.parametrize("mode", ["uniform", "fixed"])
def test_measured_figures_do_not_touch_configured_rounds(mode: str, topology: str) -> None:
    section = PlannerSection(mode=mode, topology=topology, fixed={"rtx": (4, 7)})  # type: ignore[arg-type]
    first = plan_round(inputs(paper()), section, INNER)
    slower = tuple(
        replace(p, curve=tuple(replace(c, seconds=c.seconds * (k + 1)) for c in p.curve)) for k, p in enumerate(paper())
    )
    links = full_links(paper())[3:7]
    second = plan_round(inputs(slower, first, links=links, reports=reports(first, slower, {"rtx": 9.0})), section, INNER)

    def decided(plan: Plan) -> object:
        return (
            plan.topology,
            plan.shares,
            [(a.site, a.batch, a.inner_steps, a.last_batch, a.ranges, a.lr_scale) for a in plan.members],
        )

    assert decided(first) == decided(second)
    assert first.topology == ("reduce" if topology == "reduce" else "gather")
    assert not first.may_close
    assert first.bystanders == second.bystanders == ()
    rtx = next(a for a in first.members if a.site == "rtx")
    assert (rtx.batch, rtx.inner_steps) == ((4, 7) if mode == "fixed" else (8, 20))
    if first.shares:
        assert max(len(s) for s in first.shares) - min(len(s) for s in first.shares) <= 4 * 4096


def test_configured_batches_stay_within_memory() -> None:
    profiles = (*paper(), profile("tiny", 0.0, 0.1, 3))
    uniform = plan_round(inputs(profiles), PlannerSection(mode="uniform"), INNER)
    assert {a.batch for a in uniform.members} == {3}
    fixed = plan_round(inputs(profiles), PlannerSection(mode="fixed"), INNER)
    assert {a.site: a.batch for a in fixed.members} == {"tiny": 3, "h100": 8, "a100": 8, "l40s": 8, "rtx": 8}


# ---------------------------------------------------------------- a further attempt


def test_a_further_attempt_keeps_the_work_and_recomputes_the_exchange() -> None:
    profiles, section = paper(), PlannerSection(topology="reduce")
    first = plan_round(inputs(profiles), section, INNER)
    joined = profile("new", 0.02, 0.04, 16)
    members = (*(p for p in profiles if p.site != "a100"), joined)
    given = inputs(members, first)
    second = replan_attempt(replace(given, slot=replace(given.slot, attempt=2)), section, INNER)
    assert [a.site for a in second.members] == ["h100", "l40s", "new", "rtx"]
    assert (second.round, second.base, second.attempt) == (first.round, first.base, 2)
    assert len(second.shares) == 4
    assert second.shares[-1].stop == VOLUME.parameters
    new = second.of(joined.peer)
    assert new is not None
    assert new.finish_seconds <= first.train_seconds
    # What the lost member was to train is free again; what the others train is not.
    lost = first.of("id-a100")
    assert lost is not None
    assert new.ranges[0].start == lost.ranges[0].start
    assert [b.site for b in second.bystanders] == ["a100"]


def test_a_further_attempt_needs_the_one_before() -> None:
    profiles, section = paper(), PlannerSection()
    first = plan_round(inputs(profiles), section, INNER)
    given = inputs(profiles, first)
    with pytest.raises(ValueError, match="does not follow"):
        replan_attempt(given, section, INNER)
    with pytest.raises(ValueError, match="same round"):
        replan_attempt(inputs(profiles, first, round=8), section, INNER)
    later = replace(given, slot=replace(given.slot, term=Term(4, "id-rtx"), attempt=1))
    assert replan_attempt(later, section, INNER).term == Term(4, "id-rtx")
