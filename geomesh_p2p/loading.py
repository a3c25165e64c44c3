"""From files, environment and flags to a checked configuration, with the origin of every value.

Precedence: flag > GEOMESH_* > site file (its [net] and [metrics]) > run file > default. Whatever is wrong is a ConfigError
of one line that names file (or flag), key and value. Imports no torch.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from geomesh_p2p.addresses import address_problems, allow_problems
from geomesh_p2p.config import MetricsSection, NetSection, RunConfig, SiteConfig
from geomesh_p2p.errors import ConfigError

ENV_PREFIX = "GEOMESH_"
DEFAULT = "default"
UNKNOWN_STEP = "correct it, or leave it out"
NOTHING: Mapping[str, str] = types.MappingProxyType({})
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Resolved:
    """A run's configuration; `origins` has one entry for each `section.key`: a file, a variable, a flag or "default"."""

    config: RunConfig
    origins: dict[str, str]


@dataclass(frozen=True)
class SiteFile:
    path: Path
    config: SiteConfig

    @property
    def name(self) -> str:
        return self.config.site.name


# ---------------------------------------------------------------- what others call


def load_run(
    path: str | Path, overrides: Mapping[str, str] = NOTHING, env: Mapping[str, str] = NOTHING, site: SiteFile | None = None
) -> RunConfig:
    """The run file at `path` with `overrides` (flags, "section.key" to text) and `env` laid over it, checked as a whole."""
    return resolve_run(path, overrides, env, site).config


def resolve_run(
    path: str | Path, overrides: Mapping[str, str] = NOTHING, env: Mapping[str, str] = NOTHING, site: SiteFile | None = None
) -> Resolved:
    resolved, problems = inspect_run(path, overrides, env, site)
    if resolved is None or problems:
        raise ConfigError(_first(problems))
    return resolved


def inspect_run(
    path: str | Path | None,
    overrides: Mapping[str, str] = NOTHING,
    env: Mapping[str, str] = NOTHING,
    site: SiteFile | None = None,
) -> tuple[Resolved | None, list[str]]:
    """As resolve_run, but with all that is wrong, a line each, and what is left of the configuration without it, if any.
    Without a file: a run without a name, of defaults. Raises ConfigError if the file cannot be read."""
    data, file = (read_toml(path), str(path)) if path is not None else ({"run": {"id": "none"}}, "defaults")
    problems: list[str] = []
    origins: dict[str, str] = {}
    for section, table in data.items():
        if isinstance(table, dict):
            origins |= {f"{section}.{key}": file for key in table}
    if site is not None:
        for section, values in (("net", site.config.net), ("metrics", site.config.metrics)):
            for key, value in values.items():
                _put(data, origins, f"{section}.{key}", value, str(site.path))
    for variable, text in sorted(env.items()):
        if variable.startswith(ENV_PREFIX) and "__" in variable:
            key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
            _put_text(data, origins, key, text, variable, problems)
    for key, text in overrides.items():
        _put_text(data, origins, key, text, f"--{key}", problems)
    config, wrong = _validated(RunConfig, data, file, origins)
    problems += wrong
    if config is None:
        return None, problems
    origins = {key: origins.get(key, DEFAULT) for key in run_keys()}
    problems += [f"{_blame(keys, origins, file)}: {problem}" for keys, problem in run_problems(config)]
    return Resolved(config, origins), problems


def value_of(key: str, text: str, origin: str) -> Any:
    """`text` as the value of one key of a run file, checked for itself. Raises ConfigError."""
    section, _, name = key.partition(".")
    data: dict[str, Any] = {"run": {"id": "none"}}
    data.setdefault(section, {})[name] = _from_text(key, text, origin)
    config, problems = _validated(RunConfig, data, origin, {key: origin})
    if config is None or problems:
        raise ConfigError(_first(problems))
    return getattr(getattr(config, section), name)


def load_site(path: str | Path) -> SiteConfig:
    config, problems = inspect_site(path)
    if config is None or problems:
        raise ConfigError(_first(problems))
    return config


def inspect_site(path: str | Path) -> tuple[SiteConfig | None, list[str]]:
    """As load_site, but with all that is wrong, a line each."""
    data = read_toml(path)
    config, problems = _validated(SiteConfig, data, str(path), {})
    for section, model in (("net", NetSection), ("metrics", MetricsSection)):
        problems += _validated(model, data.get(section, {}), str(path), {}, prefix=(section,))[1]
    return config, problems


def load_sites(*paths: str | Path) -> tuple[SiteFile, ...]:
    """Site files, or all *.toml of folders, ordered by site name. Raises ConfigError if there are none or two share a name."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"{path}: no site files (*.toml) in this folder")
        files += found
    sites: dict[str, SiteFile] = {}
    for file in files:
        site = SiteFile(file, load_site(file))
        if site.name in sites:
            other = sites[site.name].path
            raise ConfigError(f'{file}: site.name = "{site.name}" is also the name in {other}: give each site its own')
        sites[site.name] = site
    if not sites:
        raise ConfigError("no site files given: name files or a folder with --sites")
    return tuple(sites[name] for name in sorted(sites))


def check_sites(run: RunConfig, sites: Sequence[SiteFile]) -> list[str]:
    """Checks that need run and sites together. Raises ConfigError; returns warnings (one line each)."""
    names = {site.name for site in sites}
    trainers = [site for site in sites if site.config.site.trains]
    if len(trainers) < run.run.min_peers:
        raise ConfigError(f"run.min_peers = {run.run.min_peers}, but only {len(trainers)} of the sites given train")
    for name in run.planner.fixed:
        if run.planner.mode == "fixed" and name not in names:
            raise ConfigError(f'planner.fixed names "{name}", which is not among the sites given{_nearest(name, names)}')
    for site in trainers:
        limits = [("device.max_batch", site.config.device.max_batch)]
        if site.config.emulation is not None:
            limits.append(("emulation.max_batch", site.config.emulation.max_batch))
        batch = run.planner.batch
        if run.planner.mode == "fixed":
            batch = run.planner.fixed.get(site.name, (batch, 0))[0]
        for key, limit in limits:
            if run.planner.mode != "planned" and limit is not None and batch > limit:
                mode = run.planner.mode
                raise ConfigError(f"{site.path}: {key} = {limit} is below the batch of {batch} of planner.mode = {mode}")
    return [
        f'{site.path}: links.{name} names no site of this run{_nearest(name, names)}: it is not used'
        for site in sites
        for name in site.config.links
        if name != "default" and name not in names
    ]


def checked(model: type[Model], data: Mapping[str, Any], file: str) -> Model:
    """What a file of another kind says. Raises ConfigError."""
    found, problems = _validated(model, data, file, NOTHING)
    if found is None or problems:
        raise ConfigError(_first(problems))
    return found


def run_keys() -> dict[str, Any]:
    """`section.key` to pydantic's field of every key of a run file, in the file's order."""
    return {
        f"{section}.{key}": field
        for section, outer in RunConfig.model_fields.items()
        for key, field in typing.cast(type[BaseModel], outer.annotation).model_fields.items()
    }


# ---------------------------------------------------------------- cross-checks


def run_problems(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """What the fields allow one by one but not together: (keys concerned, what is wrong and what to do)."""

    def value(key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(config, section), name)

    def show(key: str) -> str:
        return f"{key} = {json.dumps(value(key))}"

    def clash(low: str, high: str, relation: str) -> tuple[tuple[str, ...], str]:
        return (low, high), f"{show(low)} must {relation} {show(high)}"

    model, dataset = config.model, config.dataset
    if not model.path and model.hidden_size % (2 * model.heads):
        yield clash("model.hidden_size", "model.heads", "be an even multiple of")
    if not model.path and model.heads % model.kv_heads:
        yield clash("model.kv_heads", "model.heads", "divide")
    if not model.path and model.pretrained:
        yield ("model.pretrained",), "model.pretrained = true needs model.path, the folder or hub id that has the weights"
    if dataset.source != "python-stdlib" and not dataset.paths:
        yield ("dataset.source",), f"{show('dataset.source')} needs dataset.paths: files or glob patterns"
    if dataset.source == "python-stdlib" and dataset.paths:
        yield ("dataset.paths",), f"{show('dataset.source')} reads no dataset.paths: set the source to text or jsonl"
    if config.inner.warmup_tokens >= config.inner.total_tokens:
        yield clash("inner.warmup_tokens", "inner.total_tokens", "be below")
    if max(config.inner.betas) >= 1:
        yield ("inner.betas",), f"{show('inner.betas')} must be below 1"
    if config.outer.momentum >= 1:
        yield ("outer.momentum",), f"{show('outer.momentum')} must be below 1"
    if config.planner.min_steps > config.planner.max_steps:
        yield clash("planner.min_steps", "planner.max_steps", "not be above")
    if config.planner.max_steps_ratio < 1:
        yield ("planner.max_steps_ratio",), f"{show('planner.max_steps_ratio')} must be at least 1"
    if config.planner.overlap != "none" and config.planner.mode != "planned":
        why = "how many steps are done early depends on timing, and so would the digest"
        yield ("planner.overlap", "planner.mode"), f"{show('planner.overlap')} needs planner.mode = \"planned\": {why}"
    if config.net.heartbeat_seconds * 2 > config.net.heartbeat_limit_seconds:
        yield clash("net.heartbeat_seconds", "net.heartbeat_limit_seconds", "be at most half of")
    yield from allow_problems(config.net.allow)
    yield from address_problems(config.net.listen, config.net.announce, config.net.seeds)


# ---------------------------------------------------------------- reading


def read_toml(path: str | Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is missing, unreadable, not UTF-8 or not TOML."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = _nearest(path.name, (file.name for file in path.parent.glob("*.toml"))) if path.parent.is_dir() else ""
        raise ConfigError(f"{path}: there is no such file{near}") from None
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        raise ConfigError(f"{path}: line {line} is not UTF-8 (byte 0x{byte:02x}): save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _put(data: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    section, _, name = key.partition(".")
    table = data.setdefault(section, {})
    if isinstance(table, dict):                                   # else validation names the section that is no table
        table[name] = value
        origins[key] = origin


def _put_text(data: dict[str, Any], origins: dict[str, str], key: str, text: str, origin: str, problems: list[str]) -> None:
    try:
        _put(data, origins, key, _from_text(key, text, origin), origin)
    except ConfigError as error:
        problems.append(str(error))


def _from_text(key: str, text: str, origin: str) -> Any:
    field = run_keys().get(key)
    if field is None:
        raise ConfigError(f"{origin}: unknown key {key}{_nearest_key(key.split('.'), RunConfig)}: {UNKNOWN_STEP}")
    try:
        return _parse(text, field.annotation)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}: {key} = {text}: not valid JSON: {error.msg} at character {error.pos + 1}") from None


def _parse(text: str, kind: Any) -> Any:
    """`text` as the JSON value that a field of type `kind` wants; what does not fit stays text, for validation to refuse."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _parse(text, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return None if text.lower() in ("", "none", "null") else _parse(text, arguments[0])
    if origin is typing.Literal:
        return next((value for value in arguments if str(value) == text), text)
    if origin is dict or (origin is tuple and text.lstrip().startswith("[")):
        return json.loads(text)
    if origin is tuple:
        return [_parse(item.strip(), arguments[0]) for item in text.split(",") if item.strip()]
    if kind is bool:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower(), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


# ---------------------------------------------------------------- errors in words


def _validated(
    model: type[Model], data: Any, file: str, origins: Mapping[str, str], prefix: tuple[str, ...] = ()
) -> tuple[Model | None, list[str]]:
    """What is wrong in `data`, and the configuration without that, None if there is none."""
    try:
        return model.model_validate_json(json.dumps(data, default=str), strict=True), []
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [problem for problem in found if not _misspelled(problem, found)]
    rest = copy.deepcopy(data)
    for problem in problems:
        *parents, name = problem["loc"][:2] or ("",)
        table = rest.get(parents[0], {}) if parents and isinstance(rest, dict) else rest
        if isinstance(table, dict):
            table.pop(name, None)
    words = [_in_words(model, problem, file, origins, prefix) for problem in problems]
    try:
        return model.model_validate_json(json.dumps(rest, default=str), strict=True), words
    except ValidationError:
        return None, words


def _first(problems: Sequence[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _misspelled(problem: Any, problems: Sequence[Any]) -> bool:
    """Whether a missing key is there under another name: that it is unknown says it all."""
    if problem["type"] != "missing":
        return False
    *table, name = problem["loc"]
    unknown = [other["loc"][-1] for other in problems if other["type"] == "extra_forbidden" and [*other["loc"][:-1]] == table]
    return bool(difflib.get_close_matches(str(name), unknown, n=1, cutoff=0.6))


def _in_words(
    model: type[BaseModel], problem: Any, file: str, origins: Mapping[str, str], prefix: tuple[str, ...]
) -> str:
    path = [str(part) for part in (*prefix, *problem["loc"])]
    key = ".".join(path)
    where = origins.get(".".join(path[:2]), file)
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {key}{_nearest_key(path, RunConfig if prefix else model)}: {UNKNOWN_STEP}"
    if problem["type"] == "missing":
        return f"{where}: {key} is missing: add it"
    if problem["type"] == "value_error":                          # a table's own words; its input is too long to repeat
        return ": ".join([where, *([key] if key else []), str(problem["ctx"]["error"])])
    reason = re.sub(r"^(Input|String|Object) should", "should", problem["msg"])
    reason = reason.replace("an object", "a table").replace("valid array", "list")
    return f"{where}: {key} = {json.dumps(problem['input'], default=str)}: {reason}"


def _blame(keys: Iterable[str], origins: Mapping[str, str], file: str) -> str:
    """The origin of the first of `keys` that somebody set, the most deliberate first: flag, variable, file."""
    set_by = [origins[key] for key in keys if origins.get(key, DEFAULT) != DEFAULT]
    return min(set_by, key=lambda origin: (not origin.startswith("--"), not origin.startswith(ENV_PREFIX)), default=file)


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{match[0]}"?)' if match else ""


def _nearest_key(path: Sequence[str], model: type[BaseModel]) -> str:
    """The key most like the one at `path`: a sibling, else the same name in another section, else whatever is near."""
    parents, name = path[:-1], path[-1]
    keys = list(run_keys()) if model in (RunConfig, SiteConfig) else list(_all_keys(model))
    same_name = [key for key in keys if "." in key and key.rpartition(".")[2] == name]
    siblings: list[str] = list(model.model_fields)
    for parent in parents:
        if parent.isdigit():                                      # which table of a list
            continue
        inner = _model_of(model.model_fields[parent].annotation) if parent in model.model_fields else None
        if inner is None:
            break
        model, siblings = inner, list(inner.model_fields)
    else:
        match = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
        if match and not same_name:
            return f" (did you mean {'.'.join([*parents, match[0]])}?)"
    elsewhere = same_name or difflib.get_close_matches(".".join(path), keys, n=1, cutoff=0.6)
    return f" (did you mean {' or '.join(elsewhere)}?)" if elsewhere else ""


def _all_keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _model_of(field.annotation)
        yield from _all_keys(inner, f"{above}{name}.") if inner is not None else [above + name]


def _model_of(annotation: Any) -> type[BaseModel] | None:
    options = [annotation, *typing.get_args(annotation)]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)
