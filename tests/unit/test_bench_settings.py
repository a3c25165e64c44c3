"""Settings of the benchmark: what ships, and how a setting's links are read."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from setuptools import Distribution

from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.clock import World
from geomesh_p2p.lab.bench.settings import SHIPPED, Setting, load_setting, shipped
from tests.unit.benching import place, setting

ROOT = Path(__file__).parent.parent.parent
MBPS = 1e6 / 8


def apart(matrix: Any) -> Any:
    return matrix[~np.eye(len(matrix), dtype=bool)]


def test_what_ships() -> None:
    assert shipped() == ["azure4", "azure8", "drift", "halos", "harsh", "homogeneous", "paper"]


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_setting_makes_sense(name: str) -> None:
    setting = load_setting(name)
    assert setting.about
    assert any("assumed" in text for text in setting.sources), "what is not measured is said"
    assert len(setting.sites) >= 4
    assert all(site.region and site.device for site in setting.sites)
    rates, rtts = setting.rates, setting.rtts
    assert np.isinf(np.diag(rates)).all()
    assert (np.diag(rtts) == 0).all()
    assert np.isfinite(apart(rates)).all()
    assert (apart(rates) > 0).all()
    # As fast there as back; the published round trips differ by direction.
    assert np.abs(apart(rates) / apart(rates.T) - 1).max() <= 0.15
    assert apart(np.abs(rtts - rtts.T)).max() <= 0.01
    assert setting.notes() == [], "nothing is left to a default"
    assert setting.reference_round_sequences % len(setting.sites) == 0
    assert setting.reference_batch <= min(site.max_batch for site in setting.sites)
    if setting.links.rtt_ms_file:
        assert any(text.startswith(setting.links.rtt_ms_file) for text in setting.sources), "the matrix has a source"
        assert (apart(rtts) > 0).all()


@pytest.mark.parametrize("table", sorted(path.name for path in SHIPPED.glob("*.csv")))
def test_every_table_has_a_source(table: str) -> None:
    assert any(table in text for name in shipped() for text in load_setting(name).sources)


def test_homogeneous_has_nothing_to_balance() -> None:
    setting = load_setting("homogeneous")
    assert len({(site.fixed_seconds, site.sequence_seconds, site.max_batch) for site in setting.sites}) == 1
    assert len(set(apart(setting.rates).tolist())) == 1


def test_harsh_has_one_slow_way_and_one_slow_peer() -> None:
    setting = load_setting("harsh")
    slow = np.argwhere(setting.rates == setting.rates.min())
    assert setting.rates.min() == 20 * MBPS
    assert sorted(np.unique(slow).tolist()) == [setting.names.index("a100"), setting.names.index("l40s")]
    assert len(slow) == 2, "one pair, both directions"
    seconds = sorted(site.fixed_seconds + 8 * site.sequence_seconds for site in setting.sites)
    assert seconds[-1] / seconds[0] == pytest.approx(8)
    assert seconds[-2] / seconds[0] < 4


def test_drift_changes_in_the_middle_third_alone() -> None:
    setting, world = load_setting("drift"), World(load_setting("drift"))
    h100, a100 = setting.names.index("h100"), setting.names.index("a100")
    for share, speed, rate in ((0.0, 1, 1), (0.3, 1, 1), (0.34, 2, 1 / 3), (0.66, 2, 1 / 3), (0.67, 1, 1), (0.99, 1, 1)):
        moment = world.at(1, share)
        assert moment.step_seconds(h100, 8) == pytest.approx(speed * (0.005 + 8 * 0.010))
        assert moment.step_seconds(a100, 8) == pytest.approx(0.010 + 8 * 0.020)
        assert moment.rates[h100, a100] == pytest.approx(940 * MBPS * rate, rel=1e-4)
        assert moment.rates[a100, h100] == moment.rates[h100, a100]


def test_halos_has_four_workers_in_each_region() -> None:
    setting = load_setting("halos")
    rates, place = setting.rates / MBPS, setting.names.index
    assert rates[place("r0-w0"), place("r3-w2")] == pytest.approx(202)
    assert rates[place("r1-w3"), place("r3-w0")] == pytest.approx(117)
    assert rates[place("r2-w0"), place("r2-w1")] == pytest.approx(10_000)
    speeds = np.sort([0.005 / site.sequence_seconds for site in setting.sites])
    assert speeds == pytest.approx(np.linspace(0.107, 0.907, 16), rel=1e-3)


def test_the_rule_of_rates_is_the_fit_to_the_table_that_it_names() -> None:
    with (SHIPPED / "aws_links.csv").open() as lines:
        ways = [(float(row["delay_ms"]) / 1000, 1000 * float(row["gbps"])) for row in csv.DictReader(lines)]
    rtts, rates = np.array(ways).T

    def residual(most: float, per_trip: float) -> float:
        return math.sqrt(np.mean(np.log(np.minimum(most, per_trip / rtts) / rates) ** 2))

    for name in ("azure4", "azure8"):
        links = load_setting(name).links
        assert links.mbit_per_round_trip is not None
        ours = residual(links.most_mbps, links.mbit_per_round_trip)
        best = min(residual(most, per_trip) for most in range(500, 1500, 20) for per_trip in range(40, 120))
        assert ours == pytest.approx(best, rel=0.01)
        assert ours == pytest.approx(0.18, abs=0.005)


def test_settings_and_their_tables_are_in_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    distribution.include_package_data = False  # what a source control system knows would hide what is not named
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    (found,) = (names for package, _, _, names in build.data_files if package == "geomesh_p2p.lab.bench")
    assert sorted(found) == sorted(f"settings/{path.name}" for path in SHIPPED.iterdir())


# ---------------------------------------------------------------- reading one of your own

SITE = 'device = "d"\nfixed_seconds = 0.0\nsequence_seconds = 0.1\nmax_batch = 8\n'


def own(folder: Path, sites: dict[str, str], links: str) -> Setting:
    lines = ['about = "own"', "reference_round_sequences = 8", "stands_for_parameters = 1e6"]
    lines += [f'[[sites]]\nname = "{name}"\nregion = "{region}"\n{SITE}' for name, region in sorted(sites.items())]
    (folder / "mine.toml").write_text("\n".join([*lines, "[links]", links]))
    (folder / "rtt.csv").write_text("src,x,y,lone\nx,1,50,70\ny,60,1,\nlone,,80,0\n")
    return load_setting(str(folder / "mine.toml"))


def test_links_by_pair_then_region_then_matrix(tmp_path: Path) -> None:
    links = 'rtt_ms_file = "rtt.csv"\nmost_mbps = 100\nmbit_per_round_trip = 4\nsame_region_mbps = 500\n'
    links += 'pairs = [{ between = ["a", "y"], mbps = 7, rtt_ms = 9 }]'
    setting = own(tmp_path, {"a": "x", "b": "x", "c": "x", "d": "y", "lone": ""}, links)
    a, b, c, d, lone = range(5)
    rates, rtts = setting.rates / MBPS, setting.rtts * 1000
    assert (rates[a, d], rtts[a, d], rates[d, a]) == (pytest.approx(7), pytest.approx(9), pytest.approx(7))
    assert (rates[a, b], rates[b, c], rtts[b, c]) == (pytest.approx(500), pytest.approx(500), 0)
    assert (rtts[b, d], rtts[d, c]) == (pytest.approx(50), pytest.approx(60))
    assert (rates[b, d], rates[d, c]) == (pytest.approx(80), pytest.approx(4 / 0.06))
    assert (rtts[c, lone], rtts[lone, c], rtts[lone, d]) == (pytest.approx(70), pytest.approx(70), pytest.approx(80))
    for i, one in enumerate(setting.sites):
        for j, other in enumerate(setting.sites):
            if i != j:
                assert rates[i, j] == pytest.approx(setting._mbps(one, other))
                assert rtts[i, j] == pytest.approx(setting._rtt_ms(one, other))


def test_a_region_that_the_matrix_lacks_is_named(tmp_path: Path) -> None:
    setting = own(tmp_path, {"a": "x", "b": "elsewhere"}, 'rtt_ms_file = "rtt.csv"')
    with pytest.raises(ConfigError, match=r"rtt\.csv: no round trip between x and elsewhere"):
        _ = setting.rtts


TWO = {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ('pairs = [{ between = ["a", "nobody"] }]', "links.pairs name 'nobody', which is neither a site nor a region"),
        ('pairs = [{ between = ["a", ""] }]', "links.pairs name ''"),
        ('pairs = [{ between = ["a", "a"] }]', "a way from 'a' to itself"),
        ('pairs = [{ between = ["a", "b"] }, { between = ["b", "a"] }]', "'b' and 'a' twice"),
        ('[[changes]]\nbegins_share = 0.6\nends_share = 0.5\nsite = "a"', "begins_share = 0.6 must be below ends_share = 0.5"),
        ("[[changes]]\nbegins_share = 0.1\nends_share = 0.5", "names nothing that changes"),
        ('[[changes]]\nbegins_share = 0.1\nends_share = 0.5\nsite = "x"', "changes name 'x', which is a region: name"),
        ('[[changes]]\nbegins_share = 0.1\nends_share = 0.5\nbetween = ["a", "y"]', "changes name 'y', which is a region"),
        ('[[changes]]\nbegins_share = 0.1\nends_share = 0.5\nbetween = ["a", ""]', "changes name '', which is no site"),
        ('[[changes]]\nbegins_share = 0.1\nends_share = 0.5\nbetween = ["a", "a"]', "a way from 'a' to itself"),
        ('[[changes]]\nbegins_share = 0.1\nends_share = 0.5\nsite = "a"\nrate = 0.5', "rate is that of a way"),
        ('[[changes]]\nbegins_share = 0.1\nends_share = 0.5\nbetween = ["a", "b"]\nspeed = 0.5', "speed is that of a site"),
    ],
)
def test_a_setting_that_says_what_cannot_be_is_refused_in_one_line(links: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        own(tmp_path, TWO, links)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "mine.toml"))
    assert "Value error" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_batch =", "max_bacth =", "mean sites.0.max_batch?): correct it, or leave it out (and 1 more)"),
        ("[links]", "[lniks]", "unknown key lniks (did you mean links?)"),
        ("[links]", "[links]\nrtt_file = ''", "unknown key links.rtt_file (did you mean links.rtt_ms_file?)"),
        ("stands_for", "jitter_share = 0.1\nstands_for", "unknown key jitter_share (did you mean links.jitter_share?)"),
        ("stands_for", "seed = 3\nstands_for", "unknown key seed: correct it"),
        ("[links]", '[links]\npairs = [{ between = ["a", "b"], rtt = 9 }]', "rtt (did you mean links.pairs.0.rtt_ms?)"),
        ("[links]", '[links]\npairs = [{ between = ["a", "b"], mbps = "15" }]', 'links.pairs.0.mbps = "15": should be a val'),
        ("max_batch = 8", "max_batch = 8.5", "sites.0.max_batch = 8.5: should be a valid integer"),
        ('device = "d"', "", "sites.0.device is missing: add it (and 1 more)"),
        ('name = "b"', 'name = "a"', "sites: two have the same name"),
        ("stands_for", 'name = "elsewhere"\nstands_for', "name: not for the file to say, a setting has its file's name"),
        ("stands_for", 'folder = "/"\nstands_for', "folder: not for the file to say"),
    ],
)
def test_a_key_that_is_none_and_a_value_of_another_kind_are_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    own(tmp_path, TWO, "")
    path = tmp_path / "mine.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load_setting(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert "did you mean run." not in str(caught.value)


@pytest.mark.parametrize("name", ["nofile.toml", "nofile", "folder/none"])
def test_a_path_where_there_is_no_file_is_said_to_be_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file") as caught:
        load_setting(str(tmp_path / name))
    assert str(caught.value) == f"{tmp_path / name}: there is no such file"


def test_a_setting_of_your_own_may_have_any_suffix(tmp_path: Path) -> None:
    own(tmp_path, TWO, "")
    (tmp_path / "mine.toml").rename(tmp_path / "mine")
    assert load_setting(str(tmp_path / "mine")).name == "mine"


def test_a_pair_that_was_forgotten_is_named(tmp_path: Path) -> None:
    sites = [place(name, 0.1) for name in ("a", "b", "c")]
    pairs = [{"between": ["a", "b"], "mbps": 300, "rtt_ms": 95}, {"between": ["a", "c"], "mbps": 200, "rtt_ms": 20}]
    with pytest.raises(ConfigError, match="says nothing of b and c"):
        _ = setting(sites=sites, links={"pairs": pairs}).rtts
    for_all_others = setting(sites=sites, links={"pairs": pairs, "most_mbps": 100})
    assert for_all_others.rates[1, 2] == 100e6 / 8


ONE_REGION = {"a": "x", "b": "x", "c": "x", "d": "y"}


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ("most_mbps = 100", "no rate is written for a and b in x (nor for 2 more such pairs)"),
        ('pairs = [{ between = ["a", "x"], mbps = 15 }]\nmost_mbps = 100', "no rate is written for b and c in x: 10000 Mbit/s"),
        ('pairs = [{ between = ["x", "x"], rtt_ms = 30 }]\nmost_mbps = 100', "no rate is written for a and b in x (nor for 2"),
    ],
)
def test_sites_of_one_region_without_a_rate_are_named(links: str, said: str, tmp_path: Path) -> None:
    (note,) = own(tmp_path, ONE_REGION, links).notes()
    assert said in note
    assert "links.same_region_mbps" in note


@pytest.mark.parametrize("links", ["same_region_mbps = 10000", 'pairs = [{ between = ["x", "x"], mbps = 3 }]'])
def test_a_rate_inside_a_region_that_is_written_needs_no_note(links: str, tmp_path: Path) -> None:
    assert own(tmp_path, ONE_REGION, f"most_mbps = 100\n{links}").notes() == []


@pytest.mark.parametrize("links", ["", 'pairs = [{ between = ["a", "b"], rtt_ms = 30 }]', 'rtt_ms_file = "rtt.csv"'])
def test_sites_of_two_regions_without_a_rate_are_named(links: str, tmp_path: Path) -> None:
    (note,) = own(tmp_path, TWO, links).notes()
    assert note.startswith("no rate is written for a and b: 1000 Mbit/s is assumed, and no delay unless one is written")
    assert "links.most_mbps" in note


@pytest.mark.parametrize("links",
    ["most_mbps = 1000", "mbit_per_round_trip = 75", 'pairs = [{ between = ["a", "b"], mbps = 3 }]'],
)
def test_a_rate_between_regions_that_is_written_needs_no_note(links: str, tmp_path: Path) -> None:
    assert own(tmp_path, TWO, links).notes() == []


def test_a_reference_batch_that_a_site_cannot_take_is_said() -> None:
    sites = [place("far", 0.4, max_batch=2), place("near", 0.1, max_batch=3), place("old", 0.1, max_batch=2)]
    (note,) = setting(sites=sites, links={"most_mbps": 100}).notes()
    assert note.startswith("reference_batch = 4 is more than max_batch = 2 of far: where all have the same batch, it is 2")


def test_a_region_may_have_links_of_its_own(tmp_path: Path) -> None:
    setting = own(tmp_path, {"a": "x", "b": "x"}, 'pairs = [{ between = ["x", "x"], mbps = 3 }]')
    assert setting.rates[0, 1] / MBPS == pytest.approx(3)


@pytest.mark.parametrize("value", ["nan", "inf", "-5", "soon"])
def test_a_round_trip_that_is_no_time_is_refused(value: str, tmp_path: Path) -> None:
    setting = own(tmp_path, TWO, 'rtt_ms_file = "rtt.csv"')
    (tmp_path / "rtt.csv").write_text(f"src,x,y\nx,0,{value}\ny,10,0\n")
    with pytest.raises(ConfigError, match=rf"rtt\.csv: not a matrix of round trips in ms \(.*{value}"):
        _ = setting.rtts


def test_files_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    setting = own(tmp_path, TWO, 'rtt_ms_file = "rtt.csv"')
    (tmp_path / "rtt.csv").write_bytes(b"src,x,\xff")
    with pytest.raises(ConfigError, match=r"rtt\.csv: not a matrix"):
        _ = setting.rtts
    (tmp_path / "mine.toml").write_bytes(b'about = "\xff"')
    with pytest.raises(ConfigError, match="line 1 is not UTF-8"):
        load_setting(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("share", [0, 1])
def test_a_share_that_no_rates_lead_to_is_refused(share: int, tmp_path: Path) -> None:
    own(tmp_path, TWO, "")
    text = (tmp_path / "mine.toml").read_text().replace("stands_for_parameters = 1e6", f"reference_wan_idle_share = {share}.0")
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"reference_wan_idle_share = {share}.0: should be "):
        load_setting(str(tmp_path / "mine.toml"))


def test_a_name_close_to_a_shipped_one() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'azur4' \(did you mean azure4\?\): azure4, azure8, drift, "):
        load_setting("azur4")


def test_the_example_of_the_manual_is_a_setting(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", manual, re.DOTALL)
    (tmp_path / "own.toml").write_text(example, encoding="utf-8")
    found = load_setting(str(tmp_path / "own.toml"))
    assert found.names == ("frankfurt", "oregon")
    assert found.rtts[0, 1] == pytest.approx(0.145)
