"""Units that some ranks skip in a forward pass, as in LayerDrop, while others gather and reduce them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import disable
from torch.distributed.fsdp import FSDPModule

from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.job import Job
from atorch_ns.text import first_few
from atorch_ns.torch_compat import in_backward, plain_name


def call_skipped_units(job: Job, method: str, units: Iterable[nn.Module]) -> None:
    """Lets ranks skip different units, and says in the report which were."""
    unit_set = set(units)
    watches = [
        SkippedUnits(job, root, [module for module in root.modules() if module in unit_set])
        for root in job.roots
        if isinstance(root, FSDPModule)
    ]
    job.explain(method, lambda: "".join(each.text() for each in watches))


class SkippedUnits:
    """Calls units that a forward pass of ``root`` has left out as the identity, where other ranks call them.

    Ranks gather a unit before its forward pass and reduce its gradients after its backward pass, all in one
    order: a rank that skips it would wait in the wrong collective. Units are expected in the order of the
    model's modules, and after the first pass in the order of that pass, on which ranks agree. Backward passes
    run in the opposite order.
    """

    def __init__(self, job: Job, root: nn.Module, units: list[nn.Module]) -> None:
        self._job = job
        self._units = units
        self._names = {module: plain_name(name) for name, module in root.named_modules()}
        self._order = list(range(len(units)))
        self._is_agreed = False
        self._calls: dict[int, bool] = {}  # whether the model itself called it; in the order of first calls
        # Whether the input that the model gives a unit has a gradient; units without one are reduced at the
        # end. Until the ranks agree, and for units that they do not know, it counts as having one.
        self._has_gradient: dict[int, bool] = {}
        self._due = 0  # place in the order that comes next
        self._results: list[torch.Tensor] = []
        self._skipped_names: dict[str, None] = {}
        root.register_forward_pre_hook(disable(self._begin_forward), with_kwargs=True)
        for index, unit in enumerate(units):
            before = disable(partial(self._before_unit, index))
            unit.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        root.register_forward_hook(disable(self._end_forward), prepend=True)

    def text(self) -> str:
        """The findings so far, for the report."""
        what = "units that some pass has skipped on this rank, gathered beside those of the others: "
        return what + first_few(list(self._skipped_names)) if self._skipped_names else ""

    def _begin_forward(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_backward():
            self._calls, self._results, self._due = {}, [], 0

    def _before_unit(self, index: int, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward() or isinstance(unit.forward, _Identity):
            return None
        # Units that this rank has left out come first: other ranks gather them now.
        end = self._order.index(index)
        absent = [due for due in self._order[self._due : end] if due not in self._calls]
        self._due = max(self._due, end + 1)
        self._call_skipped(absent)
        if not self._calls.get(index):
            self._calls.pop(index, None)  # if it was called as the identity, since it was expected before
            self._calls[index] = True
        if not torch.is_grad_enabled():
            return None
        # Ranks must agree where a unit is reduced: behind its input, or at the end of the backward pass.
        has_gradient = any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
        is_known = self._is_agreed and index in self._has_gradient
        common = self._has_gradient.setdefault(index, has_gradient or bool(absent) or self._is_agreed)
        if has_gradient or (is_known and not common):
            return None
        return map_tensors(_with_gradient, (args, kwargs))

    def _end_forward(self, root: nn.Module, _: Any, output: Any) -> Any:
        if in_backward():
            return None
        self._call_skipped([index for index in self._order if index not in self._calls])
        if not self._is_agreed and torch.is_grad_enabled():
            self._is_agreed = True
            assert self._job.mesh is not None
            record = (self._calls, self._has_gradient)
            passes = self._job.cluster.gathered(record, group=self._job.mesh.data_group)
            for _, flags in passes:
                for index, has_gradient in flags.items():
                    self._has_gradient[index] = has_gradient or self._has_gradient.get(index, False)
            # The pass that called most units knows their order best.
            fullest = max(passes, key=lambda record: sum(record[0].values()))
            self._order = list(fullest[0])
        return _join_results(output, self._results) if self._results else None

    def _call_skipped(self, indices: list[int]) -> None:
        """Calls units as the identity, on a separate tensor, with a gradient where their input has one."""
        for index in indices:
            unit = self._units[index]
            has_gradient = self._has_gradient.get(index, True)
            self._calls[index] = False
            self._skipped_names[self._names[unit]] = None
            override = vars(unit).pop("forward", None)  # one that is set on the object; put back below
            unit.forward = _Identity()
            try:
                x = torch.zeros(1, device=self._job.device, requires_grad=has_gradient)
                self._results.append(unit(x))
            finally:
                del unit.forward
                if override is not None:
                    unit.forward = override


class _Identity:
    """The forward pass of a unit that is skipped; its result has a gradient, as that of the unit has."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros_like(x, requires_grad=not x.requires_grad)


class _Join(torch.autograd.Function):
    """The first tensor; the others get gradients of zero, and so a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has a gradient where the unit before it has been skipped."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _join_results(values: Any, results: list[torch.Tensor]) -> Any:
    # A backward pass reaches the results only through outputs that require a gradient.
    def join(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        result: torch.Tensor = _Join.apply(tensor, *results)  # type: ignore[no-untyped-call]
        return result

    return map_tensors(join, values)
