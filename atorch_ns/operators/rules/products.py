"""Rules of layers: matrix products, convolutions, attention, norms, pooling and look-ups.

Legend: B batch, T tokens, N rows, I input and O output features or channels, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.dims import Dims, Letters, Table, broadcast, frozen, letters

_SUMMED = "products are summed over it"
_ALIGNMENT = 16  # bytes, of which rows of grouped products must be multiples


def _dims_of_linear(call: Call) -> Dims:
    # […, I] × [O, I] + [O] to […, O]; a weight [I] leaves no O.
    rows = letters(len(call.tensors[0].shape) - 1)
    inputs: list[Letters] = [(*rows, "I"), ("O", "I") if len(call.tensors[1].shape) == 2 else ("I",)]
    result = (*rows, "O") if len(call.tensors[1].shape) == 2 else rows
    return Dims([*inputs, ("O",)][: len(call.tensors)], [result], "I", (2,), why=_SUMMED)  # 2 is the bias


def _dims_of_matmul(call: Call) -> Dims:
    # […, N, I] × […, I, O] to […, N, O]; batch dims are broadcast against each other.
    first, second = (spec.shape for spec in call.tensors)  # a vector has no N, or no O
    batch = letters(max(len(first), len(second), 2) - 2)
    whole = call.outputs[0].shape[: len(batch)]
    left: Letters = ("I",) if len(first) == 1 else (*broadcast(whole, batch, first[:-2]), "N", "I")
    other: Letters = ("I",) if len(second) == 1 else (*broadcast(whole, batch, second[:-2]), "I", "O")
    result = (*batch, *(("N",) if len(first) > 1 else ()), *(("O",) if len(second) > 1 else ()))
    return Dims([left, other], [result], "I", why=_SUMMED)


def _dims_of_outer(call: Call) -> Dims:
    return Dims([("N",), ("O",)], [("N", "O")], why="a product for each pair")


def _dims_of_addmm(call: Call) -> Dims:
    # [N, O], broadcast, + [N, I] × [I, O], of which the first is added once; baddbmm has a batch dim.
    batch = letters(len(call.tensors[1].shape) - 2)
    result = (*batch, "N", "O")
    bias = broadcast(call.outputs[0].shape, result, call.tensors[0].shape)
    return Dims([bias, (*batch, "N", "I"), (*batch, "I", "O")], [result], "I", (0,), why=_SUMMED)


def _dims_of_einsum(call: Call) -> Dims | None:
    left, arrow, right = str(call.argument("equation")).replace(" ", "").partition("->")
    sides = left.split(",")
    if not left:  # one operand without dims
        return None
    if not arrow:  # implicit result: the ellipsis, then letters that stand once, in order
        right = ("..." if "..." in left else "") + "".join(
            sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
        )
    counts = [  # dims that each operand's ellipsis stands for
        len(spec.shape) - len(side.replace("...", "")) for side, spec in zip(sides, call.tensors, strict=True)
    ]
    spares = [chr(code) for code in range(256, 256 + max(counts))]  # letters of equations are a-z and A-Z
    shape = call.outputs[0].shape[right.find("...") :] if "..." in right else ()  # from the ellipsis on

    def read(side: str, count: int, sizes: Sequence[int] | None) -> Letters:
        before, dots, after = side.partition("...")
        middle: Letters = tuple(spares[len(spares) - count :]) if dots else ()  # aligned at the last dims
        if sizes is not None and dots:
            middle = broadcast(shape[: len(spares)], tuple(spares), sizes[len(before) : len(before) + count])
        return (*before, *middle, *after)

    if "..." in left and "..." not in right:  # sums over the ellipsis
        return None
    inputs = [
        read(side, count, spec.shape) for side, count, spec in zip(sides, counts, call.tensors, strict=True)
    ]
    sum_letters = {letter for letter in left if letter.isalpha() and letter not in right}
    return Dims(inputs, [read(right, len(spares), None)], sum_letters, why=_SUMMED)


def _dims_of_convolution(call: Call) -> Dims:
    # [B, I, …] with [O, I, …] and [O] to [B, O, …]; B is absent from a single sample.
    space = (None,) * (len(call.tensors[1].shape) - 2)
    lead: Letters = ("B",) if len(call.tensors[0].shape) > len(space) + 1 else ()
    if call.argument("groups") != 1:  # a piece of the channels would cut groups
        return Dims([(*lead, None, *space), *frozen(call, 1)], [(*lead, None, *space)], why="samples")
    name = call.short_name
    is_swapped = "transpose" in name or (name == "convolution" and call.argument("transposed"))
    channels: Letters = ("I", "O") if is_swapped else ("O", "I")  # a transposed weight is [I, O, …]
    inputs: list[Letters] = [(*lead, "I", *space), (*channels, *space), ("O",)]
    return Dims(inputs[: len(call.tensors)], [(*lead, "O", *space)], "I", (2,), why=_SUMMED)  # 2 is the bias


def _dims_of_attention(call: Call) -> Dims:
    # Queries, keys and values are […, H, T, D]; masks are broadcast to the scores […, H, T, T].
    query, key, *_ = (spec.shape for spec in call.tensors)
    whole = call.outputs[0].shape[:-2]
    lead = letters(len(whole))
    rows = None if call.argument("is_causal") else "T"  # a causal mask counts rows from 0, in a piece too
    is_grouped = bool(call.argument("enable_gqa")) and len(key) > 2  # fewer heads of keys than of queries

    def lead_of(shape: Sequence[int]) -> Letters:
        prefix = broadcast(whole, lead, shape[:-2])
        # Piece i of the key heads serves piece i of the query heads; a single head serves all.
        return (*prefix[:-1], lead[-1]) if is_grouped and shape[-3] > 1 else prefix

    inputs: list[Letters] = [(*lead_of(query), rows, None)]  # scores sum over D before the softmax
    inputs += [(*lead_of(spec.shape), None, None) for spec in call.tensors[1:3]]  # softmax is over all keys
    scores = (*whole, query[-2], key[-2])
    inputs += [broadcast(scores, (*lead, rows, None), spec.shape) for spec in call.tensors[3:]]
    return Dims(inputs, [(*lead, rows, None)], why="samples, heads and rows of queries are independent")


def _layer_norm(call: Call) -> Dims:
    normal = (None,) * len(call.argument("normalized_shape"))  # the last dims, normalised together
    dims = (*letters(len(call.tensors[0].shape) - len(normal)), *normal)
    return Dims([dims, *frozen(call, 1)], [dims] * len(call.outputs), why="rows are normalised one by one")


def _group_norm(call: Call) -> Dims | None:
    if call.short_name == "instance_norm" and not call.argument("use_input_stats"):
        return None
    # Running statistics are updated with means over all samples.
    if call.short_name == "instance_norm" and call.argument("running_mean") is not None:
        return None
    dims: Letters = ("B", *(None,) * (len(call.tensors[0].shape) - 1))
    return Dims([dims, *frozen(call, 1)], [dims], why="samples are normalised one by one")


def _dims_of_channelwise(call: Call) -> Dims:
    # max_pool2d works on the last 2 dims; those before are samples and channels.
    space = next(int(digit) for digit in "123" if f"{digit}d" in call.short_name)
    dims = (*letters(len(call.tensors[0].shape) - space), *(None,) * space)
    return Dims([dims], [dims] * len(call.outputs), why="each channel of each sample by itself")


def _dims_of_embedding(call: Call) -> Dims | None:
    # [V, O] at ids […] to […, O]
    if call.argument("scale_grad_by_freq") or call.argument("sparse"):  # counts all ids; sparse gradients
        return None
    ids = letters(len(call.tensors[1].shape))
    rows = {"V": "embedding_rows"}  # zeros for ids of other ranks: partial sums
    return Dims([("V", "O"), ids], [(*ids, "O")], "V", kernels=rows, why="a look-up for each id")


def _grouped_product(call: Call) -> Dims | None:
    # [N, I] × [G, I, O] to [N, O], by groups of rows that end at the third tensor's numbers.
    if [len(spec.shape) for spec in call.tensors] != [2, 3, 1]:
        return None
    item = call.tensors[0].dtype.itemsize

    def is_aligned(letter: str, size: int) -> bool:
        return call.short_name != "_grouped_mm" or size * item % _ALIGNMENT == 0

    inputs: list[Letters] = [(None, "I"), (None, "I", "O"), (None,)]  # a piece of N would cut groups
    return Dims(inputs, [(None, "O")], "I", fits=is_aligned, why=_SUMMED)


_POOLS = " ".join(f"{kind}_pool{n}d" for kind in ("avg", "max", "adaptive_avg") for n in (1, 2, 3))
_KINDS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_UPSAMPLE = " ".join(f"upsample_{kind}" for kind in _KINDS)

_BY_TABLE: Mapping[Table, str] = {
    _dims_of_linear: "linear",
    _dims_of_matmul: "matmul mm bmm mv dot",
    _dims_of_outer: "outer",
    _dims_of_addmm: "addmm baddbmm",
    _dims_of_einsum: "einsum",
    _dims_of_convolution: "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
    _dims_of_attention: "scaled_dot_product_attention",
    _layer_norm: "layer_norm rms_norm native_layer_norm _fused_rms_norm",
    _group_norm: "group_norm instance_norm",
    _dims_of_channelwise: f"{_POOLS} {_UPSAMPLE} max_pool2d_with_indices max_pool3d_with_indices",
    _dims_of_embedding: "embedding",
    _grouped_product: "_grouped_mm grouped_mm_fallback",
}
PRODUCTS: Mapping[str, Table] = {name: table for table, names in _BY_TABLE.items() for name in names.split()}
"""Tables by the operator's name."""
