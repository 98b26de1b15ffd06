"""Functions on divided logits keep the division exactly where the whole result lies in the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from atorch_ns.sharding.divided_tensor import changes_in_place
from atorch_ns.sharding.vocabulary.dispatch import apply_to_part

RANKS, LOCAL = 2, 3
WHOLE = torch.arange(4 * 5 * RANKS * LOCAL, dtype=torch.float32).view(4, 5, RANKS * LOCAL)

KEPT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a slice of tokens": (Tensor.__getitem__, ((slice(None), slice(None, -1)),)),
    "a mask of rows": (Tensor.__getitem__, (torch.arange(20).view(4, 5) % 2 == 0,)),
    "the rest": (Tensor.__getitem__, ((..., slice(None)),)),
    "flat rows": (Tensor.view, (-1, RANKS * LOCAL)),
    "rows by -1": (Tensor.reshape, ((20, -1),)),
    "the vocabulary first": (Tensor.transpose, (1, 2)),
    "a cast": (Tensor.to, (torch.float64,)),
    "a product with a number": (torch.mul, (0.5,)),
}
GATHERED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a part of the vocabulary": (Tensor.__getitem__, ((..., slice(2)),)),
    "one word": (Tensor.__getitem__, ((0, 0, 1),)),
    "rows that cut the vocabulary": (Tensor.view, (-1, LOCAL)),
    "everything flat": (Tensor.reshape, (-1,)),
    "a softmax": (Tensor.softmax, (-1,)),
    "a product with a tensor": (torch.mul, (torch.ones(1),)),
    "a flattened vocabulary": (Tensor.flatten, (1,)),
}


def _on_parts(func: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    parts = (part.contiguous() for part in WHOLE.chunk(RANKS, -1))
    return [apply_to_part(func, part, 2, RANKS, args=args, kwargs={}) for part in parts]


@pytest.mark.parametrize("name", KEPT)
def test_kept_parts_join_to_the_whole_result(name: str) -> None:
    func, args = KEPT[name]
    found = _on_parts(func, args)
    assert all(kept is not None and not kept.several for kept in found)
    joined = torch.cat([kept.parts[0] for kept in found], found[0].dims[0])
    assert torch.equal(joined, func(WHOLE, *args))


@pytest.mark.parametrize("name", GATHERED)
def test_anything_else_needs_the_whole(name: str) -> None:
    assert _on_parts(*GATHERED[name]) == [None] * RANKS


def test_functions_that_return_several_tensors_keep_all_of_them() -> None:
    first, second = _on_parts(Tensor.unbind, (1,))
    assert first.several
    wanted = WHOLE.unbind(1)
    for mine, theirs, whole in zip(first.parts, second.parts, wanted, strict=True):
        assert torch.equal(torch.cat([mine, theirs], -1), whole)


def test_changes_in_place_are_recognised() -> None:
    assert changes_in_place(Tensor.add_, (), {})
    assert changes_in_place(Tensor.__imul__, (), {})
    assert changes_in_place(Tensor.__setitem__, (), {})
    assert changes_in_place(torch.add, (), {"out": WHOLE})
    assert changes_in_place(torch.nn.functional.relu, (), {"inplace": True})
    assert not changes_in_place(Tensor.__invert__, (), {})
    assert not changes_in_place(Tensor.__add__, (), {"out": None})
