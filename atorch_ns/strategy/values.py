"""Config values: the one JSON form that each value in a config has.

A strategy must be hashable, comparable and writable, so every config is reduced to plain JSON values the
moment it enters. Module classes and functions become their qualified names, dtypes and enum members their
names. Reading a strategy back never imports or calls anything.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import math
from collections.abc import Mapping, Set
from typing import Any, TypeAlias

from atorch_ns.text import with_article

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class UnwritableValueError(ValueError):
    """A config value that has no readable form in a file."""


def canonical(value: Any) -> JSON:
    """Reduces ``value`` to plain JSON values.

    Raises:
        UnwritableValueError: for lambdas, tensors, modules and other objects without a name.
    """
    if isinstance(value, enum.Enum):  # before int and str, which members may be
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        raise UnwritableValueError(f"{value} is not a finite number")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _canonical_mapping(value)
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if isinstance(value, Set):
        return _canonical_set(value)
    return _canonical_object(value)


def canonical_text(value: JSON) -> str:
    """The one text of a JSON value: sorted keys, no spaces. Equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def qualified_name(thing: type | Any) -> str:
    """``package.module.Name`` of a class or function.

    Raises:
        UnwritableValueError: if the name leads nowhere, as for lambdas and nested functions.
    """
    name = getattr(thing, "__qualname__", "")
    if "<lambda>" in name or ("<locals>" in name and not isinstance(thing, type)):
        raise UnwritableValueError(
            f"{name or thing!r} cannot be named in a strategy file; use a function defined at module level"
        )
    return f"{thing.__module__}.{name}"


def _canonical_mapping(value: Mapping[Any, Any]) -> dict[str, JSON]:
    result: dict[str, JSON] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise UnwritableValueError(f"the key {key!r} is {with_article(key)}; keys must be strings")
        result[key] = canonical(item)
    return result


def _canonical_set(value: Set[Any]) -> JSON:
    # The specification writes {"use_ds_zero", True} where it means {"use_ds_zero": True}.
    names = [item for item in value if isinstance(item, str)]
    if len(value) == 2 and len(names) == 1 and any(item is True for item in value):
        return {names[0]: True}
    return sorted((canonical(item) for item in value), key=canonical_text)


def _canonical_object(value: Any) -> JSON:
    if isinstance(value, type) or inspect.isroutine(value):
        return qualified_name(value)
    if isinstance(value, functools.partial):
        if value.args:
            raise UnwritableValueError(f"{value!r} has positional arguments; name them")
        return {"function": qualified_name(value.func), "arguments": canonical(value.keywords)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return canonical({name: item for name, item in fields.items() if item is not None})
    return _canonical_foreign(value)


def _canonical_foreign(value: Any) -> JSON:
    # Recognised by names and shape, so that torch, numpy and pydantic are not imported here.
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if kind.__name__ == "ModuleWrapPolicy":  # of torch's FSDP
        classes = canonical(frozenset(value._module_classes))
        return {"function": qualified_name(kind), "arguments": {"module_classes": classes}}
    if hasattr(value, "model_dump"):
        return canonical(value.model_dump(mode="json", exclude_unset=True))
    if kind.__module__.startswith("numpy") and getattr(value, "ndim", None) == 0:
        return canonical(value.item())
    raise UnwritableValueError(f"a {kind.__module__}.{kind.__qualname__} cannot be in a strategy file")
