"""Rules of operators that read or write at indices: dims that no index reads, and those of the indices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.dims import Dims, Letters, Table, broadcast, but, frozen, letters

_WHY = "dims that no index reads, and those of the indices"


def _dims_of_index(call: Call) -> Dims | None:
    argument = call.argument("indices")
    tensor = call.tensors[0]
    read = [dim for dim, index in enumerate(argument) if index is not None]  # None stands for a slice `:`
    indices = call.tensors[1 : 1 + len(read)]
    if not read or any(spec.dtype in (torch.bool, torch.uint8) for spec in indices):
        return None  # a mask gives as many rows as it has True, which is not known
    shape = torch.broadcast_shapes(*(spec.shape for spec in indices))
    common = letters(len(shape), "p")  # dims of the indices, broadcast together
    dims = but(letters(len(tensor.shape)), *read)
    # As in NumPy: dims of adjacent indices stand in their place, other ones first in the result.
    adjacent = read == list(range(read[0], read[-1] + 1))
    first = read[0] if adjacent else 0
    rest = [dim for dim in range(len(dims)) if dim not in read]
    before, after = rest[:first], rest[first:]
    result = (*(dims[dim] for dim in before), *common, *(dims[dim] for dim in after))
    places = [broadcast(shape, common, spec.shape) for spec in indices]  # letters of each index
    if "values" not in call.argument_names:
        return Dims([dims, *places], [result], linear=[[0]], why=_WHY)
    sizes = (*(tensor.shape[dim] for dim in before), *shape, *(tensor.shape[dim] for dim in after))
    if not call.argument("accumulate"):  # the last write to a place wins; ranks cannot tell which
        places, result = (
            frozen(call, 1)[: len(read)],
            tuple(None if item in common else item for item in result),
        )
    values = broadcast(sizes, result, call.tensors[-1].shape)
    return Dims([dims, *places, values], [dims], [str(item) for item in common], [0], why=_WHY)


def _index_select(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    dim = call.argument("dim") % max(len(dims), 1)  # a tensor without dims takes 0 and -1
    result = (*dims[:dim], "p", *dims[dim + 1 :]) if dims else ()
    index: Letters = ("p",) if call.tensors[1].shape and dims else (None,) * len(call.tensors[1].shape)
    return Dims([but(dims, dim), index], [result], linear=[[0]], why=_WHY)


def _index_written(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    dim = call.argument("dim") % max(len(dims), 1)
    target = but(dims, dim)
    adds = "index_add" in call.name
    row = "p" if adds and call.tensors[1].shape else None  # copies at one place overwrite each other
    source = (*target[:dim], row, *target[dim + 1 :])
    inputs: list[Letters] = [target, (row,) * len(call.tensors[1].shape)]
    inputs += [source if spec.shape else () for spec in call.tensors[2:]]  # index_fill's value has no dims
    return Dims(inputs, [target], ["p"], [0], why=_WHY)


def _dims_of_gather(call: Call) -> Dims | None:
    count = len(call.tensors[0].shape)
    if call.argument("dim") is None or any(len(spec.shape) != count for spec in call.tensors):
        return None
    dims = letters(count)
    dim = call.argument("dim") % max(count, 1)
    # Where an index is shorter than the tensor, their pieces do not cover the same places.
    differ = [n for n in range(count) if n != dim and len({spec.shape[n] for spec in call.tensors}) > 1]
    operand = but(dims, dim, *differ) if dims else dims
    at_index = tuple("p" if n == dim else letter for n, letter in enumerate(operand))  # p: the index's size
    if call.short_name in ("gather", "take_along_dim"):
        return Dims([operand, at_index], [at_index], linear=[[0]], why=_WHY)
    adds = "scatter_add" in call.name and call.tensors[1].shape == call.tensors[2].shape
    writes = at_index if adds else operand  # only sums may be written by pieces of the index
    return Dims([operand, *[writes] * (len(call.tensors) - 1)], [operand], ["p"], [0], why=_WHY)


def _one_hot(call: Call) -> Dims | None:
    if call.argument("num_classes") < 0:
        return None  # as many as the largest index says
    dims = letters(len(call.tensors[0].shape))
    return Dims([dims], [(*dims, None)], why="each index by itself")


INDEXING: Mapping[str, Table] = {
    **dict.fromkeys(("index", "index_put", "_unsafe_index"), _dims_of_index),
    "index_select": _index_select,
    **dict.fromkeys(("index_add", "index_copy", "index_fill"), _index_written),
    **dict.fromkeys(
        ("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce"), _dims_of_gather
    ),
    "one_hot": _one_hot,
}
"""Tables by the operator's name."""
