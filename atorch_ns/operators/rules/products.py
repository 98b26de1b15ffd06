"""Rules of operators that compute: matrix products, convolutions, attention, norms, reductions, look-ups and losses.

Legend: B batch, T tokens, I input features, O output features, N rows, C classes, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atorch_ns.operators.rules.dims import Dims, Letters, but, letters
from atorch_ns.operators.rules.rule import Call

Table = Callable[[Call], Dims | None]
_SUMMED = "products are summed over it"


def _linear(call: Call) -> Dims:
    """[…, I] × [O, I] + [O] to […, O]."""
    rows = letters(len(call.tensors[0].shape) - 1)
    inputs: list[Letters] = [(*rows, "I"), ("O", "I") if len(call.tensors[1].shape) == 2 else ("I",)]
    result = (*rows, "O") if len(call.tensors[1].shape) == 2 else rows
    return Dims([*inputs, ("O",)][: len(call.tensors)], [result], "I", (2,), why=_SUMMED)


def _matmul(call: Call) -> Dims | None:
    """[…, N, I] × […, I, O] to […, N, O], either side with fewer dims."""
    first, second = (spec.shape for spec in call.tensors[:2])
    count = max(len(first), len(second)) - 2
    batch = letters(max(count, 0))
    one: Letters = ("I",) if len(first) == 1 else (*_aligned(batch, first[:-2], call), "N", "I")
    other: Letters = ("I",) if len(second) == 1 else (*_aligned(batch, second[:-2], call), "I", "O")
    result = (*batch, *(("N",) if len(first) > 1 else ()), *(("O",) if len(second) > 1 else ()))
    return Dims([one, other], [result], "I", why=_SUMMED)


def _aligned(batch: Letters, shape: Sequence[int], call: Call) -> Letters:
    whole = call.outputs[0].shape[: len(batch)][len(batch) - len(shape) :]
    own = batch[len(batch) - len(shape) :]
    return tuple(one if size == full else None for one, size, full in zip(own, shape, whole, strict=True))


def _addmm(call: Call) -> Dims | None:
    """[O] or [N, O] plus [N, I] × [I, O]; with a leading dim for ``baddbmm``."""
    added, first, _ = (spec.shape for spec in call.tensors)
    batch: Letters = letters(len(first) - 2)
    result = (*batch, "N", "O")
    whole = call.outputs[0].shape
    own = result[len(result) - len(added) :]
    bias = tuple(
        a if size == full else None
        for a, size, full in zip(own, added, whole[len(whole) - len(added) :], strict=True)
    )
    return Dims([bias, (*batch, "N", "I"), (*batch, "I", "O")], [result], "I", (0,), why=_SUMMED)


def _einsum(call: Call) -> Dims | None:
    equation = str(call.argument("equation")).replace(" ", "")
    left, arrow, result = equation.partition("->")
    inputs = left.split(",")
    if not arrow or "." in equation or any(len(set(side)) < len(side) for side in inputs):
        return None
    summed = {letter for letter in left if letter.isalpha() and letter not in result}
    return Dims([tuple(side) for side in inputs], [tuple(result)], summed, why=_SUMMED)


def _convolution(call: Call) -> Dims | None:
    """[B, I, …] with [O, I, …] and [O] to [B, O, …]; samples, and channels where they are not in groups."""
    space = (None,) * (len(call.tensors[0].shape) - 2)
    if (
        call.argument("groups") != 1
        or len(call.tensors[1].shape) != len(space) + 2
        or "transpose" in call.name
    ):
        return None
    if len(call.tensors[0].shape) != len(call.outputs[0].shape):
        return None
    inputs: list[Letters] = [("B", "I", *space), ("O", "I", *space), ("O",)]
    return Dims(inputs[: len(call.tensors)], [("B", "O", *space)], "I", (2,), why=_SUMMED)


def _attention(call: Call) -> Dims:
    """Queries, keys and values [B, H, T, D]: samples and heads are independent, and rows of queries without a causal mask.

    A mask is broadcast to [B, H, T, T]."""
    query, key, value, *mask = (spec.shape for spec in call.tensors)
    batch = letters(len(query) - 2)
    heads_differ = len(query) > 2 and query[-3] != key[-3]
    lead: Letters = batch
    grouped = call.argument("enable_gqa") and heads_differ
    rows = None if call.argument("is_causal") else "T"
    inputs: list[Letters] = [(*lead, rows, None)]
    inputs += [
        (*_with_ones(lead, shape[:-2], query[:-2], grouped=bool(grouped)), None, None)
        for shape in (key, value)
    ]
    for shape in mask:
        whole = (*query[:-1], key[-2])
        dims = (*lead, rows, None)
        own = dims[len(dims) - len(shape) :]
        full = whole[len(whole) - len(shape) :]
        inputs.append(tuple(a if size == f else None for a, size, f in zip(own, shape, full, strict=True)))
    return Dims(inputs, [(*lead, rows, None)], why="samples, heads and rows of queries are independent")


def _with_ones(lead: Letters, shape: Sequence[int], whole: Sequence[int], *, grouped: bool) -> Letters:
    """The letters of keys or values: none where they are broadcast; their heads in groups follow those of queries."""
    return tuple(
        letter if size == full or (grouped and place == len(shape) - 1) else None
        for place, (letter, size, full) in enumerate(zip(lead, shape, whole, strict=True))
    )


def _layer_norm(call: Call) -> Dims:
    normal = len(call.argument("normalized_shape"))
    rows = letters(len(call.tensors[0].shape) - normal)
    inputs: list[Letters] = [(*rows, *(None,) * normal)]
    inputs += [(None,) * normal] * (len(call.tensors) - 1)
    means: list[Letters] = [(*rows, *(None,) * normal)] * (len(call.outputs) - 1)
    return Dims(inputs, [(*rows, *(None,) * normal), *means], why="rows are normalised one by one")


def _group_norm(call: Call) -> Dims:
    dims: Letters = ("B", *(None,) * (len(call.tensors[0].shape) - 1))
    others: list[Letters] = [(None,) * len(spec.shape) for spec in call.tensors[1:]]
    return Dims([dims, *others], [dims], why="samples are normalised one by one")


def _embedding(call: Call) -> Dims | None:
    """[V, O] at ids […] to […, O]; rows of the table by a kernel, which leaves zeros for those of other ranks."""
    if call.argument("scale_grad_by_freq") or call.argument("sparse"):
        return None
    ids = letters(len(call.tensors[1].shape))
    rows = {"V": "embedding_rows"}
    return Dims([("V", "O"), ids], [(*ids, "O")], "V", kernels=rows, why="a look-up for each id")


_REDUCING = (
    "sum",
    "mean",
    "nansum",
    "amax",
    "amin",
    "prod",
    "var",
    "std",
    "any",
    "all",
    "argmax",
    "argmin",
    "logsumexp",
    "norm",
    "linalg_vector_norm",
    "max",
    "min",
    "count_nonzero",
)


def _reduced(call: Call) -> Dims | None:
    """Dims that are kept may be divided; over those that are summed, the results of ``sum`` and ``mean`` are partial."""
    shape = call.tensors[0].shape
    names = {one.name for one in call.operator._schema.arguments}  # type: ignore[attr-defined]
    given: Any = call.argument("dim") if "dim" in names else None
    places = (
        range(len(shape))
        if given is None or given == []
        else (given if isinstance(given, (list, tuple)) else [given])
    )
    gone = {place % len(shape) for place in places} if shape else set()
    dims = letters(len(shape))
    keeps = bool(call.argument("keepdim")) if "keepdim" in names else False
    name = call.name.split(".")[1]
    result = tuple(
        None if place in gone else one for place, one in enumerate(dims) if keeps or place not in gone
    )
    summed = [dims[place] for place in gone] if name in ("sum", "mean") and call.outputs[0].is_float else []
    kernels = {str(one): "mean_of_parts" for one in summed} if name == "mean" else {}
    inputs = dims if summed else but(dims, *gone) if gone else dims
    if len(call.tensors) > 1:
        return None
    return Dims(
        [inputs], [result] * len(call.outputs), [str(one) for one in summed], kernels=kernels, why="kept dims"
    )


def _indexed(call: Call) -> Dims | None:
    """Dims of the first tensor that no index reads, and those of the indices where these are alike."""
    given = call.argument("indices")
    count = len(call.tensors[0].shape)
    read = [place for place, index in enumerate(given) if index is not None]
    shapes = [spec.shape for spec in call.tensors[1 : 1 + len(read)]]
    if (
        not read
        or read != list(range(read[0], read[-1] + 1))
        or any(not spec.dtype.is_signed or spec.is_float for spec in call.tensors[1:])
    ):
        return None  # masks, and indices with a slice between them, lay out their results in other ways
    whole = call.outputs[0].shape[read[0] : read[0] + max(map(len, shapes))]
    common = letters(len(whole), "p")
    indices: list[Letters] = []
    for shape in shapes:
        own, full = common[len(common) - len(shape) :], whole[len(whole) - len(shape) :]
        indices.append(tuple(a if size == f else None for a, size, f in zip(own, shape, full, strict=True)))
    dims = but(letters(count), *read)
    result = (*dims[: read[0]], *common, *dims[read[-1] + 1 :])
    return Dims([dims, *indices], [result], why="dims that no index reads, and the indices")


def _index_select(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    place = call.argument("dim") % len(dims)
    result = (*dims[:place], "p", *dims[place + 1 :])
    return Dims([but(dims, place), ("p",)], [result], why="dims that no index reads, and the index")


def _gathered(call: Call) -> Dims | None:
    """Tensors of one rank; dims that the index does not read, where all have them whole."""
    shapes = {len(spec.shape) for spec in call.tensors}
    if len(shapes) > 1:
        return None
    rank = shapes.pop()
    dims = but(letters(rank), call.argument("dim"))
    same = [place for place in range(rank) if len({spec.shape[place] for spec in call.tensors}) == 1]
    dims = tuple(one if place in same else None for place, one in enumerate(dims))
    return Dims([dims] * len(call.tensors), [dims], why="dims that the index does not read")


def _cross_entropy(call: Call) -> Dims | None:
    """[N, C, …] against [N, …]: samples, and classes, by kernels where the loss is reduced."""
    scores, target = call.tensors[0].shape, call.tensors[1].shape
    if (
        len(scores) != len(target) + 1
        or call.tensors[1].is_float
        or len(call.tensors) > 2 + (call.argument("weight") is not None)
    ):
        return None
    place = 0 if len(scores) == 1 else 1
    rest = letters(len(target))
    dims = (*rest[:place], "C", *rest[place:])
    reduced = call.argument("reduction") != 0
    # A kernel's result is whole: it sums over the ranks itself.
    kernels = {"C": "cross_entropy_classes"} | (
        {str(one): "cross_entropy_samples" for one in rest} if reduced else {}
    )
    weights: list[Letters] = [(None,)] * (len(call.tensors) - 2)
    if weights:
        kernels.pop("C")
        dims = but(dims, place)
    result: Letters = () if reduced else rest
    return Dims([dims, rest, *weights], [result], kernels=kernels, why="samples and classes")


def _pointwise_loss(call: Call) -> Dims | None:
    """Losses of pairs of equal shape: all dims where nothing is reduced, sums and means of parts else."""
    if len({spec.shape for spec in call.tensors}) > 1:
        return None
    dims = letters(len(call.tensors[0].shape))
    reduction = call.argument("reduction")
    if reduction == 0:
        return Dims([dims] * len(call.tensors), [dims], why="element by element")
    kernels = {str(one): "mean_of_parts" for one in dims} if reduction == 1 else {}
    names = [str(one) for one in dims]
    return Dims([dims] * len(call.tensors), [()], names, kernels=kernels, why="a sum or mean of elements")


def _grouped_product(call: Call) -> Dims | None:
    """[N, I] × [G, I, O] by groups of rows that end at the third tensor's numbers, to [N, O]."""
    if [len(spec.shape) for spec in call.tensors] != [2, 3, 1]:
        return None
    return Dims([(None, "I"), (None, "I", "O"), (None,)], [(None, "O")], "I", why=_SUMMED)


PRODUCTS: Mapping[str, Table] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "group_norm": _group_norm,
    "embedding": _embedding,
    **dict.fromkeys(_REDUCING, _reduced),
    "index": _indexed,
    "index_select": _index_select,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "take_along_dim"), _gathered),
    "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"), _pointwise_loss
    ),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_product),
}
"""Tables by the operator's name."""
