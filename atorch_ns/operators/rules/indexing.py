"""Rules of operators that read or write at indices: dims that no index reads, and those of the indices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.dims import Dims, Letters, Table, broadcast, but, frozen, letters

_WHY = "dims that no index reads, and those of the indices"


def _dims_of_index(call: Call) -> Dims | None:
    """``x[indices]``, and ``x`` with values put there; of a tensor of masks only the whole call."""
    given = call.argument("indices")
    own = call.tensors[0]
    read = [place for place, index in enumerate(given) if index is not None]
    indices = call.tensors[1 : 1 + len(read)]
    if not read or any(spec.dtype in (torch.bool, torch.uint8) for spec in indices):
        return None
    shape = torch.broadcast_shapes(*(spec.shape for spec in indices))
    common = letters(len(shape), "p")
    dims = but(letters(len(own.shape)), *read)
    adjacent = read == list(range(read[0], read[-1] + 1))
    first = read[0] if adjacent else 0
    kept = [place for place in range(len(dims)) if place not in read]
    before, after = kept[:first], kept[first:]
    result = (*(dims[place] for place in before), *common, *(dims[place] for place in after))
    places = [broadcast(shape, common, spec.shape) for spec in indices]
    if "values" not in (one.name for one in call.operator._schema.arguments):  # type: ignore[attr-defined]
        return Dims([dims, *places], [result], linear=[[0]], why=_WHY)
    sizes = (*(own.shape[place] for place in before), *shape, *(own.shape[place] for place in after))
    if not call.argument("accumulate"):
        places, result = frozen(call, 1)[: len(read)], tuple(None if one in common else one for one in result)
    values = broadcast(sizes, result, call.tensors[-1].shape)
    return Dims([dims, *places, values], [dims], [str(one) for one in common], [0], why=_WHY)


def _index_select(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    place = call.argument("dim") % max(len(dims), 1)
    result = (*dims[:place], "p", *dims[place + 1 :]) if dims else ()
    index: Letters = ("p",) if call.tensors[1].shape and dims else (None,) * len(call.tensors[1].shape)
    return Dims([but(dims, place), index], [result], linear=[[0]], why=_WHY)


def _index_written(call: Call) -> Dims:
    """[…] with rows of a source added, or copied, along a dim; sums are partial where the rows are divided."""
    dims = letters(len(call.tensors[0].shape))
    place = call.argument("dim") % max(len(dims), 1)
    own = but(dims, place)
    adds = "index_add" in call.name
    row = "p" if adds and call.tensors[1].shape else None
    source = (*own[:place], row, *own[place + 1 :])
    inputs: list[Letters] = [own, (row,) * len(call.tensors[1].shape)]
    inputs += [source if spec.shape else () for spec in call.tensors[2:]]
    return Dims(inputs, [own], ["p"], [0], why=_WHY)


def _dims_of_gather(call: Call) -> Dims | None:
    """Tensors of one rank that an index of as many dims reads along one; dims in which all are equally large."""
    count = len(call.tensors[0].shape)
    if call.argument("dim") is None or any(len(spec.shape) != count for spec in call.tensors):
        return None
    dims = letters(count)
    place = call.argument("dim") % max(count, 1)
    differ = [n for n in range(count) if n != place and len({spec.shape[n] for spec in call.tensors}) > 1]
    own = but(dims, place, *differ) if dims else dims
    at_index = tuple("p" if n == place else one for n, one in enumerate(own))
    if call.name.split(".")[1] in ("gather", "take_along_dim"):
        return Dims([own, at_index], [at_index], linear=[[0]], why=_WHY)
    adds = "scatter_add" in call.name and call.tensors[1].shape == call.tensors[2].shape
    written = at_index if adds else own
    return Dims([own, *[written] * (len(call.tensors) - 1)], [own], ["p"], [0], why=_WHY)


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
