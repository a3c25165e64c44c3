"""A peer whose run settings differ, in whatever field, is refused at its first word, and told which field (C018)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import digest
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.swarm.membership import Admission, Membership, Self

MODEL = {"hidden_size": 16, "intermediate_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "sequence_length": 16}
# What somebody may have in a run file of their own, by the fields of which a refusal must name one.
CHANGES: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("seed", {"run": {"seed": 5}}),
    ("model.hidden_size", {"model": {"hidden_size": 32}}),
    ("model.layers", {"model": {"layers": 2}}),
    ("model.sequence_length", {"model": {"sequence_length": 8}}),
    ("inner.optimizer", {"inner": {"optimizer": "lion"}}),
    ("inner.learning_rate", {"inner": {"learning_rate": 0.5}}),
    ("inner.warmup_tokens", {"inner": {"warmup_tokens": 100}}),
    ("inner.total_tokens", {"inner": {"total_tokens": 77}}),
    ("inner.weight_decay", {"inner": {"weight_decay": 0.0}}),
    ("outer.learning_rate", {"outer": {"learning_rate": 0.1}}),
    ("outer.momentum", {"outer": {"momentum": 0.5}}),
    ("outer.nesterov", {"outer": {"nesterov": False}}),
    ("codec.payload", {"codec": {"payload": "fp16"}}),
    ("codec.granularity", {"codec": {"granularity": "row"}}),
    ("codec.residual", {"codec": {"residual": True}}),
    ("data.", {"dataset": {"validation_sequences": 5}}),
    ("data.", {"dataset": {"paths": ("other.jsonl",)}}),
]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    for name, animal in (("corpus.jsonl", "sheep"), ("other.jsonl", "goats")):
        lines = (f'{{"text": "document {i} counts {i * i} {animal}"}}\n' for i in range(400))
        Path(name).write_text("".join(lines))

    def of(changes: dict[str, dict[str, Any]]) -> dict[str, str]:
        run: dict[str, Any] = {
            "run": {"id": "demo", "seed": 4},
            "model": MODEL,
            "dataset": {"source": "jsonl", "paths": ("corpus.jsonl",), "validation_sequences": 4},
        }
        for section, values in changes.items():
            run[section] = run.get(section, {}) | values
        where = {"site": {"name": "b"}, "device": {"name": "cpu", "threads": 1}}
        return TorchEngine(RunConfig.model_validate(run), SiteConfig.model_validate(where)).settings

    return of


def greeted(ours: dict[str, str], theirs: dict[str, str]) -> tuple[Membership, list[m.Refused]]:
    """What the running peer says to the Hello of one with other settings."""
    answers: list[Any] = []
    a = Membership(Self("a", "a", True, fingerprint(ours), ours), Admission(), lambda to, said: answers.append(said), 5.0)
    b = Membership(Self("b", "b", True, fingerprint(theirs), theirs), Admission(), lambda to, said: None, 5.0)
    a.on_hello("b", b.hello("a"), 1.0)
    return a, [answer for answer in answers if isinstance(answer, m.Refused)]


def fingerprint(settings: dict[str, str]) -> bytes:
    return digest("settings", list(settings.items()))


@pytest.mark.case("C018")
def test_each_setting_that_may_be_changed_in_a_run_file_is_named(settings: Any) -> None:
    ours = settings({})
    assert greeted(ours, settings({}))[0].admitted("b")
    for field, changes in CHANGES:
        members, refusals = greeted(ours, settings(changes))
        assert not members.admitted("b"), f"{field}: in the run, and in its first round"
        (refusal,) = refusals
        assert refusal.final
        assert field in refusal.reason, (field, refusal.reason)


@pytest.mark.case("C018")
@pytest.mark.case("C087")
def test_each_field_of_the_fingerprint_alone_is_refused_by_name(settings: Any) -> None:
    ours = settings({})
    assert len(ours) > 25
    assert "data.tokenizer" in ours
    for field in ours:
        members, (refusal,) = greeted(ours, ours | {field: "another"})
        assert not members.admitted("b")
        assert f"{field} is another, not {ours[field][:80]}" in refusal.reason
    members, (refusal,) = greeted(ours, {field: value for field, value in ours.items() if field != "inner.optimizer"})
    assert "inner.optimizer is absent" in refusal.reason
