"""Parameters that a pass leaves idle on some ranks, as those of experts that got no token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import disable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from atorch_ns.capture.nests import unique_tensors_of
from atorch_ns.errors import StepError
from atorch_ns.job import Job
from atorch_ns.pipeline.run.weight_gradients import awaits_gradient
from atorch_ns.text import first_few
from atorch_ns.torch_compat import after_backward, in_backward, plain_name, unwrap_checkpoint


def reduce_idle_parameters(job: Job, method: str, ignored_params: Collection[nn.Parameter]) -> None:
    """Lets ranks call different modules of a unit, and says in the report which were left out.

    Args:
        ignored_params: parameters that belong to no unit.
    """
    idle = IdleParameters(ignored_params)
    for root in job.roots:
        idle.attach(root, calls=not job.plan.compiled)  # hooks on modules inside of a unit would be traced
    job.explain(method, idle.text)


class IdleParameters:
    """Gives parameters that a pass has not used a gradient that adds nothing.

    ``fully_shard`` reduces the gradients that a rank has, so that ranks that use different parameters would
    exchange buffers of different sizes. A parameter that no rank uses has no gradient afterwards, as in one
    process. A rank that holds nothing of a parameter has none if it has not used it itself.

    Args:
        ignored_params: parameters that belong to no unit.
    """

    def __init__(self, ignored_params: Collection[nn.Parameter]) -> None:
        self._outside = ignored_params
        self._names: dict[nn.Module, str] = {}
        self._idle: dict[nn.Module, None] = {}  # of the backward pass that runs
        self._late: dict[nn.Module, list[nn.Module]] = {}  # units whose input has no gradient
        self._placeholders: set[nn.Parameter] = set()  # also in earlier passes of the same step
        self._idle_names: dict[str, None] = {}  # names for the report

    def attach(self, root: nn.Module, *, calls: bool = True) -> None:
        """Watches the passes of the units in ``root``, and with ``calls`` which modules they call."""
        self._names |= {module: plain_name(name) for name, module in root.named_modules()}
        root.register_forward_pre_hook(disable(self._begin_forward))
        # Before what reduces the last gradients.
        root.register_forward_hook(disable(self._schedule_late_reduce), prepend=True)
        for unit in root.modules():
            if not isinstance(unit, FSDPModule):
                continue
            parts = [
                part
                for part in (unit, *_gathered_by(unit))
                if any(p not in self._outside for p in _trainable_parameters(part))
            ]
            if calls:
                _watch_unit(unit, [part for part in parts if part is not unit], self._outside, self._left_out)
            unit.register_forward_pre_hook(disable(partial(self._watch_unit_input, parts)), with_kwargs=True)

    def text(self) -> str:
        """The findings so far, for the report."""
        what = "modules that some pass has not used on this rank, where their gradients count as none: "
        return what + first_few(list(self._idle_names)) if self._idle_names else ""

    def _begin_forward(self, *_: Any) -> None:
        self._idle.clear()  # of a backward pass that has failed
        self._late.clear()
        self._placeholders = {parameter for parameter in self._placeholders if parameter.grad is not None}

    def _watch_unit_input(self, parts: list[nn.Module], unit: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            # A backward pass that reaches a unit's input is through it, and reduces its gradients next.
            tensor = next((arg for arg in unique_tensors_of((args, kwargs)) if arg.requires_grad), None)
            if tensor is None:
                self._late[unit] = parts  # nothing reaches its input: looked at when the pass ends
            else:
                tensor.register_hook(lambda _: self._handle_unused_parts(parts))

    def _schedule_late_reduce(self, root: nn.Module, inputs: Any, output: Any) -> None:
        if self._late and torch.is_grad_enabled():
            call_in_backward(output, lambda: after_backward(self._reduce_late, in_turn=True))

    def _reduce_late(self) -> None:
        for parts in self._late.values():
            self._handle_unused_parts(parts)

    def _left_out(self, parts: list[nn.Module]) -> None:
        if not self._idle:  # the first of this pass
            after_backward(self._remove_placeholders)
        self._idle.update(dict.fromkeys(parts))
        self._idle_names.update(dict.fromkeys(self._names[part] for part in parts))
        for part in parts:
            for parameter in _trainable_parameters(part):
                if self._has_none(parameter) and parameter.grad is None:
                    # A sum is -0.0 only if all summands are: no rank's gradient is taken for none.
                    parameter.grad = torch.full_like(parameter, -0.0)
                    self._placeholders.add(parameter)

    def _handle_unused_parts(self, parts: list[nn.Module]) -> None:
        idle = [part for part in parts if any(map(self._has_none, _trainable_parameters(part)))]
        if idle:
            self._left_out(idle)

    def _has_none(self, parameter: nn.Parameter) -> bool:
        # A placeholder of an earlier micro-batch is not a gradient either.
        is_none = parameter.grad is None or parameter in self._placeholders
        return is_none and parameter not in self._outside and not awaits_gradient(parameter)

    def _remove_placeholders(self) -> None:
        parts = list(self._idle)
        self._idle.clear()
        for parameter in (parameter for part in parts for parameter in _trainable_parameters(part)):
            if parameter.grad is None:
                continue
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            # -0.0 everywhere after the reduction: no rank has a gradient. An empty shard counts so too.
            if not local.any() and bool(local.signbit().all()):
                parameter.grad = None


def _gathered_by(unit: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a unit that belong to no unit inside it."""
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _gathered_by(child)


def _trainable_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad)


def _watch_unit(
    unit: nn.Module,
    parts: list[nn.Module],
    ignored_params: Collection[nn.Parameter],
    left_out: Callable[[list[nn.Module]], None],
) -> None:
    """Calls ``left_out`` in backward passes of ``unit`` with ``parts`` that its forward pass did not call."""
    active_parts: set[nn.Module] = set()
    # As the user has named it, before torch has put its own class around it.
    class_name = type(unwrap_checkpoint(unit)).__name__.removeprefix("FSDP").removeprefix("Replicate")

    def end(_: nn.Module, inputs: Any, output: Any) -> None:
        idle = [part for part in parts if part not in active_parts] if torch.is_grad_enabled() else []
        if idle:  # a tied parameter is used by any of its modules
            used_ids = {id(parameter) for part in active_parts for parameter in _trainable_parameters(part)}
            idle = [part for part in idle if any(id(p) not in used_ids for p in _trainable_parameters(part))]
        if idle:
            call_in_backward(output, partial(left_out, idle))

    # Ignored parameters are whole at all times.
    sharded_ids = {id(p) for part in parts for p in _trainable_parameters(part) if p not in ignored_params}

    def note(part: nn.Module, _: Any) -> None:
        active_parts.add(part)
        if in_backward() and any(id(parameter) in sharded_ids for parameter in _trainable_parameters(part)):
            raise StepError(
                f"{type(part).__name__} is called in the backward pass, by a torch.autograd.Function of the model's own, "
                f"while its parameters are divided: they are gathered where {class_name} is called. Train it with "
                f"ddp or zero1 alone, or leave it out of sharding: atorch_ignored_cls=[{class_name!r}]."
            )

    unit.register_forward_pre_hook(lambda *_: active_parts.clear())
    for part in parts:
        part.register_forward_pre_hook(note)
    unit.register_forward_hook(end)


def call_in_backward(output: Any, action: Callable[[], None]) -> None:
    """Calls ``action`` once, where a backward pass comes to a tensor of ``output``."""
    actions = [action]  # the first hook takes it

    def begin(_: torch.Tensor) -> None:
        if actions:
            actions.pop()()

    for tensor in unique_tensors_of(output):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(disable(begin))
