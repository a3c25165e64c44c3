"""A hundred rounds of five real (tiny) models, one of which flips all its signs: the run ends as well, and it is flagged."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.poison import play
from geomesh_p2p.core.agreement import ROUNDS_TO_JUDGE
from tests.injection.proof import fired, injecting

WITHIN = 1.25   # times the final loss of the run without a liar


@pytest.mark.fault
@pytest.mark.long
@pytest.mark.case("C119")
@pytest.mark.timeout(600)
def test_one_of_five_flips_its_signs_for_a_hundred_rounds(tmp_path: Path) -> None:
    rounds = 100 if injecting() else ROUNDS_TO_JUDGE
    lied = play("flipped" if injecting() else "none", rounds, 5, "gather", 0, 5e-4, tmp_path)
    fired(lied.liar_with_update < 0.5, "flipped signs from one of five")
    honest = play("none", rounds, 5, "gather", 0, 5e-4, tmp_path)
    assert honest.final_loss < 0.6 * honest.first_loss, "there is something to learn"
    assert lied.final_loss < WITHIN * honest.final_loss
    assert lied.flagged == {"site-4": ROUNDS_TO_JUDGE}
    assert honest.flagged == {}
    assert min(honest.honest_with_others, lied.honest_with_others) > 0.6 > 0.4 > lied.liar_with_others
