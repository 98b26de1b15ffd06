"""Experts that are modules of their own: the calls of a forward pass, collected first and answered together.

A layer calls its experts one after the other, each on the rows that are routed to it. Rows must travel to the ranks
that hold the experts, and one exchange an expert would let all ranks wait for one. So the layer's code runs twice: in
the first pass its experts note their rows and give zeros; then all rows travel at once and every rank computes its
experts; in the second pass they give the results. The second pass makes the same calls, since routing
does not depend on what experts give; gradients of rows go through the first pass, all others through the second.

Legend: R rows, D features of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from atorch_ns.errors import StepError

__all__ = ["ExpertCalls", "Rows", "as_answered", "not_answered", "once_more"]

_SETTING = "_expert_calls"


@dataclass(frozen=True)
class Rows:
    """What all experts of a layer were called with.

    Attributes:
        features: [R, D], the arguments of each row side by side.
        experts: int64 [R], the expert of each row.
        widths: of each argument.
    """

    features: torch.Tensor
    experts: torch.Tensor
    widths: tuple[int, ...]


class ExpertCalls:
    """The calls of the experts of one layer.

    Args:
        name: of the experts, for messages.

    Attributes:
        state: whether calls are noted, answered, or computed.
    """

    def __init__(self, name: str) -> None:
        self.state: Literal["compute", "note", "answer"] = "compute"
        self._name = name
        self._noted: list[tuple[int, torch.Size, tuple[torch.Tensor, ...]]] = []
        self._answers: list[torch.Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """From here on calls are noted."""
        self.state, self._noted, self._next = "note", [], 0

    def rows(self) -> Rows | None:
        """What has been noted, in the order of calls; ``None`` if no expert was called."""
        self.state = "compute"
        if not self._noted:
            return None
        widths = {tuple(one.size(-1) for one in given) for _, _, given in self._noted}
        if len(widths) > 1:
            raise self._error(f"its experts are called with arguments of different widths: {sorted(widths)}")
        features = torch.cat([torch.cat(given, -1) for _, _, given in self._noted])
        experts = [torch.full((len(given[0]),), number) for number, _, given in self._noted]
        return Rows(features, torch.cat(experts).to(features.device), widths.pop())

    def answer(self, results: torch.Tensor) -> None:
        """From here on calls are answered with ``results`` [R, D'], in the order in which they were noted."""
        self.state = "answer"
        self._answers = list(results.split([len(given[0]) for _, _, given in self._noted]))

    def end(self) -> None:
        """Calls are computed again, and nothing is kept."""
        self.state, self._noted, self._answers = "compute", [], []

    def call(self, number: int, args: Sequence[Any], kwargs: Any) -> torch.Tensor:
        """Notes or answers a call of one expert."""
        if kwargs or not args or not all(isinstance(one, torch.Tensor) and one.dim() for one in args):
            raise self._error("its experts are called with more than tensors of rows")
        lead = args[0].shape[:-1]
        if self.state == "note":
            given = tuple(one.reshape(lead.numel(), -1) for one in args)
            self._noted.append((number, lead, given))
            return torch.zeros_like(args[0])
        place, self._next = self._next, self._next + 1
        if place >= len(self._noted) or self._noted[place][:2] != (number, lead):
            raise self._error(
                f"call {place + 1} of its experts is another one when its code runs again: it may depend on what "
                "experts return"
            )
        return self._answers[place].reshape(*lead, -1)

    def _error(self, reason: str) -> StepError:
        return StepError(
            f"expert_parallel cannot follow the calls of {self._name}: {reason}. Stack the experts' parameters in one "
            "module with forward(hidden_states, top_k_index, top_k_weights), or leave the axis out."
        )


class _Answered:
    """An expert whose calls are noted and answered while its layer runs."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the expert's."""
        calls, number = vars(self)[_SETTING]
        if calls.state == "compute":
            return type(self).whole_forward(self, *args, **kwargs)
        return calls.call(number, args, kwargs)


def as_answered(experts: Sequence[nn.Module], calls: ExpertCalls) -> None:
    """Lets ``calls`` note and answer the calls of ``experts``."""
    for number, expert in enumerate(experts):
        vars(expert)[_SETTING] = (calls, number)
        whole: Any = type(expert)
        expert.__class__ = _class(whole)


def not_answered(experts: Sequence[nn.Module]) -> None:
    """The inverse of :func:`as_answered`."""
    for expert in experts:
        answered: Any = type(expert)
        expert.__class__ = answered.whole_class
        del vars(expert)[_SETTING]


@cache
def _class(whole: Any) -> Any:
    """A subclass of ``whole``; one for all experts, so that their classes are equal."""
    body = {"whole_forward": whole.forward, "whole_class": whole, "__doc__": whole.__doc__}
    return type(f"Answered{whole.__name__}", (_Answered, whole), body)


@contextmanager
def once_more(layer: nn.Module, device: torch.device) -> Iterator[Callable[..., Any]]:
    """A call of the layer's code that leaves random states and buffers as they were."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield layer.forward
        finally:
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, value):  # else the backward pass may still need it as it is
                        buffer.copy_(value)
