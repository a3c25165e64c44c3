"""What a user can do wrong: one plain line with cause and next step, the right exit code, and nothing left on disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p import cli
from geomesh_p2p.engine import files
from geomesh_p2p.errors import TemporaryError

RUN = """
[run]
id = "demo"
[model]
hidden_size = 16
intermediate_size = 32
layers = 1
heads = 2
kv_heads = 2
sequence_length = 32
[dataset]
source = "text"
paths = ["corpus.txt"]
validation_sequences = 4
"""
SITES = {
    "north": "",
    "south": "",
    "twin": '[site]\nname = "north"\n',
    "gpu": '[site]\nname = "gpu"\n[device]\nname = "cuda:99"\n',
    "typo": '[site]\nname = "typo"\n[device]\nname = "gpu0"\n',
    "watcher": '[site]\nname = "watcher"\ntrains = false\n',
    "profiled": '[site]\nname = "profiled"\n[device]\nprofile = "none.json"\n',
    "wide": '[site]\nname = "wide"\n[emulation]\ndevice = "toy"\nfixed_seconds = 0\nsequence_seconds = 0\nmax_batch = 4\n',
}
SEED = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWN3KhwZA84KG8Q9JGqrUWdacwffsYMNYbs72cCUgPHxXq"
WORDS = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 900}, "unk_token": "a"}}'
LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a run file, site files and data. Logging is afterwards as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    for name, text in SITES.items():
        (tmp_path / f"{name}.toml").write_text(text or f'[site]\nname = "{name}"\n')
    (tmp_path / "corpus.txt").write_text("".join(f"line {i} of a short text\n" for i in range(6000)))
    (tmp_path / "latin.txt").write_bytes("un café\n".encode("latin-1") * 1000)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short\n")
    (tmp_path / "no-sites").mkdir()
    (tmp_path / "latin.toml").write_bytes('[run]\nid = "x" # é\n'.encode("latin-1"))
    (tmp_path / "words.json").write_text(WORDS)
    (tmp_path / "secret").write_text("\n")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.pkl").write_text("no model")
    yield tmp_path
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def ended(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, the last line on stderr), which is the only one that is no log line."""
    code = cli.main(words)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("geomesh: ")] == lines[-1:]
    assert "Traceback" not in "".join(lines)
    return code, lines[-1]


MESH = ["mesh", "run.toml", "--sites"]
FIRST = ["peer", "run.toml", "--first", "--site"]
JOIN = ["peer", "run.toml", "--site", "north.toml", "--bootstrap"]


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (["mehs"], 2, ["'mehs'", "'mesh'"]),
        (["mesh", "run.toml"], 2, ["--sites"]),
        ([*MESH, "no-sites"], 2, ["no-sites", "no site files"]),
        ([*MESH, "north.toml", "twin.toml"], 2, ["twin.toml", '"north"', "north.toml", "give each site its own"]),
        ([*MESH, "watcher.toml"], 2, ["run.min_peers = 1"]),
        ([*MESH, "gpu.toml"], 2, ["gpu.toml", "cuda:99", "give cpu, auto"]),
        ([*MESH, "typo.toml"], 2, ["typo.toml", "device.name", "gpu0", "cuda"]),
        ([*MESH, "wide.toml"], 2, ["wide.toml", "emulation.sequence_seconds = 0", "greater than 0"]),
        ([*MESH, "north.toml", "--run.ronds", "3"], 2, ["run.ronds", "run.rounds"]),
        ([*MESH, "north.toml", "--run.rounds", "many"], 2, ["run.rounds", '"many"', "integer"]),
        ([*MESH, "north.toml", "--outer.momentum", "2"], 2, ["outer.momentum = 2.0", "less than"]),
        ([*MESH, "north.toml", "--model.heads", "3"], 2, ["model.hidden_size = 16", "model.heads = 3"]),
        ([*MESH, "north.toml", "--model.kv_heads", "3"], 2, ["model.kv_heads = 3", "model.heads = 2"]),
        (["mesh", "latin.toml", "--sites", "north.toml"], 2, ["latin.toml", "line 2", "UTF-8"]),
        ([*MESH, "north.toml", "--dataset.paths", "none.txt"], 4, ["dataset.paths", "none.txt", "correct the path"]),
        ([*FIRST, "watcher.toml"], 2, ["watcher.toml", "observer", "--bootstrap"]),
        ([*FIRST, "run.toml"], 2, ["run.toml", "site"]),
        ([*FIRST, "north.toml", "--fork-from", "3"], 2, ["--fork-from", "--first", "one of them"]),
        ([*JOIN, "nonsense"], 2, ["nonsense", "multiaddress"]),
        ([*JOIN, "/ip4/127.0.0.1/tcp/99"], 2, ["/p2p/PEER_ID"]),
        ([*JOIN, "/ip4/127.0.0.1/tcp/99/p2p/nobody"], 2, ["nobody", "write it like"]),
        ([*JOIN, "@none", "--net.reach_seconds", "0.1"], 3, ["@none", "net.reach_seconds"]),
        (["eval", "no-sites"], 4, ["no-sites", "snapshot"]),
        (["history", "verify", "none"], 2, ["none", "does not exist"]),
    ],
)
def test_it_is_said_before_anything_is_made(
    words: list[str], code: int, parts: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = ended(words, capsys)
    assert (found, [part for part in parts if part not in said]) == (code, []), said
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ([*FIRST, "gpu.toml"], 2, ["cuda:99", "give cpu, auto"]),
        ([*FIRST, "profiled.toml"], 4, ["device.profile", "none.json", "geomesh profile"]),
        ([*FIRST, "north.toml", "--dataset.paths", "none.txt"], 4, ["none.txt", "correct the path"]),
        ([*FIRST, "north.toml", "--dataset.paths", "empty.txt"], 4, ["empty.txt", "the file is empty"]),
        ([*FIRST, "north.toml", "--dataset.paths", "short.txt"], 4, ["11 tokens", "Give more text"]),
        ([*FIRST, "north.toml", "--dataset.paths", "latin.txt"], 4, ["latin.txt", "line 1", "0xe9", "iconv"]),
        ([*FIRST, "north.toml", "--dataset.tokenizer", "./none"], 4, ["dataset.tokenizer", "./none", "give an existing one"]),
        (
            [*FIRST, "north.toml", "--dataset.tokenizer", "an-org/none"],
            4,
            ["dataset.tokenizer", "HF_HUB_OFFLINE"],
        ),
        ([*FIRST, "north.toml", "--dataset.tokenizer", "other.pkl"], 4, ["dataset.tokenizer", "other.pkl"]),
        ([*FIRST, "north.toml", "--model.path", "/none"], 4, ["model.path", "/none", "give an existing one"]),
        ([*FIRST, "north.toml", "--model.path", "no-sites"], 4, ["model.path", "no-sites"]),
        ([*FIRST, "north.toml", "--model.path", "small"], 4, ["vocabulary of 100", "255", "choose the tokenizer"]),
        ([*FIRST, "north.toml", "--net.join_secret_file", "none"], 2, ["net.join_secret_file", "none", "No such file"]),
        ([*FIRST, "north.toml", "--net.join_secret_file", "secret"], 2, ["net.join_secret_file", "secret", "is empty"]),
        ([*JOIN, SEED, "--net.reach_seconds", "0.5"], 3, [SEED, "connection refused", "net.reach_seconds"]),
    ],
)
def test_a_peer_that_cannot_start_takes_away_what_it_made(
    words: list[str], code: int, parts: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = ended(words, capsys)
    assert (found, [part for part in parts if part not in said]) == (code, []), said
    assert not (folder / "runs").exists()


def test_what_was_there_before_a_failed_start_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = folder / "runs" / "demo" / "north"
    (site / "log").mkdir(parents=True)
    (site / "peer.log").write_text("kept")
    assert ended([*FIRST, "north.toml", "--dataset.paths", "none.txt"], capsys)[0] == 4
    assert {path.name for path in site.iterdir()} == {"log", "peer.log"}
    assert (site / "peer.log").read_text() == "kept"


# ---------------------------------------------------------------- disks


@pytest.mark.parametrize("words", [[*FIRST, "north.toml"], [*MESH, "north.toml"]])
def test_a_full_disk_is_said_before_anything_is_made(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3_000_000}))
    code, said = ended(words, capsys)
    assert code == 75
    assert "3 MB are free: free some space" in said
    assert not (folder / "runs").exists()


def test_a_disk_that_fills_up_while_a_peer_starts(folder: Path) -> None:
    """The limit on a file's size stands for the disk: the key and the small records still fit, the configuration does not."""
    done = subprocess.run(
        [sys.executable, "-m", "geomesh_p2p.cli", *FIRST, "north.toml"],
        capture_output=True, text=True, timeout=90, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines()[-1] == "geomesh: runs/demo/north: File too large: free some space and start again"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [(errno.ENOSPC, 75, "free some space"), (errno.EDQUOT, 75, "free some space"), (errno.EACCES, 2, "choose another place")],
)
def test_a_failed_write_of_any_verb_is_one_line(
    number: int, code: int, advice: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(args: Any) -> int:
        raise OSError(number, os.strerror(number), "out.json")

    monkeypatch.setattr(cli, "_profile", verb)
    found, said = ended(["profile", "run.toml"], capsys)
    assert found == code
    assert said.startswith(f"geomesh: out.json: {os.strerror(number)}: {advice}")


# ---------------------------------------------------------------- folders


def test_a_folder_in_use_is_not_moved_aside(tmp_path: Path) -> None:
    site = tmp_path / "north"
    site.mkdir()
    lock = files.FolderLock(site)
    with pytest.raises(TemporaryError, match=f"in use by process {os.getpid()}"):
        files.move_aside(site)
    lock.release()
    aside = files.move_aside(site)
    assert aside is not None
    assert aside.is_dir()
    assert not site.exists()
    assert files.move_aside(site) is None


def test_what_was_made_is_undone_and_no_more(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "kept").touch()
    made = files.Made(old)
    (old / "log").mkdir()
    (old / "log" / "x").touch()
    (old / "identity.key").touch()
    made.undo(keep="identity.key")
    assert {path.name for path in old.iterdir()} == {"kept", "identity.key"}
    new = tmp_path / "runs" / "demo" / "north"
    made = files.Made(new)
    new.mkdir(parents=True)
    (new / "x").touch()
    (new.parent / "south").mkdir()
    made.undo()
    assert not new.exists()
    assert (new.parent / "south").exists()  # another's
