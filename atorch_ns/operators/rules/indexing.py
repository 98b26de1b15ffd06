"""Rules of operators that read or write at indices: dims that no index reads, and those of the indices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.dims import Dims, Letters, Table, broadcast, but, frozen, letters

_WHY = "dims that no index reads, and those of the indices"


def _dims_of_index(call: Call) -> Dims | None:
    """``x[indices]``, and ``x`` with values put there; of a tensor of masks only the whole call."""
    argument = call.argument("indices")
    tensor = call.tensors[0]
    read = [dim for dim, index in enumerate(argument) if index is not None]
    indices = call.tensors[1 : 1 + len(read)]
    if not read or any(spec.dtype in (torch.bool, torch.uint8) for spec in indices):
        return None
    shape = torch.broadcast_shapes(*(spec.shape for spec in indices))
    common = letters(len(shape), "p")
    dims = but(letters(len(tensor.shape)), *read)
    adjacent = read == list(range(read[0], read[-1] + 1))
    first = read[0] if adjacent else 0
    kept = [dim for dim in range(len(dims)) if dim not in read]
    before, after = kept[:first], kept[first:]
    result = (*(dims[dim] for dim in before), *common, *(dims[dim] for dim in after))
    places = [broadcast(shape, common, spec.shape) for spec in indices]
    if "values" not in (one.name for one in call.operator._schema.arguments):  # type: ignore[attr-defined]
        return Dims([dims, *places], [result], linear=[[0]], why=_WHY)
    sizes = (*(tensor.shape[dim] for dim in before), *shape, *(tensor.shape[dim] for dim in after))
    if not call.argument("accumulate"):
        places, result = frozen(call, 1)[: len(read)], tuple(None if one in common else one for one in result)
    values = broadcast(sizes, result, call.tensors[-1].shape)
    return Dims([dims, *places, values], [dims], [str(one) for one in common], [0], why=_WHY)


def _index_select(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    dim = call.argument("dim") % max(len(dims), 1)
    result = (*dims[:dim], "p", *dims[dim + 1 :]) if dims else ()
    index: Letters = ("p",) if call.tensors[1].shape and dims else (None,) * len(call.tensors[1].shape)
    return Dims([but(dims, dim), index], [result], linear=[[0]], why=_WHY)


def _index_written(call: Call) -> Dims:
    """[…] with rows of a source added, or copied, along a dim; sums are partial where the rows are divided."""
    dims = letters(len(call.tensors[0].shape))
    dim = call.argument("dim") % max(len(dims), 1)
    target = but(dims, dim)
    adds = "index_add" in call.name
    row = "p" if adds and call.tensors[1].shape else None
    source = (*target[:dim], row, *target[dim + 1 :])
    inputs: list[Letters] = [target, (row,) * len(call.tensors[1].shape)]
    inputs += [source if spec.shape else () for spec in call.tensors[2:]]
    return Dims(inputs, [target], ["p"], [0], why=_WHY)


def _dims_of_gather(call: Call) -> Dims | None:
    """Tensors of one rank that an index of as many dims reads along one; dims in which all are equally large."""
    count = len(call.tensors[0].shape)
    if call.argument("dim") is None or any(len(spec.shape) != count for spec in call.tensors):
        return None
    dims = letters(count)
    dim = call.argument("dim") % max(count, 1)
    differ = [n for n in range(count) if n != dim and len({spec.shape[n] for spec in call.tensors}) > 1]
    operand = but(dims, dim, *differ) if dims else dims
    at_index = tuple("p" if n == dim else letter for n, letter in enumerate(operand))
    if call.name.split(".")[1] in ("gather", "take_along_dim"):
        return Dims([operand, at_index], [at_index], linear=[[0]], why=_WHY)
    adds = "scatter_add" in call.name and call.tensors[1].shape == call.tensors[2].shape
    written = at_index if adds else operand
    return Dims([operand, *[written] * (len(call.tensors) - 1)], [operand], ["p"], [0], why=_WHY)


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
