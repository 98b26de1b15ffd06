"""Small inputs to test a block with, and guesses at how it runs on a part of the sequence."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from atorch_ns.sharding._divided_calls import SeenCalls
from atorch_ns.sharding._nested import Path, leaves, map_leaves
from atorch_ns.sharding._sequence_plan import AttentionKind, BlockPlan, Numbers, find_hidden, sequence_dims
from atorch_ns.sharding._ulysses import heads_divide

__all__ = ["Subject", "candidates", "lengths_to_test", "small_arguments", "unshared"]

_LOCAL_LENGTHS: Final = (22, 26, 14, 10, 6, 34, 38, 4, 2, 8)
"""Positions of a rank in the test, preferred first: unlike the sizes that models have, and even."""
_ROWS: Final = 2
_MOST_SITES: Final = 5
"""So many position numbers of a block are guessed at one by one."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A block to be tested.

    Attributes:
        name: its path in the model.
        block: a copy that nobody else uses, with weights equal on all ranks of the group.
        arguments: ``(args, kwargs)`` of a real call, whole; the hidden states may have any length.
        length: positions of the sequence in the other arguments.
        dim: the hidden states' dimension of positions.
        kind: how attention may be computed.
        balanced: whether zigzag may be chosen.
        zigzag: whether the sequence is in zigzag, if that is settled.
        group: the ranks.
        device: where they compute.
        head_share: of how many ranks each will hold some of the heads that the copy has.
    """

    name: str
    block: nn.Module
    arguments: Any
    length: int
    dim: int
    kind: Literal["auto", "ulysses", "ring"]
    balanced: bool
    zigzag: bool | None
    group: dist.ProcessGroup
    device: torch.device
    head_share: int = 1


def candidates(
    subject: Subject, seen: SeenCalls, arguments: Any, length: int
) -> Iterator[tuple[BlockPlan, bool]]:
    hidden = find_hidden(arguments, subject.dim)
    assert hidden is not None
    divisions = _divisions(arguments, hidden, length, subject.dim, squares=True)
    divisions += _divisions(arguments, hidden, length, subject.dim, squares=False)
    divisions = [division for place, division in enumerate(divisions) if division not in divisions[:place]]
    for kind in _kinds(subject, seen):
        wants = kind == "ring" and subject.balanced and any(call.causal for call in seen.attentions)
        zigzag = wants if subject.zigzag is None else subject.zigzag
        for sites, divided in itertools.product(_numberings(seen), divisions):
            yield BlockPlan(kind=kind, divided=divided, sites=sites), zigzag


def _numberings(seen: SeenCalls) -> list[Mapping[int, Numbers]]:
    """What the numbers and tables of the sequence's length may mean: nothing, a rank's positions, or all."""
    sites = sorted(seen.sites)
    if not sites:
        return [{}]
    same: list[Mapping[int, Numbers]] = [{}, dict.fromkeys(sites, "own"), dict.fromkeys(sites, "whole")]
    if 1 < len(sites) <= _MOST_SITES:
        choices: tuple[Numbers, ...] = ("own", "whole")
        same += [
            dict(zip(sites, chosen, strict=True)) for chosen in itertools.product(choices, repeat=len(sites))
        ]
    return [numbers for place, numbers in enumerate(same) if numbers not in same[:place]]


def _kinds(subject: Subject, seen: SeenCalls) -> tuple[AttentionKind, ...]:
    if subject.kind != "auto":
        return (subject.kind,)
    ranks = subject.group.size()
    own = [call for call in seen.attentions if call.query.size(-2) == call.key.size(-2)]
    return ("ulysses",) if all(heads_divide(call, ranks * subject.head_share) for call in own) else ("ring",)


def _divisions(
    arguments: Any, hidden: tuple[Path, torch.Tensor], length: int, dim: int, *, squares: bool
) -> list[dict[Path, int]]:
    """Sets of arguments to divide, the likeliest first.

    What looks like hidden states of another sequence is left out, then in. A bias of attention that is trained has
    the rows of this rank's queries, so that each rank trains its own; other masks are whole, then have such rows.
    """
    path, states = hidden
    others: dict[Path, int] = {}
    streams: dict[Path, int] = {}
    biases: dict[Path, int] = {}
    masks: dict[Path, int] = {}
    for place, leaf in leaves(arguments):
        if place == path or not isinstance(leaf, torch.Tensor):
            continue
        dims = sequence_dims(leaf, length, dim, squares=squares)
        if len(dims) == 1 and not (leaf.dim() >= 3 and dims[0] == leaf.dim() - 1):
            is_stream = leaf.is_floating_point() and leaf.dim() == states.dim() and leaf.shape == states.shape
            (streams if is_stream else others)[place] = dims[0]
        elif leaf.dim() >= 3 and leaf.size(-2) == length:
            (biases if leaf.requires_grad else masks)[place] = leaf.dim() - 2
    found: list[dict[Path, int]] = []
    for rows in (biases, {}, {**biases, **masks}):
        found += [
            {path: dim, **others, **rows},
            {path: dim, **others, **streams, **rows},
            {path: dim, **rows},
        ]
    return [division for place, division in enumerate(found) if division not in found[:place]]


def lengths_to_test(subject: Subject) -> list[int]:
    """Lengths to test with: one whose parts are like no other size in the block, and the real one."""
    ranks = subject.group.size()
    sizes = {size for tensor in subject.block.parameters() for size in tensor.shape}
    others = [
        leaf
        for path, leaf in leaves(subject.arguments)
        if isinstance(leaf, torch.Tensor) and sequence_dims(leaf, subject.length, subject.dim)
    ]
    fixed = len(others) > 1  # besides the hidden states something has the length, and can only be shortened
    chosen = [
        local * ranks
        for local in _LOCAL_LENGTHS
        if not any(size % local == 0 for size in sizes) and not (fixed and local * ranks > subject.length)
    ]
    short = [length for length in chosen if length <= subject.length]
    return list(dict.fromkeys([*chosen[:2], *short[:2], subject.length]))


def small_arguments(subject: Subject, length: int, *, squares: bool) -> Any:
    """The arguments with ``length`` positions and few rows; hidden states are random, the same on all ranks.

    ``squares``: whether what has the sequence's length twice is a mask.
    """
    found = find_hidden(subject.arguments, subject.dim)
    assert found is not None
    hidden_path, hidden = found
    rows = hidden.size(0) if subject.dim > 0 else 0
    generator = torch.Generator().manual_seed(0)

    def make(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return unshared(leaf)
        if path == hidden_path:
            shape = list(hidden.shape)
            shape[subject.dim] = length
            if rows:
                shape[0] = min(rows, _ROWS)
            random = torch.randn(shape, generator=generator)
            return random.to(subject.device).requires_grad_()
        small = leaf.detach()
        for dim in sequence_dims(leaf, subject.length, subject.dim, squares=squares):
            small = small.narrow(dim, 0, length)
        if rows > _ROWS and small.dim() > 0 and small.size(0) == rows:
            small = small.narrow(0, 0, _ROWS)
        small = small.to(subject.device, copy=True)
        if not small.is_floating_point():
            return small
        return small.float().requires_grad_(leaf.requires_grad)

    return map_leaves(subject.arguments, make)


class _GraphsDropped(TorchFunctionMode):
    """Copies tensors that have a graph, which ``copy.deepcopy`` refuses, without it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = copied = tensor.detach().clone()
            return copied
        return func(*args, **(kwargs or {}))


def unshared(value: Any) -> Any:
    """A cache that a block writes into must not see the test."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        with _GraphsDropped():
            return copy.deepcopy(value)
    except Exception:  # whatever the class says: then the test sees the object itself, as the block would
        return value
