"""Rounds in virtual time: every second of every site has a name, and what happens follows the setting, not the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.ahead import goes_on
from geomesh_p2p.core.plan import AHEAD_SHARE
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.asynchronous import _best_connected, race
from geomesh_p2p.lab.bench.clock import World
from geomesh_p2p.lab.bench.methods import METHODS, Method, method_of
from geomesh_p2p.lab.bench.results import limit_seconds
from geomesh_p2p.lab.bench.runner import jobs, varied, world_of
from geomesh_p2p.lab.bench.settings import Setting, load_setting, shipped
from geomesh_p2p.lab.bench.timeline import Round, idle_shares
from geomesh_p2p.lab.report import FP32_BYTES
from tests.unit.benching import SEQUENCE_LENGTH, place, run_config, setting

OVER_2_MBPS = {"pairs": [{"between": ["far", "near"], "mbps": 2, "rtt_ms": 100}]}
BUDGET = 20 * 16 * SEQUENCE_LENGTH
SMALL = RunConfig.model_validate({"run": {"id": "bench"}, "model": {"hidden_size": 96, "intermediate_size": 256, "layers": 2,
                                                                     "heads": 3, "kv_heads": 3}})  # fmt: skip


def play(name: str, where: Setting, folder: Path, budget: int = BUDGET, **changes: Any) -> list[Round]:
    method = replace(METHODS[name], **changes)
    (job,) = jobs(run_config(folder), where, [method], [1], budget)
    return [stage for stage in job.stages() if isinstance(stage, Round)]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.kind == "rounds"])
def test_the_parts_of_each_site_add_up_to_the_round_and_the_rounds_to_the_budget(name: str, tmp_path: Path) -> None:
    played = play(name, setting(), tmp_path)
    for one in played:
        for part in one.parts:
            assert part.seconds == pytest.approx(one.ends - one.begins)
            assert min(part.compute, part.straggler_idle, part.wan_idle, part.codec) >= 0
    assert [one.begins for one in played[1:]] == [one.ends for one in played[:-1]]
    assert sum(one.tokens for one in played) == pytest.approx(BUDGET, abs=8 * SEQUENCE_LENGTH), "half a round"
    # No position of the stream is trained twice, and none is left out.
    ranges = sorted(r for one in played for member in one.plan.members for r in member.ranges)
    assert ranges[0].start == 0
    assert all(a.stop == b.start for a, b in pairwise(ranges))


def test_equal_sites_do_not_wait_for_each_other_and_unequal_ones_do_unless_planned(tmp_path: Path) -> None:
    equal = setting(sites=[place("far", 0.1), place("near", 0.1)])
    assert idle_shares(play("diloco", equal, tmp_path), "near").straggler == 0
    uneven = idle_shares(play("diloco", setting(), tmp_path), "near")
    planned = idle_shares(play("geomesh", setting(), tmp_path), "near")
    assert uneven.straggler_fastest > 10 * planned.straggler_fastest
    assert planned.straggler < uneven.straggler


def test_who_trains_ahead_in_short_rounds_takes_small_batches_and_many_steps(tmp_path: Path) -> None:
    where = load_setting("paper")
    asked = METHODS["geomesh-delayed"].run_config(SMALL, where, 10**6)
    assert asked.planner.critical_batch_tokens == 4 * 8 * SMALL.model.sequence_length
    small, any_size = (play("geomesh-delayed", where, tmp_path, critical=critical)[0].plan for critical in (1.0, None))
    for ours, theirs in zip(small.members, any_size.members, strict=True):
        assert ours.batch <= theirs.batch
        assert ours.inner_steps >= theirs.inner_steps
    assert max(ours.inner_steps for ours in small.members) > 2 * max(theirs.inner_steps for theirs in any_size.members)


def test_who_trains_ahead_waits_for_links_only_when_the_steps_are_used_up(tmp_path: Path) -> None:
    sites = [place("far", 0.2), place("near", 0.1)]
    where = setting(sites=sites, reference_round_sequences=64, links=OVER_2_MBPS)
    both = ("geomesh", "geomesh-delayed")
    plain, delayed = (play(name, where, tmp_path, 4 * BUDGET, length=1.0, longest=None) for name in both)
    assert idle_shares(plain, "near").wan > 0.2
    assert idle_shares(delayed[:-1], "near").wan < 0.01, "but for the last round, which none follows"
    assert delayed[-1].ends < 0.8 * plain[-1].ends
    for before, one in pairwise(delayed):
        for member in before.plan.members:
            done, now = before.ahead_steps(member.site), one.plan.of(member.peer)
            assert 0 < done <= member.ahead_steps
            assert now is not None
            assert goes_on(member, done, now)
    assert all(part.ahead_steps == 0 for part in delayed[-1].parts), "no round follows the last one"
    # Rounds so short that the steps that may be done early do not last: the rest is idle time.
    short = setting(sites=sites, links={"pairs": [{"between": ["far", "near"], "mbps": 3, "rtt_ms": 100}]})
    middle = play("geomesh-delayed", short, tmp_path, length=1.0, longest=None)[2:-1]
    most = [(m.ahead_steps, int(AHEAD_SHARE * m.inner_steps)) for one in middle for m in one.plan.members]
    assert all(one.ahead_steps(m.site) == m.ahead_steps for one in middle for m in one.plan.members)
    assert all(reserved == share > 0 for reserved, share in most)
    exchanging = sum(one.exchange_seconds for one in middle) / sum(one.ends - one.begins for one in middle)
    assert 0.02 < idle_shares(middle, "near").wan < 0.5 * exchanging


def test_what_was_done_ahead_is_dropped_with_another_batch_and_done_again(tmp_path: Path) -> None:
    """The parts add up all the same, and no position is lost."""
    where = setting(changes=[{"site": "near", "speed": 0.2, "begins_share": 0.3, "ends_share": 0.7}])
    played = play("geomesh-delayed", where, tmp_path, 4 * BUDGET, length=1.0, longest=None)
    dropped = 0
    for before, one in pairwise(played):
        for member in before.plan.members:
            now = one.plan.of(member.peer)
            assert now is not None
            dropped += not goes_on(member, before.ahead_steps(member.site), now)
    for one in played:
        assert all(part.seconds == pytest.approx(one.ends - one.begins) for part in one.parts)
    assert dropped > 0


def test_bytes_are_those_of_the_topology(tmp_path: Path) -> None:
    """Of two sites: fp32 in a reduce sends 4 bytes a parameter, a gather of signs one contribution."""
    (of_diloco, of_signs) = jobs(run_config(tmp_path), setting(), [METHODS["diloco"], METHODS["diloco-1bit"]], [1], BUDGET)
    fp32, sign = play("diloco", setting(), tmp_path)[0], play("diloco-1bit", setting(), tmp_path)[0]
    assert {part.sent_bytes for part in fp32.parts} == {4 * of_diloco.volume().parameters}
    assert {part.sent_bytes for part in sign.parts} == {of_signs.volume().payload_bytes}


def test_links_are_slowed_until_the_reference_waits_as_long_as_it_should(tmp_path: Path) -> None:
    where = setting(stands_for_parameters=None, reference_wan_idle_share=0.6)
    world = world_of(run_config(tmp_path), where, BUDGET)
    assert 0 < world.rate_scale < 1
    assert idle_shares(play("diloco", where, tmp_path), "near").wan == pytest.approx(0.6, abs=0.005)


def test_a_site_that_slows_down_is_closed_and_planned_anew_and_a_plan_for_ever_waits(tmp_path: Path) -> None:
    where = setting(changes=[{"site": "near", "speed": 0.25, "begins_share": 0.3, "ends_share": 0.7}])
    played = play("geomesh", where, tmp_path)
    during = [one for one in played if one.changed]
    assert 0 < len(during) < len(played)
    first = during[0]
    near = [part.site for part in first.parts].index("near")
    assert first.parts[near].steps < first.plan.members[near].inner_steps, "it was not closed"
    assert first.parts[near].tokens < first.plan.members[near].sequences * SEQUENCE_LENGTH
    later = idle_shares(during[2:], "near")
    static = idle_shares([one for one in play("geomesh-static", where, tmp_path) if one.changed], "near")
    assert later.straggler < 0.05 < static.straggler


def test_noise_is_that_of_the_seed(tmp_path: Path) -> None:
    links = {"pairs": [{"between": ["far", "near"], "mbps": 8, "rtt_ms": 100}], "jitter_share": 0.2}
    base, noisy = run_config(tmp_path), setting(links=links)
    ends = [[s.ends for s in job.stages()] for job in jobs(base, noisy, [METHODS["diloco"]], [1, 1, 2], BUDGET)]
    assert ends[0] == ends[1] != ends[2]
    assert ends[0] != [one.ends for one in play("diloco", setting(), tmp_path)]


def test_what_the_servers_own_site_gives_to_it_is_not_sent() -> None:
    where = load_setting("paper")
    (job,) = jobs(SMALL, where, [METHODS["async"]], [1], 3 * where.reference_round_sequences * SMALL.model.sequence_length)
    _, events = race(job.run, job.world, job.volume().parameters, job.budget_tokens, job.reference_tokens)
    server = where.names[_best_connected(job.world)]
    ways = [event for event in events if event.kind in ("send", "apply") and event.site not in (server, "")]
    assert any(event.kind == "send" and event.site == server for event in events)
    sent = {name: sum(p.sent_bytes for stage in job.stages() for p in stage.parts if p.site == name) for name in where.names}
    assert sum(sent.values()) == len(ways) * FP32_BYTES * job.volume().parameters
    answers = sum(event.kind == "apply" for event in ways)
    assert sent[server] == answers * FP32_BYTES * job.volume().parameters


@pytest.mark.parametrize("name", shipped())
def test_every_setting_that_ships_can_be_played_by_every_method(name: str) -> None:
    where = load_setting(name)
    budget = 3 * where.reference_round_sequences * SMALL.model.sequence_length
    played = {}
    for job in jobs(SMALL, where, [METHODS[n] for n in ("diloco", "geomesh", "ddp", "async")], [1], budget):
        stages = job.stages()
        assert stages
        assert sum(stage.tokens for stage in stages) >= 0.99 * budget
        played[job.method.name] = stages[-1].ends
    assert played["geomesh"] < played["diloco"] < played["ddp"]


def test_variations_are_methods_with_names_of_their_own() -> None:
    found = varied([METHODS["diloco"]], ["outer.momentum=0,0.9", "outer.learning_rate=1.0"])
    names = [method.name.removeprefix("diloco") for method in found]
    assert names == ["[momentum=0,learning_rate=1.0]", "[momentum=0.9,learning_rate=1.0]"]
    configs = [method.run_config(SMALL, load_setting("paper"), 10**6) for method in found]
    assert [config.outer.momentum for config in configs] == [0, 0.9]
    assert varied([METHODS["diloco"]], []) == [METHODS["diloco"]]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["foo.bar=1"], "unknown key foo.bar"),
        (["outer.foo=1"], "unknown key outer.foo"),
        (["outer.momentun=1"], r"did you mean outer.momentum\?"),
        (["outer.momentum=2"], "outer.momentum = 2.0: should be less than or equal to 1"),
        (["outer.momentum=abc"], 'outer.momentum = "abc": should be a valid number'),
        (["outer.momentum=NaN"], "outer.momentum = NaN: "),
        (["outer.momentum=,"], "give section.key=value,value"),
        (["outer.momentum=0.5,"], "give section.key=value,value"),
        (["outer.momentum=0.5", "outer.momentum=0.6"], "outer.momentum is given twice"),
        (["planner.fixed={"], "not valid JSON"),
        (["run.seed=1,2"], "run.seed cannot be varied: .*--seeds"),
        (["run.target_ppl=4"], "run.target_ppl cannot be varied"),
        (["model.layers=1,2"], "model.layers cannot be varied: one model"),
        (["dataset.shuffle=false"], "dataset.shuffle cannot be varied"),
        (["net.streams=4"], "net.streams cannot be varied: .*--engine real"),
    ],
)
def test_a_variation_that_is_wrong_is_a_users_mistake(asked: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^--vary .*{said}") as caught:
        varied([METHODS["diloco"]], asked)
    assert "\n" not in str(caught.value)


def test_values_that_are_the_same_are_one_and_brackets_hold_lists_together() -> None:
    found = varied([METHODS["diloco"]], ["outer.momentum=1e-1,0.1,0.10", "inner.betas=[0.9,0.95],[0.9,0.99]"])
    assert [method.name for method in found] == [
        "diloco[momentum=1e-1,betas=[0.9,0.95]]", "diloco[momentum=1e-1,betas=[0.9,0.99]]"
    ]  # fmt: skip
    assert found[1].run_config(SMALL, load_setting("paper"), 10**6).inner.betas == (0.9, 0.99)
    both = varied([METHODS["diloco"]], ["inner.learning_rate=0.1", "outer.learning_rate=0.1"])
    assert both[0].name == "diloco[inner.learning_rate=0.1,outer.learning_rate=0.1]"
    assert varied([METHODS["diloco"]], ["net.streams=4"], real=True)[0].changes["net"] == {"streams": 4}


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("diloco", "planner.overlap=delayed", 'planner.overlap = "delayed" needs planner.mode = "planned"'),
        ("geomesh", "outer.momentum=1", "outer.momentum = 1.0 must be below 1"),
        ("geomesh", "inner.warmup_tokens=2000000", "inner.warmup_tokens = 2000000 must be below inner.total_tokens"),
    ],
)
def test_a_variation_is_checked_with_the_rest_of_its_methods_configuration(name: str, asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--vary: {name}.*{said}"):
        jobs(SMALL, load_setting("paper"), varied([METHODS[name]], [asked]), [1], 10**6)


def test_a_negative_seed_is_one_as_in_a_run_file() -> None:
    noisy = setting(links={"most_mbps": 8, "jitter_share": 0.2})
    ends = [[s.ends for s in job.stages()] for job in jobs(SMALL, noisy, [METHODS["diloco"]], [-1, 1], 10 * 16 * 128)]
    assert ends[0] != ends[1]


def test_calibration_that_does_not_get_there_is_refused_and_what_it_came_to_is_known() -> None:
    unknown = {"stands_for_parameters": None, "reference_wan_idle_share": 0.3}
    world = world_of(SMALL, setting(**unknown), 10**6)
    assert world.reference_wan_idle_share == pytest.approx(0.3, abs=1e-3)
    alone = setting(sites=[place("only", 0.1)], links={}, **unknown)
    with pytest.raises(ConfigError, match=r"setting small: reference_wan_idle_share = 0.3 is not reached.* 0\.01"):
        world_of(SMALL, alone, 10**6)
    far = setting(links={"pairs": [{"between": ["far", "near"], "mbps": 8, "rtt_ms": 60_000}]}, **unknown)
    with pytest.raises(ConfigError, match=r"is not reached.* 0\.9"):
        world_of(SMALL, far, 10**6)


@pytest.mark.parametrize("name", ["diloco", "geomesh", "async", "ddp"])
def test_no_method_is_faster_than_the_limit_where_a_change_speeds_sites_up(name: str) -> None:
    changes = [
        {"site": "near", "speed": 6.0, "begins_share": 0.0, "ends_share": 1.0},
        {"site": "far", "speed": 3.0, "begins_share": 0.2, "ends_share": 0.8},
        {"site": "far", "speed": 2.0, "begins_share": 0.5, "ends_share": 0.9},
    ]
    where = setting(changes=changes, links={"most_mbps": 1000})
    assert [where.best_speed(site) for site in where.names] == [6.0, 6.0]
    slower = setting(changes=[{"site": "far", "speed": 0.5, "begins_share": 0.0, "ends_share": 1.0}])
    assert [slower.best_speed(site) for site in slower.names] == [0.5, 1.0]
    (job,) = jobs(SMALL, where, [METHODS[name]], [1], 40 * 16 * 128)
    stages = job.stages()
    assert stages[-1].ends >= limit_seconds(where, job.run, sum(stage.tokens for stage in stages))


def test_a_name_that_is_not_one_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean geomesh"):
        method_of("geomsh")
    with pytest.raises(ConfigError, match=r"\(did you mean diloco-tuned-H\?\): ddp, .*, diloco-tuned-H, all$"):
        method_of("diloco-tuned-h")
    with pytest.raises(ConfigError, match="did you mean paper"):
        load_setting("papr")
    with pytest.raises(ConfigError, match=r"section\.key"):
        varied([Method("x", "")], ["momentum"])


def test_the_world_of_a_smaller_model_has_slower_links() -> None:
    where = load_setting("paper").model_copy(update={"reference_wan_idle_share": None, "stands_for_parameters": 1e9})
    world = world_of(SMALL, where, 10**6)
    assert isinstance(world, World)
    assert world.rate_scale == pytest.approx(jobs(SMALL, where, [METHODS["diloco"]], [1], 10**6)[0].volume().parameters / 1e9)
