"""How long steps and transfers take under a setting: its devices, its links with their noise, and its changes on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from geomesh_p2p.core.types import BatchTime, Profile
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.settings import Array, Setting

SMALLEST_SCALE, LARGEST_SCALE = 1e-9, 1e9
MAX_SHARE_OFF = 0.01


@dataclass(frozen=True)
class World:
    """A setting with rates that hold for the model at hand: `rate_scale` times those written in it."""

    setting: Setting
    rate_scale: float = 1.0
    seed: int = 0
    reference_wan_idle_share: float | None = None
    """What the reference waits for links with it, where the scale was found by that."""

    def profiles(self) -> tuple[Profile, ...]:
        """What each site would find at the start; site names stand for peer ids."""
        return tuple(
            Profile(site.name, site.name, site.device, tuple(
                BatchTime(batch, site.step_seconds(batch)) for batch in sorted({1, site.max_batch})
            ))
            for site in self.setting.sites
        )  # fmt: skip

    def at(self, round: int, share: float) -> Moment:
        """`share` of the run's tokens are committed. The noise is drawn from seed and round alone."""
        setting = self.setting
        speeds, rates = np.ones(len(setting.sites)), setting.rates * self.rate_scale
        for change in setting.changes:
            if change.begins_share <= share < change.ends_share:
                if change.site:
                    speeds[setting.names.index(change.site)] *= change.speed
                if change.between:
                    i, j = (setting.names.index(name) for name in change.between)
                    rates[i, j] *= change.rate
                    rates[j, i] *= change.rate
        rtts = setting.rtts
        if setting.links.jitter_share:
            drawn = np.random.default_rng((self.seed % 2**64, round)).normal(size=(2, *rates.shape))
            noise = drawn * setting.links.jitter_share
            rates, rtts = rates * np.exp(noise[0]), rtts * np.exp(np.abs(noise[1]))
        return Moment(setting, speeds, rates, rtts)

    def changed(self, share: float) -> bool:
        return any(change.begins_share <= share < change.ends_share for change in self.setting.changes)


@dataclass(frozen=True, eq=False)
class Moment:
    """Conditions during one round. Rates are in bytes a second, round trips in seconds, [from, to]."""

    setting: Setting
    speeds: Array
    rates: Array
    rtts: Array

    def step_seconds(self, site: int, batch: int) -> float:
        return self.setting.sites[site].step_seconds(batch) / float(self.speeds[site])

    def transfer_seconds(self, source: int, target: int, size: float) -> float:
        """Until the last of `size` bytes has arrived."""
        return 0.0 if source == target else size / float(self.rates[source, target]) + float(self.rtts[source, target]) / 2


def calibrated(world: World, wan_idle_share: Callable[[World], float], wanted: float) -> World:
    """Rates scaled, to 0.01%, until `wan_idle_share(world)`, which falls as rates rise, is `wanted`. Raises ConfigError if it
    never is, as with a single site, or with round trips that take longer than that."""
    low, high = SMALLEST_SCALE, LARGEST_SCALE
    while high > low * 1.0001:
        middle = math.sqrt(low * high)
        if wan_idle_share(replace(world, rate_scale=middle)) > wanted:
            low = middle
        else:
            high = middle
    found = replace(world, rate_scale=high)
    came_to = wan_idle_share(found)
    if abs(came_to - wanted) > MAX_SHARE_OFF:
        raise ConfigError(
            f"setting {world.setting.name}: reference_wan_idle_share = {wanted:g} is not reached, whatever the rates; the"
            f" nearest is {came_to:.4f}: change it or the round trips, or give stands_for_parameters instead"
        )
    return replace(found, reference_wan_idle_share=came_to)
