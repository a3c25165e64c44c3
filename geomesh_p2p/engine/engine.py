"""TorchEngine: model, data, optimizer and device of one peer behind the seam that the algorithm uses."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core.canonical import Digest, digest
from geomesh_p2p.core.emulation import emulated_seconds, time_scale_for
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.observations import Warned
from geomesh_p2p.core.ports import InnerResult, Vector
from geomesh_p2p.core.types import Assignment, BatchTime, Plan
from geomesh_p2p.engine import device as devices
from geomesh_p2p.engine import model as models
from geomesh_p2p.engine.data import DataManifest, load_corpus
from geomesh_p2p.engine.evaluate import token_losses
from geomesh_p2p.engine.feed import Feed, Patience
from geomesh_p2p.engine.files import tensor_errors
from geomesh_p2p.engine.inner import InnerLoop, run_round
from geomesh_p2p.engine.profiles import read_profile
from geomesh_p2p.engine.ranks import Ranks
from geomesh_p2p.engine.tokenizer import load_tokenizer
from geomesh_p2p.errors import DataError

_STATE_FORMAT = "geomesh-inner-1"


class TorchEngine:
    """Implements core.ports.Engine. Blocking; to be used by one thread at a time.

    On a CPU in fp32 everything it computes is a function of configuration, weights, inner state, and the number of torch
    threads. `report` hears of progress and of trouble with data. Raises ConfigError and DataError at construction.
    """

    def __init__(
        self,
        run: RunConfig,
        site: SiteConfig,
        *,
        cache: Path | None = None,
        report: Callable[[Any], None] | None = None,
    ) -> None:
        self.run = run
        self.site = site
        self.report = report
        self.device = devices.choose_device(site.device.name)
        devices.set_threads(site.device, site.emulation is not None)
        tokenizer = load_tokenizer(run.dataset.tokenizer)
        self._vocabulary = tokenizer.highest_id + 1
        self.model = models.build(run.model, self._vocabulary, run.run.seed, self.device, run.codec.granularity)
        self.corpus = load_corpus(run.dataset, tokenizer, run.model.sequence_length, run.run.seed, cache)
        profile = Path(site.device.profile) if site.device.profile and site.emulation is None else None
        self.corpus.batch(range(1))  # its file is held open from here on
        self._validation = self.corpus.validation()
        self.feed = Feed(self.corpus, Patience(run.dataset.read_seconds), self._warn_of_data)
        self._profile = read_profile(profile, self.parameters, run.model.sequence_length) if profile else None
        others = devices.other_ranks(self.device, site.device.ranks)
        ranks = Ranks(self.model, others, lambda: devices.set_threads(site.device, site.emulation is not None))
        self.loop = InnerLoop(self.model, run.inner, devices.wants_bf16(run.model.autocast, self.device), ranks)
        self.time_scale = site.emulation.time_scale if site.emulation else None
        self._initial_weights = self.model.weights_digest
        # Only models with dropout draw from it; each site draws its own.
        torch.manual_seed(int.from_bytes(digest("site", run.run.seed, site.site.name)[:8], "little", signed=True))

    # ------------------------------------------------------------ what it is

    @property
    def parameters(self) -> int:
        return self.model.layout.parameters

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def manifest(self) -> DataManifest:
        return self.corpus.manifest

    @property
    def weights_digest(self) -> Digest:
        """Hash of the initial weights, those at construction."""
        return self._initial_weights

    @property
    def settings(self) -> dict[str, str]:
        """The fields of the run's fingerprint."""
        return fingerprint_fields(self.run, self)

    @property
    def device_label(self) -> str:
        return self.site.emulation.device if self.site.emulation else devices.device_label(self.device)

    # ------------------------------------------------------------ weights

    def weights(self) -> Vector:
        return self.model.weights()

    def set_weights(self, anchor: Vector) -> None:
        self.model.set_weights(anchor)

    def initial_weights(self) -> Vector:
        seed, granularity = self.run.run.seed, self.run.codec.granularity
        again = models.build(self.run.model, self._vocabulary, seed, torch.device("cpu"), granularity)
        if again.weights_digest != self._initial_weights:
            raise DataError(f"{self.run.model.path or 'the model'}: its initial weights are no longer those of the start")
        return np.array(again.weights())

    # ------------------------------------------------------------ speed

    def measure(self) -> tuple[BatchTime, ...]:
        """The device's curve: emulated, from the profile file, or measured. Weights and inner state stay as they are, and steps
        are compiled, if the run wants that."""
        limit = self.site.device.max_batch
        if self.site.emulation is not None:
            return self._compiled_for(devices.emulated_curve(self.site.emulation, self._scale(), limit))
        if self._profile is not None:
            known = tuple(point for point in self._profile if limit is None or point.batch <= limit) or self._profile[:1]
            return self._compiled_for(known)
        with _Undone(self):
            return devices.profile(self._trial_step, self.device, limit)

    @property
    def speed_depends_on(self) -> dict[str, str]:
        """See ports.LocalEngine."""
        if self.site.emulation is not None or self._profile is not None:
            return {}
        found = devices.speed_depends_on(self.device, self.site.device)
        found["layout"] = self.layout.digest.hex()[:16]
        for name in ("model", "inner"):
            section = getattr(self.run, name).model_dump(mode="json")
            found |= {f"{name}.{key}": json.dumps(value) for key, value in section.items()}
        return found

    def disagreement(self, curve: tuple[BatchTime, ...]) -> str:
        """See ports.LocalEngine. Weights and inner state stay as they are."""
        self._compiled_for(curve)
        with _Undone(self):
            return devices.disagreement(self._trial_step, self.device, curve)

    def measure_rate(self, seconds: float = 3.0) -> float:
        """Tokens a second of real steps at the largest batch, emulated limit included; for calibration, unpaced."""
        limits = [self.site.device.max_batch, self.site.emulation and self.site.emulation.max_batch]
        batch = min((limit for limit in limits if limit), default=self.run.planner.batch)
        with _Undone(self):
            self._trial_step(batch)
            begun, steps = time.perf_counter(), 0
            while (spent := time.perf_counter() - begun) < seconds or not steps:
                self._trial_step(batch)
                steps += 1
        return steps * batch * self.corpus.sequence_length / spent

    def _scale(self) -> float:
        """The emulation's time scale; calibrated for this peer alone if nobody set one."""
        assert self.site.emulation is not None
        if self.time_scale is None:
            self.time_scale = time_scale_for(self.measure_rate(), [self.site.emulation], self.corpus.sequence_length)
        return self.time_scale

    def _warn_of_data(self, text: str) -> None:
        if self.report is not None:
            self.report(Warned("starved", text))

    def _compiled_for(self, curve: tuple[BatchTime, ...]) -> tuple[BatchTime, ...]:
        """`curve`. Compiling takes seconds that are in no step time: it is done here, before the first round. Some batches are
        compiled apart from others, that of one above all."""
        if self.run.model.compile:
            with _Undone(self):
                for point in curve:
                    self._trial_step(point.batch)
        return curve

    def _trial_step(self, batch: int) -> None:
        self.loop.step(self.corpus.batch(range(batch)), self.run.inner.learning_rate)

    # ------------------------------------------------------------ rounds

    def train(self, assignment: Assignment, plan: Plan, should_close: Callable[[], bool], started: float) -> InnerResult:
        """`started` is time.monotonic() when the assignment's time began to run; emulated steps are paced from there."""
        devices.set_threads(self.site.device, self.site.emulation is not None)
        pacer = None
        if (emulation := self.site.emulation) is not None:
            scale = self._scale()
            pacer = devices.Pacer(lambda batch: emulated_seconds(emulation, scale, batch), started)
        return run_round(self.loop, self.feed, assignment, plan, should_close, pacer, self.report)

    def validate(self, share: int, of: int, should_close: Callable[[], bool] | None = None) -> tuple[float, int]:
        return token_losses(self.model, self._validation[share::of], should_close)

    # ------------------------------------------------------------ inner state on disk

    def save_inner(self, path: str) -> None:
        """Optimizer moments, step counts and random state in one safetensors file, written aside and renamed."""
        tensors = {f"optimizer.{name}": tensor.contiguous() for name, tensor in self.loop.state().items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        metadata = {"format": _STATE_FORMAT, "layout": self.layout.digest.hex(), "inner": self.run.inner.model_dump_json()}
        target = Path(path)
        aside = target.with_name(f"{target.name}.tmp-{os.getpid()}")
        try:
            with tensor_errors(aside):
                safetensors.torch.save_file(tensors, aside, metadata)
            with aside.open("rb+") as stream:
                os.fsync(stream.fileno())
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)

    def load_inner(self, path: str) -> None:
        """Raises DataError if the file is missing, broken, or of another model or optimizer."""
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as stream:
                metadata = stream.metadata() or {}
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(
                f"{path}: no usable inner state ({error}); delete it to start this site's inner state anew"
            ) from None
        if metadata.get("format") != _STATE_FORMAT or metadata.get("layout") != self.layout.digest.hex():
            raise DataError(f"{path}: the inner state of another model; delete it to start this site's inner state anew")
        self.loop.load_state(
            {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
        )
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)

    def forget_inner(self) -> None:
        self.loop.load_state({})


class _Undone:
    """Steps taken inside leave no trace in weights, optimizer and random state."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    def __enter__(self) -> None:
        self.weights = np.array(self.engine.weights())
        self.state = {name: tensor.cpu().clone() for name, tensor in self.engine.loop.state().items()}
        self.random = torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state(self.engine.device) if self.engine.device.type == "cuda" else None

    def __exit__(self, *_: object) -> None:
        self.engine.set_weights(self.weights)
        self.engine.loop.load_state(self.state)
        torch.set_rng_state(self.random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random, self.engine.device)


# Per site or without influence on what a step computes, beyond rounding.
_NOT_IN_FINGERPRINT = {
    "model": {"path", "attention", "compile", "gradient_checkpointing"},
    "dataset": {"read_seconds", "keep_tokens", "source", "paths", "field", "tokenizer", "validation_sequences", "shuffle"},
    "inner": {"micro_batch", "max_skipped_steps"},
}


def fingerprint_fields(run: RunConfig, engine: TorchEngine) -> dict[str, str]:
    """What every peer of a run must have in common, by the name a refusal calls it: settings of model, optimizers,
    schedule, precision and codec, the seed, the layout and initial weights, and the data manifest (as data.*)."""
    fields = {"seed": str(run.run.seed), "layout": engine.layout.digest.hex()[:16], "weights": engine.weights_digest.hex()[:16]}
    for name in ("model", "inner", "outer", "codec"):
        section = getattr(run, name).model_dump(mode="json", exclude=_NOT_IN_FINGERPRINT.get(name, set()))
        fields |= {f"{name}.{key}": json.dumps(value) for key, value in section.items()}
    fields |= {f"data.{key}": value for key, value in engine.manifest.fields}
    return dict(sorted(fields.items()))
