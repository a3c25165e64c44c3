"""The history checker on schedules of the real protocol: silent while all rules hold, not when one is switched off."""

from __future__ import annotations

import json

import pytest

from geomesh_p2p.lab.histories import Reading, add_lines
from geomesh_p2p.lab.verify import check
from geomesh_p2p.telemetry.sinks import jsonable
from tests.mesh.checker import Violation
from tests.mesh.simulator import World


def recorded(world: World) -> Reading:
    """The histories of a schedule as their files would be read, each with the founding that its peer was born with."""
    founding = {"base": world.founding.base, "founder": world.founding.founder, "view": [world.founding.founder]}
    reading = Reading()
    for peer, notes in world.histories().items():
        head = {"peer": peer, "site": world.sites[peer], "run": world.founding.run}
        lines = [{**head, "kind": kind, **fields} for kind, fields in [("founding", founding), *notes]]
        add_lines(reading, peer, [json.dumps(jsonable(line)) for line in lines])
    return reading


def violated(seed: int, without: str = "") -> set[int]:
    """Invariants that the checker finds broken in the histories of one schedule."""
    world = World(seed, frozenset([without] if without else []))
    try:
        world.run()
    except Violation:
        assert without, f"seed {seed} broke an invariant with all rules on"
    return {violation.invariant for violation in check(recorded(world)).violations}


def test_no_violation_while_all_rules_hold() -> None:
    assert {seed: found for seed in range(40) if (found := violated(seed))} == {}


@pytest.mark.parametrize(
    ("rule", "invariant"),
    [
        ("pair_terms", 3), ("saved_terms", 3), ("found_once", 3), ("plan_has_quorum", 5), ("held_survives", 5),
        ("count_view", 5), ("ranges_within", 6), ("held_again", 5), ("identity_unit", 3), ("wait_quorum", 3),
    ],
)  # fmt: skip
def test_histories_show_that_a_rule_is_off(rule: str, invariant: int) -> None:
    assert any(invariant in violated(seed, rule) for seed in range(60)), f"no violation in 60 schedules without {rule}"
