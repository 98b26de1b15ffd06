"""Training states: weights and optimizer states, read and written by the user's names of parameters.

A checkpoint sees every job through :class:`TrainingStates`, whatever shards, wraps or flattens the model.
:class:`ParameterStates` is that of models that keep their parameters, plain or DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from atorch_ns.cluster import gather_values
from atorch_ns.errors import CheckpointError, InputError
from atorch_ns.job.materialise import divided_like
from atorch_ns.job.model import ModelParts, OriginalModel, parameter_names
from atorch_ns.job.optimizer.step_optimizer import StepOptimizer, inner_optimizer
from atorch_ns.profile.optimizer import nested_optimizers
from atorch_ns.sharding import Packing
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.text import with_article
from atorch_ns.torch_compat import show_gathered

T = TypeVar("T")


class TrainedModel(Protocol):
    """Source of training states, a built :class:`~atorch_ns.job.Job`."""

    module: nn.Module
    original: OriginalModel
    parts: ModelParts

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the stages of one pipeline, or ``None`` if the model is in one piece."""


def on_all_stages(job: TrainedModel, value: T) -> list[T]:
    """``value`` of every rank of a pipeline, or of this rank without one. Collective over the pipeline."""
    group = job.stage_group
    if group is None:
        return [value]
    return gather_values(value, distributed=True, group=group)


def groups_of_all_stages(job: TrainedModel, groups: list[list[str]]) -> list[list[str]]:
    """Names by group of all stages together, in the user's order. Collective like :func:`on_all_stages`."""
    stages = on_all_stages(job, groups)
    return [job.original.ordered(name for stage in stages for name in stage[i]) for i in range(len(groups))]


StateValue: TypeAlias = bool | int | float | str | None
"""A non-tensor entry of an optimizer's state."""


class StateSpec(NamedTuple):
    """Shape (of the whole tensor over all ranks) and dtype of one tensor of an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OptimizerStates:
    """Optimizer state by the parameter's name, then by the name of the state.

    Attributes:
        tensors: plain tensors, or DTensors where this rank holds a shard.
        values: entries that are not tensors.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, StateValue]] = field(default_factory=dict)


class TrainingStates(Protocol):
    """Weights and optimizer states of one job, keyed by parameter names in the user's model.

    A tied parameter has one name, the first of its names in ``named_parameters()`` order. Every method may
    be collective: all ranks call it, in the same order. A tensor may be plain or a DTensor. In both cases
    ``torch.distributed.checkpoint`` must be able to save it and to load into it. A plain tensor that several
    ranks give under one name must be the same on all of them. A single rank may also give it alone.
    """

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters, including frozen ones, at the job's full precision: fp32 masters if there are any.

        The tensors may be the live ones or copies. To change weights, the caller fills the tensors and passes
        them to :meth:`set_weights`. Every rank that needs a weight must give it here.
        """

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Makes the job continue training with ``weights``, the filled tensors of :meth:`weights`."""

    def optimizer_class(self) -> str:
        """Qualified name of the optimizer's class, or an empty text without an optimizer."""

    def group_names(self) -> list[list[str]]:
        """Parameter names in each group of ``result.optim.param_groups``, the same on every rank."""

    def optimizer_states(self) -> OptimizerStates:
        """This rank's part of the optimizer's state, as live tensors or copies.

        Raises:
            CheckpointError: for states that can be neither tensors nor plain values of one parameter.
        """

    def blank_states(
        self, specs: Mapping[str, Mapping[str, StateSpec]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """New tensors to be filled, for entries of ``specs`` that this rank holds or needs.

        Args:
            specs: shape and dtype of every expected tensor, by the parameter's name, then the state's.
        """

    def set_optimizer_states(self, states: OptimizerStates) -> None:
        """Replaces the optimizer's whole state.

        Args:
            states: the filled tensors of :meth:`blank_states`, and the values of all parameters.
        """


def reshard(model: nn.Module) -> None:
    """Frees parameters that an evaluation has left gathered, which are plain tensors instead of shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class ParameterStates:
    """The default :class:`~atorch_ns.job.TrainingStates`.

    If several ranks hold the stages of a pipeline, each gives its own parameters. Both stages give a
    parameter that they share. Fused parameters are given in the user's order, as copies.

    Args:
        job: a built job.
        optimizer: the optimizer of its result.
        holder: returns the inner optimizer that holds this rank's states, such as
            ``operator.attrgetter("optim")`` for ``ZeroRedundancyOptimizer``.
    """

    def __init__(
        self,
        job: TrainedModel,
        optimizer: torch.optim.Optimizer | None,
        *,
        holder: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None = None,
    ) -> None:
        for root in (job.module, *job.parts.stages):
            show_gathered(module for module in root.modules() if isinstance(module, FSDPModule))
            reshard(root)  # weights may be gathered after an evaluation
        masters = optimizer.masters if isinstance(optimizer, StepOptimizer) else None
        if masters is not None:
            masters.take_writes()  # the loop may have written weights
        aliases = parameter_names(job.module)
        self._job = job
        self._parameters = {job.original.first_name(names): p for p, names in aliases.items()}
        self._packings = {
            job.original.first_name(names): job.parts.packings[name]
            for names in aliases.values()
            for name in names
            if name in job.parts.packings
        }
        self._targets = {
            name: p if masters is None else masters.master_of(p) for name, p in self._parameters.items()
        }
        self._names = {tensor: name for name, tensor in self._targets.items()}  # of updated tensors
        self._outer = None if optimizer is None else inner_optimizer(optimizer)
        self._holder = self._outer
        if self._outer is not None and holder is not None:
            self._holder = holder(self._outer)
        self._inner = [] if self._holder is None else list(nested_optimizers(self._holder))

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that the optimizer updates, or their masters. Collective for fused parameters."""
        return {name: self._unpack_value(name, tensor.detach()) for name, tensor in self._targets.items()}

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes over ``weights``, and rounds masters into their parameters."""
        for name, value in weights.items():
            target, parameter = self._targets[name], self._parameters[name]
            target.copy_(self._pack_value(name, value))
            if parameter is not target:
                parameter.copy_(target)

    def optimizer_class(self) -> str:
        """The class of the optimizer that holds the states."""
        if self._holder is None:
            return ""
        return f"{type(self._holder).__module__}.{type(self._holder).__qualname__}"

    def group_names(self) -> list[list[str]]:
        """Names by group, in the order of the user's model. Collective if ranks hold stages of it."""
        if self._outer is None:
            return []
        names = [[self._names[p] for p in group["params"]] for group in self._outer.param_groups]
        return names if self._job.stage_group is None else groups_of_all_stages(self._job, names)

    def optimizer_states(self) -> OptimizerStates:
        """The live tensors, and the entries that are not tensors.

        Raises:
            CheckpointError: naming the first entry without a parameter, or of another kind.
        """
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        values: dict[str, dict[str, StateValue]] = {}
        holders = [] if self._holder is None else [self._holder, *self._inner]
        for key, state in ((key, state) for each in holders for key, state in each.state.items()):
            name = self._names.get(key) if isinstance(key, torch.Tensor) else None
            if name is None or not isinstance(state, Mapping):
                raise self._unsupported_error(f"it keeps {type(state).__name__} under {str(key)[:80]!r}")
            if name in tensors or name in values:
                raise self._unsupported_error(f"two of its optimizers have states of {name}")
            for entry, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(name, {})[entry] = self._unpack_value(name, value.detach())
                elif value is None or isinstance(value, (bool, int, float, str)):
                    values.setdefault(name, {})[entry] = value
                else:
                    raise self._unsupported_error(f"its state {entry!r} of {name} is {with_article(value)}")
        return OptimizerStates(tensors, values)

    def blank_states(
        self, specs: Mapping[str, Mapping[str, StateSpec]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors with the layout of the parameters that this rank's optimizer updates."""
        return {
            name: {
                entry: self._blank_state(tensor, options, entry, spec) for entry, spec in specs[name].items()
            }
            for name, tensor, options in self._updated_parameters()
            if name in specs
        }

    def set_optimizer_states(self, states: OptimizerStates) -> None:
        """Replaces the state of every parameter that this rank's optimizer updates."""
        if self._holder is None:
            return
        owners: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for holder in (self._holder, *self._inner):  # inner optimizers update their own state
            holder.state.clear()
            owners |= dict.fromkeys((p for group in holder.param_groups for p in group["params"]), holder)
        for name, tensor, _ in self._updated_parameters():
            tensors = {
                entry: _like_its_parameter(self._pack_value(name, value), tensor)
                for entry, value in states.tensors.get(name, {}).items()
            }
            if state := {**tensors, **states.values.get(name, {})}:
                owners[tensor].state[tensor] = state

    def _unpack_value(self, name: str, value: torch.Tensor) -> torch.Tensor:
        packing = self._packing_of(name, value)
        if packing is None or not isinstance(value, DTensor):
            return value
        return divided_like(packing.unpack(value.full_tensor()), value)  # the user's order

    def _pack_value(self, name: str, value: torch.Tensor) -> torch.Tensor:
        packing = self._packing_of(name, value)
        if packing is None or not isinstance(value, DTensor):
            return value
        return divided_like(packing.pack(value.full_tensor()), value)

    def _packing_of(self, name: str, value: torch.Tensor) -> Packing | None:
        # States of other shapes, such as step counts, are not packed.
        return self._packings.get(name) if value.shape == self._parameters[name].shape else None

    def _updated_parameters(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, Any]]]:
        for group in () if self._holder is None else self._holder.param_groups:
            for tensor in group["params"]:
                yield self._names[tensor], tensor, group

    @staticmethod
    def _blank_state(
        tensor: torch.Tensor, options: Mapping[str, Any], entry: str, spec: StateSpec
    ) -> torch.Tensor:
        if spec.shape == tuple(tensor.shape) and tensor.dim() > 0:
            return torch.empty_like(tensor.detach(), dtype=spec.dtype)
        # As in torch's own load_state_dict: the step counter stays on the CPU unless a kernel reads it.
        on_device = entry != "step" or options.get("capturable") or options.get("fused")
        return torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device if on_device else "cpu")

    def _unsupported_error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the state of {type(self._holder).__name__} cannot be saved: {what}. Checkpoints hold tensors, "
            "numbers and texts that belong to one parameter each."
        )


def _like_its_parameter(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    # States with dims must be DTensors like the parameter, since operators refuse mixtures.
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False
    )


class WeightAverage:
    """An average of the weights (or fp32 masters if there are any), sharded as the strategy shards them.

    It costs one more copy of this rank's weights. Buffers come from the model.

    Args:
        states: source of the weights.
        decay: d of ``average = d * average + (1 - d) * weights``, as ``get_ema_multi_avg_fn`` of torch;
            ``None`` for the mean of all updates, as ``AveragedModel`` has it by default.

    Attributes:
        num_updates: number of weights in the average.

    Raises:
        InputError: for a decay outside of 0 to 1.
    """

    def __init__(self, states: Callable[[], TrainingStates], decay: float | None) -> None:
        if decay is not None and not (isinstance(decay, (int, float)) and 0.0 <= decay <= 1.0):
            raise InputError(
                f"average: decay must be a number from 0 to 1, or None for a mean of all updates; it is {decay!r}."
            )
        self._states = states
        self._decay = decay
        self._averages = {name: _in_fp32(weight) for name, weight in states().weights().items()}
        self.num_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights, the first unchanged. Call it on every rank after a step."""
        if self.num_updates == 0:
            share = 1.0
        else:
            share = 1.0 / (self.num_updates + 1) if self._decay is None else 1.0 - self._decay
        for name, weight in self._states().weights().items():
            average, value = local_part(self._averages[name]), local_part(weight)
            if average.is_floating_point() or average.is_complex():
                average.lerp_(value.to(average.dtype), share)
            else:
                average.copy_(value)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model uses the average as its weights, for evaluation, export or saving.

        Weights loaded inside, as by ``checkpoint.import_state_dict``, become the average. Collective.
        """
        states = self._states()
        weights = states.weights()
        old_weights = {name: local_part(weight).clone() for name, weight in weights.items()}
        _fill_weights(weights, self._averages)
        states.set_weights(weights)
        try:
            yield
        finally:
            states = self._states()
            weights = states.weights()
            for name, weight in weights.items():
                average, value = local_part(self._averages[name]), local_part(weight)
                if not torch.equal(average.to(value.dtype), value):  # rounded values are not taken back
                    average.copy_(value)
            _fill_weights(weights, old_weights)
            states.set_weights(weights)


def _fill_weights(weights: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            local_part(weight).copy_(local_part(values[name]))


def _in_fp32(weight: torch.Tensor) -> torch.Tensor:
    value = local_part(weight.detach())
    is_short = value.is_floating_point() and value.itemsize < 4  # 16-bit averages would not move
    return value.to(torch.float32, copy=True) if is_short else value.clone()
