"""Rules of operators that move, join, cut or repeat elements and compute nothing, and of those that make tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.dims import (
    Dims,
    Letters,
    Table,
    arguments_of,
    broadcast,
    but,
    frozen,
    letters,
    name_of,
)

_MOVED = "elements keep their place along it"


def _letters(call: Call) -> Letters:
    return letters(len(call.tensors[0].shape))


def _moving(inputs: Sequence[Letters], outputs: Sequence[Letters], why: str = _MOVED, **others: Any) -> Dims:
    """The dims of an operator that moves elements and makes none: it may be applied to summands as to their sum."""
    return Dims(inputs, outputs, linear=[range(len(inputs))], why=why, **others)


def _permuted(call: Call) -> Dims:
    dims = _letters(call)
    return _moving([dims], [tuple(dims[place] for place in _order(call, len(dims)))])


def _order(call: Call, rank: int) -> list[int]:
    """For each dim of the result the argument's."""
    name = name_of(call)
    if name == "permute":
        return [place % rank for place in call.argument("dims")]
    if name in ("movedim", "moveaxis"):
        return _moved(call, rank)
    if name == "numpy_T":
        return list(reversed(range(rank)))
    order = list(range(rank))
    if rank > 1:
        first, second = _exchanged(call, name)
        order[first], order[second] = order[second], order[first]
    return order


def _exchanged(call: Call, name: str) -> tuple[int, int]:
    if name in ("t", "mT", "mH", "adjoint", "matrix_H"):
        return -2, -1
    first, second = ("axis0", "axis1") if name == "swapaxes" else ("dim0", "dim1")
    return call.argument(first), call.argument(second)


def _moved(call: Call, rank: int) -> list[int]:
    def listed(value: Any) -> list[int]:
        return [place % rank for place in (value if isinstance(value, (list, tuple)) else [value])]

    source, target = listed(call.argument("source")), listed(call.argument("destination"))
    rest = iter(place for place in range(rank) if place not in source)
    by_target = dict(zip(target, source, strict=True))
    return [by_target[place] if place in by_target else next(rest) for place in range(rank)]


def _reshaped(call: Call) -> Dims | None:
    """Dims of equal products belong together; of each group the first that is not 1 may be divided, on either side."""
    if call.name.endswith(".dtype"):
        return None
    before, after = call.tensors[0].shape, call.outputs[0].shape
    inputs: list[str | None] = [None] * len(before)
    outputs: list[str | None] = [None] * len(after)
    for number, (mine, theirs) in enumerate(_groups(before, after)):
        one = next((place for place in mine if before[place] != 1), None)
        other = next((place for place in theirs if after[place] != 1), None)
        if one is not None and other is not None:
            inputs[one] = outputs[other] = chr(ord("a") + number)
    if name_of(call) == "unflatten":  # whose sizes are those of the dims that it makes alone
        start = call.argument("dim") % len(before)
        made = range(start, start + len(call.argument("sizes")))
        outputs = [one if place in made else None for place, one in enumerate(outputs)]
        inputs = [one if one in outputs else None for one in inputs]
    like = [tuple(outputs)] * (len(call.tensors) - 1)
    why = "the first of the dims that are joined or cut"
    return Dims([tuple(inputs), *like], [tuple(outputs)], linear=[[0]], why=why)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The least runs of dims on both sides whose products are equal; none if there are no elements."""
    if 0 in before:
        return
    one = other = 0
    while one < len(before) or other < len(after):
        mine: list[int] = []
        theirs: list[int] = []
        left = right = 1
        while not (mine or theirs) or left != right:
            if other == len(after) or (one < len(before) and left <= right):
                left *= before[one]
                mine.append(one)
                one += 1
            else:
                right *= after[other]
                theirs.append(other)
                other += 1
        yield mine, theirs


def _expanded(call: Call) -> Dims:
    shape = call.outputs[0].shape
    dims = letters(len(shape))
    own = broadcast(shape, dims, call.tensors[0].shape)
    like = [dims] * (len(call.tensors) - 1)
    return Dims([own, *like], [dims], linear=[[0]], why="repeated elements are the same for all")


def _unsqueezed(call: Call) -> Dims:
    dims = _letters(call)
    place = call.argument("dim") % (len(dims) + 1)
    return _moving([dims], [(*dims[:place], None, *dims[place:])])


def _squeezed(call: Call) -> Dims:
    """A dim that it would take away if it were 1 must be larger on each rank too."""
    shape, dims = call.tensors[0].shape, _letters(call)
    given = call.argument("dim") if "dim" in arguments_of(call) else range(len(shape))
    asked = {
        place % max(len(shape), 1)
        for place in (given if isinstance(given, (list, tuple, range)) else [given])
    }
    kept = tuple(one for place, one in enumerate(dims) if place not in asked or shape[place] != 1)
    touched = {one for place, one in enumerate(dims) if place in asked}
    return _moving([dims], [kept], fits=lambda letter, size: size > 1 or letter not in touched)


def _cut(call: Call) -> Dims:
    dims = but(_letters(call), call.argument("dim"))
    return _moving([dims], [dims] * len(call.outputs), why="the dim that it cuts is whole")


def _sliced(call: Call) -> Dims:
    place = call.argument("dim") or 0
    if call.tensors[0].shape[place] != call.outputs[0].shape[place]:
        return _cut(call)
    dims = _letters(call)
    start = call.argument("start")
    if start is not None and start < 0:  # of a piece it would be another place
        dims = but(dims, place)
    return _moving([dims], [dims])


def _selected(call: Call) -> Dims:
    dims = _letters(call)
    place = call.argument("dim") % len(dims)
    results: list[Letters] = [(*dims[:place], *dims[place + 1 :])] * len(call.outputs)
    return _moving([but(dims, place)], results, why="the dim that it takes from is whole")


def _windows(call: Call) -> Dims:
    dims = but(_letters(call), call.argument("dimension"))
    return _moving([dims], [(*dims, None)], why="the dim that it cuts is whole")


def _stacked(call: Call) -> Dims:
    dims = _letters(call)
    place = call.argument("dim") % (len(dims) + 1)
    return _moving([dims] * len(call.tensors), [(*dims[:place], None, *dims[place:])])


def _joined(call: Call) -> Dims | None:
    if len({len(spec.shape) for spec in call.tensors}) > 1:
        return None  # an empty tensor of one dim among others
    dims = but(_letters(call), call.argument("dim"))
    return _moving([dims] * len(call.tensors), [dims], why="the dim that it joins is whole")


def _padded(call: Call) -> Dims:
    pad = call.argument("pad")
    touched = [-1 - number for number in range(len(pad) // 2) if pad[2 * number] or pad[2 * number + 1]]
    dims = but(_letters(call), *touched)
    zeros = not call.argument("value") and (
        "mode" not in arguments_of(call) or call.argument("mode") == "constant"
    )
    return Dims([dims], [dims], linear=[[0]] if zeros else [], why="the dims that are padded are whole")


def _repeated(call: Call) -> Dims:
    given = call.argument("repeats" if name_of(call) == "repeat" else "dims")
    shape, rank = call.tensors[0].shape, len(call.outputs[0].shape)
    counts = [1] * (rank - len(given)) + list(given)
    dims = tuple(one if count == 1 else None for one, count in zip(letters(rank), counts, strict=True))
    new = rank - len(shape)
    return _moving([dims[new:]], [(*(None,) * new, *dims[new:])], why="the dims that are repeated are whole")


def _interleaved(call: Call) -> Dims | None:
    dims = _letters(call)
    place = call.argument("dim")
    if len(call.tensors) > 1:
        if place is None:
            return None
        own = but(dims, place)
        return Dims([own, *frozen(call, 1)], [own], linear=[[0]], why="the dim that is repeated is whole")
    if place is None:  # of all dims one is made
        dims = but(dims, *range(1, len(dims)))
        return _moving([dims], [dims[:1] or (None,)])
    return _moving([dims], [dims], why="each element is repeated beside itself")


def _turned(call: Call) -> Dims:
    dims = but(_letters(call), *(call.argument("dims") or range(len(call.tensors[0].shape))))
    return _moving([dims], [dims], why="the dims that are turned are whole")


def _triangle(call: Call) -> Dims:
    dims = but(_letters(call), -1, -2)
    return _moving([dims], [dims], why="each matrix by itself")


def _made(call: Call) -> Dims:
    return Dims(frozen(call), [letters(len(call.outputs[0].shape))], why="every element is made alike")


VIEWS: Mapping[str, Table] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"), _reshaped),
    **dict.fromkeys(("view_as", "reshape_as"), _reshaped),
    **dict.fromkeys(("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims"), _permuted),
    **dict.fromkeys(("mT", "mH", "adjoint", "matrix_H", "numpy_T"), _permuted),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "narrow"), _cut),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("flip", "roll"), _turned),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn", "randint"), _made),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _made),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "slice": _sliced,
    "unfold": _windows,
    **dict.fromkeys(("select", "unbind"), _selected),
    "stack": _stacked,
    "cat": _joined,
    **dict.fromkeys(("pad", "constant_pad_nd"), _padded),
    **dict.fromkeys(("repeat", "tile"), _repeated),
    "repeat_interleave": _interleaved,
}
"""Tables by the operator's name."""

_SIZES = {
    **dict.fromkeys(("view", "expand", "_unsafe_view", "_reshape_alias", "broadcast_to"), "size"),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn", "randint"), "size"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), "size"),
    "reshape": "shape",
    "unflatten": "sizes",
}


def size_argument(call: Call) -> tuple[str, int, int] | None:
    """The argument that gives a result's sizes: its name, its place, and the result's dim that its first entry is."""
    name = _SIZES.get(name_of(call))
    if name is None or name not in arguments_of(call):
        return None
    first = call.argument("dim") % len(call.tensors[0].shape) if name == "sizes" else 0
    return name, arguments_of(call).index(name), first
