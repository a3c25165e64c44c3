"""Run and site files: what is taken, where each value comes from, and the one line that names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from geomesh_p2p.addresses import parse_address
from geomesh_p2p.config import RunConfig
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.loading import (
    check_sites,
    load_run,
    load_site,
    load_sites,
    resolve_run,
    run_keys,
)

PEER = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
RELAY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ROOT = Path(__file__).parents[2]
RUN = '[run]\nid = "demo"\n'
SITE = '[site]\nname = "north"\n'
EMULATION = '[emulation]\ndevice = "X"\nfixed_seconds = 0.01\nsequence_seconds = 0.01\nmax_batch = 4\n'


def write(folder: Path, text: str | bytes, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ---------------------------------------------------------------- shipped files


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_run_files_load(path: Path) -> None:
    config = load_run(path)
    planned = config.run.rounds * config.planner.round_tokens
    assert config.inner.total_tokens == planned, "the schedule should end where the run ends"


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "peers").glob("*.toml")), *sorted((ROOT / "deploy").rglob("*.toml"))], ids=lambda path: path.name
)
def test_shipped_site_files_load(path: Path) -> None:
    load_site(path)


def test_shipped_sites_fit_the_demo_and_keep_the_papers_ratios() -> None:
    sites = load_sites(ROOT / "peers")
    assert [site.name for site in sites] == ["a100", "h100", "l40s", "rtx6000ada"]
    assert check_sites(load_run(ROOT / "configs/quickstart.toml"), sites) == []
    emulations = {site.name: site.config.emulation for site in sites}
    assert all(emulations.values())
    cost = {name: e.fixed_seconds + 8 * e.sequence_seconds for name, e in emulations.items() if e is not None}
    speeds = {name: cost["rtx6000ada"] / seconds for name, seconds in cost.items()}
    assert speeds == pytest.approx({"h100": 4, "a100": 2, "l40s": 1.1, "rtx6000ada": 1}, rel=1e-3)
    assert len({e.max_batch for e in emulations.values() if e is not None}) > 1


def test_shipped_links_are_the_same_from_both_ends() -> None:
    sites = {site.name: site.config for site in load_sites(ROOT / "peers")}
    for name, site in sites.items():
        assert set(site.links) == set(sites) - {name}
        for other, link in site.links.items():
            assert sites[other].links[name] == link


# ---------------------------------------------------------------- precedence and origins


def test_flag_beats_variable_beats_site_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, RUN + "[metrics]\nport = 1\n[net]\nstreams = 2\n")
    site_path = write(tmp_path, SITE + "[metrics]\nport = 2\n", "site.toml")
    site = load_sites(site_path)[0]
    env = {"GEOMESH_METRICS__PORT": "3", "GEOMESH_HOME": "ignored", "OTHER__KEY": "ignored"}
    flags = {"metrics.port": "4"}
    for layers, port, origin in (
        ((path, flags, env, site), 4, "--metrics.port"),
        ((path, {}, env, site), 3, "GEOMESH_METRICS__PORT"),
        ((path, {}, {}, site), 2, str(site_path)),
        ((path, {}, {}, None), 1, str(path)),
    ):
        resolved = resolve_run(*layers)
        assert (resolved.config.metrics.port, resolved.origins["metrics.port"]) == (port, origin)
        assert resolved.origins["metrics.host"] == "default"
        assert resolved.origins["net.streams"] == str(path)
        assert resolved.origins.keys() == run_keys().keys()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("run.rounds", "20", 20),
        ("run.rounds", "1_000", 1000),
        ("run.target_ppl", "9.5", 9.5),
        ("run.target_ppl", "none", None),
        ("run.fresh", "true", True),
        ("run.fresh", "no", False),
        ("inner.betas", "0.8,0.9", (0.8, 0.9)),
        ("inner.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("inner.micro_batch", "4", 4),
        ("codec.second_phase_bits", "4", 4),
        ("planner.mode", "uniform", "uniform"),
        ("planner.fixed", '{"north": [8, 20]}', {"north": (8, 20)}),
        ("net.allow", "", ()),
        ("net.allow", f"{PEER}, {RELAY}", (PEER, RELAY)),
    ],
)
def test_text_of_flags_and_variables_becomes_the_fields_type(tmp_path: Path, key: str, text: str, value: object) -> None:
    path = write(tmp_path, RUN)
    section, name = key.split(".")
    for config in (load_run(path, {key: text}), load_run(path, {}, {f"GEOMESH_{section}__{name}".upper(): text})):
        assert getattr(getattr(config, section), name) == value


# ---------------------------------------------------------------- what is wrong, in one line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["run is missing"]),
        ("[run]\nrounds = 3\n", ["run.id is missing"]),
        (RUN + "ronds = 3\n", ["unknown key run.ronds", "did you mean run.rounds?"]),
        ('[run]\nidd = "x"\n', ["unknown key run.idd", "did you mean run.id?"]),
        (RUN + "[iner]\nx = 1\n", ["unknown key iner", "did you mean inner?"]),
        (RUN + "micro_batch = 3\n", ["unknown key run.micro_batch", "inner.micro_batch"]),
        (RUN + 'rounds = "3"\n', ['run.rounds = "3"', "integer"]),
        (RUN + "rounds = 2.5\n", ["run.rounds = 2.5", "integer"]),
        (RUN + "rounds = true\n", ["run.rounds = true", "integer"]),
        (RUN + "rounds = 0\n", ["run.rounds = 0", "greater than 0"]),
        (RUN + "target_ppl = nan\n", ["run.target_ppl = NaN", "finite"]),
        (RUN + "[inner]\nlearning_rate = inf\n", ["inner.learning_rate = Infinity", "finite"]),
        (RUN + "[inner]\nbetas = [0.9]\n", ["inner.betas.1 is missing"]),
        (RUN + "[inner]\nbetas = [0.9, 7]\n", ["inner.betas.1 = 7", "less than or equal to 1"]),
        (RUN + '[planner]\nmode = "unifrom"\n', ['planner.mode = "unifrom"', "'uniform'"]),
        (RUN + "[planner]\nfixed = {north = [0, 1]}\n", ["planner.fixed.north.0 = 0"]),
        ('[run]\nid = "A b"\n', ['run.id = "A b"', "pattern"]),
        ("run = 3\n", ["run = 3", "table"]),
        (RUN + "x = \n", ["not valid TOML", "line 3"]),
        (RUN + "id = 1\n", ["not valid TOML", "line 3"]),
        (b'[run]\nid = "caf\xe9"\n', ["line 2", "UTF-8", "0xe9"]),
        # each field alone would do
        (RUN + "[model]\nhidden_size = 100\nheads = 8\nkv_heads = 8\n", ["model.hidden_size = 100", "model.heads = 8"]),
        (RUN + "[model]\nkv_heads = 3\n", ["model.kv_heads = 3", "divide", "model.heads = 4"]),
        (RUN + "[model]\npretrained = true\n", ["model.pretrained", "model.path"]),
        (RUN + '[dataset]\nsource = "text"\n', ['dataset.source = "text"', "dataset.paths"]),
        (RUN + '[dataset]\npaths = ["x"]\n', ["python-stdlib", "dataset.paths"]),
        (RUN + "[inner]\nwarmup_tokens = 9\ntotal_tokens = 9\n", ["inner.warmup_tokens = 9", "below"]),
        (RUN + "[inner]\nbetas = [0.9, 1.0]\n", ["inner.betas", "below 1"]),
        (RUN + "[outer]\nmomentum = 1.0\n", ["outer.momentum = 1.0", "below 1"]),
        (RUN + "[planner]\nmin_steps = 9\nmax_steps = 8\n", ["planner.min_steps = 9", "planner.max_steps = 8"]),
        (RUN + "[planner]\nmax_steps_ratio = 0.5\n", ["planner.max_steps_ratio = 0.5"]),
        (
            RUN + '[planner]\nmode = "uniform"\noverlap = "delayed"\n',
            ['planner.overlap = "delayed" needs planner.mode = "planned"', "the digest"],
        ),
        (RUN + "[net]\nheartbeat_seconds = 4.0\n", ["net.heartbeat_seconds = 4.0", "net.heartbeat_limit_seconds"]),
        (RUN + '[net]\nlisten = "0.0.0.0:80"\n', ["net.listen", "0.0.0.0:80", "multiaddress"]),
        (RUN + '[net]\nannounce = "/ip4/0.0.0.0/tcp/80"\n', ["net.announce", "wildcard"]),
        (RUN + '[net]\nlisten = "/ip4/0.0.0.0/tcp/80"\n', ["net.listen", "wildcard", "net.announce"]),
        (RUN + '[net]\nannounce = "/ip4/203.0.113.5/tcp/0"\n', ["net.announce", "port 0"]),
        (RUN + '[net]\nseeds = ["/ip4/203.0.113.5/tcp/80"]\n', ["net.seeds", "/p2p/"]),
        (RUN + '[net]\nseeds = ["/ip4/203.0.113.5/tcp/80/p2p/PEER"]\n', ["net.listen", "loopback", "203.0.113.5"]),
        (
            RUN + '[net]\nannounce = "/dns4/localhost/tcp/9"\nseeds = ["/dns4/h100/tcp/80/p2p/PEER"]\n',
            ["net.announce", "loopback", "h100"],
        ),
    ],
)
def test_a_wrong_run_file_gets_one_line_with_file_key_and_value(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    path = write(tmp_path, text.replace("PEER", PEER) if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    line = str(caught.value)
    assert "\n" not in line
    for part in [str(path), *parts]:
        assert part in line


def test_a_wrong_flag_or_variable_is_named_as_the_culprit(tmp_path: Path) -> None:
    path = write(tmp_path, RUN)
    for flags, env, parts in (
        ({"run.ronds": "3"}, {}, ["--run.ronds", "run.rounds"]),
        ({"rounds": "3"}, {}, ["--rounds", "run.rounds"]),
        ({"run.rounds": "many"}, {}, ["--run.rounds", '"many"', "integer"]),
        ({"planner.fixed": "{x"}, {}, ["--planner.fixed", "JSON"]),
        ({"model.heads": "3"}, {}, ["--model.heads", "model.heads = 3"]),
        ({}, {"GEOMESH_RUN__RONDS": "3"}, ["GEOMESH_RUN__RONDS", "run.rounds"]),
        ({}, {"GEOMESH_RUN__ROUNDS": "-3"}, ["GEOMESH_RUN__ROUNDS", "run.rounds = -3"]),
    ):
        with pytest.raises(ConfigError) as caught:
            load_run(path, flags, env)
        for part in parts:
            assert part in str(caught.value)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path, RUN, "quickstart.toml")
    with pytest.raises(ConfigError, match=r"no such file .*quickstart\.toml"):
        load_run(tmp_path / "quikstart.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path)


def test_sections_are_not_named_like_a_verb() -> None:
    verbs = {"mesh", "peer", "plan", "profile", "status", "follow", "history", "drain", "stop", "rollback", "data"}
    verbs |= {"eval", "export", "bench", "doctor", "config"}
    assert not verbs & set(RunConfig.model_fields)


# ---------------------------------------------------------------- sites


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[device]\n", ["site is missing"]),
        ('[site]\nname = "North"\n', ['site.name = "North"']),
        (SITE + "[net]\nlistn = 1\n", ["unknown key net.listn", "net.listen"]),
        (SITE + "[metrics]\nport = 70000\n", ["metrics.port = 70000"]),
        (SITE + '[emulation]\ndevice = "X"\n', ["emulation.fixed_seconds is missing"]),
        (SITE + "[links.south]\nmbs = 3\n", ["unknown key links.south.mbs"]),
        (SITE + "[links.south]\nmbps = -3\n", ["links.south.mbps = -3"]),
    ],
)
def test_a_wrong_site_file_gets_one_line_with_file_key_and_value(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text, "site.toml")
    with pytest.raises(ConfigError) as caught:
        load_site(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_sites_with_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, SITE, "a.toml")
    write(tmp_path, SITE, "b.toml")
    with pytest.raises(ConfigError, match=r'b\.toml: site\.name = "north" is also the name in .*a\.toml'):
        load_sites(tmp_path)


def test_no_site_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no site files"):
        load_sites(tmp_path)
    with pytest.raises(ConfigError, match="no site files"):
        load_sites()


def test_run_and_sites_are_checked_together(tmp_path: Path) -> None:
    run = write(tmp_path, RUN)
    sites = load_sites(write(tmp_path, SITE + EMULATION + "[links.sout]\nrtt_ms = 1\n", "north.toml"))
    assert check_sites(load_run(run), sites) == [f"{tmp_path}/north.toml: links.sout names no site of this run: it is not used"]
    for flags, parts in (
        ({"run.min_peers": "2"}, ["run.min_peers = 2", "1"]),
        ({"planner.mode": "fixed", "planner.fixed": '{"nort": [4, 4]}'}, ['"nort"', '"north"']),
        ({"planner.mode": "uniform", "planner.batch": "5"}, ["north.toml", "emulation.max_batch = 4", "5"]),
        ({"planner.mode": "fixed", "planner.fixed": '{"north": [6, 4]}'}, ["north.toml", "emulation.max_batch = 4", "6"]),
    ):
        with pytest.raises(ConfigError) as caught:
            check_sites(load_run(run, flags), sites)
        for part in parts:
            assert part in str(caught.value)


def test_observers_do_not_count_towards_min_peers(tmp_path: Path) -> None:
    sites = load_sites(write(tmp_path, SITE + "trains = false\n", "north.toml"))
    with pytest.raises(ConfigError, match=r"run\.min_peers = 1, but only 0"):
        check_sites(load_run(write(tmp_path, RUN)), sites)


def test_addresses() -> None:
    address = parse_address(f"/dns4/h100/tcp/31337/p2p/{PEER}")
    assert (address.host, address.port, address.peer) == ("h100", 31337, PEER)
    assert not address.loopback
    assert not address.wildcard
    assert parse_address("/ip6/::1/tcp/1").loopback
    assert parse_address("/ip6/::/tcp/1").wildcard
    malformed = ("", "h100:31337", "/ip4/1.2.3.4", "/ip4/1.2.3.4/tcp/x", "/ip4/1.2.3.4/tcp/70000", "/unix/x/tcp/1")
    for text in (*malformed, "/ip4/1.2.3/tcp/1", "/ip4/1.2.3.4/udp/1"):
        with pytest.raises(ValueError, match=r"is not a multiaddress|has no (TCP )?port"):
            parse_address(text)
    relayed = parse_address(f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}")
    assert (relayed.peer, relayed.relay) == (PEER, RELAY)
    for text in ("0OIl", "nobody", PEER[:-1], PEER + "1", "1" * 200):
        with pytest.raises(ValueError, match="peer id"):
            parse_address(f"/ip4/1.2.3.4/tcp/1/p2p/{text}")


def test_addresses_of_a_network_of_its_own() -> None:
    for text, private in (("10.0.0.1", True), ("172.17.0.2", True), ("8.8.8.8", False), ("127.0.0.1", False)):
        assert parse_address(f"/ip4/{text}/tcp/1").private is private
