"""Tracing the calls of a model's units, on fake tensors where the model runs on them, with their costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import NamedModule
from atorch_ns.capture.nests import floats_to, map_tensors, samples_and_tokens
from atorch_ns.capture.random_states import buffers_and_generators_kept, random_states_kept
from atorch_ns.capture.real_values import RealValues, fake_like, largest_real
from atorch_ns.capture.structure import copy_structure
from atorch_ns.costs import OperatorCounter, OperatorCounts
from atorch_ns.data import call_model
from atorch_ns.errors import InputError
from atorch_ns.pipeline.cut.follow import Follower
from atorch_ns.pipeline.cut.graph import CallGraph
from atorch_ns.text import error_line
from atorch_ns.torch_compat import fake_tensor_mode, quiet_fake_kernels


class CallCosts(OperatorCounter):
    """Counts operator costs by call. Code before a call counts to it, and the last code to the last call.

    Args:
        follower: reports the running call.
        parameters: tensors that stay in memory anyway. Saving them for the backward pass costs nothing.
    """

    def __init__(self, follower: Follower, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._by_call: dict[int, _CallCost] = {}
        self._cost = self._by_call.setdefault(0, _CallCost(self.counts))
        self._storages = {p.untyped_storage()._cdata for p in parameters}
        self._saved_tensors: list[torch.Tensor] = []  # so that the address of a counted storage is not reused
        follower.on_call = self._on_call

    @contextmanager
    def counting(self) -> Iterator[CallCosts]:
        """Counts the costs of the code inside the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack_tensor, lambda tensor: tensor), self:
            yield self

    def added_to(self, graph: CallGraph) -> CallGraph:
        """The graph with these costs added."""
        costs = [self._by_call.get(number, _CallCost()) for number in range(len(graph.calls))]
        for number, cost in self._by_call.items():
            if number >= len(costs):  # after the last call
                costs[-1].counts += cost.counts
                costs[-1].saved_bytes += cost.saved_bytes
        calls = (replace(call, **vars(cost)) for call, cost in zip(graph.calls, costs, strict=True))
        return replace(graph, calls=tuple(calls))

    def _pack_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:  # views of one storage keep it once
            self._storages.add(storage._cdata)
            self._saved_tensors.append(tensor.detach())
            self._cost.saved_bytes += storage.nbytes()
        return tensor

    def _on_call(self, number: int, begins: bool) -> None:
        # Code after a call counts to the next one, whose stage runs it.
        self._cost = self._by_call.setdefault(number if begins else number + 1, _CallCost())
        self.counts = self._cost.counts


@dataclass
class _CallCost:
    counts: OperatorCounts = field(default_factory=OperatorCounts)
    saved_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class HowToRun:
    """The way in which a training step runs the model.

    Attributes:
        model_input_format: how a batch is passed to it.
        loss_func: ``(batch, output) -> loss``, which tells the used part of the output; ``None`` for all.
        outputs: whether all outputs are wanted besides the loss.
        autocast: the dtype of autocast around it, if any.
        weights: the dtype that weights and inputs are cast to, if any.
    """

    model_input_format: str | None = None
    loss_func: Callable[[Any, Any], Any] | None = None
    outputs: bool = False
    autocast: torch.dtype | None = None
    weights: torch.dtype | None = None


class CallTracer:
    """Traces forward passes of one model, for batches of any shapes.

    It keeps a copy of the model's structure without memory, so that it works after the model has lost the
    modules of other ranks.

    Args:
        model: the model, on any device, also meta; never changed.
        device: the device on which the model will compute.
    """

    def __init__(self, model: nn.Module, units: Sequence[NamedModule], device: torch.device) -> None:
        self._mode = fake_tensor_mode()
        self._device = device
        self._paths = [unit.name for unit in units]
        with self._mode, quiet_fake_kernels():
            self._copy = copy_structure(model, self._make_fake_tensor, {})
            self._copy.train(model.training)

    def trace(self, batch: Any, how: HowToRun, thaw_names: Collection[str] = ()) -> CallGraph:
        """Traces one forward pass on fake tensors. Small integer tensors of the batch keep their values.

        Args:
            thaw_names: names of parameters that were frozen when this was made and are trained now.

        Raises:
            InputError: if the model does not run on fake tensors.
        """
        units = [NamedModule(path, self._copy.get_submodule(path)) for path in self._paths]
        for name in thaw_names:
            self._copy.get_parameter(name).requires_grad_(True)
        follower = Follower(self._copy, units)
        with random_states_kept(), self._mode, quiet_fake_kernels():
            if how.weights is not None:
                _cast_parameters(self._copy, how.weights)
            largest = largest_real(math.prod(samples_and_tokens(batch)))
            fake = map_tensors(lambda tensor: fake_like(tensor, self._device, largest=largest), batch)
            costs = CallCosts(follower, self._copy.parameters())  # after the cast, which makes new storages
            with RealValues(largest), costs.counting():
                try:
                    _run_model(self._copy, fake, follower, how, device=self._device)
                except Exception as error:
                    raise InputError(_refusal_message(follower, error)) from error
        return costs.added_to(follower.graph())

    def _make_fake_tensor(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        return fake_like(tensor, self._device, is_parameter=kind == "parameter")


def trace_with_values(
    model: nn.Module, units: Sequence[NamedModule], batch: Any, how: HowToRun, *, device: torch.device
) -> CallGraph:
    """Traces a real forward pass of models that fail on fake tensors. Keeps buffers and random states.

    Raises:
        InputError: if the model or the loss raises.
    """
    follower = Follower(model, units)
    empty = torch.empty(0)  # in place of what a backward pass would need
    nothing_saved = torch.autograd.graph.saved_tensors_hooks(lambda _: empty, lambda tensor: tensor)
    with buffers_and_generators_kept(model, device), torch.enable_grad(), nothing_saved:
        try:
            _run_model(model, batch, follower, how, device=device)
        except Exception as error:
            raise InputError(f"the model raised {type(error).__name__} on a sample batch: {error}") from error
    return follower.graph()


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model's structure with its parameters on the meta device and its buffers as they are."""

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if kind == "parameter":
            return torch.empty_like(tensor, device="meta")
        return tensor.detach().clone()

    return copy_structure(model, make, {})


def _run_model(
    model: nn.Module, batch: Any, follower: Follower, how: HowToRun, *, device: torch.device
) -> None:
    autocast = torch.autocast(device.type, how.autocast) if how.autocast else nullcontext()
    with follower.watching(), autocast:
        inputs = batch if how.weights is None else floats_to(batch, how.weights)
        result = output = call_model(model, inputs, how.model_input_format)
        if how.loss_func is not None:
            try:
                result = how.loss_func(batch, output)
            except Exception:  # a loss that cannot be followed may use anything
                result = output
    follower.conclude(result, output if how.outputs else ())


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _refusal_message(follower: Follower, error: Exception) -> str:
    read = follower.last_read
    reason = f" It looked into a value that {read} computes." if read else ""
    return f"the model does not run without its data ({error_line(error)}).{reason}"
