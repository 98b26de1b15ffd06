"""Arguments and results of modules as leaves with paths."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Path", "leaves", "map_leaves", "path_text"]

Path = tuple[Any, ...]
"""Keys and places from the outermost container to a leaf."""


def map_leaves(value: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """``value`` with ``function(path, leaf)`` in place of every leaf of its dictionaries, lists, tuples, dataclasses."""
    if isinstance(value, dict):
        items = {key: map_leaves(item, function, (*path, key)) for key, item in value.items()}
        if type(value) is dict:
            return items
        copied = value.copy()  # an output of transformers, an OrderedDict
        copied.update(items)
        return copied
    if isinstance(value, (list, tuple)):
        parts = [map_leaves(item, function, (*path, place)) for place, item in enumerate(value)]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if _is_dataclass(value):
        made = copy.copy(value)  # not `replace`, which would run __post_init__ again
        for name, item in _fields(value):
            object.__setattr__(made, name, map_leaves(item, function, (*path, name)))
        return made
    return function(path, value)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves in the order of :func:`map_leaves`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
    elif _is_dataclass(value):
        for name, item in _fields(value):
            yield from leaves(item, (*path, name))
    else:
        yield path, value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[tuple[str, Any]]:
    names = [entry.name for entry in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def path_text(path: Path) -> str:
    """A path of ``(args, kwargs)`` as a person would name the argument."""
    _, *keys = path
    head, *rest = keys or [""]
    shown = str(head) if isinstance(head, str) else f"argument {head}"
    return shown + "".join(f"[{key!r}]" for key in rest)
