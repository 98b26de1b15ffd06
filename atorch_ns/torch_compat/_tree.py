"""Nested data."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["tree_leaves", "tree_map_only"]


def tree_leaves(data: Any) -> list[Any]:
    """The leaves of nested data (``torch.utils._pytree``), those of dataclasses that nobody has registered too."""
    from torch.utils import _pytree

    found: list[Any] = []
    for leaf in _pytree.tree_leaves(data):
        if _is_open(leaf):
            for entry in dataclasses.fields(leaf):
                found += tree_leaves(getattr(leaf, entry.name, None))
        else:
            found.append(leaf)
    return found


def tree_map_only(kind: type[Any], function: Callable[[Any], Any], data: Any) -> Any:
    """Nested data with ``function(leaf)`` for leaves of a kind, in the places of :func:`tree_leaves`."""
    from torch.utils import _pytree

    def change(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return function(leaf)
        return (
            _changed_fields(leaf, lambda value: tree_map_only(kind, function, value))
            if _is_open(leaf)
            else leaf
        )

    return _pytree.tree_map(change, data)


def _is_open(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _changed_fields(instance: Any, change: Callable[[Any], Any]) -> Any:
    """A copy with every field changed; not by ``replace``, which would run ``__post_init__`` again."""
    made = copy.copy(instance)
    for entry in dataclasses.fields(instance):
        if hasattr(instance, entry.name):
            object.__setattr__(made, entry.name, change(getattr(instance, entry.name)))
    return made
