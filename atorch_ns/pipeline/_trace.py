"""Tracing the calls of a model's units, without its memory where it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.data import call_model
from atorch_ns.errors import InputError
from atorch_ns.pipeline._call_costs import CallCosts
from atorch_ns.pipeline._follow import Follower
from atorch_ns.pipeline._graph import CallGraph
from atorch_ns.pipeline._nests import map_leaves
from atorch_ns.profile import NamedModule
from atorch_ns.profile._real_values import RealValues, may_be_real
from atorch_ns.profile._structure import copy_structure
from atorch_ns.torch_compat import fake_tensor_mode, outside_fake_mode, quiet_fake_kernels

__all__ = ["CallTracer", "HowToRun", "trace_really", "without_memory"]


@dataclass(frozen=True, kw_only=True)
class HowToRun:
    """How a training step runs the model.

    Attributes:
        model_input_format: how a batch is passed to it.
        loss_func: ``(batch, output) -> loss``, to see what of the output is used; ``None`` for all of it.
        autocast: dtype of autocast around it, if any.
        weights: dtype that weights and inputs are cast to, if any.
    """

    model_input_format: str | None = None
    loss_func: Callable[[Any, Any], Any] | None = None
    autocast: torch.dtype | None = None
    weights: torch.dtype | None = None


class CallTracer:
    """Traces forward passes of one model, for batches of any shapes.

    It keeps a copy of the model's structure without memory, so that it works after the model has lost the
    modules of other ranks.

    Args:
        model: on any device, meta too; never changed.
        units: its units.
        device: on which the model will compute.
    """

    def __init__(self, model: nn.Module, units: Sequence[NamedModule], device: torch.device) -> None:
        self._mode = fake_tensor_mode()
        self._device = device
        self._paths = [unit.name for unit in units]
        with self._mode, quiet_fake_kernels():
            self._copy = copy_structure(model, self._make, {})
            self._copy.train(model.training)

    def trace(self, batch: Any, how: HowToRun) -> CallGraph:
        """One forward pass on fake tensors; the batch's small integers keep their values.

        Raises:
            InputError: if the model does not run on them.
        """
        units = [NamedModule(path, self._copy.get_submodule(path)) for path in self._paths]
        follower = Follower(self._copy, units)
        with torch.random.fork_rng(devices=[]), self._mode, quiet_fake_kernels():
            if how.weights is not None:
                _cast(self._copy, how.weights)
            fake = map_leaves(batch, torch.Tensor, self._fake)
            costs = CallCosts(follower, self._copy.parameters())
            with RealValues(), costs.counting():
                try:
                    _run(self._copy, fake, follower, how, self._device)
                except Exception as error:
                    raise InputError(_refused(follower, error)) from error
        return costs.added_to(follower.graph())

    def _make(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if kind != "parameter" and may_be_real(tensor, tensor.numel(), self._device):
            with outside_fake_mode():
                return tensor.detach().to(self._device, copy=True)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if may_be_real(tensor, tensor.numel(), self._device):
            with outside_fake_mode():
                return tensor.detach().to(self._device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)


def trace_really(
    model: nn.Module, units: Sequence[NamedModule], batch: Any, how: HowToRun, device: torch.device
) -> CallGraph:
    """One real forward pass, for models that do not run on fake tensors. Buffers and random states are kept.

    Raises:
        InputError: if the model or the loss raises.
    """
    follower = Follower(model, units, trainable=True)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        try:
            _run(model, batch, follower, how, device)
        except Exception as error:
            raise InputError(f"the model raised {type(error).__name__} on a sample batch: {error}") from error
        finally:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    return follower.graph()


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model's structure with its parameters on the meta device and its buffers as they are."""

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if kind == "parameter":
            return torch.empty_like(tensor, device="meta")
        return tensor.detach().clone()

    return copy_structure(model, make, {})


def _run(model: nn.Module, batch: Any, follower: Follower, how: HowToRun, device: torch.device) -> None:
    autocast = torch.autocast(device.type, how.autocast) if how.autocast else nullcontext()
    with follower.watching(), autocast:
        output = call_model(model, _inputs(batch, how.weights), how.model_input_format)
        used = output
        if how.loss_func is not None:
            try:
                used = how.loss_func(batch, output)
            except Exception:  # a loss that cannot be followed may use anything
                used = output
    follower.conclude(used)


def _inputs(batch: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return batch
    return map_leaves(batch, torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _refused(follower: Follower, error: Exception) -> str:
    read = follower.last_read
    looked = f" It looked into a value that {read} computes." if read else ""
    reason = str(error).splitlines()[0] if str(error) else ""
    return f"the model does not run without its data ({type(error).__name__}: {reason}).{looked}"
