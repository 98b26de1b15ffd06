"""Dispatch of torch's functions on divided logits: those that keep the division, and their results on a part.

Legend: V vocabulary, n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Functions of each element alone: applied to the part, they give the part of the result.
_CASTS = frozenset(
    {Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.to, Tensor.contiguous, Tensor.clone}
    | {Tensor.detach, Tensor.cpu, Tensor.cuda, torch.clone, torch.detach}
)
_ARITHMETIC = ("mul", "div", "true_divide", "add", "sub", "neg", "tanh", "clamp")
_WITH_NUMBERS = frozenset(
    {getattr(home, name) for home in (Tensor, torch) for name in _ARITHMETIC}
    | {Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__}
    | {Tensor.__neg__}
)
# Functions that move or cut dimensions: shapes show where the vocabulary is afterwards.
_SHAPE_NAMES = (
    "transpose", "swapaxes", "permute", "movedim", "squeeze", "unsqueeze", "flatten", "narrow", "select",
    "chunk", "split", "unbind",
)  # fmt: skip
_SHAPES = frozenset(getattr(home, name) for home in (Tensor, torch) for name in _SHAPE_NAMES)
_VIEWS = frozenset({Tensor.view, Tensor.reshape, torch.reshape})


@dataclass(frozen=True)
class Kept:
    """The divided result of a function on a part.

    Attributes:
        parts: this rank's parts of the resulting tensors.
        dims: the dimension along which each is divided.
        several: whether the function returns several tensors.
    """

    parts: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]
    several: bool = False

    def joined(self, make: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
        """The function's return value, with ``make(part, dim)`` in place of each part."""
        outputs = tuple(make(part, dim) for part, dim in zip(self.parts, self.dims, strict=True))
        return outputs if self.several else outputs[0]


def apply_to_part(
    func: Callable[..., Any],
    part: torch.Tensor,
    dim: int,
    degree: int,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Kept | None:
    """Applies ``func`` to logits divided along ``dim``; ``None`` where it needs the whole.

    Args:
        func: the function, as ``__torch_function__`` receives it.
        part: this rank's part.
        dim: the dimension of the vocabulary.
        degree: n.
        args, kwargs: the arguments after the logits, and the keyword arguments.
    """
    operands = (*args, *kwargs.values())
    if func is Tensor.__getitem__:
        return _index_logits(part, dim, args[0])
    if any(isinstance(value, torch.Tensor) for value in operands):  # it may vary along the vocabulary
        return None
    if func in _CASTS or func in _WITH_NUMBERS:  # their other operands are plain numbers
        return Kept((func(part, *args, **kwargs),), (dim,))
    if func in _VIEWS:
        return _view_logits(part, dim, degree, args, kwargs=kwargs)
    return _reshape_logits(func, part, dim, degree, args=args, kwargs=kwargs) if func in _SHAPES else None


def _index_logits(part: torch.Tensor, dim: int, index: Any) -> Kept | None:
    # The vocabulary must be the last dimension, and the index must take all of it.
    if dim != part.dim() - 1:
        return None
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, (list, bool)) for item in items):
        return None
    takes = [_dims_taken(item) for item in items]  # [items] dimensions that each takes
    has_rest = any(item is Ellipsis for item in items)
    # The last item is the vocabulary's if the index names all dimensions, or if an ellipsis stands before it.
    reaches = sum(takes) == part.dim() or (has_rest and items[-1] is not Ellipsis)
    if reaches and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return None
    if sum(takes) > part.dim():  # on the whole torch raises its own error
        return None
    output = part[index]
    return Kept((output,), (output.dim() - 1,))


def _dims_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0  # None adds a dimension; an ellipsis takes the rest
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()  # a mask takes as many as it has
    return 1


def _view_logits(
    part: torch.Tensor, dim: int, degree: int, args: Sequence[Any], *, kwargs: Mapping[str, Any]
) -> Kept | None:
    if kwargs.keys() - {"shape", "size"}:  # such as view(dtype=…)
        return None
    shape = args[0] if args else next(iter(kwargs.values()), None)
    sizes = list(shape) if isinstance(shape, (tuple, list)) else list(args)
    if dim != part.dim() - 1 or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    words = part.shape[-1] * degree  # V
    if -1 in sizes:
        product = math.prod(size for size in sizes if size != -1)
        if not product:  # torch calls -1 ambiguous beside a size of 0
            return None
        sizes[sizes.index(-1)] = part.numel() * degree // product
    if sizes[-1] != words or math.prod(sizes) != part.numel() * degree:
        return None
    return Kept((part.reshape(*sizes[:-1], part.shape[-1]),), (len(sizes) - 1,))


def _reshape_logits(
    func: Callable[..., Any],
    part: torch.Tensor,
    dim: int,
    degree: int,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Kept | None:
    # Run for the whole on meta, and for the part: shapes show where the vocabulary is afterwards.
    shape = [size * degree if axis == dim else size for axis, size in enumerate(part.shape)]
    wholes = func(torch.empty(shape, device="meta"), *args, **kwargs)
    output = func(part, *args, **kwargs)
    several = not isinstance(output, torch.Tensor)  # chunk, split, unbind
    parts, wholes = (tuple(output), tuple(wholes)) if several else ((output,), (wholes,))
    if len(parts) != len(wholes) or not parts:  # cut along the vocabulary
        return None
    dims = [
        _find_vocabulary_dim(piece.shape, whole.shape, part.shape[dim], degree)
        for piece, whole in zip(parts, wholes, strict=True)
    ]
    vocab_dims = [axis for axis in dims if axis is not None]
    return Kept(parts, tuple(vocab_dims), several) if len(vocab_dims) == len(dims) else None


def _find_vocabulary_dim(part: Sequence[int], whole: Sequence[int], local: int, degree: int) -> int | None:
    if len(part) != len(whole):
        return None
    # Exactly one size may differ between the part and the whole, and by the degree.
    other = [axis for axis, (size, all_) in enumerate(zip(part, whole, strict=True)) if size != all_]
    if len(other) != 1 or (part[other[0]], whole[other[0]]) != (local, local * degree):
        return None
    return other[0]
