"""States of jobs whose model keeps its parameters, plain or DTensor, and whose optimizer keys states by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from atorch_ns.errors import CheckpointError
from atorch_ns.job._layout import divided_like
from atorch_ns.job._optimizer import StepOptimizer, inner_optimizer
from atorch_ns.job._packing import Packing
from atorch_ns.job._stages import in_user_order, on_all_stages
from atorch_ns.job._states import OptimizerStates, StateSpec, StateValue, parameter_names

if TYPE_CHECKING:
    from atorch_ns.job._job import Job

__all__ = ["ParameterStates"]


class ParameterStates:
    """The default :class:`~atorch_ns.job.TrainingStates`.

    Where several ranks hold the stages of a pipeline, each gives its own parameters; a parameter of two stages is
    given by both. Fused parameters that lie in another order than the user's are given in the user's, as copies.

    Args:
        job: a built job.
        optimizer: the one its result has.
        holder: from the user's optimizer to the one that holds this rank's states, where those differ, as
            ``operator.attrgetter("optim")`` for ``ZeroRedundancyOptimizer``.
    """

    def __init__(
        self,
        job: Job,
        optimizer: torch.optim.Optimizer | None,
        *,
        holder: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None = None,
    ) -> None:
        for module in job.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves parameters gathered: plain tensors in place of the shards
        masters = optimizer.masters if isinstance(optimizer, StepOptimizer) else None
        aliases = parameter_names(job.module)
        self._job = job
        self._parameters = {_user_name(job, names): p for p, names in aliases.items()}
        self._packings = {
            _user_name(job, names): job.packings[name]
            for names in aliases.values()
            for name in names
            if name in job.packings
        }
        self._trained = {
            name: p if masters is None else masters.of(p) for name, p in self._parameters.items()
        }
        self._names = {tensor: name for name, tensor in self._trained.items()}
        self._outer = None if optimizer is None else inner_optimizer(optimizer)
        self._holder = self._outer
        if self._outer is not None and holder is not None:
            self._holder = holder(self._outer)

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that the optimizer updates: masters where there are any. Collective for fused ones."""
        return {name: self._unpacked(name, tensor.detach()) for name, tensor in self._trained.items()}

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes over ``weights``, and rounds masters into the parameters they stand for."""
        for name, value in weights.items():
            trained, parameter = self._trained[name], self._parameters[name]
            trained.copy_(self._packed(name, value))
            if parameter is not trained:
                parameter.copy_(trained)

    def optimizer_class(self) -> str:
        """The class of the optimizer that holds the states."""
        if self._holder is None:
            return ""
        return f"{type(self._holder).__module__}.{type(self._holder).__qualname__}"

    def group_names(self) -> list[list[str]]:
        """Names by group, in the order of the user's model where ranks hold stages of it; collective then."""
        if self._outer is None:
            return []
        own = [[self._names[p] for p in group["params"]] for group in self._outer.param_groups]
        if self._job.stage_group is None:
            return own
        stages = on_all_stages(self._job, own)
        return [
            in_user_order(self._job, (name for stage in stages for name in stage[place]))
            for place in range(len(own))
        ]

    def optimizer_states(self) -> OptimizerStates:
        """The live tensors, and the entries that are no tensors.

        Raises:
            CheckpointError: naming the first entry that belongs to no parameter or is neither.
        """
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        values: dict[str, dict[str, StateValue]] = {}
        for key, state in {} if self._holder is None else self._holder.state.items():
            name = self._names.get(key) if isinstance(key, torch.Tensor) else None
            if name is None or not isinstance(state, Mapping):
                raise self._unsupported(f"it keeps {type(state).__name__} under {str(key)[:80]!r}")
            for entry, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(name, {})[entry] = self._unpacked(name, value.detach())
                elif value is None or isinstance(value, (bool, int, float, str)):
                    values.setdefault(name, {})[entry] = value
                else:
                    raise self._unsupported(f"its state {entry!r} of {name} is a {type(value).__name__}")
        return OptimizerStates(tensors, values)

    def blank_states(
        self, specs: Mapping[str, Mapping[str, StateSpec]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors laid out like the parameters that this rank's optimizer updates."""
        return {
            name: {entry: self._blank(tensor, options, entry, spec) for entry, spec in specs[name].items()}
            for name, tensor, options in self._held()
            if name in specs
        }

    def set_optimizer_states(self, states: OptimizerStates) -> None:
        """Replaces the state of every parameter that this rank's optimizer updates."""
        if self._holder is None:
            return
        self._holder.state.clear()
        for name, tensor, _ in self._held():
            filled = {
                entry: _like_its_parameter(self._packed(name, value), tensor)
                for entry, value in states.tensors.get(name, {}).items()
            }
            if state := {**filled, **states.values.get(name, {})}:
                self._holder.state[tensor] = state

    def _unpacked(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """``value`` in the user's order: itself, or a copy divided as it is."""
        packing = self._packing_of(name, value)
        if packing is None or not isinstance(value, DTensor):
            return value
        return divided_like(packing.unpack(value.full_tensor()), value)

    def _packed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        packing = self._packing_of(name, value)
        if packing is None or not isinstance(value, DTensor):
            return value
        return divided_like(packing.pack(value.full_tensor()), value)

    def _packing_of(self, name: str, value: torch.Tensor) -> Packing | None:
        """That of a parameter, for whatever has its shape."""
        return self._packings.get(name) if value.shape == self._parameters[name].shape else None

    def _held(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, Any]]]:
        """Name, tensor and group options of each parameter that this rank's optimizer updates."""
        for group in () if self._holder is None else self._holder.param_groups:
            for tensor in group["params"]:
                yield self._names[tensor], tensor, group

    @staticmethod
    def _blank(tensor: torch.Tensor, options: Mapping[str, Any], entry: str, spec: StateSpec) -> torch.Tensor:
        if spec.shape == tuple(tensor.shape) and tensor.dim() > 0:
            return torch.empty_like(tensor.detach(), dtype=spec.dtype)
        # As in torch's own load_state_dict: the step counter stays on the CPU unless a kernel reads it.
        on_device = entry != "step" or options.get("capturable") or options.get("fused")
        return torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device if on_device else "cpu")

    def _unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the state of {type(self._holder).__name__} cannot be saved: {what}. Checkpoints hold tensors, "
            "numbers and texts that belong to one parameter each."
        )


def _user_name(job: Job, names: list[str]) -> str:
    """The first name that the user's model has for a parameter; a stage may hold it under a later one only."""
    for first, others in job.tied.items():
        if first in names or not set(others).isdisjoint(names):
            return first
    return names[0]


def _like_its_parameter(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``value``, as a DTensor if the parameter is one and the state is of a size to take part in its algebra."""
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False
    )
