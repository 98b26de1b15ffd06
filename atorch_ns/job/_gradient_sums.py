"""Gradients of which each rank of a group has one summand, added up once a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.torch_compat import plain_name

__all__ = ["GradientSums"]


@dataclass(frozen=True)
class _Sum:
    names: frozenset[str]
    group: dist.ProcessGroup
    mean: bool = False


class GradientSums:
    """Sums gradients over groups of ranks after the last backward pass of a step.

    Used for parameters that are whole on every rank of a group while each rank sees a part of what they do:
    norms on a part of the sequence, weights shared by two pipeline stages. It is run by ``train_step``, by
    clipping and by the optimizer's step, whichever comes first, and once only. Further backward passes may add to
    gradients that have been summed.
    """

    def __init__(self) -> None:
        self._sums: list[_Sum] = []
        self._pending = False
        self._summed = False

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, names: Iterable[str], group: dist.ProcessGroup, *, mean: bool = False) -> None:
        """Lets the gradients of the parameters called ``names`` be summed over ``group``.

        Args:
            names: the same on all ranks of the group, as the user's model has them.
            group: the ranks.
            mean: divide the sum by their number, for parameters that nothing else averages over the data.
        """
        wanted = frozenset(names)
        if wanted and group.size() > 1:
            self._sums.append(_Sum(wanted, group, mean))

    def watch(self, module: nn.Module) -> None:
        """Notices forward passes of ``module``, after which there is something to sum."""
        module.register_forward_pre_hook(self._note)

    @torch.no_grad()
    def expect(self, module: nn.Module) -> None:
        """A backward pass is going to add to the gradients of ``module``.

        Of a sum that is there already each rank keeps its share, so that the next sum is the whole again.
        """
        self._pending = True
        if not self._summed:
            return
        self._summed = False
        for entry in self._sums:
            for parameter in _parameters(module, entry.names):
                if parameter.grad is not None and not entry.mean:
                    parameter.grad /= entry.group.size()

    @torch.no_grad()
    def run(self, module: nn.Module) -> None:
        """Sums what has not been summed since the last backward pass; collective."""
        if not self._pending:
            return
        self._pending, self._summed = False, True
        for entry in self._sums:
            for parameters in _alike(_parameters(module, entry.names)):
                _sum(parameters, entry)

    def _note(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.expect(module)


def _sum(parameters: list[torch.Tensor], entry: _Sum) -> None:
    """Sums the gradients of ``parameters``, whose parts travel as one tensor.

    A mean takes along which of them any rank has: an optimizer decays a parameter whose gradient is zero, and leaves
    alone one that took no part in the loss.
    """
    used = [parameter.grad is not None for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:  # no token of this rank used it, but one of another rank's may have
            parameter.grad = torch.zeros_like(parameter)
    grads = [_local(parameter.grad) for parameter in parameters]
    pieces = [grad.reshape(-1) for grad in grads]
    if entry.mean:
        pieces.append(grads[0].new_tensor(used))
    flat = torch.cat(pieces)
    dist.all_reduce(flat, group=entry.group)
    summed = flat.split([piece.numel() for piece in pieces])
    for grad, piece in zip(grads, summed[: len(grads)], strict=True):
        grad.copy_((piece / entry.group.size() if entry.mean else piece).view_as(grad))
    if entry.mean:
        for parameter, count in zip(parameters, summed[-1].tolist(), strict=True):
            if not count:
                parameter.grad = None


def _local(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _parameters(module: nn.Module, names: frozenset[str]) -> Iterator[torch.Tensor]:
    """Those of ``names`` that train, each once, in the order of the names, so that all ranks agree on it."""
    parameters = {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    seen: set[int] = set()
    for name in sorted(names):
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        yield parameter


def _alike(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters by the dtype of their gradients, which can travel as one tensor."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.dtype, []).append(parameter)
    yield from kinds.values()
