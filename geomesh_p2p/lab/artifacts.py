"""What is made from the folder of a peer, running or not, or from a run file alone: evaluation, export, a device's profile."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomesh_p2p.config import DeviceSection, RunConfig, SiteConfig, SiteSection
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.choice import Items, Outcome
from geomesh_p2p.core.types import BatchTime
from geomesh_p2p.engine.checkpoint import Snapshots
from geomesh_p2p.engine.choice import held_out_items, score
from geomesh_p2p.engine.device import choose_device
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.evaluate import perplexity, token_losses
from geomesh_p2p.engine.files import tensor_errors
from geomesh_p2p.engine.model import FlatModel, build
from geomesh_p2p.engine.onlooking import newest_state
from geomesh_p2p.engine.profiles import write_profile
from geomesh_p2p.engine.tokenizer import END_OF_DOCUMENT_BYTE, load_tokenizer
from geomesh_p2p.errors import ConfigError, DataError
from geomesh_p2p.lab.choice_task import write_task

END_OF_DOCUMENT = "<|endoftext|>"
"""How the byte that ends documents is written in an exported tokenizer."""


@dataclass(frozen=True)
class Anchor:
    """The model of a folder after its last committed round."""

    folder: Path
    run: RunConfig
    model: FlatModel
    round: int
    digest: Digest


def load_anchor(folder: Path, device: str = "cpu") -> Anchor:
    """The newest snapshot below `folder` (a peer's, or a run's: then the peer that is furthest) and the updates since.

    Works beside a peer that goes on in it, and changes nothing. Raises DataError if there is none.
    """
    site_folder = _furthest(folder)
    run = RunConfig.model_validate_json(json.dumps(json.loads((site_folder / "config.json").read_text())["run"]), strict=True)
    tokenizer = load_tokenizer(run.dataset.tokenizer)
    model = build(run.model, tokenizer.highest_id + 1, run.run.seed, device, run.codec.granularity)
    seen = newest_state(site_folder, lambda: model.weights().copy(), (model.layout, run.codec, run.outer))
    model.set_weights(seen.state.anchor)
    return Anchor(site_folder, run, model, seen.round, seen.digest)


def _furthest(folder: Path) -> Path:
    sites = [site for site in (folder, *sorted(folder.glob("*/"))) if (site / "config.json").is_file()]
    saved = {site: max(rounds) for site in sites if (rounds := Snapshots(site).rounds())}
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    if not sites:
        raise DataError(f"{folder}: neither a peer's nor a run's folder: there is no snapshot in it")
    if not saved:
        raise DataError(f"{folder}: no snapshot in it yet: the first is saved after save.snapshot_every_rounds rounds")
    return max(saved, key=lambda site: saved[site])


def evaluate(folder: Path, device: str = "cpu", choice: int = 0, task: Path | None = None) -> dict[str, Any]:
    """Validation perplexity of the anchor, over the whole validation set; and with `choice`, continuation choice over so many
    items of the held-out text, which with `task` are written there for lm-evaluation-harness too.

    Raises ConfigError: a device that is not there, more items than the text gives, or a `task` that is not empty.
    """
    device = str(choose_device(device, setting="--device"))
    anchor = load_anchor(folder, device)
    site = SiteConfig(site=SiteSection(name="eval"), device=DeviceSection(name=device))
    engine = TorchEngine(anchor.run, site)
    engine.set_weights(anchor.model.weights())
    items = _items(engine, anchor.run, choice, task)
    nats, tokens = token_losses(engine.model, engine.corpus.validation(0, 1))
    found: dict[str, Any] = {
        "folder": str(anchor.folder),
        "round": anchor.round,
        "digest": anchor.digest.hex(),
        "perplexity": perplexity(nats, tokens),
        "tokens": tokens,
    }
    if items is not None:
        outcome = score(engine.model, items)
        found["choice"] = _figures(outcome) | {"seed": anchor.run.run.seed, "digest": outcome.items, "right": outcome.bits}
        if task is not None:
            kept = write_task(task, items, hugging_face_tokenizer(anchor.run.dataset.tokenizer))
            found["choice"]["task"] = {"folder": str(task)} | _figures(Outcome(items.chosen(kept).digest, outcome.right[kept]))
    return found


def _items(engine: TorchEngine, run: RunConfig, choice: int, task: Path | None) -> Items | None:
    if task is not None and task.exists() and any(task.iterdir()):
        raise ConfigError(f"--lm-eval-task {task}: not empty: name a new folder")
    if not choice:
        return None
    return held_out_items(engine.corpus, load_tokenizer(run.dataset.tokenizer).end_of_document, choice, run.run.seed)


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {"items": len(outcome.right), "accuracy": outcome.accuracy, "stderr": outcome.stderr}


def export(folder: Path, out: Path) -> dict[str, Any]:
    """Writes the anchor as a Hugging Face folder with its tokenizer. Raises ConfigError if `out` is not empty."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: not empty: name a new folder")
    anchor = load_anchor(folder)
    module: Any = anchor.model.module
    with _bars_on_a_terminal(), tensor_errors(out):
        module.save_pretrained(out)
        hugging_face_tokenizer(anchor.run.dataset.tokenizer).save_pretrained(out)
    parameters = anchor.model.layout.parameters
    return {"folder": str(out), "round": anchor.round, "digest": anchor.digest.hex(), "parameters": parameters}


@contextlib.contextmanager
def _bars_on_a_terminal() -> Iterator[None]:
    """Progress bars of transformers only where somebody sees them move."""
    from transformers.utils import logging as bars

    had = bars.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if had:
            bars.enable_progress_bar()


def hugging_face_tokenizer(name: str) -> Any:
    """The tokenizer of an exported folder: `dataset.tokenizer` as transformers knows it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name != "bytes":
        path = Path(name)
        return PreTrainedTokenizerFast(tokenizer_file=name) if path.is_file() else AutoTokenizer.from_pretrained(name)
    import tokenizers

    # The end's letter would be ÿ, and the text "ÿ" then the end of a document.
    letters = [*_letters_of_bytes()[:END_OF_DOCUMENT_BYTE], END_OF_DOCUMENT]
    fast = tokenizers.Tokenizer(tokenizers.models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END_OF_DOCUMENT)


def _letters_of_bytes() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte: itself if it is one, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def profile(run: RunConfig, device: str, out: Path) -> tuple[BatchTime, ...]:
    """Measures step_seconds(batch) up to the largest batch that fits, on the real model, and writes it to `out`."""
    device = str(choose_device(device, setting="--device"))
    site = SiteConfig(site=SiteSection(name="profile"), device=DeviceSection(name=device))
    engine = TorchEngine(run, site)
    curve = engine.measure()
    write_profile(out, engine.device_label, engine.parameters, engine.corpus.sequence_length, curve)
    return curve
