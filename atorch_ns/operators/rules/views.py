"""Rules of operators that move, join, cut or repeat elements without computing, or that make tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.dims import Dims, Letters, Table, broadcast, but, frozen, letters

_MOVED = "elements keep their place along it"


def _input_letters(call: Call) -> Letters:
    return letters(len(call.tensors[0].shape))


def _movement_dims(
    inputs: Sequence[Letters], outputs: Sequence[Letters], why: str = _MOVED, **others: Any
) -> Dims:
    # Moving creates no elements, so partial sums stay partial sums of the moved tensor.
    return Dims(inputs, outputs, linear=[range(len(inputs))], why=why, **others)


def _dims_of_permute(call: Call) -> Dims:
    dims = _input_letters(call)
    return _movement_dims([dims], [tuple(dims[dim] for dim in _permutation_order(call, len(dims)))])


def _permutation_order(call: Call, rank: int) -> list[int]:
    # The result's dim i is the argument's dim order[i].
    name = call.short_name
    if name == "permute":
        return [dim % rank for dim in call.argument("dims")]
    if name in ("movedim", "moveaxis"):
        return _movedim_order(call, rank)
    if name == "numpy_T":
        return list(reversed(range(rank)))
    order = list(range(rank))
    if rank > 1:  # t() returns a vector as it is
        first, second = _swapped_axes(call, name)
        order[first], order[second] = order[second], order[first]
    return order


def _swapped_axes(call: Call, name: str) -> tuple[int, int]:
    if name in ("t", "mT", "mH", "adjoint", "matrix_H"):
        return -2, -1  # of real numbers the adjoint is the transpose
    first, second = ("axis0", "axis1") if name == "swapaxes" else ("dim0", "dim1")
    return call.argument(first), call.argument(second)


def _movedim_order(call: Call, rank: int) -> list[int]:
    def list_dims(value: Any) -> list[int]:
        return [dim % rank for dim in (value if isinstance(value, (list, tuple)) else [value])]

    source, target = list_dims(call.argument("source")), list_dims(call.argument("destination"))
    rest = iter(dim for dim in range(rank) if dim not in source)  # they fill the other places in order
    by_target = dict(zip(target, source, strict=True))
    return [by_target[dim] if dim in by_target else next(rest) for dim in range(rank)]


def _dims_of_reshape(call: Call) -> Dims | None:
    if call.name.endswith(".dtype"):  # view as another dtype
        return None
    before, after = call.tensors[0].shape, call.outputs[0].shape
    inputs: list[str | None] = [None] * len(before)
    outputs: list[str | None] = [None] * len(after)
    # A contiguous piece of a group is a piece of its outermost dim that is not 1, on both sides.
    for number, (mine, theirs) in enumerate(_equal_products(before, after)):
        axis = next((dim for dim in mine if before[dim] != 1), None)
        other = next((dim for dim in theirs if after[dim] != 1), None)
        if axis is not None and other is not None:
            inputs[axis] = outputs[other] = chr(ord("a") + number)
    if call.short_name == "unflatten":  # whose sizes are those of the dims that it makes alone
        start = call.argument("dim") % len(before)
        new_dims = range(start, start + len(call.argument("sizes")))
        outputs = [axis if dim in new_dims else None for dim, axis in enumerate(outputs)]
        inputs = [axis if axis in outputs else None for axis in inputs]
    like = [tuple(outputs)] * (len(call.tensors) - 1)  # view_as: the other has the result's shape
    why = "the first of the dims that are joined or cut"
    return Dims([tuple(inputs), *like], [tuple(outputs)], linear=[[0]], why=why)


def _equal_products(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    if 0 in before:  # any run of dims has the product 0
        return
    index = other = 0
    while index < len(before) or other < len(after):
        mine: list[int] = []
        theirs: list[int] = []
        my_product = their_product = 1  # products of the sizes in mine and in theirs
        while not (mine or theirs) or my_product != their_product:  # extend the side whose product is smaller
            if index == len(before) and other == len(after):
                return  # sizes that depend on values, whose products are not known
            if other == len(after) or (index < len(before) and my_product <= their_product):
                my_product *= before[index]
                mine.append(index)
                index += 1
            else:
                their_product *= after[other]
                theirs.append(other)
                other += 1
        yield mine, theirs


def _dims_of_expand(call: Call) -> Dims:
    shape = call.outputs[0].shape
    dims = letters(len(shape))
    source = broadcast(shape, dims, call.tensors[0].shape)
    like = [dims] * (len(call.tensors) - 1)
    return Dims([source, *like], [dims], linear=[[0]], why="repeated elements are the same for all")


def _dims_of_unsqueeze(call: Call) -> Dims:
    dims = _input_letters(call)
    dim = call.argument("dim") % (len(dims) + 1)
    return _movement_dims([dims], [(*dims[:dim], None, *dims[dim:])])


def _dims_of_squeeze(call: Call) -> Dims:
    shape, dims = call.tensors[0].shape, _input_letters(call)
    axes = call.argument("dim") if "dim" in call.argument_names else range(len(shape))
    gaps = {dim % max(len(shape), 1) for dim in (axes if isinstance(axes, (list, tuple, range)) else [axes])}
    result = tuple(name for dim, name in enumerate(dims) if dim not in gaps or shape[dim] != 1)
    gap_names = {name for dim, name in enumerate(dims) if dim in gaps}
    # A piece of size 1 would lose a dim that the whole tensor keeps.
    return _movement_dims([dims], [result], fits=lambda letter, size: size > 1 or letter not in gap_names)


def _dims_of_split(call: Call) -> Dims:
    dims = but(_input_letters(call), call.argument("dim"))
    inputs = [dims, *frozen(call, 1)]  # places to cut at may be a tensor
    return Dims(inputs, [dims] * len(call.outputs), linear=[[0]], why="the dim that it cuts is whole")


def _dims_of_slice(call: Call) -> Dims:
    dim = call.argument("dim") or 0
    if call.tensors[0].shape[dim] != call.outputs[0].shape[dim]:
        return _dims_of_split(call)  # a part of the dim: some ranks would have none of it
    dims = _input_letters(call)
    start = call.argument("start")
    if start is not None and start < 0:  # of a piece it would be another place
        dims = but(dims, dim)
    return _movement_dims([dims], [dims])


def _dims_of_select(call: Call) -> Dims:
    dims = _input_letters(call)
    dim = call.argument("dim") % len(dims)
    results: list[Letters] = [(*dims[:dim], *dims[dim + 1 :])] * len(call.outputs)
    return _movement_dims([but(dims, dim)], results, why="the dim that it takes from is whole")


def _dims_of_unfold(call: Call) -> Dims:
    dims = but(_input_letters(call), call.argument("dimension"))
    return _movement_dims([dims], [(*dims, None)], why="the dim that it cuts is whole")


def _dims_of_stack(call: Call) -> Dims:
    dims = _input_letters(call)
    dim = call.argument("dim") % (len(dims) + 1)
    return _movement_dims([dims] * len(call.tensors), [(*dims[:dim], None, *dims[dim:])])


def _dims_of_cat(call: Call) -> Dims | None:
    if len({len(spec.shape) for spec in call.tensors}) > 1:
        return None  # an empty tensor of one dim among others
    dims = but(_input_letters(call), call.argument("dim"))
    return _movement_dims([dims] * len(call.tensors), [dims], why="the dim that it joins is whole")


def _dims_of_pad(call: Call) -> Dims:
    pad = call.argument("pad")
    # `pad` holds two sizes for each dim, from the last dim backwards.
    padded_dims = [-1 - number for number in range(len(pad) // 2) if pad[2 * number] or pad[2 * number + 1]]
    dims = but(_input_letters(call), *padded_dims)
    zeros = not call.argument("value") and (  # another constant would be added once by every rank
        "mode" not in call.argument_names or call.argument("mode") == "constant"
    )
    return Dims([dims], [dims], linear=[[0]] if zeros else [], why="the dims that are padded are whole")


def _dims_of_repeat(call: Call) -> Dims:
    repeats = call.argument("repeats" if call.short_name == "repeat" else "dims")
    shape, rank = call.tensors[0].shape, len(call.outputs[0].shape)
    counts = [1] * (rank - len(repeats)) + list(repeats)  # aligned at the last dims
    dims = tuple(letter if count == 1 else None for letter, count in zip(letters(rank), counts, strict=True))
    new = rank - len(shape)  # dims that the result has in front
    result = (*(None,) * new, *dims[new:])
    return _movement_dims([dims[new:]], [result], why="the dims that are repeated are whole")


def _dims_of_repeat_interleave(call: Call) -> Dims | None:
    if "dim" not in call.argument_names:  # it gives indices, as many as its counts add up to
        return None
    dims, dim = _input_letters(call), call.argument("dim")
    is_sized = call.argument("output_size") is not None  # a size of the whole result
    if len(call.tensors) > 1:  # a count for each element: results of pieces differ in size
        if dim is None:
            return None
        rest = but(dims, dim)
        return Dims([rest, *frozen(call, 1)], [rest], linear=[[0]], why="the dim that is repeated is whole")
    if dim is None:  # of all dims one is made
        dims = but(dims, *range(0 if is_sized else 1, len(dims)))
        return _movement_dims([dims], [dims[:1] or (None,)])
    dims = but(dims, dim) if is_sized else dims
    return _movement_dims([dims], [dims], why="each element is repeated beside itself")


def _dims_of_flip(call: Call) -> Dims:
    dims = but(_input_letters(call), *(call.argument("dims") or range(len(call.tensors[0].shape))))
    return _movement_dims([dims], [dims], why="the dims that are turned are whole")


def _dims_of_triangle(call: Call) -> Dims:
    dims = but(_input_letters(call), -1, -2)  # the diagonal is counted from the corner of the matrix
    return _movement_dims([dims], [dims], why="each matrix by itself")


def _dims_of_factory(call: Call) -> Dims:
    return Dims(frozen(call), [letters(len(call.outputs[0].shape))], why="every element is made alike")


_BY_TABLE: Mapping[Table, str] = {
    _dims_of_reshape: "view reshape _unsafe_view flatten unflatten _reshape_alias view_as reshape_as",
    _dims_of_permute: "permute transpose t movedim moveaxis swapaxes swapdims mT mH adjoint matrix_H numpy_T",
    _dims_of_expand: "expand expand_as broadcast_to",
    _dims_of_split: "split split_with_sizes chunk tensor_split narrow",
    _dims_of_triangle: "tril triu",
    _dims_of_flip: "flip roll",
    _dims_of_factory: "zeros ones full empty rand randn randint new_zeros new_ones new_full new_empty",
    _dims_of_unsqueeze: "unsqueeze",
    _dims_of_squeeze: "squeeze",
    _dims_of_slice: "slice",
    _dims_of_unfold: "unfold",
    _dims_of_select: "select unbind",
    _dims_of_stack: "stack",
    _dims_of_cat: "cat",
    _dims_of_pad: "pad constant_pad_nd",
    _dims_of_repeat: "repeat tile",
    _dims_of_repeat_interleave: "repeat_interleave",
}
VIEWS: Mapping[str, Table] = {name: table for table, names in _BY_TABLE.items() for name in names.split()}
"""Tables by the operator's name."""

_SIZES = {  # by operator the argument that has the result's sizes
    **dict.fromkeys(("view", "expand", "_unsafe_view", "_reshape_alias", "broadcast_to"), "size"),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn", "randint"), "size"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), "size"),
    "reshape": "shape",
    "unflatten": "sizes",
}


def size_argument(call: Call) -> tuple[str, int, int] | None:
    """Name and position of the argument with the result's sizes, and the result's dim of its first entry."""
    name = _SIZES.get(call.short_name)
    if name is None or name not in call.argument_names:
        return None
    first = call.argument("dim") % len(call.tensors[0].shape) if name == "sizes" else 0
    return name, call.argument_names.index(name), first
