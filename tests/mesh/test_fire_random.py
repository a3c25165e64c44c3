"""Random faults: a rule-based machine over the simulator, and schedules of whole peers.

More of the latter, and other seeds: `python -m tests.mesh.fire --help`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.injection.proof import fired
from tests.injection.script import KINDS
from tests.mesh.checker import check_histories
from tests.mesh.faults import FAULTS_END, WEIGHTS
from tests.mesh.fire import play
from tests.mesh.simulator import World

GO_ON_SECONDS = 60.0
FAULT_KINDS = sorted({kind for weights in WEIGHTS.values() for kind in weights} - {"leave"})


class FaultsAndTime(RuleBasedStateMachine):
    """Steps are faults and the passing of time. The checker looks at the histories after each; at the end everything is mended
    and the run must go on with everybody."""

    world: World

    @initialize(seed=st.integers(0, 10_000), bias=st.sampled_from(sorted(WEIGHTS)))
    def begin(self, seed: int, bias: str) -> None:
        self.world = World(seed, bias=bias, scripted=False)
        self.world.heals = True
        self.until = 4.0
        self.world.play_until(self.until)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.until += seconds
        self.world.play_until(self.until)

    @precondition(lambda self: self.until < FAULTS_END)
    @rule(kinds=st.lists(st.sampled_from(FAULT_KINDS), min_size=1, max_size=3))
    def something_goes_wrong(self, kinds: list[str]) -> None:
        self.world.now = max(self.world.now, self.until)
        for kind in kinds:
            self.world.on_fault(kind)

    @invariant()
    def histories_are_sound(self) -> None:
        if hasattr(self, "world"):
            check_histories(self.world.histories(), self.world.founding, self.world.rules)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.now = max(world.now, self.until)
        world.on_heal(None)
        world.play_until(world.now + GO_ON_SECONDS)
        assert not world.stuck()
        self.histories_are_sound()
        TOTALS[0] += world.faults_fired


TOTALS = [0]


@pytest.mark.fault
def test_faults_and_time_in_any_order() -> None:
    TOTALS[0] = 0
    machine: Any = FaultsAndTime.TestCase
    machine.settings = settings(max_examples=40, stateful_step_count=30)
    machine().runTest()
    fired(TOTALS[0] > 40, "faults that made a difference")


# Schedules of whole peers on which something once went wrong, and what it was.
ONCE_WRONG = {
    3: "an isolated peer waited for its plan for ever, without a word in its history",
    6: "the checker took a clock that jumped for a peer that waited",
}


@pytest.mark.fault
@pytest.mark.parametrize("seed", [*range(12), *(seed for seed in ONCE_WRONG if seed >= 12)])
def test_random_faults_of_whole_peers(seed: int) -> None:
    found, counts = play(seed)
    fired(counts["faults"] >= 3, "three faults that had an effect")
    assert found == []


@pytest.mark.long
@pytest.mark.fault
def test_more_random_faults_of_whole_peers() -> None:
    kinds: set[str] = set()
    for seed in range(1000, 1040):
        found, counts = play(seed)
        fired(counts["faults"] >= 3, "three faults that had an effect")
        assert found == []
        kinds |= set(counts)
    assert kinds >= set(KINDS), "each kind of fault had an effect somewhere"
