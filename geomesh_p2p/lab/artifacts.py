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
from geomesh_p2p.core.types import BatchTime
from geomesh_p2p.engine.checkpoint import Snapshots
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.evaluate import perplexity, token_losses
from geomesh_p2p.engine.model import FlatModel, build
from geomesh_p2p.engine.onlooking import newest_state
from geomesh_p2p.engine.profiles import write_profile
from geomesh_p2p.engine.tokenizer import END_OF_DOCUMENT_BYTE, load_tokenizer
from geomesh_p2p.errors import ConfigError, DataError


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
    if not saved:
        raise DataError(f"{folder}: neither a peer's nor a run's folder with a snapshot in it")
    return max(saved, key=lambda site: saved[site])


def evaluate(folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Validation perplexity of the anchor, over the whole validation set."""
    anchor = load_anchor(folder, device)
    site = SiteConfig(site=SiteSection(name="eval"), device=DeviceSection(name=device))
    engine = TorchEngine(anchor.run, site)
    engine.set_weights(anchor.model.weights())
    nats, tokens = token_losses(engine.model, engine.corpus.validation(0, 1))
    return {
        "folder": str(anchor.folder),
        "round": anchor.round,
        "digest": anchor.digest.hex(),
        "perplexity": perplexity(nats, tokens),
        "tokens": tokens,
    }


def export(folder: Path, out: Path) -> dict[str, Any]:
    """Writes the anchor as a Hugging Face folder with its tokenizer. Raises ConfigError if `out` is not empty."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: not empty: name a new folder")
    anchor = load_anchor(folder)
    module: Any = anchor.model.module
    with _bars_on_a_terminal():
        module.save_pretrained(out)
        _hugging_face_tokenizer(anchor.run.dataset.tokenizer).save_pretrained(out)
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


def _hugging_face_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name != "bytes":
        path = Path(name)
        return PreTrainedTokenizerFast(tokenizer_file=name) if path.is_file() else AutoTokenizer.from_pretrained(name)
    import tokenizers

    letters = _letters_of_bytes()
    fast = tokenizers.Tokenizer(tokenizers.models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=letters[END_OF_DOCUMENT_BYTE])


def _letters_of_bytes() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte: itself if it is one, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def profile(run: RunConfig, device: str, out: Path) -> tuple[BatchTime, ...]:
    """Measures step_seconds(batch) up to the largest batch that fits, on the real model, and writes it to `out`."""
    site = SiteConfig(site=SiteSection(name="profile"), device=DeviceSection(name=device))
    engine = TorchEngine(run, site)
    curve = engine.measure()
    write_profile(out, engine.device_label, engine.parameters, engine.corpus.sequence_length, curve)
    return curve
