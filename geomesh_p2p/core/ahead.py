"""Training ahead (planner.overlap = delayed): the beginning of the next round, while this round's update is on its way.

A plan reserves for each member the first positions of its next assignment (`Assignment.ahead`). Who has handed in its
contribution trains on there, step by step, from where it expects the new anchor (core/outer.py): of the update it knows its own
part, and guesses the rest. That is nearer to the anchor than its own weights are (Kale et al. 2025 go by their own part alone).
When the update comes, at the next step's end,

    weights = new anchor + (weights - the anchor that was expected)

and the next plan lets the same member, with the same batch, begin with the same positions: what is done of them counts as the
first steps of that round. Nothing else changes: a contribution is made after its plan and against its base. Whoever is not a
member of the next round, or gets other positions or another batch, drops what it trained ahead; those positions were never
credited and are handed out like any others.
"""

from __future__ import annotations

from dataclasses import replace

from geomesh_p2p.core.log import first_positions, joined, later_positions
from geomesh_p2p.core.ports import InnerResult
from geomesh_p2p.core.types import Assignment, Plan


def steps_ahead(plan: Plan, mine: Assignment, done: int) -> tuple[Plan, Assignment]:
    """What is left to train ahead of `mine` after `done` steps, as an assignment of the round that follows `plan`: for the
    learning rate that round is taken to be as long as this one."""
    count = mine.ahead_steps - done
    following = replace(plan, round=plan.round + 1, committed_tokens=plan.committed_tokens + plan.planned_tokens)
    ranges = later_positions(mine.ahead, done * mine.batch)
    return _stretch(following, mine.inner_steps, done, count), replace(
        mine, inner_steps=count, last_batch=mine.batch, ranges=ranges, ahead=()
    )


def steps_left(plan: Plan, mine: Assignment, done: int) -> tuple[Plan, Assignment]:
    """What is left of `mine` after its first `done` steps."""
    if done == 0:
        return plan, mine
    count = mine.inner_steps - done
    ranges = later_positions(mine.ranges, done * mine.batch)
    return _stretch(plan, mine.inner_steps, done, count), replace(mine, inner_steps=count, ranges=ranges)


def _stretch(plan: Plan, steps: int, done: int, count: int) -> Plan:
    """`plan` as if `count` of `steps` steps after the first `done` were all of the round: their learning rates are the same."""
    before, tokens = round(plan.planned_tokens * done / steps), round(plan.planned_tokens * count / steps)
    return replace(plan, committed_tokens=plan.committed_tokens + before, planned_tokens=tokens)


def goes_on(before: Assignment, done: int, mine: Assignment) -> bool:
    """Whether `done` steps ahead of `before` are the first ones of `mine`, and not all of them."""
    positions = done * before.batch
    given = first_positions(mine.ranges, positions)
    return mine.batch == before.batch and done < mine.inner_steps and joined(given) == joined(
        first_positions(before.ahead, positions)
    )


def together(first: InnerResult | None, then: InnerResult) -> InnerResult:
    """One run of inner steps after the other, as one."""
    if first is None:
        return then
    taken = first.steps - first.skipped_steps, then.steps - then.skipped_steps
    return InnerResult(
        tokens=first.tokens + then.tokens,
        ranges=joined(first.ranges, then.ranges),
        steps=first.steps + then.steps,
        loss=(first.loss * taken[0] + then.loss * taken[1]) / max(1, sum(taken)),
        seconds=first.seconds + then.seconds,
        data_wait_seconds=first.data_wait_seconds + then.data_wait_seconds,
        step_seconds=first.step_seconds + then.step_seconds,
        skipped_steps=first.skipped_steps + then.skipped_steps,
        overrun_seconds=then.overrun_seconds,
        learning_rate=then.learning_rate if then.steps else first.learning_rate,
        stopped=then.stopped if then.steps or not first.tokens else "",
    )
