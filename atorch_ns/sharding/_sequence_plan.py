"""How one block runs on a part of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from atorch_ns.sharding._nested import Path, leaves

__all__ = ["AttentionKind", "BlockPlan", "Numbers", "find_hidden", "sequence_dims"]

AttentionKind = Literal["ulysses", "ring"]

Numbers = Literal["own", "whole"]
"""What position numbers made inside a block become: those of this rank's positions, or of all."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """What is done to the arguments, the inner calls and the results of a block.

    Attributes:
        kind: how attention sees the keys of other ranks.
        divided: the arguments of which a rank gets its positions, and along which dimension.
        sites: which of the block's position numbers, tables and square masks, counted in the order of the calls
            that make them, are the sequence's, and what they become.
        crossed: which of its attention calls, in order, see keys that every rank has whole.
        outputs: the results that are parts, and along which dimension.
    """

    kind: AttentionKind
    divided: Mapping[Path, int]
    sites: Mapping[int, Numbers] = field(default_factory=dict)
    crossed: frozenset[int] = frozenset()
    outputs: Mapping[Path, int] = field(default_factory=dict)


def find_hidden(arguments: Any, dim: int) -> tuple[Path, torch.Tensor] | None:
    """The hidden states: the first floating tensor that has ``dim``, with its path in ``(args, kwargs)``."""
    for path, leaf in leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > dim:
            return path, leaf
    return None


def sequence_dims(tensor: torch.Tensor, length: int, dim: int, *, squares: bool = True) -> tuple[int, ...]:
    """The dimensions of an argument that are the sequence's, judged by their size.

    ``dim``, or of a table with a row for each position the first; of a mask the last two. What is square is a mask,
    or without ``squares`` a table whose width happens to be the length.
    """
    sizes = tensor.shape
    if not squares and tensor.dim() >= 2 and sizes[-1] == sizes[-2] == length:
        return (tensor.dim() - 2,)
    if tensor.dim() >= 3 and sizes[-1] == length and sizes[-2] in (1, length):
        return tuple(place for place in (tensor.dim() - 2, tensor.dim() - 1) if sizes[place] == length)
    if tensor.dim() > dim and sizes[dim] == length:
        return (dim,)
    if 1 <= tensor.dim() <= 2 and sizes[0] == length:
        return (0,)
    return ()
