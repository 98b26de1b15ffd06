"""Linear layers whose matrix products are in fewer bits than a plan computes in: their share, and their casts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from atorch_ns.estimate._units import cost_of
from atorch_ns.profile import Growth, OperatorCost, ParameterSpec, Segment
from atorch_ns.strategy import NarrowProducts, Plan

__all__ = ["NarrowShare", "narrow_share"]

_PRODUCTS = ("aten.mm", "aten.addmm")
"""What linear layers compute by; products of activations are batched ones."""


class NarrowShare(NamedTuple):
    """What of a segment is computed in fewer bits, both passes together.

    Attributes:
        flops: share of its floating point operations.
        bytes_per_flop: bytes that finding scales and rounding move, for each operation of the segment.
    """

    flops: float = 0.0
    bytes_per_flop: float = 0.0


def narrow_share(plan: Plan, segment: Segment, num_samples: float, num_tokens: float) -> NarrowShare:
    """The share of a segment under a plan, at the micro-batch that was traced.

    Which layers a product belongs to is not traced: products are shared out by the sizes of weights, to which the
    operations of a linear layer are proportional.
    """
    if plan.narrow is None:
        return NarrowShare()
    operators = cost_of(plan, segment).operators
    products = [each for each in operators if each.name.removesuffix(".default") in _PRODUCTS]
    total = _sum((each.flops for each in operators), num_samples, num_tokens)
    share = _eligible(plan.narrow, segment)
    if not total or not share:
        return NarrowShare()
    flops = share * _sum((each.flops for each in products), num_samples, num_tokens) / total
    moved = share * _operand_bytes(products, num_samples, num_tokens) / total
    return NarrowShare(flops, moved * plan.narrow.casts_per_operand)


def _operand_bytes(products: Iterable[OperatorCost], num_samples: float, num_tokens: float) -> float:
    return _sum((each.moved for each in products), num_samples, num_tokens)


def _sum(values: Iterable[Growth], num_samples: float, num_tokens: float) -> float:
    return float(sum(max(0.0, value.at(num_samples, num_tokens)) for value in values))


def _eligible(narrow: NarrowProducts, segment: Segment) -> float:
    """Share of the elements of a segment's matrices that belong to such layers."""
    matrices = [each for each in segment.parameters if len(each.shape) == 2]
    total = sum(each.num_elements for each in matrices)
    chosen = sum(each.num_elements for each in matrices if _is_chosen(narrow, segment, each))
    return chosen / total if total else 0.0


def _is_chosen(narrow: NarrowProducts, segment: Segment, matrix: ParameterSpec) -> bool:
    path = f"{segment.paths[0]}.{matrix.name}" if segment.paths else matrix.name
    name = path.rpartition(".")[0]
    if any(size % narrow.multiple for size in matrix.shape) or any(part in name for part in narrow.exclude):
        return False
    if narrow.include is not None:
        return any(part in name for part in narrow.include)
    return matrix.tied_to is None
