"""Reading and writing what training has learned (weights and optimizer states) by the user's names.

How they lie on the ranks is the strategy's business; what they are called is not. A checkpoint therefore
sees every job through :class:`TrainingStates`, whatever has sharded, wrapped or flattened the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from atorch_ns.torch_compat import plain_name

if TYPE_CHECKING:
    from atorch_ns.job._job import Job

__all__ = ["MakeStates", "OptimizerStates", "StateSpec", "StateValue", "TrainingStates", "parameter_names"]

StateValue: TypeAlias = bool | int | float | str | None
"""An entry of an optimizer's state that is no tensor."""


class StateSpec(NamedTuple):
    """Shape (of the whole, over all ranks) and dtype of one tensor of an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer remembers of each parameter, by the parameter's name and then by its own.

    Attributes:
        tensors: plain tensors, or DTensors where this rank holds a shard.
        values: entries that are no tensors.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, StateValue]] = field(default_factory=dict)


class TrainingStates(Protocol):
    """Weights and optimizer states of one job, by the names that the user's model gives its parameters.

    A tied parameter has one name, the first of its names in ``named_parameters()`` order. Every method may
    be collective: all ranks call it, in the same order. A tensor may be plain or a DTensor; whatever it is,
    ``torch.distributed.checkpoint`` must be able to save it and to load into it. A plain tensor that several
    ranks give under one name must be the same on all of them; it may also be given by one rank only.
    """

    def weights(self) -> dict[str, torch.Tensor]:
        """Every parameter, frozen ones included, as precise as the job has it: fp32 masters where there are any.

        The tensors may be the live ones or copies. To change weights, the caller fills them and then calls
        :meth:`set_weights` with them. Every rank that needs a weight must give it here.
        """
        ...

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Makes the job train on with ``weights``, the filled tensors of :meth:`weights`."""
        ...

    def optimizer_class(self) -> str:
        """Qualified name of the optimizer's class; empty without an optimizer."""
        ...

    def group_names(self) -> list[list[str]]:
        """The names of the parameters in each of ``result.optim.param_groups``; on every rank the same."""
        ...

    def optimizer_states(self) -> OptimizerStates:
        """What this rank holds of the optimizer's state; live tensors or copies.

        Raises:
            CheckpointError: for states that can be neither tensors nor plain values of one parameter.
        """
        ...

    def blank_states(
        self, specs: Mapping[str, Mapping[str, StateSpec]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Fresh tensors to be filled, for those of ``specs`` that this rank holds or needs.

        Args:
            specs: of every tensor there will be: parameter name, then the state's name.
        """
        ...

    def set_optimizer_states(self, states: OptimizerStates) -> None:
        """Replaces the optimizer's whole state.

        Args:
            states: the filled tensors of :meth:`blank_states`, and the values of all parameters.
        """
        ...


MakeStates = Callable[["Job", torch.optim.Optimizer | None], TrainingStates]
"""``(job, result.optim) -> its states``. Cheap: made anew for every save and load."""


def parameter_names(module: nn.Module) -> dict[torch.Tensor, list[str]]:
    """All names of every parameter, the first one first, as the model without wrappers inside it has them."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in _named_parameters(module):
        names.setdefault(parameter, []).append(name)
    return names


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter
