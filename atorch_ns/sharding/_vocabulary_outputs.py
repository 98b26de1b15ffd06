"""Letting the heads of a model give divided logits, and its callers see whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from atorch_ns.sharding._divided_logits import whole_logits
from atorch_ns.sharding._tensor_layers import keep_divided

__all__ = ["LogitOutputs"]


class LogitOutputs:
    """What leaves a model whose heads give divided logits: the whole ones, but inside a training step.

    In a step the output goes to the loss function alone, so it stays divided there.
    """

    def __init__(self) -> None:
        self._in_step = False

    def __deepcopy__(self, memo: Any) -> LogitOutputs:
        return self

    def attach(self, model: nn.Module, heads: Sequence[nn.Module]) -> None:
        """Lets divided ``heads`` of ``model`` give divided logits."""
        for head in heads:
            keep_divided(head)
        model.register_forward_hook(self._leave)

    @contextmanager
    def stay_divided(self) -> Iterator[None]:
        """A training step."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._in_step else whole_logits(output)
