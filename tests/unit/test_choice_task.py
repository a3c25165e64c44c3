"""The folder that lm-evaluation-harness runs: sound, and its answers are those of our own scoring."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from geomesh_p2p.config import ModelSection
from geomesh_p2p.core.choice import Items, make_items
from geomesh_p2p.engine.choice import likelihoods, score
from geomesh_p2p.engine.model import build
from geomesh_p2p.lab.artifacts import hugging_face_tokenizer
from geomesh_p2p.lab.choice_task import ITEMS_FILE, TASK, write_task

PROSE = "".join(f"Line {n}: {n**9} naïve\n   \t indented {n**5},  'quoted' ÿ\n" for n in range(120)).encode()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Items, np.ndarray]:
    """A model's folder, the task's, the items that the task has, and our likelihoods for them."""
    section = ModelSection(hidden_size=32, intermediate_size=32, layers=1, heads=2, kv_heads=2, sequence_length=64)
    model, folder = build(section, 256, seed=3), tmp_path_factory.mktemp("exported")
    model.flat.mul_(8)                                            # opinions strong enough to differ from item to item
    module: Any = model.module
    module.save_pretrained(folder / "model")
    tokenizer = hugging_face_tokenizer("bytes")
    tokenizer.save_pretrained(folder / "model")
    items = make_items(np.frombuffer(PROSE, np.uint8), 150, seed=1, passage=24, continuation=8)
    kept = write_task(folder / "task", items, tokenizer)
    assert 75 < kept.sum() < 150, "letters that are cut in two are left out, nothing else"
    assert (score(model, items).right[kept] == score(model, items.chosen(kept)).right).all()
    return folder / "model", folder / "task", items.chosen(kept), likelihoods(model, items.chosen(kept))


def lines(task: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / ITEMS_FILE).read_text(encoding="utf-8").splitlines()]


def test_the_task_says_what_the_harness_needs(exported: tuple[Path, Path, Items, np.ndarray]) -> None:
    _, task, items, _ = exported
    said = yaml.safe_load((task / f"{TASK}.yaml").read_text(encoding="utf-8"))
    assert said["task"] == TASK
    assert said["output_type"] == "multiple_choice"
    assert said["dataset_path"] == "json"
    file = Path(said["dataset_kwargs"]["data_files"][said["test_split"]])
    assert file.is_absolute()
    assert file == (task / ITEMS_FILE).resolve()
    assert said["target_delimiter"] == "", "a space before the continuation would be another text"
    written = lines(task)
    assert len(written) == len(items)
    for line, passage, options, answer in zip(written, items.passages, items.continuations, items.answers, strict=True):
        assert {said["doc_to_text"], said["doc_to_choice"], said["doc_to_target"]} < line.keys()
        assert line["passage"].encode() == bytes(passage.tolist())
        assert [text.encode() for text in line["continuations"]] == [bytes(option.tolist()) for option in options]
        assert line["answer"] == answer
    assert any(line["passage"] != line["passage"].rstrip() for line in written), "white space before the continuation"
    assert any("ÿ" in line["passage"] for line in written)


def accuracy_by_the_harness(model: Path, task: Path) -> float:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task), include_defaults=False)
    found = lm_eval.simple_evaluate("hf", model_args=f"pretrained={model}", tasks=[TASK], task_manager=manager, device="cpu")
    return found["results"][TASK]["acc,none"]


def test_text_scored_as_the_harness_does_it_gives_our_answers(
    exported: tuple[Path, Path, Items, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """White space at the passage's end goes to the continuation; what is encoded together is cut at the passage's length.
    The harness itself is asked too where it is installed."""
    folder, task, items, ours = exported
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    theirs = np.empty((len(items), 4))
    for item, line in enumerate(lines(task)):
        before = line["passage"].rstrip()
        known = len(tokenizer.encode(before))
        for option, text in enumerate(line["continuations"]):
            ids = torch.tensor(tokenizer.encode(line["passage"] + text))
            with torch.inference_mode():
                logs = model(ids[None, :-1]).logits[0].log_softmax(-1)
            theirs[item, option] = float(logs.gather(1, ids[1:, None])[known - 1 :].double().sum())
    assert (theirs.argmax(1) == ours.argmax(1)).all()
    assert len(set(theirs.argmax(1).tolist())) == 4
    spaceless = np.array([line["passage"] == line["passage"].rstrip() for line in lines(task)])
    assert np.abs(theirs / 8 - ours)[spaceless].max() < 1e-5
    if importlib.util.find_spec("lm_eval") is not None:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        assert accuracy_by_the_harness(folder, task) == pytest.approx((ours.argmax(1) == items.answers).mean(), abs=1e-9)


def test_items_that_another_tokenizer_would_cut_elsewhere_are_left_out(tmp_path: Path) -> None:
    """A tokenizer that knows "ab" and "c " reads each as one token, and the harness moves the space at a passage's end."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "ab": 2, "c": 3, " ": 4, "c ": 5}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b"), ("c", " ")]))
    fast.decoder = tokenizers.decoders.Fuse()
    fine = [[2, 3], [3, 3], [0, 0], [1, 1]]
    items = Items(
        #         abc     ca|b    a|b in one  c |, cut before the space  nothing but space
        np.array([[2, 3], [3, 0], [3, 3], [0, 5], [4, 4]]),
        np.array([fine, [[1, 3], *fine[1:]], [*fine[:3], [0, 1]], fine, fine]),
        np.array([0, 1, 2, 3, 0]),
    )
    kept = write_task(tmp_path, items, PreTrainedTokenizerFast(tokenizer_object=fast))
    assert kept.tolist() == [True, False, False, False, False]
    assert lines(tmp_path) == [{"item": 0, "passage": "abc", "continuations": ["abc", "cc", "aa", "bb"], "answer": 0}]
