"""What each call of a traced pass costs: operations, bytes moved, bytes kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atorch_ns.pipeline._follow import Follower
from atorch_ns.pipeline._graph import CallGraph
from atorch_ns.pipeline._nests import leaves
from atorch_ns.profile._operators import count_flops, is_free, moved_bytes
from atorch_ns.torch_compat import TorchDispatchMode

__all__ = ["CallCosts"]


class CallCosts(TorchDispatchMode):
    """Counts what operators do, call by call. The code before a call counts to it, the code after the last to that.

    Args:
        follower: knows which call runs.
        parameters: tensors that are not kept for the backward pass alone.
    """

    def __init__(self, follower: Follower, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = 0
        self._flops: dict[int, int] = {}
        self._moved: dict[int, int] = {}
        self._saved: dict[int, int] = {}
        self._storages = {p.untyped_storage()._cdata for p in parameters}
        self._kept: list[
            torch.Tensor
        ] = []  # so that no other storage takes the place of one that was counted
        follower.on_call = self._on_call

    @contextmanager
    def counting(self) -> Iterator[CallCosts]:
        """Counts what runs inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed), self:
            yield self

    def added_to(self, graph: CallGraph) -> CallGraph:
        """The graph with these costs."""
        last = len(graph.calls) - 1
        totals = [_until(counted, last) for counted in (self._flops, self._moved, self._saved)]
        calls = tuple(
            replace(
                call,
                flops=totals[0].get(number, 0),
                moved_bytes=totals[1].get(number, 0),
                saved_bytes=totals[2].get(number, 0),
            )
            for number, call in enumerate(graph.calls)
        )
        return replace(graph, calls=calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "prim" and not is_free(func):
            tensors = leaves((args, tuple(kwargs.values()), result))
            self._add(self._flops, count_flops(func, args, kwargs, result))
            self._add(self._moved, sum(moved_bytes(tensors)))
        return result

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._kept.append(tensor.detach())
            self._add(self._saved, storage.nbytes())
        return tensor

    def _add(self, counted: dict[int, int], amount: int) -> None:
        counted[self._call] = counted.get(self._call, 0) + amount

    def _on_call(self, number: int, begins: bool) -> None:
        self._call = number if begins else number + 1


def _until(counted: Mapping[int, int], last: int) -> dict[int, int]:
    totals: dict[int, int] = {}
    for call, amount in counted.items():
        totals[min(call, last)] = totals.get(min(call, last), 0) + amount
    return totals
