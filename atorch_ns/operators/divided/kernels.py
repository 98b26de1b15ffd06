"""Kernels: functions on pieces, for operators that would not give a piece of the whole result themselves.

Each is called as ``kernel(group, rule, operator, *args, **kwargs)`` with one rank's pieces. Results that are
whole are summed over the ranks inside; their gradients are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atorch_ns.operators.rules.rule import Rule
from atorch_ns.sharding.collectives import Group, reduce_from
from atorch_ns.sharding.divided_tensor import LossCall
from atorch_ns.sharding.vocabulary.logits import cross_entropy_on_parts

Operator = Callable[..., Any]

_REDUCTIONS = ("none", "mean", "sum")


def embedding_rows(
    group: Group,
    rule: Rule,
    operator: Operator,
    weight: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int = -1,
    *_: Any,
) -> torch.Tensor:
    """This rank's summand of […, D]: rows of its [V / n, D] shard, and zeros for ids of other ranks."""
    first = group.rank() * weight.size(0)  # index of this rank's first row in the whole table
    local = ids - first
    foreign = (local < 0) | (local >= weight.size(0))
    padding = padding_idx - first if first <= padding_idx < first + weight.size(0) else -1
    rows: torch.Tensor = operator(weight, local.masked_fill(foreign, 0), padding)  # row 0 for foreign ids
    return rows.masked_fill(foreign.unsqueeze(-1), 0)  # zeros for foreign ids, in the gradient too


def mean_of_parts(group: Group, rule: Rule, operator: Operator, *args: Any, **kwargs: Any) -> torch.Tensor:
    """This rank's summand of a mean over equal parts on all ranks."""
    summand: torch.Tensor = operator(*args, **kwargs) / group.size()  # parts are equally large
    return summand


def loss_over_samples(
    group: Group,
    rule: Rule,
    operator: Operator,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    *smoothing: float,
) -> torch.Tensor:
    """The mean loss over all ranks' samples whose targets are not ignored, weighted by class."""
    loss_sum = operator(scores, target, weight, _REDUCTIONS.index("sum"), ignore_index, *smoothing)
    mask = target != ignore_index
    counts = mask if weight is None else weight[target.where(mask, 0)] * mask  # -100 is not a class
    exact = torch.promote_types(loss_sum.dtype, torch.float32)  # half precision cannot count tokens
    both = reduce_from(torch.stack([loss_sum.to(exact), counts.sum().to(exact)]), group)  # one all-reduce
    return (both[0] / both[1].detach()).to(loss_sum.dtype)


def loss_over_classes(
    group: Group,
    rule: Rule,
    operator: Operator,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of scores whose classes are divided."""
    dim = 0 if scores.dim() == 1 else 1  # scores are [C] or [N, C, …]
    shape = [size * group.size() if axis == dim else size for axis, size in enumerate(scores.shape)]
    call = LossCall(
        tuple(shape), dim, ignore_index, _REDUCTIONS[reduction], weight is not None, label_smoothing
    )
    return cross_entropy_on_parts(scores, target, weight, call, group=group)
