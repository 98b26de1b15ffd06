"""Fused experts divided over ranks, and the route of tokens to the ranks that hold their experts and back.

Each rank computes its share of the experts for the tokens of all ranks. A token goes once to each rank that
holds any of its experts. No token is dropped, so numbers of rows vary; ranks exchange them first.

Legend: N tokens of this rank, D model, K choices a token, E experts, S ranks, R rows (a token for one rank),
P pairs (a token and one expert).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atorch_ns.sharding.collectives import exchange, scale_gradient
from atorch_ns.sharding.expert.find import FoundExperts
from atorch_ns.sharding.rank_context import local_part


@dataclass(frozen=True)
class Arrived:
    """The P pairs of token and expert that this rank computes.

    Attributes:
        tokens: ``[P, D]``.
        index: ``[P, 1]``, counted from this rank's first expert.
        weights: ``[P, 1]``.
    """

    tokens: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Route:
    """The destinations of rows in one forward pass.

    Attributes:
        group: the ranks that divide the experts.
        num_tokens: N.
        row_tokens: ``[R]``, the token of each row sent, sorted by the rank it goes to.
        choices: ``[P]``, indices of the sent weights among the ``N * K`` choices, in the same order.
        sent_rows, received_rows: rows to and from each rank.
        sent_pairs, received_pairs: pairs to and from each rank.
        pair_rows: ``[P']``, the token row of each pair that arrives.
        pair_experts: ``[P']``, the local expert of each pair that arrives.
    """

    group: dist.ProcessGroup
    num_tokens: int
    row_tokens: torch.Tensor
    choices: torch.Tensor
    sent_rows: list[int]
    received_rows: list[int]
    sent_pairs: list[int]
    received_pairs: list[int]
    pair_rows: torch.Tensor
    pair_experts: torch.Tensor

    @classmethod
    @torch.no_grad()
    def find(cls, index: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Route:
        """Finds the route of tokens to their chosen experts. Collective.

        Args:
            index: ``[N, K]``, the choices; ``num_experts`` stands for none.
            num_experts: E; rank ``r`` of the group holds those from ``r * E / S`` on.
        """
        ranks, per_rank = group.size(), num_experts // group.size()
        num_tokens, num_choices = index.shape
        experts = index.reshape(-1).long()  # [N K]
        # [N K], the rank that holds the expert of each choice; S for a choice of none.
        target = torch.div(experts, per_rank, rounding_mode="floor").clamp(max=ranks)
        order = torch.argsort(target, stable=True)  # choices by rank; those of none come last
        target = target[order]
        tokens = torch.div(order, num_choices, rounding_mode="floor")  # [N K], the token of each choice
        goes = torch.zeros(ranks + 1, num_tokens, dtype=torch.bool, device=index.device)  # [S + 1, N]
        goes[target, tokens] = True  # once for each rank, however many of its experts are chosen
        position = goes.long().cumsum(1) - 1  # index of a token among those sent to one rank
        # [S + 1]: choices to each rank; bincount would wait for the device.
        pairs_to = target.new_zeros(ranks + 1).scatter_add(0, target, torch.ones_like(target))
        counts = torch.stack([goes[:ranks].sum(1), pairs_to[:ranks]], dim=1)  # [S, 2], rows and pairs
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        # One copy to the host, which waits for the device: exchanges need their sizes there.
        (sent_rows, sent_pairs), (received_rows, received_pairs) = torch.stack([counts, arriving]).mT.tolist()
        valid = slice(0, sum(sent_pairs))  # without choices of none
        # [P, 2]: index of a pair's row among those sent to its rank, and the expert's local index there.
        pairs = torch.stack([position[target, tokens], experts[order] - target * per_rank], dim=1)[valid]
        pairs = exchange(pairs, sent_pairs, received_pairs, group)
        row_counts = torch.tensor(received_rows, device=index.device)  # [S]
        # [P'], where the rows of a pair's sender begin. Without output_size the host waits for the device.
        first_rows = (row_counts.cumsum(0) - row_counts).repeat_interleave(
            torch.tensor(received_pairs, device=index.device), output_size=sum(received_pairs)
        )
        return cls(
            group=group,
            num_tokens=num_tokens,
            row_tokens=goes[:ranks].nonzero()[:, 1],
            choices=order[valid],
            sent_rows=sent_rows,
            received_rows=received_rows,
            sent_pairs=sent_pairs,
            received_pairs=received_pairs,
            pair_rows=first_rows + pairs[:, 0],
            pair_experts=pairs[:, 1],
        )

    def send(self, hidden: torch.Tensor, weights: torch.Tensor) -> Arrived:
        """Sends tokens ``[N, D]`` and weights ``[N, K]`` to the experts. Collective.

        A rank that receives nothing gets a pair of zeros, so its backward pass runs with zero gradients.
        """
        rows = exchange(hidden[self.row_tokens], self.sent_rows, self.received_rows, self.group)
        pair_weights = weights.reshape(-1, 1)[self.choices]
        pair_weights = exchange(pair_weights, self.sent_pairs, self.received_pairs, self.group)
        tokens, index = rows[self.pair_rows], self.pair_experts[:, None]
        if len(index) == 0:
            tokens = torch.cat([tokens, tokens.new_zeros(1, hidden.size(1))])
            pair_weights = torch.cat([pair_weights, pair_weights.new_zeros(1, 1)])
            index = index.new_zeros(1, 1)
        return Arrived(tokens, index, pair_weights)

    def bring_back(self, results: torch.Tensor) -> torch.Tensor:
        """Sends the experts' results ``[P, D]`` back and sums them per token to ``[N, D]``. Collective."""
        mine = results[: len(self.pair_rows)]  # drops the pair of zeros of a rank that received none
        # Results are summed per token before they are sent, so one row per token and rank travels back.
        rows = _RowSums.apply(mine, self.pair_rows, sum(self.received_rows))  # type: ignore[no-untyped-call]
        rows = exchange(rows, self.received_rows, self.sent_rows, self.group)
        # The addition saves its indices for the backward pass. As the last operator to save anything, it
        # makes a recomputation, which stops there, communicate as often as the forward pass on every rank.
        return _RowSums.apply(rows, self.row_tokens, self.num_tokens)  # type: ignore[no-any-return, no-untyped-call]


class _RowSums(torch.autograd.Function):
    """Sums of rows by index. ``index_add`` alone would keep the rows for the backward pass, not their index only."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(number, rows.size(1)).index_add_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


def divide_experts(experts: FoundExperts, mesh: DeviceMesh, *, equal: bool) -> None:
    """Divides the experts of a module over the ranks. The module is called as before. Collective.

    Its forward and backward passes become collective. Gradients are those of the mean of the ranks' losses.

    Args:
        experts: the module. The number of ranks must divide its number of experts.
        mesh: a one-dimensional mesh. The values of its first rank are used.
        equal: whether all ranks hold the same values, so that none need to be sent.
    """
    module = experts.module
    for name in experts.divided:
        parameter = module._parameters[name]
        assert parameter is not None
        module._parameters[name] = shard_parameter(parameter, mesh, 0, equal=equal)
    if not equal:
        group = mesh.get_group()
        for name in experts.whole:
            whole = module.get_parameter(name)
            dist.broadcast(whole.data, src=dist.get_process_group_ranks(group)[0], group=group)
    for name in experts.counts:
        setattr(module, name, experts.num_experts // mesh.size())
    _DividedForward(experts, mesh).attach()


def shard_parameter(parameter: torch.Tensor, mesh: DeviceMesh, dim: int, *, equal: bool) -> nn.Parameter:
    """Divides a parameter along ``dim`` over ``mesh``. Collective.

    ``equal``: whether all ranks hold the same values, so that those of the first need not be sent.
    """
    share = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None if equal else 0)
    local = share.to_local().clone()  # not a view of the whole
    share = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return nn.Parameter(share, requires_grad=parameter.requires_grad)


class _Slot(NamedTuple):
    """A parameter and the module's dictionary that holds it. Unlike assignment, it accepts any tensor."""

    table: dict[str, Any]
    key: str
    parameter: torch.Tensor


class _DividedForward:
    """Hooks that exchange tokens before and after the forward passes of a module."""

    def __init__(self, experts: FoundExperts, mesh: DeviceMesh) -> None:
        self._num_experts = experts.num_experts
        self._names = (*experts.divided, *experts.whole)
        self._arguments = experts.arguments
        self._signature = inspect.signature(experts.module.forward)
        self._module = experts.module
        self._group = mesh.get_group()
        self._under_way: list[tuple[Route, torch.Size, list[_Slot]]] = []  # a stack of running passes

    def attach(self) -> None:
        before, after = torch.compiler.disable(self._send_tokens), torch.compiler.disable(self._return_tokens)
        self._module.register_forward_pre_hook(before, with_kwargs=True)
        self._module.register_forward_hook(after, always_call=True)  # also after a pass that failed

    def _send_tokens(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        binding = self._signature.bind(*args, **kwargs)
        hidden, index, weights = (binding.arguments[name] for name in self._arguments)
        num_choices = index.size(-1)
        route = Route.find(index.reshape(-1, num_choices), self._num_experts, self._group)
        arrivals = route.send(hidden.reshape(-1, hidden.size(-1)), weights.reshape(-1, num_choices))
        places = list(self._parameter_slots(module))
        self._under_way.append((route, hidden.shape, places))
        for slot in places:
            # The code sees this rank's plain part, whose gradient is a mean over the ranks' losses.
            slot.table[slot.key] = scale_gradient(local_part(slot.parameter), 1 / self._group.size())
        values = (arrivals.tokens, arrivals.index, arrivals.weights)
        binding.arguments.update(zip(self._arguments, values, strict=True))
        return binding.args, binding.kwargs

    def _return_tokens(
        self, module: nn.Module, args: Any, output: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not self._under_way:  # the pass failed before it began
            return None
        route, shape, places = self._under_way.pop()
        for slot in places:
            slot.table[slot.key] = slot.parameter
        return None if output is None else route.bring_back(output).view(shape)  # None: the pass failed

    def _parameter_slots(self, module: nn.Module) -> Iterator[_Slot]:
        for name in self._names:
            owner, _, key = name.rpartition(".")
            parameters: dict[str, Any] = module.get_submodule(owner)._parameters
            yield _Slot(parameters, key, parameters[key])
