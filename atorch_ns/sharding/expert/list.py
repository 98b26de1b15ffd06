"""Lists of experts that are modules of their own, divided over ranks; each rank computes a share for all.

Every rank keeps 1/n of every parameter of every expert, so that names, optimizer states and checkpoints are
the same everywhere. Before a rank computes its share of the experts, it receives their parameters by one
all-to-all per parameter. Each rank sends and receives 1/n of the bytes that all experts have.

A layer calls its experts one after the other, each on the rows routed to it. Rows must travel to the ranks
that hold the experts, and one exchange per expert would make all ranks wait for one. So the layer's code runs
twice. In the first pass calls of its experts are recorded and return zeros. Then all rows travel at once and
every rank computes its experts. In the second pass the same calls return the results, since routing does not
depend on them. Gradients of rows go through the first pass, all others through the second.

Legend: E experts, n ranks, D features of a row, R rows of this rank, P rows that arrive at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from atorch_ns.capture.random_states import buffers_and_generators_kept
from atorch_ns.errors import StepError
from atorch_ns.sharding.collectives import all_to_all, scale_gradient
from atorch_ns.sharding.expert.find import ListedExperts
from atorch_ns.sharding.expert.fused import Arrived, Route, shard_parameter
from atorch_ns.sharding.rank_context import divide_class

_SETTING = "_expert_calls"  # the attribute of an expert that holds its calls and its number


def divide_expert_list(moe: ListedExperts, mesh: DeviceMesh, *, equal: bool) -> None:
    """Divides the experts' parameters over the ranks. The layer is called as before. Collective.

    The layer's forward and backward passes become collective. Gradients are those of the mean of the ranks'
    losses. Each rank holds a summand of the gradient of a parameter that cannot be divided.

    Args:
        moe: the experts. The number of ranks must divide their number.
        mesh: a one-dimensional mesh. The values of its first rank are used.
        equal: whether all ranks hold the same values, so that none need to be sent.
    """
    first = dist.get_process_group_ranks(mesh.get_group())[0]
    for expert in moe.experts:
        for name, parameter in list(expert.named_parameters()):
            dim = moe.dim_of(name, mesh.size())
            if dim is None:  # it stays whole, and each rank has a summand of its gradient
                if not equal:
                    dist.broadcast(parameter.data, src=first, group=mesh.get_group())
                continue
            owner, _, key = name.rpartition(".")
            share = shard_parameter(parameter, mesh, dim, equal=equal)
            expert.get_submodule(owner)._parameters[key] = share
    _DividedLayer(moe, mesh).attach()


class _DividedLayer:
    """Hooks that run the first of the two passes before each forward pass of a layer."""

    def __init__(self, moe: ListedExperts, mesh: DeviceMesh) -> None:
        self._moe = moe
        self._group = mesh.get_group()
        self._calls = ExpertCalls(str(moe))

    def attach(self) -> None:
        intercept(self._moe.experts, self._calls)
        before, after = torch.compiler.disable(self._answer_calls), torch.compiler.disable(self._end_calls)
        self._moe.layer.register_forward_pre_hook(before, with_kwargs=True)
        self._moe.layer.register_forward_hook(after, always_call=True)

    def _answer_calls(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.begin()
        device = next(self._moe.experts[0].parameters()).device
        # First pass, without hooks, of which this is one. The second one begins with the same random states.
        with buffers_and_generators_kept(layer, device):
            layer.forward(*args, **kwargs)
        rows = self._calls.rows()
        if rows is None:
            raise StepError(
                f"no token of this rank's batch reached {self._moe}, but the other ranks wait for some. Give every "
                "rank at least one token."
            )
        self._calls.answer(self._route_rows(rows))

    def _end_calls(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._calls.end()

    def _route_rows(self, rows: Rows) -> torch.Tensor:
        route = Route.find(rows.experts[:, None], len(self._moe.experts), self._group)
        # A row has one expert, with weight 1: the layer's code weights the results itself.
        arrivals = route.send(rows.features, rows.features.new_ones(len(rows.features), 1))
        return route.bring_back(self._compute_local_experts(arrivals, rows.widths))  # [R, D]

    def _compute_local_experts(self, arrivals: Arrived, widths: tuple[int, ...]) -> torch.Tensor:
        experts = self._moe.experts
        per_rank = len(experts) // self._group.size()
        first = self._group.rank() * per_rank
        parameters = self._local_expert_parameters(per_rank)

        def compute(index: int, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            output: torch.Tensor = functional_call(experts[first + index], parameters[index], inputs)
            return output

        return Rows(arrivals.tokens, arrivals.index[:, 0], widths).results(per_rank, compute)  # [P, D]

    def _local_expert_parameters(self, per_rank: int) -> list[dict[str, torch.Tensor]]:
        # Each rank sends its part of every expert to the rank that computes it: one all-to-all a parameter.
        ranks, first = self._group.size(), self._group.rank() * per_rank
        parameters: list[dict[str, torch.Tensor]] = [{} for _ in range(per_rank)]
        every = [dict(expert.named_parameters()) for expert in self._moe.experts]
        for name, like in every[0].items():
            if isinstance(like, DTensor):
                parts = torch.stack([of[name].to_local() for of in every])  # type: ignore[attr-defined]
                # From [E, …] with parts along `dim` to whole ones of this rank's experts, [E / n, …].
                dim = 1 + like.placements[0].dim  # type: ignore[attr-defined]
                mine = list(all_to_all(parts, 0, dim, self._group).unbind(0))
            else:
                mine = [of[name] for of in every[first : first + per_rank]]  # whole on every rank
            for index, tensor in enumerate(mine):
                parameters[index][name] = scale_gradient(tensor, 1 / ranks)  # the mean over the ranks' losses
        return parameters


@dataclass(frozen=True)
class Rows:
    """The arguments of all calls of a layer's experts.

    Attributes:
        features: [R, D], the arguments of each row side by side.
        experts: int64 [R], the expert of each row.
        widths: the width of each argument.
    """

    features: torch.Tensor
    experts: torch.Tensor
    widths: tuple[int, ...]

    def results(
        self, num_experts: int, compute: Callable[[int, tuple[torch.Tensor, ...]], torch.Tensor]
    ) -> torch.Tensor:
        """The results of ``compute(expert, arguments)`` for each expert's rows, in the order of the rows."""
        order = self.experts.argsort(stable=True)  # [R]; stable: calls keep their order
        counts = torch.bincount(self.experts, minlength=num_experts).tolist()
        pieces = enumerate(self.features[order].split(counts))
        outputs = [compute(expert, piece.split(self.widths, -1)) for expert, piece in pieces if len(piece)]
        return torch.cat(outputs)[order.argsort()]  # back in the order of the rows


class ExpertCalls:
    """The calls of the experts of one layer.

    Args:
        name: the experts' name, for messages.

    Attributes:
        state: whether calls are recorded, answered, or computed.
    """

    def __init__(self, name: str) -> None:
        self.state: Literal["compute", "record", "answer"] = "compute"
        self._name = name
        self._records: list[tuple[int, torch.Size, tuple[torch.Tensor, ...]]] = []
        self._answers: list[torch.Tensor] = []
        self._next = 0  # the next call of the second pass

    def begin(self) -> None:
        """Starts recording calls."""
        self.state, self._records, self._next = "record", [], 0

    def rows(self) -> Rows | None:
        """The recorded rows, in the order of calls; ``None`` if no expert was called."""
        self.state = "compute"  # between the passes experts are computed
        if not self._records:
            return None
        widths = {tuple(tensor.size(-1) for tensor in inputs) for _, _, inputs in self._records}
        if len(widths) > 1:
            raise self._calls_error(
                f"its experts are called with arguments of different widths: {sorted(widths)}"
            )
        features = torch.cat([torch.cat(inputs, -1) for _, _, inputs in self._records])
        experts = [torch.full((len(inputs[0]),), number) for number, _, inputs in self._records]
        return Rows(features, torch.cat(experts).to(features.device), widths.pop())

    def answer(self, results: torch.Tensor) -> None:
        """Starts answering calls with ``results`` [R, D'], in the order in which they were recorded."""
        self.state = "answer"
        self._answers = list(results.split([len(inputs[0]) for _, _, inputs in self._records]))

    def end(self) -> None:
        """Forgets the calls; from here on calls are computed."""
        self.state, self._records, self._answers = "compute", [], []

    def call(self, number: int, args: Sequence[Any], kwargs: Any) -> torch.Tensor:
        """Records or answers a call of one expert."""
        if (
            kwargs
            or not args
            or not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in args)
        ):
            raise self._calls_error("its experts get arguments that are not tensors of rows")
        lead = args[0].shape[:-1]
        if self.state == "record":
            inputs = tuple(tensor.reshape(lead.numel(), -1) for tensor in args)  # [rows, width] each
            self._records.append((number, lead, inputs))
            return torch.zeros_like(args[0])  # results are taken to be as wide as the first argument
        index, self._next = self._next, self._next + 1
        if index >= len(self._records) or self._records[index][:2] != (number, lead):  # another call
            raise self._calls_error(
                f"call {index + 1} of its experts differs when its code runs again: it may depend on what "
                "experts return"
            )
        return self._answers[index].reshape(*lead, -1)

    def _calls_error(self, reason: str) -> StepError:
        return StepError(
            f"expert_parallel cannot follow the calls of {self._name}: {reason}. Stack the experts' parameters in one "
            "module with forward(hidden_states, top_k_index, top_k_weights), or leave the axis out."
        )


class _Intercepted:
    """An expert whose calls are recorded and answered while its layer runs."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls, number = vars(self)[_SETTING]
        if calls.state == "compute":
            return type(self).whole_forward(self, *args, **kwargs)
        return calls.call(number, args, kwargs)


def intercept(experts: Sequence[nn.Module], calls: ExpertCalls) -> None:
    """Makes ``calls`` record and answer the calls of ``experts``."""
    for number, expert in enumerate(experts):
        vars(expert)[_SETTING] = (calls, number)
        divide_class(expert, _Intercepted)


def release(experts: Sequence[nn.Module]) -> None:
    """The inverse of :func:`intercept`."""
    for expert in experts:
        kind: Any = type(expert)
        expert.__class__ = kind.whole_class
        del vars(expert)[_SETTING]
