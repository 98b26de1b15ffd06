"""Lists of experts divided over ranks: each rank computes a share of them for the rows of all.

Every rank keeps 1/n of every parameter of every expert, so that names, optimizer states and checkpoints are the same
everywhere. Before a rank computes its share of the experts, the parts of their parameters come to it by one
all-to-all a parameter, of which each rank sends and receives 1/n of the bytes that all experts have.

Legend: E experts, n ranks, R rows of this rank, P rows that come to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call

from atorch_ns.errors import StepError
from atorch_ns.sharding._collectives import all_to_all, scale_gradient
from atorch_ns.sharding._expert_calls import ExpertCalls, Rows, as_answered, once_more
from atorch_ns.sharding._experts_find import ListedExperts
from atorch_ns.sharding._experts_route import Arrived, Route

__all__ = ["divide_expert_list"]


def divide_expert_list(listed: ListedExperts, mesh: DeviceMesh, *, equal: bool) -> None:
    """Leaves each rank its part of the experts' parameters; the layer is called as before; collective.

    Every forward pass of the layer is collective from now on, and so is its backward pass. The gradients of the
    experts are those of the mean of the ranks' losses; of parameters that no dimension divides, each rank has a
    summand.

    Args:
        listed: the experts; the number of ranks divides theirs.
        mesh: a one-dimensional one; its first rank's values are taken.
        equal: whether all ranks hold the same values, so that none need to be sent.
    """
    first = dist.get_process_group_ranks(mesh.get_group())[0]
    for expert in listed.experts:
        for name, parameter in list(expert.named_parameters()):
            dim = listed.dim_of(name, mesh.size())
            if dim is None:
                if not equal:
                    dist.broadcast(parameter.data, src=first, group=mesh.get_group())
                continue
            share = distribute_tensor(
                parameter.detach(), mesh, [Shard(dim)], src_data_rank=None if equal else 0
            )
            local = share.to_local().clone()  # not a view of the whole
            share = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            owner, _, key = name.rpartition(".")
            expert.get_submodule(owner)._parameters[key] = nn.Parameter(
                share, requires_grad=parameter.requires_grad
            )
    _DividedLayer(listed, mesh).attach()


class _DividedLayer:
    """Surrounds the forward passes of a layer with the first of its two passes."""

    def __init__(self, listed: ListedExperts, mesh: DeviceMesh) -> None:
        self._listed = listed
        self._group = mesh.get_group()
        self._calls = ExpertCalls(str(listed))

    def attach(self) -> None:
        """Adds the hooks."""
        as_answered(self._listed.experts, self._calls)
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        self._listed.layer.register_forward_pre_hook(before, with_kwargs=True)
        self._listed.layer.register_forward_hook(after, always_call=True)

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.begin()
        device = next(self._listed.experts[0].parameters()).device
        with once_more(layer, device) as run:
            run(*args, **kwargs)
        rows = self._calls.rows()
        if rows is None:
            raise StepError(
                f"no token of this rank's batch reached {self._listed}, and the other ranks wait for some. Give every "
                "rank at least one token."
            )
        self._calls.answer(self._answers(rows))

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._calls.end()

    def _answers(self, rows: Rows) -> torch.Tensor:
        """What the experts make of the rows, [R, D]; collective."""
        route = Route.find(rows.experts[:, None], len(self._listed.experts), self._group)
        arrived = route.send(rows.features, rows.features.new_ones(len(rows.features), 1))
        return route.bring_back(self._computed(arrived, rows.widths))

    def _computed(self, arrived: Arrived, widths: tuple[int, ...]) -> torch.Tensor:
        """What this rank's experts make of the P rows that came to it."""
        experts = self._listed.experts
        per_rank = len(experts) // self._group.size()
        first = self._group.rank() * per_rank
        parameters = self._parameters(per_rank)
        index = arrived.index[:, 0]
        order = index.argsort(stable=True)
        counts = torch.bincount(index, minlength=per_rank).tolist()
        results = []
        for place, piece in enumerate(arrived.tokens[order].split(counts)):
            if len(piece):
                given = piece.split(widths, -1)
                results.append(functional_call(experts[first + place], parameters[place], given))
        return torch.cat(results)[order.argsort()]

    def _parameters(self, per_rank: int) -> list[dict[str, torch.Tensor]]:
        """The parameters of this rank's experts, whole; collective."""
        ranks, first = self._group.size(), self._group.rank() * per_rank
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(per_rank)]
        every = [dict(expert.named_parameters()) for expert in self._listed.experts]
        for name, like in every[0].items():
            if isinstance(like, DTensor):
                parts = torch.stack([of[name].to_local() for of in every])  # type: ignore[attr-defined]
                dim = 1 + like.placements[0].dim  # type: ignore[attr-defined]
                mine = list(all_to_all(parts, 0, dim, self._group).unbind(0))
            else:
                mine = [of[name] for of in every[first : first + per_rank]]
            for place, tensor in enumerate(mine):
                found[place][name] = scale_gradient(tensor, 1 / ranks)
        return found
