"""Outputs of models with divided logits: gathering them, and a test of losses on parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.capture.nests import map_tensors, resized_batch, samples_and_tokens, unique_tensors_of
from atorch_ns.profile.record.steps import TracedModel
from atorch_ns.sharding.collectives import SimulatedGroup, simulate
from atorch_ns.sharding.compare import gradients_of, largest, relative_error
from atorch_ns.sharding.divided_tensor import DividedTensor, LogitUses, LossCall, whole_logits
from atorch_ns.sharding.rank_context import TensorGroup
from atorch_ns.sharding.tensor.layers import keep_divided
from atorch_ns.sharding.tensor.trace import ways_to_run
from atorch_ns.sharding.vocabulary.logits import DividedLogits
from atorch_ns.text import error_line

LOSS_TOLERANCE = 1e-4
"""The largest error of a loss or a gradient that counts as rounding, in units of its largest value."""

Run = Callable[[nn.Module, Any], Any]
"""``(model, batch) -> output``."""

Loss = Callable[[Any, Any], Any]
"""``(batch, output) -> loss``, or a list or tuple that begins with it."""


class LogitOutputs:
    """Gathers divided logits that leave a model, except inside a training step: only the loss gets those."""

    def __init__(self) -> None:
        self._in_step = False

    def __deepcopy__(self, memo: Any) -> LogitOutputs:
        return self  # hooks of a copied model follow the same steps

    def attach(self, model: nn.Module, heads: Sequence[nn.Module]) -> None:
        """Makes the divided ``heads`` of ``model`` return divided logits."""
        for head in heads:
            keep_divided(head)
        model.register_forward_hook(self._gather_output)

    @contextmanager
    def stay_divided(self) -> Iterator[None]:
        """Keeps outputs divided inside the block, which is a training step."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    def _gather_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._in_step else whole_logits(output)


@dataclass
class LossStudy:
    """The use of divided logits in one forward pass.

    Attributes:
        uses: operations on them inside the model.
        output: the model's output, whose tensors have no values.
        batch: the batch given, with values.
        failure: the error on divided logits; empty if the pass ran.
        replays: whether cross-entropies inside the model are tested too, on random logits.
        parameters: names of the parameters that were used on parts; ``None`` where that is not known.
    """

    uses: LogitUses = field(default_factory=LogitUses)
    output: Any = None
    batch: Any = None
    failure: str = ""
    replays: bool = True
    parameters: frozenset[str] | None = None


def study_logits(model: nn.Module, batch: Any, run: Run, heads: Sequence[str], *, degree: int) -> LossStudy:
    """Runs a copy of the model once with divided logits, without memory where possible.

    Args:
        model: the whole model; not changed.
        heads: paths of the layers that give the logits.
        degree: the number of ranks that they are divided over.
    """
    sizes = samples_and_tokens(batch)
    subject = TracedModel(model, batch, run, sizes, sizes)
    study = LossStudy()
    for prepare, at in ways_to_run(sizes, degree):
        study = LossStudy(batch=resized_batch(batch, sizes, at))
        try:
            with prepare(subject, at) as (copy, small), torch.enable_grad():
                _divide_outputs(copy, heads, degree, study.uses)
                study.output = run(copy.train(), small)
            return study
        except Exception as error:
            study.failure = error_line(error)
            if study.uses.changed:  # every other way to run refuses in-place changes too
                return study
    return study


def _divide_outputs(model: nn.Module, heads: Sequence[str], degree: int, uses: LogitUses) -> None:
    group = TensorGroup(degree)

    def divide(module: nn.Module, args: Any, output: torch.Tensor) -> DividedLogits:
        return DividedLogits.of(output.chunk(degree, -1)[0], group, uses=uses)  # only shapes count

    for path in heads:
        model.get_submodule(path).register_forward_hook(divide)


def compare_losses(
    study: LossStudy, loss: Loss | None, degree: int, device: torch.device, *, uses: LogitUses
) -> float:
    """The largest error of a loss on parts and its gradients against the whole one, on simulated ranks.

    The user's loss runs on the small batch and on random outputs of the model. Cross-entropies inside the
    model run again on random logits, if the study says so.

    Args:
        loss: the user's loss; ``None`` without one.
        degree: the number of ranks that the logits are divided over.
        uses: receives the loss's operations on the logits.

    Returns:
        The error in units of the largest value; 0 where no loss uses the logits.

    Raises:
        Exception: the exception of the loss.
    """

    def replay(group: SimulatedGroup) -> float:
        calls = study.uses.losses if study.replays else ()
        return max((_cross_entropy_error(call, TensorGroup(group), device) for call in calls), default=0.0)

    errors = simulate(degree, replay, device)
    if loss is not None and any(isinstance(leaf, DividedTensor) for leaf in unique_tensors_of(study.output)):
        errors += _loss_errors(study, loss, degree, device, uses=uses)
    return max(errors)


def _loss_errors(
    study: LossStudy, loss: Loss, degree: int, device: torch.device, *, uses: LogitUses
) -> Iterator[float]:
    batch = map_tensors(lambda tensor: tensor.to(device), study.batch)

    def run(group: SimulatedGroup | None) -> tuple[torch.Tensor, list[torch.Tensor], list[Share]]:
        leaves: list[torch.Tensor] = []
        shares: list[Share] = []
        output = map_tensors(_random_values(leaves, shares, group, device, uses=uses), study.output)
        with torch.enable_grad():
            value = loss(batch, output)
            first = value[0] if isinstance(value, (list, tuple)) and value else value
        return first.detach().float(), gradients_of(first, leaves), shares

    whole, references, _ = run(None)
    for mine, gradients, shares in simulate(degree, run, device):
        yield relative_error(mine, whole)
        for gradient, reference, share in zip(gradients, references, shares, strict=True):
            # Compares on the scale of the whole gradient, since one rank's share may be almost zero.
            yield relative_error(gradient, share(reference), floor=largest(reference))


Share = Callable[[torch.Tensor], torch.Tensor]
"""A rank's share of the gradient of a whole tensor."""


def _random_values(
    leaves: list[torch.Tensor],
    shares: list[Share],
    group: SimulatedGroup | None,
    device: torch.device,
    *,
    uses: LogitUses,
) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(13)  # the same values on every rank

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        values = torch.randn(tensor.shape, generator=generator).to(device, torch.float32)
        values, share, join = (
            tensor.of_rank(values, group, uses)
            if isinstance(tensor, DividedTensor) and group is not None
            else (values, _identity_map, _identity_map)
        )
        leaves.append(values.requires_grad_())  # gradients of these are compared
        shares.append(share)
        with torch.enable_grad():
            return join(values.clone())  # a loss may change what is not a leaf

    return make


def _identity_map(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _cross_entropy_error(call: LossCall, group: TensorGroup, device: torch.device) -> float:
    # The sizes and options of the model's own call, on random logits, targets and weights of classes.
    generator = torch.Generator().manual_seed(17)
    words = call.shape[call.dim]
    logits = torch.randn(call.shape, generator=generator).to(device)
    shape = [size for axis, size in enumerate(call.shape) if axis != call.dim]
    targets = torch.randint(words, shape, generator=generator).to(device)
    weight = torch.rand(words, generator=generator).to(device) if call.weighted else None
    # The part is cut before the whole requires a gradient, so that both are leaves.
    part = logits.chunk(group.size, call.dim)[group.rank].contiguous().requires_grad_()
    logits.requires_grad_()

    def loss(of: torch.Tensor) -> torch.Tensor:
        kinds: Any = {"ignore_index": call.ignore_index, "reduction": call.reduction}
        return F.cross_entropy(of, targets, weight, label_smoothing=call.smoothing, **kinds).sum()

    with torch.enable_grad():
        whole, mine = loss(logits), loss(DividedLogits.of(part, group, dim=call.dim))
        (reference,), (gradient,) = torch.autograd.grad(whole, logits), torch.autograd.grad(mine, part)
    wanted_part = reference.chunk(group.size, call.dim)[group.rank]
    return max(relative_error(mine, whole), relative_error(gradient, wanted_part, floor=largest(reference)))
