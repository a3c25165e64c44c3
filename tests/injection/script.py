"""A fault script: what is to go wrong, where and when, as data; and the count of what really went wrong.

A script is a table of rows `At(who, phase, round) -> Fault`. A driver (over virtual time, or over real processes) tells it of
every Moment that it sees, does the faults which `due` answers with, and says `happened` when it has seen a fault's effect by
other means than its own doing. Nothing here knows of either driver.

    script = Script([(At("leader", "in_commit", round=3, step=1), Fault("kill", seconds=2.0))])
    for strike in script.due(Moment("a", ("leader",), 3, "in_commit", step=1)):
        ...  # kill it; then, when its process is seen to be gone:
        script.happened(strike)
    script.prove()  # NotFired if a row has had no effect

Clocks that jump: all limits of the protocol are differences of a monotonic clock, so a jump of the time of day can only show
in time stamps of logs and in records that expire. A driver does it all the same (`clock_jump`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tests.injection.proof import fired, injecting

Phase = Literal[
    "before_plan",       # a leader is about to plan the round
    "after_plan",        # this peer has accepted the round's plan (a leader: and sent it)
    "training",          # `step`: inner steps done
    "exchange",          # `step`: chunks handed to the network; now comes the next one
    "before_held",       # the whole update is here, and not yet on disk
    "before_commit",     # a leader: a quorum holds it, no commit is sent yet; another: the commit is here, and not on disk
    "in_commit",         # `step`: commits that this leader has sent
    "saving",            # a snapshot is being written
    "joining",           # a peer without a vote fetches what it lacks; `step`: requests made
    "catching_up",       # a voter does
]  # fmt: skip
Kind = Literal[
    "kill",              # kill -9; after `seconds` it is started again (0: never)
    "pause",             # SIGSTOP, and SIGCONT after `seconds`
    "cut",               # nothing passes between it and the others, for `seconds`
    "one_way",           # nothing passes from it to the others
    "slow",              # `amount` bytes a second between it and the others, for `seconds`
    "loss",              # this share of messages and chunks is lost, for `seconds`
    "reset",             # each connection breaks after `amount` more bytes, taking with it what is under way
    "half_open",         # it is silent: what is sent to it or by it is taken and never arrives, for `seconds`
    "full_disk",         # every write fails, for `seconds`
    "clock_jump",        # its time of day jumps by `amount` seconds
    "bad_bytes",         # a byte is flipped in each of its next `amount` bulk chunks
    "nan",               # its weights are NaN after these inner steps
    "slow_donor",        # whoever is asked for state answers `amount` seconds late, for `seconds`
    "helper_killed",     # its transport is gone (the libp2p daemon killed), and back after `seconds`
]  # fmt: skip
PHASES: tuple[str, ...] = get_args(Phase)
KINDS: tuple[str, ...] = get_args(Kind)
MIDDLE, LAST = -2, -1    # steps of an exchange, as far as the driver knows how many there are


@dataclass(frozen=True)
class Moment:
    """Where a peer is. `roles`: leader or member, voter or joiner. `steps`: how many steps this phase has, 0 if not known.
    `other`: the site that it is dealing with just now, if it is one."""

    site: str
    roles: tuple[str, ...]
    round: int
    phase: str
    step: int = 0
    steps: int = 0
    other: str = ""


@dataclass(frozen=True)
class At:
    """When a row is due. `who` is a site, a role or "anyone"; `round` 0: any, negative: from that one on (-5: 5, 6, ...)."""

    who: str
    phase: Phase
    round: int = 0
    step: int | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r}: choose from {', '.join(PHASES)}")

    def fits(self, moment: Moment) -> bool:
        if self.phase != moment.phase or self.who not in (moment.site, *moment.roles, "anyone"):
            return False
        if self.round and not (moment.round == self.round or 0 < -self.round <= moment.round):
            return False
        if self.step in (MIDDLE, LAST):
            return moment.steps > 0 and moment.step == (moment.steps // 2 if self.step == MIDDLE else moment.steps - 1)
        return self.step in (None, moment.step)


@dataclass(frozen=True)
class Fault:
    """What goes wrong, for how long, how badly, and with which other sites (none named: all of them)."""

    kind: Kind
    seconds: float = 0.0
    amount: float = 0.0
    toward: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.kind!r}: choose from {', '.join(KINDS)}")


@dataclass(frozen=True)
class Strike:
    """A fault that is to be done now, at this moment. `row`: its place in the table."""

    row: int
    fault: Fault
    moment: Moment


@dataclass
class Script:
    """The table, and the book on it. Each row is due `times` times at most (default once), at the first moments that fit."""

    rows: Sequence[tuple[At, Fault]]
    times: int = 1
    struck: list[Strike] = field(default_factory=list)
    seen: list[Strike] = field(default_factory=list)

    def due(self, moment: Moment) -> list[Strike]:
        """What is to be done at this moment, which counts as done from now on. Nothing while injections are switched off."""
        if not injecting():
            return []
        done = Counter(strike.row for strike in self.struck)
        strikes = [
            Strike(row, fault, moment)
            for row, (at, fault) in enumerate(self.rows)
            if done[row] < self.times and at.fits(moment)
        ]
        self.struck += strikes
        return strikes

    def happened(self, strike: Strike) -> None:
        """The effect of `strike` was seen."""
        if strike not in self.seen:
            self.seen.append(strike)

    @property
    def counts(self) -> Counter[str]:
        """How many faults of each kind have had an effect."""
        return Counter(strike.fault.kind for strike in self.seen)

    def missing(self, rows: Iterable[int] | None = None) -> list[tuple[At, Fault]]:
        """Rows without any effect so far."""
        seen = {strike.row for strike in self.seen}
        return [self.rows[row] for row in (range(len(self.rows)) if rows is None else rows) if row not in seen]

    def prove(self) -> None:
        """Raises NotFired unless every row has had an effect."""
        missing = self.missing()
        fired(not missing, "; ".join(f"{fault.kind} of {at.who}, {at.phase} of round {at.round}" for at, fault in missing))
