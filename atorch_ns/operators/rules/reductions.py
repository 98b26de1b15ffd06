"""Rules of operators that reduce dims, or look along one: sums, extremes, scans, sorts, softmax, and losses.

Legend: N samples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.dims import Dims, Letters, Table, broadcast, but, frozen, letters

_NONE, _MEAN, _SUM = range(3)  # torch's numbers of a loss's reduction


def _dims_of_reduction(call: Call) -> Dims:
    name, names = call.short_name, call.argument_names
    axes: Any = call.argument("dim") if "dim" in names else None  # max() of all elements has no dim
    dims = letters(len(call.tensors[0].shape))
    # No dim, or an empty list of them, stands for all.
    places = range(len(dims)) if axes is None or axes == [] else axes if isinstance(axes, list) else [axes]
    reduction_dims = {dim % len(dims) for dim in places} if dims else set()
    keeps = "keepdim" in names and call.argument("keepdim")
    rest = but(dims, *reduction_dims) if reduction_dims else dims
    result = tuple(letter for dim, letter in enumerate(rest) if keeps or dim not in reduction_dims)
    sum_dims = [str(dims[dim]) for dim in sorted(reduction_dims)]
    # Extremes of pieces do not add up, and partial sums are of floats alone.
    if name not in ("sum", "nansum", "mean") or not call.outputs[0].is_float:
        return Dims([rest], [result] * len(call.outputs), why="each kept place by itself")
    kernels = dict.fromkeys(sum_dims, "mean_of_parts") if name == "mean" else {}
    linear = [] if name == "nansum" else [[0]]  # an element with one NaN summand is skipped as a whole
    return Dims([dims], [result], sum_dims, linear=linear, kernels=kernels, why="a sum or mean of elements")


def _dims_of_axis_op(call: Call) -> Dims | None:
    dim = call.argument("dim")
    if dim is None:
        return None
    dims = but(letters(len(call.tensors[0].shape)), dim)  # the operator looks along it
    linear = [range(len(call.tensors))] if call.short_name in ("cumsum", "diff") else []
    inputs, outputs = [dims] * len(call.tensors), [dims] * len(call.outputs)
    return Dims(inputs, outputs, linear=linear, why="the dim that it looks at is whole")


def _sample_loss(call: Call) -> Dims | None:
    # Scores [N, C, …] against classes [N, …], or against probabilities like the scores.
    scores, target = call.tensors[:2]
    class_dim = 0 if len(scores.shape) == 1 else 1  # scores [C] are one sample
    rest = letters(len(scores.shape) - 1)
    alike = target.is_float  # targets are probabilities
    reduction = call.argument("reduction")
    is_smoothed = "label_smoothing" in call.argument_names and bool(call.argument("label_smoothing"))
    # Limits of the kernel over classes: cross-entropy alone, and no smoothing with class weights.
    whole_classes = (
        alike or call.short_name != "cross_entropy_loss" or (is_smoothed and len(call.tensors) > 2)
    )
    dims = (*rest[:class_dim], None if whole_classes else "C", *rest[class_dim:])
    samples = [str(letter) for letter in rest]
    kernels = {} if whole_classes else {"C": "loss_over_classes"}
    if reduction == _MEAN:  # over targets that are not ignored, which all ranks must count
        kernels |= dict.fromkeys(samples, "mean_of_parts" if alike else "loss_over_samples")
    sum_dims = samples if reduction == _SUM or alike else []  # else the kernel's mean is whole on every rank
    inputs: list[Letters] = [dims, dims if alike else rest, *frozen(call, 2)]  # class weights are whole
    result = rest if reduction == _NONE else ()
    return Dims(inputs, [result], sum_dims, kernels=kernels, why="samples and classes")


def _pointwise_loss(call: Call) -> Dims | None:
    shape = call.tensors[0].shape
    if call.tensors[1].shape != shape:
        return None  # torch's gradient of a mean is wrong then
    dims = letters(len(shape))
    inputs = [broadcast(shape, dims, spec.shape) for spec in call.tensors]  # weights may be repeated
    reduction = call.argument("reduction")
    if reduction == _NONE:
        return Dims(inputs, [dims], why="element by element")
    names = [str(letter) for letter in dims]
    kernels = dict.fromkeys(names, "mean_of_parts") if reduction == _MEAN else {}
    return Dims(inputs, [()], names, kernels=kernels, why="a sum or mean of elements")


_REDUCING = (
    *(
        "sum", "nansum", "mean", "amax", "amin", "aminmax", "max", "min", "median", "nanmedian", "mode",
        "kthvalue",
    ),
    *("prod", "var", "std", "var_mean", "std_mean", "any", "all", "argmax", "argmin", "logsumexp"),
    *("norm", "linalg_vector_norm", "count_nonzero"),
)  # fmt: skip
_ALONG = (
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff", "sort", "argsort", "topk", "glu"),
    *("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"),
)
_ELEMENT_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)

REDUCTIONS: Mapping[str, Table] = {
    **dict.fromkeys(_REDUCING, _dims_of_reduction),
    **dict.fromkeys(_ALONG, _dims_of_axis_op),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"), _sample_loss),
    **dict.fromkeys(_ELEMENT_LOSSES, _pointwise_loss),
}
"""Tables by the operator's name."""
