"""What is compared: each method is a few differences from the run file, and says how its rounds are made.

`kind` is how sites work together: `rounds` (all train, then all exchange), `gradients` (an exchange after every step) or
`async` (each sends when it is done, a server applies what comes).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from geomesh_p2p.config import RunConfig
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.report.figures import TUNED
from geomesh_p2p.lab.bench.settings import Setting

Kind = Literal["rounds", "gradients", "async"]


@dataclass(frozen=True)
class Method:
    """`changes` are by section of the run file, on top of it. `length` is the round's, in reference rounds, `longest` what
    it may grow to where the exchange takes long; `critical`: its critical batch, in reference steps of all sites together;
    `speed_steps`: inner steps follow each site's speed, at the reference's batch; `frozen`: the first plan stands for the
    whole run; `rate_share`: its inner learning rate, of the run file's; `varied`: keys of the run file that were changed on
    demand."""

    name: str
    about: str
    kind: Kind = "rounds"
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    length: float = 1.0
    longest: float | None = None
    critical: float | None = None
    speed_steps: bool = False
    frozen: bool = False
    rate_share: float = 1.0
    varied: tuple[str, ...] = ()

    def run_config(self, run: RunConfig, setting: Setting, total_tokens: int) -> RunConfig:
        """The run file's configuration for this method under `setting`, trained on `total_tokens`."""
        sequences = setting.reference_round_sequences * self.length
        batch = min(setting.reference_batch, *(site.max_batch for site in setting.sites))
        steps = max(1, round(sequences / (batch * len(setting.sites))))
        planner: dict[str, Any] = {
            "mode": "uniform", "batch": batch, "inner_steps": steps,
            "round_tokens": round(sequences * run.model.sequence_length),
        }  # fmt: skip
        if self.longest is not None:
            planner["max_round_tokens"] = round(setting.reference_round_sequences * self.longest * run.model.sequence_length)
        if self.critical is not None:
            step_sequences = setting.reference_batch * len(setting.sites)
            planner["critical_batch_tokens"] = round(self.critical * step_sequences * run.model.sequence_length)
        if self.speed_steps:
            planner |= {"mode": "fixed", "fixed": _by_speed(setting, batch, sequences)}
        inner = {"total_tokens": total_tokens, "learning_rate": run.inner.learning_rate * self.rate_share}
        changes: dict[str, dict[str, Any]] = {"planner": planner, "inner": inner}
        for section, values in self.changes.items():
            changes[section] = {**changes.get(section, {}), **values}
        fields = run.model_dump()
        for section, values in changes.items():
            fields[section] = {**fields[section], **values}
        return RunConfig.model_validate(fields)


def _by_speed(setting: Setting, batch: int, sequences: float) -> dict[str, tuple[int, int]]:
    """The same batch for all, steps in proportion to speed, `sequences` in all."""
    speeds = {site.name: 1 / site.step_seconds(batch) for site in setting.sites}
    steps = sequences / batch / sum(speeds.values())
    return {name: (batch, max(1, round(steps * speed))) for name, speed in speeds.items()}


Fields = dict[str, Any]

FP32: Fields = {"payload": "fp32"}
REDUCE: Fields = {"topology": "reduce"}
# Outer constants (LOG.md has the sweeps): plain numbers take those of the run file, which are the best found for diloco with
# its model and number of tokens; signs in rounds twice as long want larger steps.
OUTER_SIGNS: Fields = {"learning_rate": 0.7, "momentum": 0.5}
OUTER_LONG_ROUNDS: Fields = {"learning_rate": 0.85, "momentum": 0.5}
NO_OUTER: Fields = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
# Lion's usual choice beside AdamW's learning rate: a quarter of it, four times its weight decay, the momentum slower.
LION_RATE = 0.25
LION: Fields = {"optimizer": "lion", "betas": (0.9, 0.99), "weight_decay": 0.4}
# Rounds grow, to a little more than twice the reference at most, until the exchange takes 7% of them. In as many tokens fast
# sites take batches as small as the others', and more steps: no larger ones than the reference's, of all sites together.
LONGEST, CRITICAL = 2.25, 1.0
# Where sites train on meanwhile, short rounds cost no time, and each brings the weights together: they are as short as that
# an exchange is covered but for 2% of them.
DELAYED_LENGTH, DELAYED_SHARE = 0.25, 0.02
PLANNED: Fields = {"mode": "planned", "exchange_share": 0.07}


def _planned(name: str, about: str, changes: dict[str, Fields], **more: Any) -> Method:
    return Method(name, about, changes=changes, longest=LONGEST, critical=CRITICAL, **more)


def _methods() -> tuple[Method, ...]:
    diloco = {"codec": FP32, "planner": REDUCE}
    int8 = {**diloco, "codec": {"payload": "int8"}}
    planned = {"planner": PLANNED, "outer": OUTER_LONG_ROUNDS}
    delayed = {"outer": OUTER_SIGNS, "planner": {**PLANNED, "overlap": "delayed", "exchange_share": DELAYED_SHARE}}
    fp32 = {"codec": FP32, "planner": PLANNED}
    lion = {"outer": OUTER_SIGNS, "planner": PLANNED, "inner": LION}
    return (
        Method("ddp", "gradients averaged after every step, fp32", "gradients", {**diloco, "outer": NO_OUTER}),
        Method("diloco", "equal batch and steps, fp32, at the reference round length", changes=diloco),
        Method("diloco-2x", "diloco with rounds twice as long", changes=diloco, length=2),
        Method("diloco-4x", "diloco with rounds four times as long", changes=diloco, length=4),
        Method("diloco-fp16", "diloco with fp16 on the wire", changes={**diloco, "codec": {"payload": "fp16"}}),
        Method("diloco-int8", "diloco with int8 on the wire", changes=int8),
        Method("diloco-steps", "inner steps in proportion to speed, fp32", changes=diloco, speed_steps=True),
        Method("diloco-1bit", "diloco with signs on the wire", changes={"outer": OUTER_SIGNS}),
        Method("async", "each site sends when it is done, fp32, delayed Nesterov", "async", diloco),
        _planned("geomesh", "planned batch and steps, signs; a reducer answers with two bits", planned),
        _planned("geomesh-fp32", "planned batch and steps, fp32", fp32),
        _planned("geomesh-delayed", "geomesh in short rounds, the next one begun while an update is on its way", delayed,
                 length=DELAYED_LENGTH),
        Method("diloco-lion", "diloco, the inner steps by Lion", changes={**diloco, "inner": LION}, rate_share=LION_RATE),
        _planned("geomesh-lion", "geomesh, the inner steps by Lion", lion, rate_share=LION_RATE),
        _planned("geomesh-static", "geomesh with its first plan for ever", planned, frozen=True),
    )


METHODS = {method.name: method for method in _methods()}
TUNED_LENGTHS = ("diloco", "diloco-2x", "diloco-4x")
"""What diloco-tuned-H is the best of."""
GROUPS = {TUNED: TUNED_LENGTHS, "all": tuple(METHODS)}
DEFAULT_METHODS = ("diloco", "diloco-1bit", "geomesh-fp32", "geomesh")


def with_default_outer(run: RunConfig, methods: Sequence[Method]) -> dict[str, list[str]]:
    """Of the outer constants that differ from model to model, those that `run` leaves at the product's defaults, each with the
    methods that take it from there."""
    found = dict[str, list[str]]()
    for key in ("learning_rate", "momentum"):
        names = [method.name for method in methods if key not in method.changes.get("outer", {})]
        if names and key not in run.outer.model_fields_set:
            found[f"outer.{key}"] = names
    return found


def method_of(name: str) -> Method:
    if name not in METHODS:
        known = [*METHODS, *GROUPS]
        near = difflib.get_close_matches(name, known, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"no method {name!r}{meant}: {', '.join(known)}")
    return METHODS[name]


def help_text() -> str:
    """Every method in a line, for the help of the command."""
    *most, last = TUNED_LENGTHS
    lines = {name: method.about for name, method in METHODS.items()}
    lines |= {TUNED: f"the best of {', '.join(most)} and {last}", "all": "all of these"}
    named = [f"  {name:<{max(map(len, lines))}}  {about}" for name, about in lines.items()]
    return "\n".join([f"methods (without --methods: {', '.join(DEFAULT_METHODS)}):", *named])
