"""Fingerprints: equal for modules of equal structure, shapes and settings, whatever their weights."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["counters", "fingerprint", "fingerprints"]

_POSITION = re.compile(r"(idx|index|id|num|number|no|i|position|depth)$")


def fingerprint(module: nn.Module) -> str:
    """A digest of 16 hexadecimal digits."""
    return _digest(_facts(module))


def fingerprints(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """The fingerprint of each block, by path.

    A number that only says where a block stands (``layer_idx``) is left out: it goes up by one from each
    block to the next of its container, and its name says so, or at least four blocks agree.
    """
    found: dict[str, str] = {}
    for paths in _by_container(blocks).values():
        facts = [dict(_facts(blocks[path])) for path in paths]
        places = _places(facts)
        for path, own in zip(paths, facts, strict=True):
            found[path] = _digest((key, value) for key, value in own.items() if key not in places)
    return {path: found[path] for path in blocks}


def counters(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Attributes of the blocks of one container, in order, that say where a block stands, as dotted paths."""
    places = _places([dict(_facts(module)) for module in modules])
    return tuple(sorted(key.removeprefix(".") for key in places))


def _by_container(blocks: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for path in blocks:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    return groups


def _places(facts: list[dict[str, Any]]) -> set[str]:
    """Keys whose values count the blocks."""
    if len(facts) < 2:
        return set()
    places = set()
    for key, first in facts[0].items():
        if isinstance(first, bool) or not isinstance(first, int):
            continue
        counts = all(facts[step].get(key) == first + step for step in range(1, len(facts)))
        if counts and (len(facts) >= 4 or _POSITION.search(key)):
            places.add(key)
    return places


def _facts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What decides the cost of a module, as keys with plain values."""
    tied: dict[int, str] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        yield f"{path}:class", f"{type(child).__module__}.{type(child).__qualname__}"
        own = vars(child)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                if tensor is not None:
                    first = tied.setdefault(id(tensor), f"{path}.{name}")
                    shape = "x".join(map(str, tensor.shape))
                    yield f"{path}.{name}:tensor", f"{shape} {tensor.dtype} {tensor.requires_grad} {first}"
        for name, value in own.items():
            if name[:1] != "_" and (plain := _plain(value)) is not None:
                yield f"{path}.{name}", plain


def _plain(value: Any) -> Any:
    """Settings as they are; of a float, whether it is zero (a rate that is not zero costs the same, whatever
    it is); ``None`` for what is no setting."""
    if value is None:
        return "None"
    if isinstance(value, float):
        return f"float {value != 0}"
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (torch.dtype, enum.Enum)):
        return str(value)
    if isinstance(value, (tuple, list)) and len(value) <= 16:
        items = [_plain(item) for item in value]
        return None if any(item is None for item in items) else str(items)
    if callable(value) and not isinstance(value, nn.Module):
        return getattr(value, "__qualname__", None)
    return None


def _digest(facts: Any) -> str:
    text = "\n".join(f"{key}={value}" for key, value in facts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
