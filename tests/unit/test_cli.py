"""The command: what it loads, how it reads flags, what it prints where, and with which code it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from geomesh_p2p import cli
from geomesh_p2p.config import RunConfig
from geomesh_p2p.errors import ConfigError, Interrupted, UnreachableError

RUN = '[run]\nid = "demo"\n'
SITE = '[site]\nname = "north"\n'
HEAVY = ("torch", "hivemind", "transformers", "numpy", "pydantic")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def heavy_modules_after(code: str) -> list[str]:
    script = f"import sys\n{code}\nprint(*[module for module in {HEAVY} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


def test_importing_the_command_loads_nothing_heavy() -> None:
    assert heavy_modules_after("import geomesh_p2p.cli") == []


def test_help_loads_nothing_heavy() -> None:
    assert heavy_modules_after("import geomesh_p2p.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass") == []


def test_help_with_the_run_files_keys_loads_neither_torch_nor_hivemind() -> None:
    code = "import geomesh_p2p.cli as c\ntry: c.main(['mesh', '--help'])\nexcept SystemExit: pass"
    assert heavy_modules_after(code) == ["pydantic"]


def test_help_with_the_methods_loads_neither_torch_nor_hivemind() -> None:
    code = "import geomesh_p2p.cli as c\ntry: c.main(['bench', '--help'])\nexcept SystemExit: pass"
    assert heavy_modules_after(code) == ["numpy", "pydantic"]


def test_the_help_of_a_benchmark_names_each_method_and_what_is_taken_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    from geomesh_p2p.lab.bench.command import Request
    from geomesh_p2p.lab.bench.methods import METHODS

    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    told = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert [name for name, method in METHODS.items() if f"{name} {method.about}" not in lines] == []
    assert "diloco-tuned-H the best of diloco, diloco-2x and diloco-4x" in lines
    assert f"without --methods: {', '.join(Request().methods)}" in told
    assert f"(default: {Request().tokens:,})" in told


def test_configuration_loads_neither_torch_nor_hivemind(run_file: Path) -> None:
    assert heavy_modules_after(f"import geomesh_p2p.cli as c\nc.main(['config', 'show', {str(run_file)!r}])") == ["pydantic"]


@pytest.mark.parametrize(
    ("words", "rest", "overrides"),
    [
        (["mesh", "--run.id", "demo", "x.toml"], ["mesh", "x.toml"], {"run.id": "demo"}),
        (["--run.id=a b", "--sites", "p"], ["--sites", "p"], {"run.id": "a b"}),
        (["--run.fresh", "x.toml"], ["x.toml"], {"run.fresh": "true"}),
        (["--run.fresh", "false", "x"], ["x"], {"run.fresh": "false"}),
        (["--run.fresh"], [], {"run.fresh": "true"}),
        (["--run.seed", "-1"], [], {"run.seed": "-1"}),
        (["--run.rounds", "1", "--run.rounds", "2"], [], {"run.rounds": "2"}),
        (["--net.join_secret_file="], [], {"net.join_secret_file": ""}),
    ],
)
def test_keys_of_the_run_file_are_flags_anywhere(words: list[str], rest: list[str], overrides: dict[str, str]) -> None:
    assert cli.split_overrides(words) == (rest, overrides)


@pytest.mark.parametrize("words", [["--run.rounds"], ["--run.rounds", "--json"]])
def test_a_key_without_a_value_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--run\.rounds needs a value"):
        cli.split_overrides(words)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["VERB", "--help"]),
        (["mehs"], ["'mehs'", "'mesh'"]),
        (["mesh"], ["RUN.toml"]),
        (["mesh", "none.toml", "--sites", "x"], ["none.toml", "no such file"]),
        (["config", "show", "RUN", "--jsn"], ["--jsn", "--json"]),
        (["config", "show", "RUN", "--run.ronds", "3"], ["run.ronds", "run.rounds"]),
        (["mesh", "RUN", "--sites", "none.toml"], ["none.toml", "no such file"]),
        (["peer", "RUN", "--site", "SITE"], ["net.seeds is empty", "--bootstrap", "--first"]),
        (["peer", "RUN", "--site", "SITE", "--first", "--bootstrap", "x"], ["--bootstrap", "not allowed with"]),
        (["peer", "RUN", "--site", "SITE", "--bootstrap", "1.2.3.4:80"], ["net.seeds", "multiaddress"]),
    ],
)
def test_misuse_gets_one_line_on_stderr_and_code_2(
    words: list[str], parts: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = run_file.parent / "site.toml"
    site.write_text(SITE)
    assert cli.main([{"RUN": str(run_file), "SITE": str(site)}.get(word, word) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("geomesh: ")
    assert printed.err.count("\n") == 1
    for part in parts:
        assert part in printed.err


def test_an_errors_class_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails_with(error: BaseException) -> int:
        def verb(args: object) -> int:
            raise error

        monkeypatch.setattr(cli, "_config_show", verb)
        return cli.main(["config", "show", "x.toml"])

    assert fails_with(UnreachableError("nobody there")) == 3
    assert capsys.readouterr().err == "geomesh: nobody there\n"
    assert fails_with(KeyboardInterrupt()) == 130
    assert fails_with(ZeroDivisionError("a bug")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_config_show_names_the_origin_of_every_value(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEOMESH_RUN__SEED", "7")
    words = ["config", "show", str(run_file), "--run.rounds", "20"]
    assert cli.main(words) == 0
    lines = [line.split("#") for line in capsys.readouterr().out.splitlines()]
    shown = {parts[0].strip(): parts[-1].strip() for parts in lines if len(parts) > 1}
    assert shown["rounds = 20"] == "--run.rounds"
    assert shown["seed = 7"] == "GEOMESH_RUN__SEED"
    assert shown['id = "demo"'] == str(run_file)
    assert shown["min_peers = 1"] == "default"
    assert cli.main([*words, "--json"]) == 0
    shown_json = json.loads(capsys.readouterr().out)
    assert shown_json["config"]["run"]["rounds"] == 20
    assert shown_json["origins"]["run.rounds"] == "--run.rounds"


def test_seeds_given_one_by_one_are_all_kept(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that kept only the last one could not come back into the run while that one is down."""
    site = tmp_path / "north.toml"
    site.write_text('[site]\nname = "north"\n')
    addresses = [f"/ip4/127.0.0.1/tcp/{4100 + i}/p2p/12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq" for i in range(3)]
    seeds: list[str] = []

    def run_peer(config: RunConfig, *_: object) -> int:
        seeds.extend(config.net.seeds)
        return 0

    peer = SimpleNamespace(PeerOptions=lambda **_: None, run_peer=run_peer, torch_engine=None)
    monkeypatch.setitem(sys.modules, "geomesh_p2p.peer", peer)  # the real one would load hivemind into this process
    words = ["peer", str(run_file), "--site", str(site), "--bootstrap", addresses[0], "--bootstrap", *addresses[1:]]
    assert cli.main(words) == 0
    assert seeds == addresses


def test_messages_name_only_commands_that_there_are() -> None:
    """A message that says what to do next is worth nothing if there is no such command."""
    parser = cli._parser()
    verbs = next(action.choices for action in parser._actions if action.dest == "run_verb" or action.choices)
    said: dict[str, set[str]] = {}
    for path in Path(cli.__file__).parent.rglob("*.py"):
        for verb, rest in re.findall(r"`geomesh ([a-z]+)([^`]*)`", path.read_text()):
            said.setdefault(verb, set()).update(re.findall(r"--[a-z-]+(?![a-z.])", rest))
    assert len(said) > 3
    assert set(said) <= set(verbs)
    for verb, flags in said.items():
        assert flags <= set(verbs[verb]._option_string_actions), verb


def test_the_process_ends_with_its_verb_and_whatever_the_interpreter_would_wait_for_does_not_hold_it_up(run_file: Path) -> None:
    code = (
        "import atexit, threading, time\n"
        "from geomesh_p2p import cli\n"
        "atexit.register(print, 'tidied up')\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "cli.run()"
    )
    for words, exit_code in ((["config", "show", str(run_file), "--json"], 0), (["config", "show", "none.toml"], 2)):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120.0)
        assert done.returncode == exit_code
        assert done.stdout.endswith("tidied up\n")
        assert exit_code or json.loads(done.stdout.removesuffix("tidied up\n"))
        assert bool(done.stderr) == bool(exit_code)


@pytest.mark.parametrize(
    ("flag", "value", "least"), [("--choice", "-4", 0), ("--choice", "x", 0), ("--processes", "-3", 1), ("--processes", "0", 1)]
)
def test_a_benchmark_counts_items_from_0_and_processes_from_1(
    flag: str, value: str, least: int, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", str(run_file), flag, value]) == 2
    assert f"{flag}: '{value}': give a whole number from {least} on" in capsys.readouterr().err


def test_a_benchmark_takes_tokens_as_one_likes(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", str(run_file), "--tokens", "5e2"]) == 2
    assert "--tokens 500: less than one round of the setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--setting", "paper"], ["--methods", "diloco"], ["--seeds", "1"], ["--tokens", "5e6"], ["--vary", "outer.momentum=0"],
     ["--engine", "real"], ["--choice", "0"], ["--processes", "1"], ["--store", "x"], ["--outer.momentum", "0.5"]],
)  # fmt: skip
def test_a_report_made_anew_takes_nothing_that_would_change_it(
    words: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", str(run_file), "--report-only", "--check", "--out", str(run_file.parent), *words]) == 2
    assert capsys.readouterr().err == f"geomesh: --report-only goes with --out and --check alone: leave out {words[0]}\n"


def test_what_ended_by_a_signal_has_the_code_of_that_signal(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stopped, code in ((KeyboardInterrupt(), 130), (Interrupted(signal.SIGINT), 130), (Interrupted(signal.SIGTERM), 143)):

        def stop(_args: object, stopped: BaseException = stopped) -> int:
            raise stopped

        monkeypatch.setattr(cli, "_bench", stop)
        assert cli.main(["bench", str(run_file)]) == code
