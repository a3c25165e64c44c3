"""A setting's rates, scaled to the model at hand: its ratio of transfer to compute is what is kept."""

from __future__ import annotations

from dataclasses import replace

from geomesh_p2p.config import RunConfig
from geomesh_p2p.lab.bench.clock import World, calibrated
from geomesh_p2p.lab.bench.methods import METHODS
from geomesh_p2p.lab.bench.settings import Setting
from geomesh_p2p.lab.bench.timeline import foreseen, idle_shares, repeated
from geomesh_p2p.lab.whatif import layout_from_files, volume_of

CALIBRATION_ROUNDS = 3


def world_of(base: RunConfig, setting: Setting, budget_tokens: int) -> World:
    """The setting with rates for this model: scaled by its size, or until the reference waits as long as it should."""
    layout = layout_from_files(base)
    if setting.stands_for_parameters is not None:
        return World(setting, layout.parameters / setting.stands_for_parameters)
    assert setting.reference_wan_idle_share is not None
    run = METHODS["diloco"].run_config(base, setting, budget_tokens)
    volume, unchanged = volume_of(layout, run), World(setting.model_copy(update={"changes": ()}))
    plan = foreseen(run, volume, unchanged)  # equal work and shares: the same under all rates

    def wan_idle_share(world: World) -> float:
        return idle_shares(list(repeated(plan, run, volume, world, CALIBRATION_ROUNDS)), setting.names[0]).wan

    return replace(calibrated(unchanged, wan_idle_share, setting.reference_wan_idle_share), setting=setting)
