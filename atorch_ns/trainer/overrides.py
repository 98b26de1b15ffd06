"""Overrides of a configuration by the command line, and references in it; pure functions of plain data.

::

    --model.args.dim 32 --log.0.type my.Logger    a value by its path, lists by index
    --model.args!.dim 3                           model.args is emptied first
    --lr_scheduler!                               taken out
    --compute_config.use_zero                     true
    --checkpoint.save_dir '$(run).${USER}'        $(a.b), ${a.b}: a value of the configuration or environment
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atorch_ns.errors import InputError
from atorch_ns.text import did_you_mean

BARE = object()
"""The value of a flag without a value."""

_TRUE = "true"  # as a file would have it, so that only what is true or false takes it

_REFERENCE = re.compile(r"\$\((?P<round>[^()\s]+)\)|\$\{(?P<curly>[^{}\s]+)\}|\$\\(?P<escaped>[({])")


def parse(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """The paths and values of ``--a.b c``, ``--a.b=c`` and ``--a``, whose value is :data:`BARE`.

    Raises:
        InputError: for an invalid option.
    """
    overrides: list[tuple[str, Any]] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        path = key.replace("-", "_")  # as flags are often written
        if not word.startswith("--") or not all(path.replace("!", "").split(".")):
            raise InputError(
                f"{word!r} is not an override: write --path.to.field value, or --path=value if the value begins with --."
            )
        if equals:
            overrides.append((path, value))
        elif rest and not rest[0].startswith("--"):
            overrides.append((path, rest.pop(0)))
        else:
            overrides.append((path, BARE))
    return overrides


def override(config: Any, overrides: Sequence[tuple[str, Any]]) -> Any:
    """The configuration with values at their paths, in their order.

    Raises:
        InputError: for an index without a list, an index that leaves gaps in one, or nothing to take out.
    """
    for path, value in overrides:
        config = _put_value(config, path.split("."), value, path)
    return config


def _put_value(inside: Any, parts: Sequence[str], value: Any, path: str) -> Any:
    first, *others = parts
    name, empties = first.removesuffix("!"), first.endswith("!")
    if isinstance(inside, list) or (inside is None and name.isdigit()):  # index 0 of nothing begins a list
        return _put_in_list(list(inside or []), name, empties, others, value=value, path=path)
    mapping = dict(inside) if isinstance(inside, Mapping) else {}
    if empties and not others and value is BARE and name not in mapping:
        raise InputError(
            f"--{path}: there is no {name!r} to remove.{did_you_mean(name, [str(key) for key in mapping])}"
        )
    if empties:
        mapping.pop(name, None)
    if others:
        mapping[name] = _put_value(mapping.get(name), others, value, path)
    elif not (empties and value is BARE):  # --name! alone takes it out
        mapping[name] = _TRUE if value is BARE else value
    return mapping


def _put_in_list(
    entries: list[Any], name: str, empties: bool, others: Sequence[str], *, value: Any, path: str
) -> list[Any]:
    if not name.isdigit():
        raise InputError(f"--{path}: {name!r} is not an index, but the value is a list.")
    slot = int(name)
    if slot > len(entries):
        raise InputError(
            f"--{path}: the list has {len(entries)} items; the next item has index {len(entries)}."
        )
    removes = empties and not others and value is BARE
    if slot == len(entries):  # the next index appends
        if removes:
            return entries
        entries.append(None)
    if removes:
        return [*entries[:slot], *entries[slot + 1 :]]
    before = None if empties else entries[slot]
    entries[slot] = _put_value(before, others, value, path) if others else (_TRUE if value is BARE else value)
    return entries


def resolve_references(config: Any, environment: Mapping[str, str] = os.environ) -> Any:
    r"""The configuration with values of itself, else of the environment, for ``$(a.b)`` and ``${a.b}``.

    A text that is one reference has the value's type. ``$\(`` and ``$\{`` stand for ``$(`` and ``${``.

    Raises:
        InputError: for references to nothing, or circular references.
    """
    return _Resolver(config, environment).value(config, ())


class _Resolver:
    def __init__(self, config: Any, environment: Mapping[str, str]) -> None:
        self._config, self._environment = config, environment

    def value(self, inside: Any, circle: tuple[str, ...]) -> Any:
        if isinstance(inside, Mapping):
            return {key: self.value(item, circle) for key, item in inside.items()}
        if isinstance(inside, list):
            return [self.value(item, circle) for item in inside]
        if not isinstance(inside, str):
            return inside
        whole = _REFERENCE.fullmatch(inside)
        if whole is not None and whole["escaped"] is None:
            return self._resolve_reference(whole, circle)  # keeps the value's type
        return _REFERENCE.sub(
            lambda match: (
                f"${match['escaped']}" if match["escaped"] else str(self._resolve_reference(match, circle))
            ),
            inside,
        )

    def _resolve_reference(self, match: re.Match[str], circle: tuple[str, ...]) -> Any:
        name = match["round"] or match["curly"]
        if name in circle:
            raise InputError(f"circular references: {' → '.join([*circle, name])}.")
        inside = self._config
        for part in name.split("."):
            if isinstance(inside, Mapping) and part in inside:
                inside = inside[part]
            elif isinstance(inside, list) and part.isdigit() and int(part) < len(inside):
                inside = inside[int(part)]
            elif name in self._environment:  # the environment knows the whole name
                return self._environment[name]
            else:
                candidates = inside if isinstance(inside, Mapping) else ()
                raise InputError(
                    f"{match.group()}: neither the configuration nor the environment has {name!r}."
                    f"{did_you_mean(part, [str(key) for key in candidates])}"
                )
        return self.value(inside, (*circle, name))  # a value may hold references itself
