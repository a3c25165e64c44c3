"""What a member may say: figures and contributions out of these bounds are refused, and the member named.

Every rule reads one message and what all members have alike (the plan), so all who hear the same refuse the same. Whoever
refuses what another accepted loses an attempt by it, never a committed round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from geomesh_p2p.core.anchors import well_formed
from geomesh_p2p.core.forecast import LARGEST_BATCH
from geomesh_p2p.core.log import covers, merged
from geomesh_p2p.core.messages import Heartbeat
from geomesh_p2p.core.types import Assignment, Contribution, Link, PeerId, Plan, Profile, Range, Term

SECONDS_A_STEP = (1e-6, 1e5)
CURVE_POINTS = 256
BYTES_A_SECOND = (1.0, 1e13)
LONGEST_RTT_SECONDS = 600.0
REASON_CHARACTERS = 500
VALIDATION_TOKENS = 2**40
NATS_A_TOKEN = 1e4
LONGEST_SECONDS = 1e7
MOST_STEPS = 1_000_000
TERMS_AHEAD = 2**32
"""A term further ahead than this of the highest heard is refused: elections do not get there in a century."""
TIMES_THE_MEDIAN = 100.0
"""A member's delta is at most this many times as large, tensor by tensor, as that of the median member (three or more)."""
TIMES_OWN = 1000.0
"""A reducer's answer is at most this many times as large, tensor by tensor, as the receiver's own delta."""


# ---------------------------------------------------------------- heartbeats: what the planner is given


def figures_fault(sender: PeerId, beat: Heartbeat) -> str:
    """The first figure of a heartbeat that cannot be, in words; empty if all can."""
    if beat.profile is not None and (fault := _profile_fault(sender, beat.site, beat.profile)):
        return fault
    if not _step_fits(beat):
        return f"that {beat.step_batch} sequences took {beat.step_seconds:g} s a step"
    for link in beat.links:
        if not _link_fits(sender, link):
            return f"that a link has {link.bytes_per_second:g} bytes/s and {link.rtt_seconds:g} s round trip"
    return ""


def plausible(sender: PeerId, beat: Heartbeat) -> Heartbeat:
    """`beat` with nothing in it that the planner could not take: without the profile, step or links that cannot be."""
    profile = beat.profile
    if profile is not None and _profile_fault(sender, beat.site, profile):
        profile = None
    links = tuple(link for link in beat.links if _link_fits(sender, link))
    step = (beat.step_batch, beat.step_seconds) if _step_fits(beat) else (0, 0.0)
    return replace(beat, profile=profile, links=links, step_batch=step[0], step_seconds=step[1])


def _profile_fault(sender: PeerId, site: str, profile: Profile) -> str:
    if (profile.peer, profile.site) != (sender, site):
        return f"that the profile of {profile.site!r} is its own"
    if not 1 <= len(profile.curve) <= CURVE_POINTS:
        return f"{len(profile.curve)} points of its profile"
    low, high = SECONDS_A_STEP
    for point in profile.curve:
        if not 1 <= point.batch <= LARGEST_BATCH or not low <= point.seconds <= high:
            return f"that {point.batch} sequences take {point.seconds:g} s a step"
    batches = [point.batch for point in profile.curve]
    return "" if batches == sorted(set(batches)) else "batches of its profile in no order"


def _step_fits(beat: Heartbeat) -> bool:
    low, high = SECONDS_A_STEP
    return beat.step_batch == 0 or (1 <= beat.step_batch <= LARGEST_BATCH and low <= beat.step_seconds <= high)


def _link_fits(sender: PeerId, link: Link) -> bool:
    """A rate of 0 says that none has been measured yet."""
    (low, high), rate = BYTES_A_SECOND, link.bytes_per_second
    return link.source == sender and (rate == 0 or low <= rate <= high) and 0 <= link.rtt_seconds <= LONGEST_RTT_SECONDS


# ---------------------------------------------------------------- contributions


def contribution_fault(plan: Plan, sender: PeerId, contribution: Contribution) -> str:
    """Why this is no contribution of `sender`'s to `plan`, in words; empty if it is one. Ranges in the log never overlap, so
    they must not here, and lie within those given; and so many positions have only so many tokens."""
    c, given = contribution, plan.of(sender)
    if given is None or (c.peer, c.site) != (sender, given.site):
        return "a contribution in another's name"
    if (c.round, c.base) != (plan.round, plan.base):
        return f"a contribution to round {c.round}"
    if c.tokens < 0 or c.payload_bytes < 0 or len(c.reason) > REASON_CHARACTERS:
        return f"a contribution of {c.tokens} tokens and {c.payload_bytes} bytes"
    if not (0 <= c.validation_tokens <= VALIDATION_TOKENS) or c.validation_nats < 0:
        return f"a validation of {c.validation_nats:g} nats over {c.validation_tokens} tokens"
    if not well_formed(c):
        return "hashes that are none"
    if c.abstains:
        return "ranges and bytes without tokens" if c.ranges or c.payload_bytes else ""
    return _ranges_fault(plan, given, c)


def _ranges_fault(plan: Plan, given: Assignment, c: Contribution) -> str:
    if any(not 0 <= r.start < r.stop for r in c.ranges) or not covers(given.ranges, c.ranges):
        return "positions that the plan does not give it"
    positions = sum(r.stop - r.start for r in c.ranges)
    if positions != sum(r.stop - r.start for r in merged(c.ranges)):
        return "positions that it counts twice"
    sequences = sum(member.sequences for member in plan.members)
    most = positions * plan.planned_tokens
    if c.tokens * sequences > most:
        return f"{c.tokens} tokens in {positions} sequences, which hold {most // max(1, sequences)}"
    return ""


def magnitude_fault(own: Sequence[float], all_members: Sequence[Sequence[float]]) -> str:
    """Why a delta is too large to be meant: `own` are its sizes (all means of |x|, or all maxima), tensor by tensor,
    `all_members` those of every contributor, itself included. With fewer than three nobody can say who is odd."""
    if len(all_members) < 3:
        return ""
    for tensor, mine in enumerate(own):
        typical = median_low([magnitudes[tensor] for magnitudes in all_members])
        if typical > 0 and mine > TIMES_THE_MEDIAN * typical:
            return f"{mine / typical:.0f} times the others' magnitude in tensor {tensor}: at most {TIMES_THE_MEDIAN:g} times"
    return ""


def part_fault(part: Sequence[float], own: Sequence[float]) -> str:
    """As `magnitude_fault`, for a reducer's answer beside the receiver's own contribution."""
    for tensor, (said, mine) in enumerate(zip(part, own, strict=True)):
        if mine > 0 and said > TIMES_OWN * mine:
            return f"a mean that is {said / mine:.0f} times this peer's own in tensor {tensor}: at most {TIMES_OWN:g} times"
    return ""


# ---------------------------------------------------------------- plans


def _positions(ranges: Sequence[Range]) -> int:
    return sum(r.stop - r.start for r in ranges)


def plan_fault(plan: Plan) -> str:
    """Why a plan cannot be carried out by anybody, in words; empty if it can as far as its own figures say."""
    if plan.attempt < 1 or plan.planned_tokens < 0 or plan.committed_tokens < 0:
        return f"attempt {plan.attempt}, {plan.planned_tokens} tokens"
    if not all(0 <= s <= LONGEST_SECONDS for s in (plan.train_seconds, plan.exchange_seconds, plan.grace_seconds)):
        return f"{plan.train_seconds:g} s of training, {plan.exchange_seconds:g} s of exchange"
    sites = [member.site for member in plan.members]
    if not sites or sites != sorted(set(sites)) or len(set(plan.peers)) != len(sites):
        return "members that are not distinct and in site order"
    for member in plan.members:
        if not (1 <= member.batch <= LARGEST_BATCH and 1 <= member.last_batch <= member.batch):
            return f"a batch of {member.batch} for {member.site}"
        if not (1 <= member.inner_steps <= MOST_STEPS and 0 <= member.finish_seconds <= LONGEST_SECONDS):
            return f"{member.inner_steps} steps in {member.finish_seconds:g} s for {member.site}"
        if not 0 < member.lr_scale <= 1e3:
            return f"a learning rate scale of {member.lr_scale:g} for {member.site}"
        if _positions(member.ahead) != member.ahead_steps * member.batch or member.ahead_steps >= member.inner_steps:
            return f"{_positions(member.ahead)} positions ahead for {member.site}, which has {member.inner_steps} steps"
    ranges = [r for member in plan.members for r in (*member.ranges, *member.ahead)]
    if any(not 0 <= r.start < r.stop for r in ranges):
        return "positions that are none"
    if _positions(ranges) != _positions(merged(ranges)):
        return "positions given to two members"
    if (plan.topology == "reduce") != bool(plan.shares) or (plan.shares and len(plan.shares) != len(sites)):
        return f"{len(plan.shares)} shares for {len(sites)} members"
    return ""


# ---------------------------------------------------------------- terms


def term_fits(term: Term, highest: Term) -> bool:
    return 0 <= term.number <= highest.number + TERMS_AHEAD
