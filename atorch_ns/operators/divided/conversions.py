"""Conversions of a tensor from one placement to another, with their adjoints.

A value's gradient is placed like the value; that of partial sums is whole on every rank. A call may use a
replicated argument for a part of its work (:attr:`ArgumentNeed.divides`). Then each rank has a part of the
gradient, and the conversion sums it. A conversion is a chain of collectives, each with its adjoint.

=============  =======================  =================================  ==============================
from           to a part of the work    to the same work on every rank     to another placement
=============  =======================  =================================  ==============================
R              ``copy_to``              nothing                            ``scatter_to``, ``summand_of``
S(d)           ``all_gather``           ``gather_from``                    ``all_to_all``
P              ``reduce_from``,         ``reduce_from``                    ``reduce_scatter``
               ``copy_to``
=============  =======================  =================================  ==============================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from atorch_ns.operators.rules.rule import Placement, Rule, placement_text
from atorch_ns.sharding.collectives import (
    all_gather,
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
    summand_of,
)

Collective = Callable[..., torch.Tensor]


class ArgumentNeed(NamedTuple):
    """An argument's placement in a call, and whether a replicated argument is used for a part of the work."""

    placement: Placement
    divides: bool

    def __str__(self) -> str:
        mark = "*" if self.divides and isinstance(self.placement, Replicate) else ""
        return placement_text(self.placement) + mark


def need_of(rule: Rule, number: int) -> ArgumentNeed:
    """The need of a call under ``rule`` for its tensor argument at index ``number``."""
    placement = rule.inputs[number]
    return ArgumentNeed(placement, rule.divides and isinstance(placement, Replicate))


@dataclass(frozen=True)
class ConversionStep:
    """One collective of a conversion: called as ``collective(x, *dims, group)``.

    Attributes:
        forward, backward: the communication of each pass, such as ``all_reduce``; empty for none.
    """

    collective: Collective
    dims: tuple[int, ...] = ()
    forward: str = ""
    backward: str = ""


def steps(source: Placement, need: ArgumentNeed) -> tuple[ConversionStep, ...]:
    """The collectives that convert a value from the placement ``source`` to the needed one, in order."""
    target, divides = need
    if isinstance(source, Replicate):
        return _from_whole(target, divides)
    if isinstance(source, Shard):
        if source == target:
            return ()
        if isinstance(target, Shard):
            both = (target.dim, source.dim)  # split along the first, join along the second
            return (ConversionStep(all_to_all, both, forward="all_to_all", backward="all_to_all"),)
        if isinstance(target, Replicate) and divides:  # each rank has a part of the gradient: sum them
            return (
                ConversionStep(all_gather, (source.dim,), forward="all_gather", backward="reduce_scatter"),
            )
        whole = ConversionStep(gather_from, (source.dim,), forward="all_gather")  # equal gradients
        return (whole, *_from_whole(target, divides))
    if isinstance(target, Partial):  # summands stay where they are
        return ()
    if isinstance(target, Shard):
        return (
            ConversionStep(reduce_scatter, (target.dim,), forward="reduce_scatter", backward="all_gather"),
        )
    return (ConversionStep(reduce_from, forward="all_reduce"), *_from_whole(target, divides))


def _from_whole(target: Placement, divides: bool) -> tuple[ConversionStep, ...]:
    if isinstance(target, Shard):
        return (ConversionStep(scatter_to, (target.dim,), backward="all_gather"),)
    if isinstance(target, Partial):
        return (ConversionStep(summand_of),)
    return (ConversionStep(copy_to, backward="all_reduce"),) if divides else ()


def local_shape(shape: tuple[int, ...], placement: Placement, degree: int) -> tuple[int, ...]:
    """The shape of one rank's piece of a tensor."""
    if not isinstance(placement, Shard):
        return shape
    return tuple(size // degree if dim == placement.dim else size for dim, size in enumerate(shape))


def convert_placement(x: Any, source: Placement, need: ArgumentNeed, group: Any) -> Any:
    """Converts ``x`` from the placement ``source`` to the needed one."""
    for step in steps(source, need):
        x = step.collective(x, *step.dims, group)
    return x
