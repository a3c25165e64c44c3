"""Why a plan is as it is: one short sentence per number, and one per wish that could not be met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from geomesh_p2p.config import PlannerSection
from geomesh_p2p.core.forecast import Exchange, StepTimes
from geomesh_p2p.core.search import IDLE_AIM, TOKEN_SLACKS, Schedule, Work
from geomesh_p2p.core.types import Plan, Range
from geomesh_p2p.core.windows import Limits, knee

LOST = "was lost to the attempt before"
MORE_STEPS = "raise it, or lower planner.round_tokens"

Kept = Literal["nothing", "batch", "steps"]


def member(times: StepTimes, work: Work, schedule: Schedule, limits: Limits, kept: Kept) -> tuple[str, ...]:
    """Batch and steps of one member of a planned round."""
    return _batch(times, work, schedule, limits, kept), _steps(times, work, schedule, limits, kept)


def _batch(times: StepTimes, work: Work, schedule: Schedule, limits: Limits, kept: Kept) -> str:
    best = knee(times, limits)
    text = f"batch {work.batch} ({work.batch / times.seconds[work.batch]:.4g} sequences/s): "
    if kept != "nothing":
        return text + "as in the last round, no other is worth a change"
    smallest = f"{best}, the smallest with about the best rate"
    if work.batch < min(best - 1, best * 0.8):
        ratio = f" (the most make up to {schedule.high}: planner.max_steps_ratio)" if schedule.low > limits.min_steps else ""
        return text + f"below {smallest}, to make at least {schedule.low} steps in the time{ratio}"
    if work.batch > max(best + 1, best * 1.25):
        limit = ", as many as fit in memory" if work.batch == times.max_batch else ""
        return text + f"above {smallest}, so that at most {schedule.high} steps fill the time{limit}"
    if work.batch == times.max_batch:
        return text + "as many as fit in memory"
    return text + f"near {smallest} ({times.max_batch} fit)"


def _steps(times: StepTimes, work: Work, schedule: Schedule, limits: Limits, kept: Kept) -> str:
    source = f"last round's median, {times.live:.3g} x the profile" if times.reported else "profile"
    last = f", the last of {work.last}" if work.last != work.batch else ""
    text = f"{work.steps} steps of {times.seconds[work.batch]:.4g} s ({source}){last}"
    finish = times.finish(work.batch, work.steps, work.last)
    idle = 1 - finish / schedule.seconds
    if kept == "steps":
        text += f": as in the last round, which leaves {schedule.idle:.1%} idle"
    else:
        text += f": fill {finish:.4g} of {schedule.seconds:.4g} s"
    if idle > 2 * IDLE_AIM:
        at_most = work.steps == schedule.high
        limit = (
            f"{_most_steps(limits)}: {MORE_STEPS}"
            if schedule.high == limits.max_steps
            else f"{limits.steps_ratio:g} x the fewest, planner.max_steps_ratio"
        )
        text += f"; idle {idle:.1%}" + (f": {work.steps} steps are the most allowed ({limit})" if at_most else ": rounding")
    return text


def _most_steps(limits: Limits) -> str:
    return f"planner.max_steps {limits.max_steps:,}"


def configured(settings: PlannerSection) -> tuple[str, ...]:
    return (f"batch and steps as configured (planner.mode = {settings.mode}), as far as memory and budget go",)


def new_member() -> tuple[str, ...]:
    return ("joined at this attempt: fresh positions, and no more steps than the round is long",)


def ahead(steps: int) -> str:
    return f"may begin the next round with {steps} steps while this one's update is on its way (planner.overlap = delayed)"


def again(old: tuple[str, ...]) -> tuple[str, ...]:
    kept = "batch, steps and positions as in the attempt before: nothing is trained twice"
    return (*old, kept) if kept not in old else old


def too_slow(times: StepTimes, schedule: Schedule) -> str:
    needed = schedule.low * times.seconds[1]
    return (
        f"too slow for this round: {schedule.low} steps of one sequence take it {needed:.4g} s, the round trains"
        f" {schedule.seconds:.4g} s (a larger planner.round_tokens or max_steps_ratio would let it in)"
    )


def slow_links(with_seconds: float, without_seconds: float, gain: float) -> str:
    cost = f"a token costs {gain:.1%} less without it"
    return f"its links make the exchange {with_seconds:.4g} s long instead of {without_seconds:.4g} s; {cost}"


def whole_round(
    schedule: Schedule,
    exchange: Exchange,
    limits: Limits,
    settings: PlannerSection,
    sequence_length: int,
    guessed_links: int,
    slowest: str,
    round_tokens: int,
) -> tuple[str, ...]:
    """Length, tokens, idle time, exchange, and every aim that was missed. `slowest`: the way that is far slower than most;
    `round_tokens`: the aim, which may be above the configured one."""
    tokens, wanted = schedule.sequences * sequence_length, limits.sequences * sequence_length
    training = f"{schedule.seconds:.4g} s of training: {tokens:,} tokens"
    idle = f"predicted straggler idle {schedule.idle:.2%} of training"
    if settings.mode != "planned":
        found = [f"{training} as configured", idle]
    else:
        aim = "the rest of the budget" if limits.exact else f"planner.round_tokens {settings.round_tokens:,}"
        if not limits.exact and round_tokens > settings.round_tokens:
            above = f"above planner.round_tokens {settings.round_tokens:,}"
            aim = f"{round_tokens:,} tokens, {above} because the exchange takes long"
        elif not limits.exact and round_tokens < settings.round_tokens:
            aim += f", shortened to {round_tokens:,}: a site that has made {_most_steps(limits)} would wait"
        count = len(schedule.members)
        found = [f"{training} at the speed of {count} site{'s' if count > 1 else ''}; the aim is {aim}"]
        if tokens > wanted:
            found.append(f"{tokens:,} tokens are more than {aim}: each site makes at least {limits.min_steps} steps")
        elif schedule.sequences < (1 - TOKEN_SLACKS[-1]) * limits.sequences:
            found.append(f"{tokens:,} tokens are less than {aim}: steps (at most {schedule.high}) and memory allow no more")
        if schedule.idle > IDLE_AIM:
            idle += f", above the {IDLE_AIM:.1%} aimed at: limits and whole sequences leave no better fit"
            if schedule.high == limits.max_steps and any(work.steps == schedule.high for work in schedule.works):
                idle += f" ({_most_steps(limits)} is one: {MORE_STEPS})"
        found.append(idle)
    text = f"{exchange.topology}, {exchange.seconds:.4g} s from the last finish to the commit"
    if exchange.other_seconds is not None:
        other = "reduce" if exchange.topology == "gather" else "gather"
        text += f"; {other} would take {exchange.other_seconds:.4g} s"
        if exchange.other_seconds < exchange.seconds:
            text += ", too little gain to change"
    found.append(text)
    idle_exchange, subject = float(limits.idle_exchange(exchange.seconds, schedule.seconds)), "the exchange"
    share = idle_exchange / (idle_exchange + schedule.seconds)
    if limits.ahead_share:
        through = "it" if not idle_exchange else f"{exchange.seconds - idle_exchange:.4g} s of it"
        found.append(f"planner.overlap = {settings.overlap}: the next round's first steps are trained through {through}")
        subject = "what is left of the exchange"
    if share > settings.exchange_share and settings.mode == "planned":
        needed = limits.training_for(exchange.seconds, max(settings.exchange_share, 1e-3)) / schedule.seconds * tokens
        text = f"{subject} takes {share:.1%} of the round, above planner.exchange_share {settings.exchange_share:.1%}: "
        found.append(f"{text}rounds of about {_round_up(needed):,} tokens would meet it{_growth(settings, needed)}")
    else:
        found.append(f"{subject} takes {share:.1%} of the round")
    if slowest:
        found.append(f"slowest way: {slowest}")
    if guessed_links:
        found.append(f"{guessed_links} links are not measured yet: taken as their opposite direction, else as the median link")
    return tuple(found)


def _growth(settings: PlannerSection, needed: float) -> str:
    most = settings.max_round_tokens
    if most is None:
        return " (rounds grow up to planner.max_round_tokens alone)"
    return f", more than planner.max_round_tokens {most:,}" if most < needed else ""


def _round_up(tokens: float) -> int:
    """Three significant digits, upwards: a figure to put into a run file."""
    unit = 10 ** max(0, len(str(int(tokens))) - 3)
    return -(-int(tokens) // unit) * unit


def explain(plan: Plan) -> list[str]:
    """The plan in words: every number with its reason, one line each."""
    lines = [f"round {plan.round}, attempt {plan.attempt}, term {plan.term.number}"]
    lines += [f"  {reason}" for reason in plan.reasons]
    lines.append(f"  close: {_grace(plan)}")
    for a in plan.members:
        lines.append(f"{a.site}: {a.sequences} sequences, done after {a.finish_seconds:.4g} s")
        lines += [f"  {reason}" for reason in a.reasons]
        begun = " after what was reserved for it in the last round" if plan.round > 1 and a.ahead else ""
        lines.append(f"  positions {_positions(a.ranges)}: the lowest not credited, in site order{begun}")
        if a.ahead:
            lines.append(f"  ahead {_positions(a.ahead)}: where its next round begins")
    for a, share in zip(plan.members, plan.shares, strict=False):
        lines.append(f"{a.site} reduces parameters {share.start:,} to {share.stop:,}, by {_shares(plan)}")
    lines += [f"{bystander.site} follows: {bystander.reason}" for bystander in plan.bystanders]
    return lines


def _positions(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{r.start:,} to {r.stop - 1:,}" for r in ranges)


def _grace(plan: Plan) -> str:
    if not plan.may_close:
        return "nobody is closed early, so that the digest depends on the configuration alone"
    late = f"a member later than its predicted finish by {plan.grace_seconds:.4g} s"
    return f"{late} stops at its next step and contributes what it has"


def _shares(plan: Plan) -> str:
    return "the measured links: all parts are to arrive at once" if plan.may_close else "equal parts, as configured"
