"""Models: a Llama from the run file's fields or any causal LM of transformers, as one flat fp32 vector.

All trainable weights live in one contiguous tensor and the module's parameters are views into it, as are their
gradients: a delta, a checkpoint or an optimizer step is then one pass over one vector. Tied weights are there once,
frozen ones not at all. New weights are a pure function of (seed, configuration): integer arithmetic on a generator
seeded by each parameter's name, so every machine starts from the same bytes.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from geomesh_p2p.config import ModelSection
from geomesh_p2p.core.canonical import Digest, digest, digest_bytes
from geomesh_p2p.core.layout import Layout, layout_of
from geomesh_p2p.engine import hub
from geomesh_p2p.engine.footprint import Shape
from geomesh_p2p.errors import ConfigError, DataError

INITIAL_STD = 0.02
# Projections that write into the residual stream start smaller by sqrt(2 * layers), as in GPT-2.
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "out_proj.weight")


@dataclass(frozen=True)
class FlatModel:
    """`flat` and `grad` are (P,) fp32 on the model's device; `layout` names their parts in order.

    `segments` are the longest runs of `flat` with one weight-decay rule: (start, stop, decays). Vectors (norms, biases)
    do not decay, everything else does.
    """

    module: torch.nn.Module
    flat: torch.Tensor
    grad: torch.Tensor
    layout: Layout
    segments: tuple[tuple[int, int, bool], ...]
    vocabulary: int
    compiled: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.flat.device

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, length) token ids -> (batch, length, vocabulary)."""
        return self.module(input_ids=inputs, use_cache=False).logits

    def training_logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """As logits, through torch.compile where the run asks for it. Raises ConfigError where it cannot compile."""
        if self.compiled is None:
            return self.logits(inputs)
        torch._dynamo.mark_dynamic(inputs, 0)  # batch sizes change with every plan
        try:
            return self.compiled(inputs)
        except torch._dynamo.exc.BackendCompilerFailed as failed:
            first = str(failed).strip().splitlines()[0]
            raise ConfigError(
                f"model.compile: {first}; install what it needs (on a CPU a C++ compiler), or set it to false"
            ) from failed

    def for_training(self, compile: bool) -> FlatModel:
        """This model, its training_logits() compiled or not."""
        return replace(self, compiled=torch.compile(self.logits) if compile else None)

    def weights(self) -> npt.NDArray[np.float32]:
        """The flat vector for NumPy: shared memory on a CPU, a copy from elsewhere."""
        return self.flat.numpy() if self.device.type == "cpu" else self.flat.cpu().numpy()

    def set_weights(self, weights: npt.NDArray[np.float32]) -> None:
        if weights.shape != (self.layout.parameters,):
            raise ValueError(f"weights: shape {weights.shape}, the model has {self.layout.parameters:,} parameters")
        self.flat.copy_(torch.from_numpy(weights))

    @property
    def weights_digest(self) -> Digest:
        """Of all weights, frozen ones too: they are not exchanged, so they must be the same from the start."""
        frozen = (p.detach().cpu().numpy() for p in self.module.parameters() if not p.requires_grad)
        parts = [np.ascontiguousarray(weights, dtype="<f4") for weights in (self.weights(), *frozen)]
        return digest_bytes(*parts)


Granularity = Literal["tensor", "row"]


def build(
    section: ModelSection, vocabulary: int, seed: int, device: torch.device | str = "cpu", granularity: Granularity = "tensor"
) -> FlatModel:
    """The model of a run on `device`, with its initial weights (those of the folder or hub id if `pretrained`).

    `vocabulary` is the smallest vocabulary that holds the tokenizer's ids: the Llama's own size, and what any other model
    must have; `granularity` is the codec's. Raises ConfigError and DataError.
    """
    config = _configuration(section, vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what transformers draws itself and new_weights() keeps
        module = _module(section, config)
    module.float()
    freeze(module, section.freeze)
    if not (section.path and section.pretrained):
        std = float(getattr(config, "initializer_range", INITIAL_STD))
        new_weights(module, seed, layers=int(getattr(config, "num_hidden_layers", 1)), std=std)
    if section.gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if section.attention != "auto":
        module.set_attn_implementation(section.attention)
    return flatten(module.to(device), int(config.vocab_size), granularity).for_training(section.compile)


def parameter_count(section: ModelSection, vocabulary: int) -> int:
    """Trainable parameters, tied weights once, without building any weights."""
    with torch.device("meta"):
        module = _module(section, _configuration(section, vocabulary), weights=False)
    freeze(module, section.freeze)
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def describe(section: ModelSection, vocabulary: int) -> Shape:
    """What the model of a run is like, without building any weights. Raises ConfigError and DataError as build does."""
    config = _configuration(section, vocabulary)
    width = int(getattr(config, "hidden_size", 0) or 0)
    return Shape(
        parameters=parameter_count(section, vocabulary),
        vocabulary=int(config.vocab_size),
        width=width,
        inner=int(getattr(config, "intermediate_size", None) or 4 * width),
        layers=int(getattr(config, "num_hidden_layers", 1)),
        heads=int(getattr(config, "num_attention_heads", 1)),
    )


def freeze(module: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose names match one of `patterns` are not trained. Raises ConfigError for a pattern without effect."""
    names = dict(module.named_parameters())
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = ", ".join(list(names)[:4])
            raise ConfigError(f"model.freeze: {pattern!r} matches no parameter ({near}, ... {len(names)} in all); correct it")
        for name in matching:
            names[name].requires_grad_(False)


def flatten(module: torch.nn.Module, vocabulary: int, granularity: Granularity = "tensor") -> FlatModel:
    """Move the trainable parameters of `module` into one vector and make them (and their gradients) views of it."""
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise DataError("model.freeze, model.path: no trainable parameter is left; unfreeze some, or choose another model")
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    total = sum(parameter.numel() for _, parameter in trainable)
    flat = torch.empty(total, dtype=torch.float32, device=trainable[0][1].device)
    grad = torch.zeros_like(flat)

    segments: list[tuple[int, int, bool]] = []
    start = 0
    for _, parameter in trainable:
        stop = start + parameter.numel()
        flat[start:stop].copy_(parameter.detach().reshape(-1))
        parameter.data = flat[start:stop].view(parameter.shape)
        parameter.grad = grad[start:stop].view(parameter.shape)
        decays = parameter.ndim > 1
        if segments and segments[-1][2] == decays:
            segments[-1] = (segments[-1][0], stop, decays)
        else:
            segments.append((start, stop, decays))
        start = stop
    shapes = ((name, tuple(parameter.shape), id(parameter) in embeddings) for name, parameter in trainable)
    return FlatModel(module, flat, grad, layout_of(shapes, granularity), tuple(segments), vocabulary)


def new_weights(module: torch.nn.Module, seed: int, layers: int, std: float) -> None:
    """Draw every matrix anew: mean 0, `std`, projections into the residual stream `std / sqrt(2 * layers)`.

    Vectors and whatever is constant (norms, biases, zeroed matrices) keep the value that the architecture gave them.
    """
    for name, parameter in module.named_parameters():
        constant = bool((parameter == parameter.flatten()[0]).all())
        if parameter.ndim < 2 or constant:
            continue
        scale = std / math.sqrt(2 * layers) if name.endswith(RESIDUAL_PROJECTIONS) else std
        values = draw(digest("weights", seed, name), parameter.numel(), scale)
        parameter.data.copy_(torch.from_numpy(values).view(parameter.shape))


def draw(seed: Digest, size: int, std: float) -> npt.NDArray[np.float32]:
    """(size,) fp32 draws of mean 0 and `std`, near normal, none beyond 3.5 std, the same bytes on every machine.

    Each is the sum of four 16-bit integers of the generator's raw stream. A normal draw would go through log and exp,
    whose last bit differs between maths libraries.
    """
    generator = np.random.PCG64(int.from_bytes(seed, "little"))
    scale = std / math.sqrt(4 * (65536**2 - 1) / 12)
    values = np.empty(size, dtype=np.float32)
    for start in range(0, size, 1 << 20):
        stop = min(size, start + (1 << 20))
        parts = generator.random_raw(stop - start).astype("<u8").view("<u2").reshape(-1, 4)
        centred = parts.sum(axis=1, dtype=np.int64) - 2 * 65535
        values[start:stop] = centred.astype(np.float64) * scale
    return values


# ---------------------------------------------------------------- through transformers


def _configuration(section: ModelSection, vocabulary: int) -> Any:
    """The transformers configuration that `section` means, checked against the tokenizer's vocabulary."""
    if not section.path:
        return _llama(section, vocabulary)
    from transformers import AutoConfig

    config = hub.load(section.path, "model.path", lambda path: AutoConfig.from_pretrained(path))
    size = getattr(config, "vocab_size", None)
    if size is None:
        raise DataError(f"model.path: {section.path!r} is no text model (no vocab_size); give a causal language model")
    if size < vocabulary:
        raise DataError(
            f"model.path: {section.path!r} has a vocabulary of {size}, but the tokenizer's highest id is {vocabulary - 1}; "
            "choose the tokenizer that belongs to the model"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < section.sequence_length:
        raise ConfigError(
            f"model.sequence_length is {section.sequence_length}, but {section.path!r} has only {longest} positions"
        )
    return config


def _llama(section: ModelSection, vocabulary: int) -> Any:
    from transformers import LlamaConfig

    if section.hidden_size % section.heads or (section.hidden_size // section.heads) % 2:
        raise ConfigError(
            f"model.hidden_size is {section.hidden_size}: it must be an even multiple of model.heads ({section.heads})"
        )
    if section.heads % section.kv_heads:
        raise ConfigError(f"model.heads is {section.heads}: it must be a multiple of model.kv_heads ({section.kv_heads})")
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=section.hidden_size,
        intermediate_size=section.intermediate_size,
        num_hidden_layers=section.layers,
        num_attention_heads=section.heads,
        num_key_value_heads=section.kv_heads,
        max_position_embeddings=section.sequence_length,
        tie_word_embeddings=section.tie_embeddings,
        initializer_range=INITIAL_STD,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
    )


def _module(section: ModelSection, config: Any, weights: bool = True) -> Any:
    """The module that `section` means; with `weights`, a pretrained one has its own."""
    from transformers import AutoModelForCausalLM

    def load(path: str) -> Any:
        if section.pretrained and weights:
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True)  # pickles are not read
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    return hub.load(section.path, "model.path", load) if section.path else load("")
