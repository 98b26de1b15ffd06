"""Whether a loss can be computed on parts of the logits: what reads them, and a comparison of loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from atorch_ns.profile._batches import batch_sizes, map_batch, resized_shape
from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.profile._steps import Subject
from atorch_ns.sharding._divided_logits import DividedLogits, LogitUses
from atorch_ns.sharding._tensor_region import Division
from atorch_ns.sharding._tensor_trace import ways_to_run
from atorch_ns.sharding._vocabulary_loss import LossCall

__all__ = ["LOSS_TOLERANCE", "LossStudy", "compare_losses", "study_logits"]

LOSS_TOLERANCE = 1e-4
"""The largest error of a loss or a gradient that counts as rounding, in units of its largest value."""

Run = Callable[[nn.Module, Any], Any]
"""``(model, batch) -> output``."""

Loss = Callable[[Any, Any], Any]
"""``(batch, output) -> loss``, or a list or tuple that begins with it."""


@dataclass
class LossStudy:
    """What a forward pass does with its logits.

    Attributes:
        uses: inside the model.
        output: what the model returned, with tensors that have no values.
        batch: what it was given, with values.
        failure: why it did not run on divided logits; empty if it did.
    """

    uses: LogitUses = field(default_factory=LogitUses)
    output: Any = None
    batch: Any = None
    failure: str = ""


def study_logits(model: nn.Module, batch: Any, run: Run, heads: Sequence[str], degree: int) -> LossStudy:
    """Runs a copy of the model once, with divided logits; without memory where it can be.

    Args:
        model: whole; not changed.
        batch: a sample batch on the CPU.
        run: a forward pass.
        heads: paths of the layers that give the logits.
        degree: ranks that they are divided over.
    """
    sizes = batch_sizes(batch)
    subject = Subject(model=model, batch=batch, forward_loss=run, blocks={}, prints={}, sizes=sizes, at=sizes)
    study = LossStudy()
    for prepare, at in ways_to_run(sizes, degree):
        study = LossStudy(batch=map_batch(lambda tensor: _resized(tensor, sizes, at), batch))  # noqa: B023
        try:
            with prepare(subject, at) as (copy, small), torch.enable_grad():
                _divide_outputs(copy, heads, degree, study.uses)
                study.output = run(copy.train(), small)
            return study
        except Exception as error:
            study.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            if study.uses.changed:
                return study
    return study


def _divide_outputs(model: nn.Module, heads: Sequence[str], degree: int, uses: LogitUses) -> None:
    division = Division(None, degree=degree)

    def divided(module: nn.Module, args: Any, output: torch.Tensor) -> DividedLogits:
        return DividedLogits.of(output.chunk(degree, -1)[0], division, uses=uses)

    for path in heads:
        model.get_submodule(path).register_forward_hook(divided)


def _resized(tensor: torch.Tensor, sizes: tuple[int, int], at: tuple[int, int]) -> torch.Tensor:
    for dim, size in enumerate(resized_shape(tuple(tensor.shape), sizes, at)):
        if size != tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
    return tensor.clone()


def compare_losses(study: LossStudy, loss: Loss | None, division: Division, uses: LogitUses) -> float:
    """The largest error of a loss on parts and its gradients against the whole one; collective over the division.

    The user's loss is run on the small batch and on random outputs of the model. Cross-entropies inside the model are
    run again on random logits.

    Args:
        study: of the model.
        loss: the user's; ``None`` without one.
        division: this rank's place.
        uses: where what the loss does with the logits is written.

    Returns:
        The error in units of the largest value; 0 where no loss uses the logits.

    Raises:
        Exception: what the loss raises.
    """
    assert division.mesh is not None
    device = torch.device(division.mesh.device_type)
    error = max((_replayed(call, division, device) for call in study.uses.losses), default=0.0)
    if loss is not None and any(isinstance(one, DividedLogits) for one in tensors_in(study.output)):
        error = max(error, _compared(study, loss, division, device, uses))
    worst = torch.tensor([error], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=division.group)
    return float(worst)


def _compared(
    study: LossStudy, loss: Loss, division: Division, device: torch.device, uses: LogitUses
) -> float:
    batch = map_batch(lambda tensor: tensor.to(device), study.batch)
    found = []
    for divides in (False, True):
        leaves: list[torch.Tensor] = []
        output = map_batch(_Values(leaves, division, device, uses if divides else None), study.output)
        with torch.enable_grad():
            value = loss(batch, output)
            first = value[0] if isinstance(value, (list, tuple)) and value else value
        found.append((first.detach().float(), _gradients(first, leaves)))
    (whole, whole_gradients), (mine, gradients) = found
    errors = [_error(mine, whole)]
    for one, reference in zip(gradients, whole_gradients, strict=True):
        part = (
            reference if one.shape == reference.shape else reference.chunk(division.degree, -1)[division.rank]
        )
        errors.append(_error(one, part, floor=float(reference.abs().max())))
    return max(errors)


class _Values:
    """Gives random values to the tensors of an output, the same on every rank; floating ones become leaves."""

    def __init__(
        self, leaves: list[torch.Tensor], division: Division, device: torch.device, uses: LogitUses | None
    ) -> None:
        self._leaves = leaves
        self._division = division
        self._device = device
        self._uses = uses
        self._generator = torch.Generator().manual_seed(13)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
        values = torch.randn(tensor.shape, generator=self._generator).to(self._device, torch.float32)
        divides = isinstance(tensor, DividedLogits) and self._uses is not None
        if divides:
            values = values.chunk(self._division.degree, tensor._dim)[self._division.rank].contiguous()  # type: ignore[attr-defined]
        self._leaves.append(values.requires_grad_())
        with torch.enable_grad():
            values = values.clone()  # a loss may change what is no leaf
        if divides:
            return DividedLogits.of(values, self._division, dim=tensor._dim, uses=self._uses)  # type: ignore[attr-defined]
        return values


def _replayed(call: LossCall, division: Division, device: torch.device) -> float:
    """The error of a cross-entropy as the model calls it."""
    generator = torch.Generator().manual_seed(17)
    words = call.shape[call.dim]
    logits = torch.randn(call.shape, generator=generator).to(device)
    shape = [size for place, size in enumerate(call.shape) if place != call.dim]
    targets = torch.randint(words, shape, generator=generator).to(device)
    weight = torch.rand(words, generator=generator).to(device) if call.weighted else None
    part = logits.chunk(division.degree, call.dim)[division.rank].contiguous().requires_grad_()
    logits.requires_grad_()

    def loss(of: torch.Tensor) -> torch.Tensor:
        kinds: Any = {"ignore_index": call.ignore_index, "reduction": call.reduction}
        return F.cross_entropy(of, targets, weight, label_smoothing=call.smoothing, **kinds).sum()

    with torch.enable_grad():
        whole, mine = loss(logits), loss(DividedLogits.of(part, division, dim=call.dim))
        (wanted,), (gradient,) = torch.autograd.grad(whole, logits), torch.autograd.grad(mine, part)
    wanted_part = wanted.chunk(division.degree, call.dim)[division.rank]
    return max(_error(mine, whole), _error(gradient, wanted_part, floor=float(wanted.abs().max())))


def _gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def _error(mine: torch.Tensor, whole: torch.Tensor, *, floor: float = 0.0) -> float:
    if mine.shape != whole.shape:
        return 1e9
    if not whole.numel():
        return 0.0
    scale = max(float(whole.detach().abs().max()), floor, 1e-30)
    error = float((mine - whole).detach().abs().max()) / scale
    return error if error < 1e9 else 1e9
