"""Reference: training in one process with plain torch and SGD, and the measure of another run's parity."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.capture.nests import floats_to, tensors_of
from atorch_ns.data import default_prepare_input, split_batch
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs
from atorch_ns.job.sampling import forward_loss, join_batches
from atorch_ns.sharding.compare import largest
from atorch_ns.text import error_line
from atorch_ns.torch_compat import TorchDispatchMode

UPDATE_FLOOR = 1e-3
"""Parameters that move less than this share of the largest update are held to that instead: their gradient
is zero but for rounding, and the quotient would measure noise."""
MOMENTUM = 0.9
LARGEST_STEP = 0.3
"""The learning rate moves the fastest parameter by this share of its largest value."""
ROUNDINGS = 2.0
"""Errors up to this many units in the last place of a weight are rounding of the weight itself."""

MAX_PARTS = 8
_PIECE = 2**20
"""Elements that are compared at a time: temporaries of a few MiB stay in a core's cache."""

Batches = Sequence[Sequence[Any]]
"""``[step][part]`` → the batch of the ranks that are given this part; see :func:`part_of_ranks`."""


def part_of_ranks(num_ranks: int) -> tuple[int, ...]:
    """The part of a batch that each data rank computes.

    More than eight ranks share eight parts, so that one process does not need hours. They are dealt
    irregularly, so that no group of ranks has the average of all.
    """
    if num_ranks <= MAX_PARTS:
        return tuple(range(num_ranks))
    return tuple(hashlib.sha256(b"%d" % rank).digest()[0] % MAX_PARTS for rank in range(num_ranks))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A run of one process.

    Attributes:
        final: every parameter after training, on the CPU, by its first name.
        updates: the largest absolute change of each of them.
        losses: the mean loss of each step.
        learning_rate, training: the learning rate of SGD, and whether the model was in training mode.
    """

    final: Mapping[str, torch.Tensor]
    updates: Mapping[str, float]
    losses: tuple[float, ...]
    learning_rate: float
    training: bool


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Deviation of a run from the reference.

    Attributes:
        errors: largest difference of each parameter, in units of its largest update.
        loss_error: the largest difference of a loss, relative to the loss or absolute below 1.
        missing: parameters that only the reference has.
    """

    errors: Mapping[str, float]
    loss_error: float
    missing: tuple[str, ...] = ()


NO_DEVIATION: Final = Deviation(errors={}, loss_error=0.0)


class RoundsTo16Bits(TorchDispatchMode):
    """Notes in ``has_rounded`` whether weights or the model's own casts have rounded anything to 16 bits."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_rounded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.has_rounded:
            floating = (tensor for tensor in tensors_of(output) if tensor.is_floating_point())
            self.has_rounded = any(tensor.itemsize <= 2 for tensor in floating)
        return output


def bare_groups(inputs: Inputs) -> Callable[[nn.Module], Iterable[Any]] | None:
    """``optim_param_func`` reduced to its groups, without their options."""
    function = inputs.optim_param_func
    if function is None:
        return None

    def groups(model: nn.Module) -> list[Any]:
        return [{"params": g["params"]} if isinstance(g, Mapping) else g for g in function(model)]

    return groups


def run_reference(
    model: nn.Module,
    inputs: Inputs,
    batches: Batches,
    parts: Sequence[int],
    num_micro_batches: int,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None = None,
    like: Reference | None = None,
    initial: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> Reference:
    """Trains ``model`` with plain SGD, the parts of each step one after the other.

    Args:
        model: a model with values, on ``device``; it is used up.
        inputs: the user's objects, with the loss, the format of a batch and the norm to clip to.
        batches: ``[step][part]``.
        parts: the part that each data rank computes.
        num_micro_batches: number of micro-batches that each part is split into.
        device: the device to compute on.
        compute_dtype: dtype of weights and inputs in the forward pass; ``None`` for their own.
        like: run whose learning rate and mode are used; ``None`` to find them.
        initial: gives, after training, the values ``model`` began with; ``None`` to keep a copy of them.

    Raises:
        InputError: if the loss changes from one evaluation to the next, or nothing gets a gradient.
    """
    copies = _copy_parameters(model) if initial is None else {}
    training = _needs_training_mode(model, inputs, batches[0][0], device) if like is None else like.training
    model.train(training)
    groups = bare_groups(inputs)
    parameters = list(model.parameters() if groups is None else groups(model))
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=MOMENTUM, foreach=False)
    rate = 0.0 if like is None else like.learning_rate  # 0 until the first gradients are there
    weights = [parts.count(part) / len(parts) for part in range(len(batches[0]))]  # shares of the ranks
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        pairs = list(zip(batch, weights, strict=True))
        loss = _add_gradients(
            model, inputs, pairs, num_micro_batches, device=device, dtype=compute_dtype, num_ranks=len(parts)
        )
        losses.append(loss)
        if inputs.max_grad_norm is not None:
            clip(_optimizer_parameters(optimizer), inputs.max_grad_norm)
        rate = rate or _learning_rate(_optimizer_parameters(optimizer))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad()
    del optimizer  # and its momentum, before the values of the beginning are made anew
    final = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return Reference(
        final=final,
        updates=updates_of(copies if initial is None else initial(), final),
        losses=tuple(losses),
        learning_rate=rate,
        training=training,
    )


def clip(parameters: Iterable[torch.Tensor], max_norm: float) -> None:
    """Torch's ``clip_grad_norm_`` with a norm in float64: in float32 on CPUs it is 9e-5 off for 4 million
    elements, and 5e-3 for 67 million (torch 2.13)."""
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float64)) for grad in grads
    ]
    nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.stack(norms).norm().float())


def run_whole(
    model: nn.Module,
    inputs: Inputs,
    batch: Sequence[Any],
    parts: Sequence[int],
    *,
    num_micro_batches: int,
    device: torch.device,
    like: Reference,
) -> tuple[Reference | None, tuple[str, ...]]:
    """One step on a whole global batch in one pass, with the arguments of :func:`run_reference`.

    Returns:
        The run, ``None`` where that is one pass already or cannot be made; and why it cannot, as sentences.
    """
    if len(parts) * num_micro_batches == 1:
        return None, ()
    if like.training:
        return None, (f"{_NOT_COMPARED}, in training mode",)
    try:
        whole = join_batches([batch[part] for part in parts])
    except Exception as error:  # parts of different shapes, or of types that nobody knows how to join
        return None, (f"{_NOT_COMPARED}: its parts cannot be joined ({error})",)
    try:
        return run_reference(model, inputs, [[whole]], (0,), 1, device, like=like), ()
    except Exception as error:  # more samples than the model takes, or than there is memory for
        return None, (f"{_NOT_COMPARED}: it cannot be run ({error_line(error)})",)


_NOT_COMPARED = "the loss of the whole batch in one pass is not compared"


def measure(reference: Reference, final: Mapping[str, torch.Tensor], losses: Sequence[float]) -> Deviation:
    """The deviation of a run with these final parameters and losses from the reference."""
    pairs = zip(losses, reference.losses, strict=True)
    return Deviation(
        errors=update_errors(reference.updates, reference.final, final, roundings=ROUNDINGS),
        loss_error=max((finite(abs(a - b)) / max(1.0, abs(b)) for a, b in pairs), default=0.0),
        missing=tuple(name for name in reference.final if name not in final),
    )


def _add_gradients(
    model: nn.Module,
    inputs: Inputs,
    parts: Sequence[tuple[Any, float]],
    num_micro_batches: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    num_ranks: int,
) -> float:
    prepare = inputs.prepare_input or default_prepare_input
    micro_batches = [
        (micro_batch, weight)
        for part, weight in parts
        for micro_batch in split_batch(prepare(part, device), num_micro_batches)
    ]
    if inputs.weight_func is not None:
        counts = [weight * float(inputs.weight_func(micro_batch)) for micro_batch, weight in micro_batches]
        shares = [count / sum(counts) for count in counts]
    else:
        # For a mean, micro-batches count equally. A sum adds the losses of all ranks.
        divisor = num_micro_batches if inputs.loss_reduction == "mean" else 1 / num_ranks
        shares = [weight / divisor for _, weight in micro_batches]
    total = 0.0
    for (micro_batch, _), factor in zip(micro_batches, shares, strict=True):
        if factor:
            share = _loss_of(model, inputs, micro_batch, dtype) * factor
            share.backward()
            total += float(share.detach())
    return total


def _loss_of(model: nn.Module, inputs: Inputs, batch: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    forward: Callable[..., Any] = model if dtype is None else _in_dtype(model, dtype)
    return forward_loss(inputs)(forward, batch).reshape(())


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Running statistics must have the dtype of what they normalise; other buffers stay as they are.
        weights = floats_to({**dict(model.named_parameters()), **_running_statistics(model)}, dtype)
        # The casts are part of the graph, so gradients have the dtype of the parameters.
        output = torch.func.functional_call(model, weights, floats_to(args, dtype), floats_to(kwargs, dtype))
        return floats_to(output, torch.float32)

    forward.__wrapped__ = model.forward  # type: ignore[attr-defined]  # what it takes of a batch
    return forward


def _running_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    names = ("running_mean", "running_var")
    return {path: buffer for path, buffer in model.named_buffers() if path.rpartition(".")[2] in names}


def _needs_training_mode(model: nn.Module, inputs: Inputs, part: Any, device: torch.device) -> bool:
    """Whether to train in training mode: only where the loss cannot be computed in the other."""
    prepare = inputs.prepare_input or default_prepare_input
    failure: Exception | None = None
    # Evaluation mode first: dropout is off, and norms use running statistics.
    for training in (False, True):
        model.train(training)
        try:
            losses = [float(_seeded_loss(model, inputs, prepare(part, device), seed)) for seed in (1, 2)]
        except Exception as error:
            failure = failure or error  # report the failure in evaluation mode
            continue
        if losses[0] == losses[1]:  # no randomness left
            return training
        if math.isnan(losses[0]) or math.isnan(losses[1]):
            failure = failure or InputError("the model's loss is not a number (NaN), before any training.")
    if failure is not None:
        raise failure
    raise InputError(
        "the model's loss changes from one evaluation of the same batch to the next, so two runs cannot "
        "be compared."
    )


def _seeded_loss(model: nn.Module, inputs: Inputs, batch: Any, seed: int) -> torch.Tensor:
    with torch.no_grad():
        torch.manual_seed(seed)
        return _loss_of(model, inputs, batch)


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _learning_rate(parameters: Iterable[torch.Tensor]) -> float:
    steepest = 0.0
    for parameter in parameters:
        if parameter.grad is not None and parameter.numel():
            steepest = max(steepest, largest(parameter.grad) / max(largest(parameter), 1e-3))
    if not 0.0 < steepest < math.inf:
        raise InputError(
            f"the largest gradient, relative to its parameter, is {steepest}: nothing to compare."
        )
    return LARGEST_STEP / steepest  # the steepest parameter moves by that share


def _copy_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


def updates_of(initial: Mapping[str, torch.Tensor], final: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The largest absolute change of any element of each parameter."""
    return {name: distance(value, initial[name].to(value.device)) for name, value in final.items()}


def update_errors(
    updates: Mapping[str, float],
    reference: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    *,
    roundings: float = 0.0,
) -> dict[str, float]:
    """``max|actual - reference| / max|reference - initial|`` of every parameter that both runs have.

    Args:
        updates: the largest change of each parameter in the reference's training (:func:`updates_of`).
        reference, actual: parameters after training, of the reference and of the other run.
        roundings: units in the last place of a weight that are taken off its error first.
    """
    floor = UPDATE_FLOOR * max(updates.values(), default=0.0)
    errors = {}
    for name, value in reference.items():
        if name not in actual:
            continue
        eps = torch.finfo(actual[name].dtype).eps if actual[name].is_floating_point() else 0.0
        beyond = max(0.0, distance(actual[name], value) - roundings * eps * largest(value))
        errors[name] = beyond / max(updates[name], floor) if beyond else 0.0  # in units of the update
    return errors


def distance(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; infinite if shapes differ or a number is not finite."""
    if tensor.shape != other.shape:
        return math.inf
    if tensor.numel() == 0:
        return 0.0
    wide = torch.promote_types(torch.promote_types(tensor.dtype, other.dtype), torch.float32)
    pieces = zip(tensor.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True)
    apart = [largest(first.to(wide) - second.to(wide)) for first, second in pieces]
    return max(map(finite, apart))


def finite(value: float) -> float:
    """The value, or infinity in the place of NaN."""
    return value if math.isfinite(value) else math.inf
