"""The checks of a host, one by one: what each finds, and what it says to do."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

from geomesh_p2p import cli, doctor, environment
from geomesh_p2p.config import MetricsSection, NetSection, RunConfig, SiteConfig
from geomesh_p2p.core import findings
from geomesh_p2p.core.findings import Finding
from geomesh_p2p.engine import preflight as host
from geomesh_p2p.engine.checkpoint import DiskStore
from geomesh_p2p.errors import ConfigError, GeoMeshError
from geomesh_p2p.loading import inspect_run, load_run
from geomesh_p2p.swarm import preflight as network
from geomesh_p2p.swarm.clocks import ClockWatch, Offset
from geomesh_p2p.swarm.identity import load_identity, making_a_secret
from tests.injection.proof import fired, inject, injecting

SEED = "/ip4/8.8.8.8/tcp/31337/p2p/12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
SITE = SiteConfig.model_validate({"site": {"name": "north"}})


def net(**keys: object) -> NetSection:
    return NetSection.model_validate(keys)


# ---------------------------------------------------------------- findings


def test_a_finding_says_what_to_do_unless_all_is_well() -> None:
    assert findings.warning("disk", "little is left", "free some").line == "little is left: free some"
    assert findings.ok("disk", "much is left").line == "much is left"
    error = findings.refused("data", "x: no file matches 'y'; correct the path", 4)
    assert error == findings.fatal("data", "x: no file matches 'y'", "correct the path", 4)
    for wrong in (("fatal", "next", 0), ("ok", "next", 0), ("warning", "", 0), ("warning", "next", 3)):
        with pytest.raises(ValueError, match="check"):
            Finding("check", wrong[0], "text", wrong[1], wrong[2])  # type: ignore[arg-type]


# ---------------------------------------------------------------- ports


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        inject(lambda: holder.listen())
        port = holder.getsockname()[1]
        if not injecting():
            holder.close()
        yield port


@pytest.mark.case("C019")
@pytest.mark.fault
def test_a_listen_port_that_is_taken_is_named_with_setting_and_owner(taken: int) -> None:
    finding = network.listen_port(net(listen=f"/ip4/127.0.0.1/tcp/{taken}"))
    fired(finding.level == "fatal", "another process has the port")
    assert finding.exit_code == 75
    for part in ("net.listen", f"port {taken}", f"process {os.getpid()}", "choose another port"):
        assert part in finding.line


@pytest.mark.case("C103")
@pytest.mark.fault
def test_a_metrics_port_that_is_taken_is_a_warning(taken: int) -> None:
    finding = network.metrics_port(MetricsSection(port=taken))
    fired(finding.level == "warning", "another process has the port")
    for part in (f"metrics.port = {taken}", f"process {os.getpid()}", "a free one is taken"):
        assert part in finding.line
    assert network.metrics_port(MetricsSection()).level == "ok"


# ---------------------------------------------------------------- addresses


@pytest.mark.case("C005")
def test_what_is_announced_must_be_an_address_that_others_can_dial() -> None:
    here = ["127.0.0.1", "192.168.1.5", "198.51.100.7"]

    def found(in_container: bool = False, **keys: object) -> Finding:
        (finding,) = network.announced(net(**keys), here, in_container)
        return finding

    assert found().level == "ok"
    listen = "/ip4/0.0.0.0/tcp/31337"
    assert found(listen=listen, announce="/ip4/198.51.100.7/tcp/31337").level == "ok"
    lan = found(listen=listen, announce="/ip4/192.168.1.5/tcp/31337", seeds=[SEED])
    assert lan.level == "warning"
    for part in ("private network", SEED, "net.announce"):
        assert part in lan.line
    assert found(listen="/ip4/192.168.1.5/tcp/31337").level == "ok"
    docker = found(in_container=True, listen="/ip4/172.17.0.2/tcp/31337")
    assert (docker.level, "container" in docker.text) == ("warning", True)
    assert "container" not in found(in_container=True, listen=listen, announce="/ip4/172.17.0.2/tcp/31337").text
    behind = found(listen=listen, announce="/ip4/203.0.113.9/tcp/4000")
    assert (behind.level, "forwarded" in behind.next_step, "4000" in behind.next_step) == ("warning", True, True)
    unknown = found(listen=listen, announce="/dns4/no-such-host.invalid/tcp/31337")
    assert (unknown.level, "no-such-host.invalid" in unknown.text) == ("warning", True)
    assert found(listen=listen, announce="/dns4/localhost/tcp/31337").level == "ok"


# ---------------------------------------------------------------- limits and files


def test_open_files_are_compared_with_what_the_group_needs() -> None:
    need = network.files_needed(8, 4)
    assert network.files_needed(9, 4) > need > network.files_needed(8, 1)
    assert network.open_files(8, 4, 1_000_000, 1_000_000).level == "ok"
    tight = network.open_files(8, 4, need, need)
    assert (tight.level, f"at most {need}" in tight.text, "more than 8" in tight.text) == ("warning", True, True)
    short = network.open_files(8, 4, 10, need - 1)
    assert (short.level, short.exit_code, "ulimit" in short.next_step) == ("fatal", 75, True)
    assert network.open_files(8, 4, 10, 1_000_000).level == "ok", "a peer raises its own limit"


def test_a_peer_raises_its_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        network.raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_join_secret_must_be_readable_and_nobody_elses(tmp_path: Path) -> None:
    assert network.join_secret("") == []
    path = tmp_path / "secret"
    (missing,) = network.join_secret(str(path))
    assert (missing.level, missing.exit_code, "net.join_secret_file" in missing.text) == ("fatal", 2, True)
    path.write_text("\n")
    assert network.join_secret(str(path))[0].level == "fatal"
    path.write_text("hush" * 4 + "\n")
    path.chmod(0o644)
    (seen,) = network.join_secret(str(path))
    assert (seen.level, seen.next_step, "mode 644" in seen.text) == ("warning", f"chmod 600 {path}", True)
    path.chmod(0o600)
    assert network.join_secret(str(path))[0].level == "ok"
    path.write_text(" hush\n")
    (short,) = network.join_secret(str(path))
    assert (short.level, "4 bytes, not 16" in short.text, "urandom" in short.next_step) == ("warning", True, True)
    path.chmod(0o604)
    assert len(network.join_secret(str(path))) == 2


def test_the_group_that_a_user_has_for_itself_may_read_the_join_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes gives it to a pod that is not root."""
    path = tmp_path / "secret"
    path.write_text("hush" * 4)
    path.chmod(0o440)
    group = path.stat().st_gid
    for user, level in ((group, "ok"), (group + 1, "warning")):
        monkeypatch.setattr(network.os, "getuid", lambda user=user: user)
        assert network.join_secret(str(path))[0].level == level


def test_the_command_that_a_missing_or_short_secret_is_answered_with_makes_a_good_one(tmp_path: Path) -> None:
    path = tmp_path / "the run's secret"
    (missing,) = network.join_secret(str(path))
    assert "copy the run's secret there" in missing.next_step
    subprocess.run(["sh", "-c", making_a_secret(path)], check=True)
    assert making_a_secret(path) in missing.next_step
    assert network.join_secret(str(path))[0].level == "ok"
    (folder,) = network.join_secret(str(tmp_path))
    assert (folder.level, "a file that this user can read" in folder.next_step) == ("fatal", True)


def test_an_entry_of_the_allow_list_that_is_no_peer_id_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nid = "x"\n')
    peer = SEED.rsplit("/", 1)[1]
    load_run(tmp_path / "run.toml", {"net.allow": peer})
    for wrong in ("oregon", peer[:-1], f"{peer[:-1]}0", SEED):
        _, (problem,) = inspect_run(tmp_path / "run.toml", {"net.allow": f"{peer},{wrong}"})
        assert f'net.allow: "{wrong}" is not a peer id: ' in problem
        assert "prints when it starts" in problem


# ---------------------------------------------------------------- geomesh doctor as a whole


def test_the_doctor_says_each_thing_once_and_nothing_good_of_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[tuple[str, ...]] = []

    async def meet_seeds(net: NetSection, folder: Path, port_free: bool, reach: bool = True) -> list[Finding]:
        met.append(net.seeds)
        assert not reach
        return [findings.ok("libp2p daemon", "starts")]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(network, "meet_seeds", meet_seeds)
    monkeypatch.setattr(doctor, "_engine", lambda *_: [])
    (tmp_path / "run.toml").write_text('[run]\nid = "x"\n[net]\nstreams = 2\n')
    (tmp_path / "a.toml").write_text('[site]\nname = "a"\n[net]\nlissten = "x"\nannounce = "/ip4/0.0.0.0/tcp/4"\n')
    (tmp_path / "seed").write_text(f"{SEED}\n")
    (tmp_path / "half").write_text("/ip4/203.0")
    found = doctor.doctor("run.toml", "a.toml", ["@none", "@seed", "@half"], {}, {})
    assert met == [(SEED,)], "what can be tried is tried"
    texts = [one.text for one in found]
    assert len(set(texts)) == len(texts)
    checks = [one.check for one in found]
    assert [checks.count(name) for name in ("libp2p daemon", "announced address", "listen port", "identity")] == [1, 0, 1, 1]
    wrong = {one.text: one for one in found if one.level == "fatal"}
    assert len(wrong) == 4
    for part in ("unknown key net.lissten", "is a wildcard", "@none: there is no such file", "@half: no whole line"):
        assert any(part in text for text in wrong), part
    assert all("--address-file" in one.next_step for one in wrong.values() if one.check == "seed")
    assert doctor.exit_code(found) == 2


@pytest.mark.case("C126")
def test_a_system_without_a_daemon_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the doctor, and by a peer at its start."""
    monkeypatch.setattr(doctor.sys, "platform", "win32")
    found = doctor.doctor(None, None, [], {}, {})
    (system,) = (one for one in found if one.check == "system")
    assert (system.level, doctor.exit_code(found)) == ("fatal", 2)
    for part in ("win32 is not supported", "libp2p daemon", "Linux or macOS", "WSL 2"):
        assert part in system.line
    run = RunConfig.model_validate({"run": {"id": "x"}, "metrics": {"port": 0}})
    with pytest.raises(GeoMeshError, match="win32 is not supported") as raised:
        asyncio.run(doctor.preflight(run, SITE, tmp_path, with_model=False))
    assert raised.value.exit_code == 2


@pytest.mark.case("C126")
def test_the_daemons_binary_must_be_there_and_executable(tmp_path: Path) -> None:
    assert network.daemon_binary().level == "ok"
    path = tmp_path / "p2pd"
    assert network.daemon_binary(path).exit_code == 2
    path.write_text("")
    assert "chmod" in network.daemon_binary(path).next_step


def test_an_identity_is_new_or_sound(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    assert network.identity(path).level == "ok"
    assert not path.exists()
    peer = load_identity(path).peer
    assert peer in network.identity(path).text
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-8])
    assert network.identity(path).exit_code == 4


def test_a_folder_in_use_is_named_and_looking_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "north"
    assert host.own_folder(folder).level == "ok"
    assert not folder.exists()
    with DiskStore(folder):
        assert host.own_folder(folder).level == "ok", "this process has it itself"
        (folder / ".lock").write_text("1\n")
        finding = host.own_folder(folder)
        assert (finding.level, finding.exit_code, "process 1" in finding.text) == ("fatal", 75, True)
    before = sorted(folder.iterdir())
    assert host.own_folder(folder).level == "ok"
    assert sorted(folder.iterdir()) == before


# ---------------------------------------------------------------- data


def sample(folder: Path, text: str, names: tuple[str, ...] = ("a.txt",), **dataset: object) -> list[Finding]:
    for name in names:
        (folder / name).write_text(text)
    section = {"source": "text", "paths": [str(folder / name) for name in names], "validation_sequences": 2, **dataset}
    return host.data_sample(RunConfig.model_validate({"run": {"id": "x"}, "dataset": section}), 4).findings


def worst(found: list[Finding]) -> Finding:
    return max(found, key=lambda finding: ("ok", "warning", "fatal").index(finding.level))


@pytest.mark.case("C086")
def test_a_corpus_that_is_too_short_is_refused_with_both_numbers(tmp_path: Path) -> None:
    finding = worst(sample(tmp_path, "abcd", ("a.txt", "b.txt", "c.txt")))
    assert finding.exit_code == 4
    for part in ("15 tokens", "validation needs 257", "model.sequence_length"):
        assert part in finding.line, finding.line
    assert worst(sample(tmp_path, "x" * 320)).level == "fatal", "two and a half sequences"
    assert worst(sample(tmp_path, "some words\n" * 200_000)).level == "ok"


@pytest.mark.case("C076")
def test_fewer_files_than_peers_are_no_matter(tmp_path: Path) -> None:
    found = sample(tmp_path, "some words\n" * 20_000)
    assert worst(found).level == "ok"
    assert "1 files for 4 peers" in found[0].text
    assert "for 4 peers" not in sample(tmp_path, "some words\n" * 20_000, ("a.txt", "b.txt", "c.txt", "d.txt"))[0].text


def tokenizer_with(folder: Path, highest: int) -> str:
    import tokenizers

    words = {f"w{index}": index for index in range(highest + 1)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.case("C087")
def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("w0 w299 w301\n" * 2000)
    run = {
        "run": {"id": "x"},
        "model": {"path": str(tmp_path / "model"), "sequence_length": 16},
        "dataset": {"source": "text", "paths": [str(tmp_path / "a.txt")], "validation_sequences": 2},
    }

    def model(highest: int) -> Finding:
        tokenizer = tokenizer_with(tmp_path, highest)
        dataset = {**run["dataset"], "tokenizer": tokenizer}
        config = RunConfig.model_validate({**run, "dataset": dataset})
        (found,) = (one for one in host.check_host(config, SITE, tmp_path / "runs", 8) if one.check == "model")
        return found

    refused = model(301)
    assert (refused.level, refused.exit_code) == ("fatal", 4)
    for part in ("vocabulary of 300", "highest id is 301"):
        assert part in refused.line
    assert model(299).level == "ok"


def test_all_that_is_wrong_with_data_and_device_is_found_at_once(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"run": {"id": "x"}, "dataset": {"source": "text", "paths": [str(tmp_path / "none*.txt")]}})
    gpu = SiteConfig.model_validate({"site": {"name": "north"}, "device": {"name": "cuda:99"}})
    found = {one.check: one for one in host.check_host(run, gpu, tmp_path / "runs", 8)}
    assert {check for check, one in found.items() if one.level == "fatal"} == {"data files", "device"}
    assert {"model", "memory", "disk", "folder"} <= set(found)


# ---------------------------------------------------------------- clocks


@pytest.mark.case("C011")
def test_a_clock_that_is_off_is_told_with_offset_and_peer_and_once() -> None:
    watch = ClockWatch()
    assert watch.news("QmA", "oregon", Offset(1.9, 0.1)) == "", "small skew is tolerated"
    assert watch.news("QmA", "oregon", Offset(4.0, 2.5)) == "", "the round trip was too long to say"
    told = watch.news("QmA", "oregon", Offset(10.3, 0.02))
    assert "10.3 s (give or take 0.02) behind that of oregon" in told
    assert watch.news("QmA", "oregon", Offset(10.4, 0.02)) == ""
    assert "ahead of" in watch.news("QmA", "oregon", Offset(-3600.0, 0.02)), "a jump is told"
    assert "agree again" in watch.news("QmA", "oregon", Offset(0.1, 0.02))
    assert watch.news("QmA", "oregon", Offset(0.1, 0.02)) == ""
    watch.news("QmA", "oregon", Offset(10.3, 0.02))
    watch.keep(set())
    assert watch.news("QmA", "oregon", Offset(10.3, 0.02)) != ""
    assert "2.2 s" in watch.news("QmB", "tokyo", Offset(2.2, 0.1)), "just above what is tolerated"


# ---------------------------------------------------------------- Python and packages


@pytest.mark.case("C012")
def test_an_old_python_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert environment.python_refusal() == ""
    assert environment.python_refusal((3, 14)) == ""
    monkeypatch.setattr(environment, "python_refusal", lambda: "Python 3.9 is not supported, GeoMesh needs 3.11 or newer")
    assert cli.main(["config", "show", "none.toml"]) == 2
    assert "Python 3.9 is not supported" in capsys.readouterr().err
    assert metadata.metadata(environment.PACKAGE)["Requires-Python"] == ">=3.11"
    assert "Python 3.9 is not supported, GeoMesh needs 3.11" in python_refusal_of((3, 9))


python_refusal_of = environment.python_refusal


@pytest.mark.case("C012")
def test_what_is_installed_goes_together_and_a_conflict_is_named() -> None:
    assert environment.conflicts() == []
    assert "scipy needs numpy" in " ".join(environment.conflicts(installed={"numpy": "1.2.0"})), "what is needed has needs"
    (conflict,) = environment.conflicts(installed={"hivemind": "1.1.11"})
    assert conflict == "geomesh-p2p needs hivemind<1.2,>=1.1.12, installed is 1.1.11"
    with pytest.raises(metadata.PackageNotFoundError):
        environment.conflicts("no-such-package")


@pytest.mark.case("C012")
def test_the_pinned_versions_are_those_that_the_tests_run_with() -> None:
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    installed = {}
    for name in pinned:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    assert {"hivemind", "numpy", "pydantic", "pytest"} <= set(installed)
    assert installed == {name: pinned[name] for name in installed}, "make setup installs what is pinned"


def test_settings_that_would_not_load_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nid = "x"\nrounds = 0\n[model]\nheads = 5\n[net]\nlisten = "/ip4/0.0.0.0/tcp/1"\n')
    _, problems = inspect_run(path, {"run.ronds": "3"})
    for part in ("run.ronds", "run.rounds = 0", "model.heads = 5", "wildcard"):
        assert any(part in problem for problem in problems), part
    with pytest.raises(ConfigError, match=r"run\.rounds = 0.*and 3 more"):
        load_run(path)


def test_without_a_run_file_the_doctor_still_reads_site_file_flags_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[NetSection] = []

    async def meet_seeds(net: NetSection, folder: Path, port_free: bool, reach: bool = True) -> list[Finding]:
        asked.append(net)
        return []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(network, "meet_seeds", meet_seeds)
    (tmp_path / "a.toml").write_text('[site]\nname = "a"\n[net]\nlisten = "/ip4/0.0.0.0/tcp/0"\n')

    def found(site: str | None, seeds: list[str], flags: dict[str, str], **env: str) -> dict[str, list[str]]:
        by_level: dict[str, list[str]] = {"ok": [], "warning": [], "fatal": []}
        for one in doctor.doctor(None, site, seeds, flags, env):
            by_level[one.level].append(one.line)
        assert not any("identity" in line for line in by_level["ok"]), "there is no folder without a run's name"
        return by_level

    wrong = found("a.toml", [], {"net.ronds": "3", "net.allow": "oregon"}, GEOMESH_NET__STREAMS="99")["fatal"]
    for part in ("a wildcard", "unknown key net.ronds", '"oregon" is not a peer id', "GEOMESH_NET__STREAMS"):
        assert any(part in line for line in wrong), (part, wrong)
    assert found("a.toml", [SEED], {"net.announce": "/ip4/198.51.100.7/tcp/31337"})["fatal"] == []
    assert (asked[-1].seeds, asked[-1].announce) == ((SEED,), "/ip4/198.51.100.7/tcp/31337")
    assert found(None, [SEED], {})["fatal"] == [], "the run file may say where to listen"
    (loopback,) = found(None, [SEED], {"net.listen": "/ip4/127.0.0.1/tcp/0"})["fatal"]
    assert "loopback" in loopback


def test_what_a_person_must_mend_goes_before_what_passes() -> None:
    passing = [findings.fatal("a", "x", "y", 75), findings.fatal("b", "x", "y", 3)]
    assert doctor.exit_code([]) == 0
    assert doctor.exit_code(passing) == 75
    assert doctor.exit_code([*passing, findings.fatal("c", "x", "y", 4), findings.fatal("d", "x", "y", 2)]) == 4


async def test_what_is_found_is_told_at_once_and_after_a_while_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told, said, go = list[str](), list[str](), asyncio.Event()

    def info(text: str, *values: object) -> None:
        said.append(text % values)
        go.set()

    monkeypatch.setattr(doctor.progress, "info", info)

    async def slow() -> list[findings.Finding]:
        await go.wait()
        assert told == ["quick"]
        return [findings.ok("slow", "done")]

    async def quick() -> list[findings.Finding]:
        return [findings.ok("quick", "done")]

    def tell(found: list[findings.Finding]) -> None:
        told.extend(one.check for one in found)

    found = await doctor._all([("a slow disk", slow), ("b", quick)], 60.0, tell, tell_seconds=0.01)
    assert [one.check for one in found] == ["slow", "quick"], "the report keeps its order"
    assert told == ["quick", "slow"]
    assert len(said) == 1
    assert said[0].startswith("still checking: a slow disk (at most ")
