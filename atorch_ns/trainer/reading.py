"""Reading of TrainerArgs: from a YAML file with overrides of a command line, every mistake at once."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.parallel import ComputeConfig
from atorch_ns.text import did_you_mean, with_article
from atorch_ns.trainer.args import (
    HookConfig,
    HookMapConfig,
    LogConfig,
    LRSchedulerConfig,
    ModuleParallelizeConfig,
    OptionalComputeConfig,
    TrainerArgs,
)
from atorch_ns.trainer.overrides import override, parse, resolve_references

# Values of these fields have no declared type: a text becomes the Python literal that it spells.
_FREE = ("args", "train_args", "val_args", "test_args", "pas_config", "user_config")


def read_args(argv: Sequence[str]) -> TrainerArgs:
    """The arguments of ``-f config.yaml --path.to.field value …``.

    Raises:
        InputError: for a file that cannot be read, and for every field that is unknown or wrong.
    """
    if len(argv) < 2 or argv[0] not in ("-f", "--file"):
        raise InputError("call the Trainer with: -f config.yaml [--path.to.field value …].")
    overrides = [(path, None if value in ("None", "null") else value) for path, value in parse(argv[2:])]
    return made_args(override(read_yaml(argv[1]), overrides), where=argv[1])


def read_yaml(path: str) -> dict[str, Any]:
    """The dictionary in a YAML file.

    Raises:
        InputError: if it cannot be read, or holds something else.
    """
    try:
        document = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} holds {with_article(document)}; it must hold the fields of TrainerArgs.")
    return document


def made_args(config: Mapping[str, Any], *, where: str = "TrainerArgs") -> TrainerArgs:
    """TrainerArgs of plain data, references replaced and texts converted to the fields' types.

    Raises:
        InputError: naming every field that is unknown or wrong.
    """
    try:
        settings: dict[str, Any] = _guess_types(resolve_references(dict(config)))
    except RecursionError:
        raise InputError(f"{where}: an alias (&, *) contains itself.") from None
    problems: list[str] = []
    try:
        if isinstance(settings.get("compute_config"), Mapping):
            settings["compute_config"] = _compute_config(settings["compute_config"], problems)
    except InputError as error:
        problems.append(str(error))
    problems = [f"compute_config: {line}" for text in problems for line in text.splitlines()]
    if problems:
        settings.pop("compute_config")  # reported above
    if isinstance(settings.get("hook"), Mapping):  # of two kinds, of which one has a type
        kind = HookConfig if "type" in settings["hook"] else HookMapConfig
        settings["hook"] = _validate_fields(kind, settings["hook"], "hook", problems)
    elif settings.get("hook") is not None:
        problems.append(
            f"hook is {settings.pop('hook')!r}: it has a type, and args, or functions by the names of hooks."
        )
    instance = _validate_fields(TrainerArgs, settings, "", problems)
    if problems:
        raise InputError(f"{where}: " + f"\n{where}: ".join(problems))
    result: TrainerArgs = instance
    return result


def check_arguments(args: TrainerArgs) -> TrainerArgs:
    """The arguments with every field of its type.

    Raises:
        InputError: naming every field that is not.
    """
    problems: list[str] = []
    config = args.compute_config
    if config is not None and not isinstance(config, ComputeConfig):
        problems.append(f"compute_config must be a ComputeConfig; it is {with_article(config)}.")
        args = replace(args, compute_config=None)
    result: TrainerArgs = _validate_fields(TrainerArgs, args, "", problems)
    if problems:
        raise InputError("TrainerArgs: " + "\nTrainerArgs: ".join(problems))
    result.check()
    return result


def _validate_fields(kind: Any, settings: Any, at: str, problems: list[str]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        reported_paths: set[str] = set()  # of a union, pydantic reports a field once for each type
        for detail in error.errors():
            location = [str(part) for part in detail["loc"] if _is_place(part)]
            path = ".".join(filter(None, [at, *location]))
            if path not in reported_paths:
                reported_paths.add(path)
                problems.append(_describe_error(kind, location, path, detail))
    return None


def _is_place(part: Any) -> bool:
    # Other parts, such as function-after[...], are types that pydantic has tried, not places in the data.
    return isinstance(part, int) or part.replace("_", "").replace("!", "").isalnum()


def _describe_error(kind: Any, location: Sequence[str], path: str, error: Any) -> str:
    if error["type"] == "unexpected_keyword_argument":
        names = [entry.name for entry in fields(_find_owner_class(kind, location[:-1]))]
        return f"there is no field {path}.{did_you_mean(location[-1], names, otherwise='Known are ' + ', '.join(names) + '.')}"
    return f"{path} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}."


def _find_owner_class(kind: Any, location: Sequence[str]) -> Any:
    for part in location:
        classes = _NESTED
        if kind is ModuleParallelizeConfig:  # it has a compute_config of another class
            classes = {"compute_config": OptionalComputeConfig}
        kind = classes.get(part, kind)  # an index of a list keeps the class
    return kind


_NESTED: dict[str, Any] = {  # dataclasses of nested fields
    each.name: each.default_factory
    for each in fields(TrainerArgs)
    if isinstance(each.default_factory, type) and is_dataclass(each.default_factory)
} | {"lr_scheduler": LRSchedulerConfig, "log": LogConfig, "parallel_modules": ModuleParallelizeConfig}


def _compute_config(options: Mapping[str, Any], problems: list[str]) -> ComputeConfig | None:
    names = [entry.name for entry in fields(ComputeConfig)]
    problems += [
        f"there is no field {key}.{did_you_mean(str(key), names)}" for key in options if key not in names
    ]
    values = {key: guess_value(value) for key, value in options.items() if key in names}
    values.setdefault("plan_ngpus", 1)  # each rank is a scale unit
    values.setdefault("runtime_ngpus", Cluster.detect().world_size)
    return ComputeConfig(**values)


def _guess_types(config: Any, *, free: bool = False) -> Any:
    if isinstance(config, Mapping):
        if "__value_type" in config:
            return dict(config)  # which says how its text is read
        return {key: _guess_types(value, free=free or key in _FREE) for key, value in config.items()}
    if isinstance(config, list):
        return [_guess_types(item, free=free) for item in config]
    return guess_value(config) if free else config


def guess_value(value: Any) -> Any:
    """The Python value of a text, such as a number for ``'1e-3'`` and True for ``'true'``; else the text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):  # YAML's spelling, not Python's
        return value.lower() == "true"
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def as_plain(value: Any) -> Any:
    """A configuration as JSON has it; classes and functions by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {key: as_plain(item) for key, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # JSON has neither NaN nor infinity
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    return str(value)
