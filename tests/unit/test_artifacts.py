"""Evaluation, export and profiles from folders as peers leave them."""

from __future__ import annotations

import json
import math
import re
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from geomesh_p2p import cli
from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core import codec
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.choice import outcome_of_bits
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.types import Contribution, Range, Rollback, Update
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshot, Snapshots
from geomesh_p2p.engine.choice import held_out_items, score
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.onlooking import newest_state
from geomesh_p2p.engine.profiles import read_profile
from geomesh_p2p.engine.tokenizer import END_OF_DOCUMENT_BYTE, load_tokenizer
from geomesh_p2p.errors import ConfigError, DataError, TemporaryError
from geomesh_p2p.lab.artifacts import evaluate, export, load_anchor, profile

SITE = SiteConfig.model_validate({"site": {"name": "north"}, "device": {"name": "cpu"}})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    text = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    said = (f"document {n} says {n**7}, naïve {n**5} of {n**9}" for n in range(300))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in said))
    return RunConfig.model_validate(
        {
            "run": {"id": "demo"},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 32,
                "layers": 1,
                "heads": 2,
                "kv_heads": 2,
                "sequence_length": 16,
            },
            "dataset": {"source": "jsonl", "paths": (str(text),), "validation_sequences": 5},
        }
    )


@pytest.fixture
def peer(run: RunConfig, tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A peer's folder with a snapshot of round 2 and the update of round 3; and the anchor after round 3."""
    folder = tmp_path / "demo" / "north"
    engine = TorchEngine(run, SITE)
    anchor = np.array(engine.weights())
    base = b"\2" * 32
    payload = codec.encode(engine.layout, anchor, anchor * np.float32(0.9), run.codec)
    assert isinstance(payload, np.ndarray)
    contribution = Contribution("QmA", "north", 3, base, 160, (Range(0, 10),), digest_bytes(payload), payload.nbytes)
    update = Update(3, base, "gather", (), (contribution,), ("QmA",), digest_bytes(payload), payload.nbytes)
    with DiskStore(folder) as store:
        (folder / "config.json").write_text(json.dumps({"run": run.model_dump(mode="json"), "site": {}}))
        Snapshots(folder).write(LogState(b"", 2, base, ("QmA",), (), 0), anchor, np.zeros_like(anchor))
        store.append(update, [payload.tobytes()])
    state = OuterState.founded(np.array(anchor))
    apply_update(state, engine.layout, run.codec, run.outer, update, payload)
    assert not np.array_equal(state.anchor, anchor)
    return folder, state.anchor


def test_the_anchor_is_the_newest_snapshot_and_the_updates_since(peer: tuple[Path, np.ndarray]) -> None:
    folder, expected = peer
    for given in (folder, folder.parent):
        anchor = load_anchor(given)
        assert anchor.round == 3
        assert np.array_equal(anchor.model.weights(), expected)


def test_of_a_runs_peers_the_furthest_is_taken(peer: tuple[Path, np.ndarray], run: RunConfig) -> None:
    folder, _ = peer
    other = folder.with_name("a-slower-one")
    values = np.zeros(TorchEngine(run, SITE).parameters, np.float32)
    Snapshots(other).write(LogState(b"", 1, b"", ("QmA",), (), 0), values, values)
    (other / "config.json").write_text((folder / "config.json").read_text())
    assert load_anchor(folder.parent).folder == folder


def test_evaluation_is_that_of_the_anchor(peer: tuple[Path, np.ndarray], run: RunConfig) -> None:
    folder, anchor = peer
    engine = TorchEngine(run, SITE)
    engine.set_weights(anchor)
    nats, tokens = engine.validate(0, 1)
    found = evaluate(folder)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens))
    assert found["round"] == 3


def test_the_export_is_a_hugging_face_folder_that_gives_the_same_logits(
    peer: tuple[Path, np.ndarray], run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = peer
    out = tmp_path / "exported"
    assert cli.main(["export", str(folder), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "round 3" in said.out
    assert "%|" not in said.err, "a bar where nobody sees it move"
    model = AutoModelForCausalLM.from_pretrained(out)
    ours = load_anchor(folder).model
    ids = torch.arange(32).view(2, 16)
    with torch.inference_mode():
        theirs, expected = model(ids).logits, ours.logits(ids)
    assert theirs.dtype == torch.float32
    assert float(expected.std()) > 1e-2, "logits too small to tell apart"
    assert float((theirs - expected).abs().max()) <= 1e-5
    other = TorchEngine(run, SITE).model                          # with the weights before the first round
    with torch.inference_mode():
        assert float((other.logits(ids) - expected).abs().max()) > 1e-4, "any weights would do"
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "naïve 🦀 ÿ\n\tcode , it 's  spaced . "
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == END_OF_DOCUMENT_BYTE
    assert tokenizer.decode([65, END_OF_DOCUMENT_BYTE, 66], skip_special_tokens=True) == "AB"
    again = load_tokenizer(str(out))
    assert again.encode(text).tolist() == list(text.encode())
    assert again.end_of_document == END_OF_DOCUMENT_BYTE
    with pytest.raises(ConfigError, match="not empty"):
        export(folder, out)


def test_continuation_choice_is_told_where_it_is_asked_for(
    peer: tuple[Path, np.ndarray], run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, anchor = peer
    assert cli.main(["eval", str(folder)]) == 0
    plain = capsys.readouterr().out
    assert cli.main(["eval", str(folder), "--choice", "8"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == plain.strip()
    assert re.fullmatch(r"continuation choice: \d+\.\d% \+- \d+\.\d% of 8 items \(25% by chance\)", second)
    assert not rest

    assert cli.main(["eval", str(folder), "--json"]) == 0
    assert "choice" not in json.loads(capsys.readouterr().out)
    assert cli.main(["eval", str(folder), "--choice", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["choice"]
    engine = TorchEngine(run, SITE)
    engine.set_weights(anchor)
    items = held_out_items(engine.corpus, END_OF_DOCUMENT_BYTE, 8, run.run.seed)
    expected = score(engine.model, items)
    assert outcome_of_bits(found["digest"], found["right"], found["items"]).right.tolist() == expected.right.tolist()
    assert (found["accuracy"], found["stderr"], found["digest"]) == (expected.accuracy, expected.stderr, items.digest)


def test_what_continuation_choice_cannot_do_is_said(
    peer: tuple[Path, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = peer
    assert cli.main(["eval", str(folder), "--choice"]) == 2
    assert "2,000 items, but the held-out text gives" in capsys.readouterr().err
    assert cli.main(["eval", str(folder), "--lm-eval-task", str(tmp_path)]) == 2
    assert "give --choice as well" in capsys.readouterr().err
    assert cli.main(["eval", str(folder), "--choice", "8", "--lm-eval-task", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a peer's nor a run's folder"):
        load_anchor(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_anchor(tmp_path / "none")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "config.json").write_text("{}")
    with pytest.raises(DataError, match="no snapshot in it yet"):
        load_anchor(tmp_path)
    assert cli.main(["eval", str(tmp_path / "none")]) == 4


def test_a_running_peers_folder_is_read_and_left_as_it_is(peer: tuple[Path, np.ndarray]) -> None:
    folder, expected = peer
    with DiskStore(folder):
        (folder / "held.record.partial").touch()                  # being written
        (folder / "snapshot-4.partial").mkdir()
        before = sorted(folder.rglob("*"))
        anchor = load_anchor(folder)
        assert sorted(folder.rglob("*")) == before
    assert anchor.round == 3
    assert np.array_equal(anchor.model.weights(), expected)


def test_a_rollback_that_is_not_in_a_snapshot_yet_leads_to_the_older_state(
    peer: tuple[Path, np.ndarray], run: RunConfig
) -> None:
    folder, _ = peer
    with DiskStore(folder) as store:
        found = store.read_update(3)
        assert found is not None
        store.append(Update(4, found[0].digest, "gather", (), (), ("QmA",), digest_bytes(b""), 0, Rollback(2, 0)), [])
    anchor = load_anchor(folder)
    assert anchor.round == 4
    assert np.array_equal(anchor.model.weights(), Snapshots(folder).read_state(2)[0])


class Writer:
    """A peer that goes on in `folder`: each round has an update of its own, each second one a snapshot; no more than two of
    these are kept, and the updates since."""

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self.layout, self.run = TorchEngine(run, SITE).layout, run
        self.store, self.snapshots = DiskStore(folder), Snapshots(folder)
        snapshot, found = self.snapshots.newest(), self.store.read_update(3)
        assert snapshot is not None
        assert found is not None
        self.model, self.last, self.states = OuterState(snapshot.anchor, snapshot.momentum), found[0], dict[int, bytes]()
        self.payload = found[1]
        self._apply()

    def _apply(self) -> None:
        apply_update(self.model, self.layout, self.run.codec, self.run.outer, self.last, np.frombuffer(self.payload, np.uint8))
        self.states[self.last.round] = self.model.anchor.tobytes()

    def commit(self) -> None:
        self.last = replace(self.last, round=self.last.round + 1, base=self.last.digest)
        self._apply()  # known before anybody can read it
        self.store.append(self.last, [self.payload])
        if self.last.round % 2 == 0:
            log = LogState(b"", self.last.round, self.last.digest, ("QmA",), (), 0)
            self.snapshots.write(log, self.model.anchor, self.model.momentum)
            self.snapshots.delete_older(log.round)
            self.store.prune(min(self.snapshots.rounds()) + 1)


def test_what_is_read_beside_a_writer_that_goes_on_is_always_a_committed_state(
    peer: tuple[Path, np.ndarray], run: RunConfig
) -> None:
    folder, _ = peer
    writer, enough, failed = Writer(folder, run), threading.Event(), list[BaseException]()

    def write() -> None:
        try:
            while not enough.is_set():
                writer.commit()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    rounds = []
    try:
        while len(rounds) < 12 or rounds[-1] < 40:
            with suppress(TemporaryError):  # the writer was quicker each time: it does nothing but write
                seen = newest_state(folder, lambda: np.zeros(0, np.float32), (writer.layout, run.codec, run.outer))
                assert seen.state.anchor.tobytes() == writer.states[seen.round]
                rounds.append(seen.round)
            assert not failed
    finally:
        enough.set()
        thread.join()
        writer.store.close()
    assert rounds == sorted(rounds)
    assert load_anchor(folder).round == writer.last.round


def test_a_snapshot_that_goes_while_it_is_read_is_no_failure(
    peer: tuple[Path, np.ndarray], run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = peer
    writer, load, went = Writer(folder, run), Snapshots._load, list[int]()

    def slow(snapshots: Snapshots, round: int, problems: list[str]) -> Snapshot:
        if not went:
            went.append(round)
            for _ in range(6):
                writer.commit()
            assert not snapshots.path(round).exists()
        return load(snapshots, round, problems)

    monkeypatch.setattr(Snapshots, "_load", slow)
    seen = newest_state(folder, lambda: np.zeros(0, np.float32), (writer.layout, run.codec, run.outer))
    assert went == [2]
    assert seen.round == 9
    assert seen.state.anchor.tobytes() == writer.states[9]
    writer.store.close()


def test_a_profile_can_be_named_in_a_site_file(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "profile.json"
    monkeypatch.setattr("geomesh_p2p.engine.device._host_has_room", lambda batch: batch < 2)
    curve = profile(run, "cpu", out)
    assert [point.batch for point in curve] == [1, 2]
    assert read_profile(out, TorchEngine(run, SITE).parameters, run.model.sequence_length) == curve


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device is 'cuda', but this host has 0 CUDA devices"):
        evaluate(tmp_path, "cuda")
