"""Experts divided over ranks: each rank holds a share of them and computes it for the tokens of all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atorch_ns.sharding._collectives import scale_gradient
from atorch_ns.sharding._experts_find import FoundExperts
from atorch_ns.sharding._experts_route import Route

__all__ = ["divide_experts"]


def divide_experts(experts: FoundExperts, mesh: DeviceMesh, *, equal: bool) -> None:
    """Leaves each rank its share of the experts of a module, which is called as before; collective.

    Every forward pass of the module is collective from now on, and so is its backward pass. The gradients of the
    experts are those of the mean of the ranks' losses.

    Args:
        experts: the module; the number of ranks divides that of its experts.
        mesh: a one-dimensional one; its first rank's values are taken.
        equal: whether all ranks hold the same values, so that none need to be sent.
    """
    module = experts.module
    source = None if equal else 0
    for name in experts.divided:
        parameter = module._parameters[name]
        assert parameter is not None
        share = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=source)
        local = share.to_local().clone()  # not a view of the whole
        share = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module._parameters[name] = nn.Parameter(share, requires_grad=parameter.requires_grad)
    if not equal:
        group = mesh.get_group()
        for name in experts.whole:
            whole = module.get_parameter(name)
            dist.broadcast(whole.data, src=dist.get_process_group_ranks(group)[0], group=group)
    for name in experts.counts:
        setattr(module, name, experts.num_experts // mesh.size())
    _DividedForward(experts, mesh).attach()


class _DividedForward:
    """Surrounds the forward passes of a module with the exchange of tokens."""

    def __init__(self, experts: FoundExperts, mesh: DeviceMesh) -> None:
        self._num_experts = experts.num_experts
        self._names = (*experts.divided, *experts.whole)
        self._arguments = experts.arguments
        self._signature = inspect.signature(experts.module.forward)
        self._module = experts.module
        self._group = mesh.get_group()
        self._under_way: list[tuple[Route, torch.Size, list[_Place]]] = []

    def attach(self) -> None:
        """Adds the hooks."""
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        self._module.register_forward_pre_hook(before, with_kwargs=True)
        self._module.register_forward_hook(after, always_call=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = self._signature.bind(*args, **kwargs)
        hidden, index, weights = (bound.arguments[name] for name in self._arguments)
        num_choices = index.size(-1)
        route = Route.find(index.reshape(-1, num_choices), self._num_experts, self._group)
        arrived = route.send(hidden.reshape(-1, hidden.size(-1)), weights.reshape(-1, num_choices))
        places = list(self._places(module))
        self._under_way.append((route, hidden.shape, places))
        for place in places:
            place.put(_local(place.parameter, 1 / self._group.size()))
        given = (arrived.tokens, arrived.index, arrived.weights)
        bound.arguments.update(zip(self._arguments, given, strict=True))
        return bound.args, bound.kwargs

    def _after(self, module: nn.Module, args: Any, output: torch.Tensor | None) -> torch.Tensor | None:
        if not self._under_way:  # the pass failed before it began
            return None
        route, shape, places = self._under_way.pop()
        for place in places:
            place.put(place.parameter)
        return None if output is None else route.bring_back(output).view(shape)

    def _places(self, module: nn.Module) -> Iterator[_Place]:
        for name in self._names:
            owner, _, key = name.rpartition(".")
            yield _Place(module.get_submodule(owner), key)


class _Place:
    """Where a module keeps a parameter."""

    def __init__(self, owner: nn.Module, key: str) -> None:
        parameter = owner._parameters[key]
        assert parameter is not None
        self.parameter: torch.Tensor = parameter
        self._owner = owner
        self._key = key

    def put(self, tensor: torch.Tensor) -> None:
        """Lets the module see ``tensor``. Its dictionary takes what is no ``nn.Parameter``; assignment would not."""
        self._owner._parameters[self._key] = tensor  # type: ignore[assignment]


def _local(parameter: torch.Tensor, scale: float) -> torch.Tensor:
    plain = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return scale_gradient(plain, scale)
