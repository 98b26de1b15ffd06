"""Attention written out as matrix products: its keys and values are gathered from all ranks.

A product of this rank's queries with the keys of all positions has this rank's rows of the scores. Code that
treats these row by row is right as it is (soft caps, sinks, biases, masks, softmax, dropout), and so is their
product with the values of all positions. Heads are not divided. All-gathers replace Ulysses' all-to-alls: n
times their bytes for keys and values, little beside scores that are kept.

Legend: T positions of the whole sequence, n ranks, L positions of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from atorch_ns.sharding.collectives import Group, all_gather
from atorch_ns.sharding.sequence.plan import SequenceLayout

# The place of the first factor among the arguments, and the names of both.
_FACTORS: Final[dict[Callable[..., Any], tuple[int, str, str]]] = {
    torch.matmul: (0, "input", "other"),
    torch.Tensor.matmul: (0, "self", "other"),
    torch.bmm: (0, "input", "mat2"),
    torch.Tensor.bmm: (0, "self", "mat2"),
    torch.baddbmm: (1, "batch1", "batch2"),
    torch.Tensor.baddbmm: (1, "batch1", "batch2"),
    torch.einsum: (1, "", ""),
}


@dataclass(frozen=True)
class Product:
    """A matrix product.

    Attributes:
        left, right: its factors, of three dimensions or more: attention has no products with single weights.
        position: index of ``right`` among the arguments, or its name.
        terms: the dimensions of both factors and of the result as letters; others may lead.
    """

    left: torch.Tensor
    right: torch.Tensor
    position: int | str
    terms: tuple[str, str, str]

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
        """The matrix product of a call; ``None`` for other calls."""
        if func not in _FACTORS:
            return None
        first, *names = _FACTORS[func]
        arguments = dict(enumerate(args)) | kwargs
        places = [key if key in arguments else name for key, name in enumerate(names, first)]
        left, right = (arguments.get(key) for key in places)
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
            return None
        if min(left.dim(), right.dim()) < 3:  # the weight of a layer has two
            return None
        terms = _parse_equation(args[0]) if func is torch.einsum else ("ij", "jk", "ik")
        # A fourth argument is the third factor of an einsum.
        return None if terms is None or len(args) > 3 else cls(left, right, places[1], terms)

    def gathered_dim(self, length: int) -> int | None:
        """The key dimension of ``right`` in a product over the whole sequence of ``length``.

        Such a product multiplies T queries with T keys, or weights for T keys with their values.
        """
        left, right, result = self.terms
        # Letters of the left factor alone that stay in the result: queries.
        queries = (set(left) & set(result)) - set(right)
        if not any(self.left.size(_dim_of_letter(left, letter)) == length for letter in queries):
            return None
        for letter in right:
            # Keys are new in the result of q k^T; in the product of weights and values they are summed over.
            is_key = (letter in result) != (letter in left)
            if is_key and self.right.size(_dim_of_letter(right, letter)) == length:
                return _dim_of_letter(right, letter)
        return None

    def with_right(
        self, right: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another second factor."""
        if isinstance(self.position, str):
            return args, {**kwargs, self.position: right}
        return (*args[: self.position], right, *args[self.position + 1 :]), kwargs

    def gathered(self, dim: int, layout: SequenceLayout, group: Group) -> torch.Tensor:
        """The second factor for the keys of all ranks."""
        return layout.in_order(all_gather(self.right, dim, group), dim)


def _parse_equation(equation: Any) -> tuple[str, str, str] | None:
    # Letters of "...ab,...bc->...ac"; None unless the result is written out, and dots stand in front only.
    factors, arrow, result = str(equation).replace(" ", "").partition("->")
    left, comma, right = factors.partition(",")
    terms = tuple(term.removeprefix("...") for term in (left, right, result))
    if not (arrow and comma) or not all(term.isalpha() for term in terms):
        return None
    return terms[0], terms[1], terms[2]


def _dim_of_letter(term: str, letter: str) -> int:
    return term.index(letter) - len(term)  # from the end, since dimensions may lead
