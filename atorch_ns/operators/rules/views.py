"""Rules of operators that move, join or cut elements and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atorch_ns.operators.rules.dims import Dims, Letters, but, letters
from atorch_ns.operators.rules.rule import Call

Table = Callable[[Call], Dims | None]
_MOVED = "elements keep their place along it"


def _same(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    return Dims([dims], [dims], why=_MOVED)


def _permuted(call: Call) -> Dims:
    rank = len(call.tensors[0].shape)
    dims = letters(rank)
    name = call.name.split(".")[1]
    order = list(range(rank))
    if name in ("permute", "movedim"):
        order = [place % rank for place in call.argument("dims")] if name == "permute" else _moved(call, rank)
    elif rank >= 2:
        first, second = (
            (0, 1) if name == "t" else (call.argument(_first_dim(call)), call.argument(_second_dim(call)))
        )
        if name in ("mT", "adjoint"):
            first, second = -2, -1
        order[first % rank], order[second % rank] = second % rank, first % rank
    return Dims([dims], [tuple(dims[place] for place in order)], why=_MOVED)


def _first_dim(call: Call) -> str:
    return {"swapaxes": "axis0", "swapdims": "dim0"}.get(call.name.split(".")[1], "dim0")


def _second_dim(call: Call) -> str:
    return {"swapaxes": "axis1", "swapdims": "dim1"}.get(call.name.split(".")[1], "dim1")


def _moved(call: Call, rank: int) -> list[int]:
    def listed(value: Any) -> list[int]:
        return [place % rank for place in (value if isinstance(value, (list, tuple)) else [value])]

    source, target = listed(call.argument("source")), listed(call.argument("destination"))
    rest = iter(place for place in range(rank) if place not in source)
    by_target = dict(zip(target, source, strict=True))
    return [by_target[place] if place in by_target else next(rest) for place in range(rank)]


def _reshaped(call: Call) -> Dims:
    """Dims of equal products belong together; of each group the first that is not 1 may be divided, on either side."""
    before, after = call.tensors[0].shape, call.outputs[0].shape
    inputs: list[str | None] = [None] * len(before)
    outputs: list[str | None] = [None] * len(after)
    for number, (mine, theirs) in enumerate(_groups(before, after)):
        one = next((place for place in mine if before[place] != 1), None)
        other = next((place for place in theirs if after[place] != 1), None)
        if one is not None and other is not None:
            inputs[one] = outputs[other] = chr(ord("a") + number)
    return Dims([tuple(inputs)], [tuple(outputs)], why="the first of the dims that are joined or cut")


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    found: list[tuple[list[int], list[int]]] = []
    one = other = 0
    while one < len(before) or other < len(after):
        mine: list[int] = []
        theirs: list[int] = []
        left = right = 1
        while True:
            if left <= right and one < len(before) and (left < right or not mine):
                left *= before[one]
                mine.append(one)
                one += 1
            elif other < len(after) and (right < left or not theirs):
                right *= after[other]
                theirs.append(other)
                other += 1
            else:
                break
            if left == right and mine and theirs:
                break
        if left != right or 0 in (left, right):
            return found if left == right else []
        found.append((mine, theirs))
    return found


def _expanded(call: Call) -> Dims:
    before, after = call.tensors[0].shape, call.outputs[0].shape
    dims = letters(len(after))
    own = dims[len(after) - len(before) :]
    full = after[len(after) - len(before) :]
    inputs = tuple(one if size == whole else None for one, size, whole in zip(own, before, full, strict=True))
    others = [(None,) * len(spec.shape) for spec in call.tensors[1:]]
    return Dims([inputs, *others], [dims], why="repeated elements are the same for all")


def _unsqueezed(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    place = call.argument("dim") % (len(dims) + 1)
    return Dims([dims], [(*dims[:place], None, *dims[place:])], why=_MOVED)


def _squeezed(call: Call) -> Dims:
    shape = call.tensors[0].shape
    dims = letters(len(shape))
    given: Any = None if call.name.endswith("default") else call.argument("dim")
    wanted = range(len(shape)) if given is None else (given if isinstance(given, (list, tuple)) else [given])
    gone = {place % len(shape) for place in wanted if shape[place] == 1} if shape else set()
    return Dims([dims], [tuple(one for place, one in enumerate(dims) if place not in gone)], why=_MOVED)


def _along(call: Call) -> Dims:
    """Operators that look at one dim: the others may be divided."""
    dims = but(letters(len(call.tensors[0].shape)), call.argument("dim"))
    return Dims(
        [dims] * len(call.tensors), [dims] * len(call.outputs), why="the dim that it looks at is whole"
    )


def _sliced(call: Call) -> Dims:
    place = call.argument("dim") or 0
    if call.tensors[0].shape[place] == call.outputs[0].shape[place] and (call.argument("step") or 1) == 1:
        return _same(call)
    dims = but(letters(len(call.tensors[0].shape)), place)
    return Dims([dims], [dims], why="the dim that it cuts is whole")


def _selected(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    place = call.argument("dim") % len(dims)
    outputs = (*dims[:place], *dims[place + 1 :])
    return Dims([but(dims, place)], [outputs] * len(call.outputs), why="the dim that it takes from is whole")


def _stacked(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    place = call.argument("dim") % (len(dims) + 1)
    return Dims([dims] * len(call.tensors), [(*dims[:place], None, *dims[place:])], why=_MOVED)


def _joined(call: Call) -> Dims | None:
    if len({len(spec.shape) for spec in call.tensors}) > 1:
        return None  # an empty tensor of one dim among others
    return _along(call)


def _padded(call: Call) -> Dims:
    rank = len(call.tensors[0].shape)
    pad = call.argument("pad")
    touched = [rank - 1 - number for number in range(len(pad) // 2) if pad[2 * number] or pad[2 * number + 1]]
    dims = but(letters(rank), *touched) if touched else letters(rank)
    return Dims([dims], [dims], why="the dims that are padded are whole")


def _repeated(call: Call) -> Dims:
    shape, result = call.tensors[0].shape, call.outputs[0].shape
    dims = letters(len(result))
    own = dims[len(result) - len(shape) :]
    repeats = call.argument("repeats")[len(result) - len(shape) :]
    kept = tuple(one if count == 1 else None for one, count in zip(own, repeats, strict=True))
    new = tuple(None for _ in range(len(result) - len(shape)))
    return Dims([kept], [(*new, *kept)], why="the dims that are repeated are whole")


def _interleaved(call: Call) -> Dims | None:
    if len(call.tensors) > 1 or call.argument("dim") is None:
        return None
    dims = letters(len(call.tensors[0].shape))
    return Dims([dims], [dims], why="each element is repeated beside itself")


def _turned(call: Call) -> Dims:
    places = call.argument("dims") or range(len(call.tensors[0].shape))
    dims = but(letters(len(call.tensors[0].shape)), *places)
    return Dims([dims], [dims], why="the dims that are turned are whole")


def _leading(call: Call) -> Dims:
    dims = but(letters(len(call.tensors[0].shape)), -1, -2)
    return Dims([dims], [dims], why="each matrix by itself")


def _diff(call: Call) -> Dims:
    dims = but(letters(len(call.tensors[0].shape)), call.argument("dim"))
    return Dims([dims] * len(call.tensors), [dims], why="the dim that it looks at is whole")


def _made(call: Call) -> Dims:
    inputs: list[Letters] = [(None,) * len(spec.shape) for spec in call.tensors]
    return Dims(inputs, [letters(len(call.outputs[0].shape))], why="every element is made alike")


def _flat_index(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    return Dims([dims], [(*dims, None)], why="each index by itself")


VIEWS: Mapping[str, Table] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"), _reshaped),
    **dict.fromkeys(
        ("permute", "transpose", "t", "movedim", "swapaxes", "swapdims", "mT", "numpy_T"), _permuted
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "tensor_split", "narrow", "cumsum", "cumprod"), _along
    ),
    **dict.fromkeys(
        ("sort", "argsort", "topk", "softmax", "_softmax", "log_softmax", "_log_softmax"), _along
    ),
    **dict.fromkeys(("cummax", "cummin", "logcumsumexp", "kthvalue", "glu"), _along),
    **dict.fromkeys(("tril", "triu"), _leading),
    **dict.fromkeys(("flip", "roll"), _turned),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn", "scalar_tensor"), _made),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _made),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "slice": _sliced,
    "select": _selected,
    "unbind": _selected,
    "stack": _stacked,
    "cat": _joined,
    "pad": _padded,
    "constant_pad_nd": _padded,
    "repeat": _repeated,
    "repeat_interleave": _interleaved,
    "diff": _diff,
    "one_hot": _flat_index,
}
"""Tables by the operator's name."""

_SIZES = {
    **dict.fromkeys(("view", "expand", "_unsafe_view", "broadcast_to"), ("size", 1, 0)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), ("size", 1, 0)),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn"), ("size", 0, 0)),
    "reshape": ("shape", 1, 0),
}


def size_argument(call: Call) -> tuple[str, int, int] | None:
    """The argument that gives a result's sizes: its name, its place, and the result's dim that its first entry is."""
    name = call.name.split(".")[1]
    if name == "unflatten":
        return ("sizes", 2, call.argument("dim") % len(call.tensors[0].shape))
    return _SIZES.get(name) if not call.name.endswith("dtype") else None


def divides_partial_sums(name: str) -> bool:
    """Whether an operator may be applied to summands as to their sum: it moves elements, and makes none."""
    made = (
        "zeros",
        "ones",
        "full",
        "empty",
        "rand",
        "randn",
        "scalar_tensor",
        "one_hot",
        "pad",
        "constant_pad_nd",
    )
    other = (
        "sort",
        "argsort",
        "topk",
        "softmax",
        "_softmax",
        "log_softmax",
        "_log_softmax",
        "cummax",
        "cummin",
    )
    unfit = {*made, *other, "logcumsumexp", "kthvalue", "glu", "cumprod"}
    return name in VIEWS and name not in unfit and not name.startswith("new_")
