"""Recomputation of neighbouring blocks as one: what is kept of them is the input of the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import nn

from atorch_ns.capture.random_states import random_stream
from atorch_ns.errors import StepError
from atorch_ns.text import with_article


class _Together(nn.Module):
    """Runs blocks in sequence. Each gets the previous result, and the first gets the arguments."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self._device = device  # each block has a stream of its random numbers, where there are seeds

    def forward(self, seeds: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        # The first runs in the stream that a stage has begun for it, by seeds[0].
        first, *others = self.blocks
        value = first(*args, **kwargs)
        for number, block in enumerate(others, 1):
            hidden = value[0] if isinstance(value, tuple) else value
            inputs, keywords = _with_first(hidden, args, kwargs)
            with random_stream(seeds[number], self._device) if seeds else nullcontext():
                value = block(*inputs, **keywords)
        return value


@final
class Chunk:
    """Blocks that a model calls one after the other, each with the result of the one before it.

    The first computes all of them; the others pass its result on. Between them the model sees a placeholder
    of NaNs without memory, whose gradient is an error if code uses it. Without gradients blocks are called
    one by one.

    Args:
        function: ``function(module, *args, **kwargs)``, a recomputation.
        device: the device that blocks compute on.
        draw_seeds: gives the seed of each block, in a pipeline; ``()`` or ``None`` for one stream of all.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        draw_seeds: Callable[[], tuple[int, ...]] | None = None,
    ) -> None:
        self._function = function
        self._together = _Together(device)
        self._draw_seeds = draw_seeds
        self._result: Any = None
        self._between: Any = None
        self._next_inputs: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
        self._num_called = 0

    def __len__(self) -> int:
        return len(self._together.blocks)

    def part(self, block: nn.Module) -> Callable[..., Any]:
        """Adds a block and returns the function ``call(block, *args, **kwargs)`` that replaces it."""
        self._together.blocks.append(block)
        return self._start_chunk if len(self) == 1 else self._go_on

    def _start_chunk(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        self._together.training = self._together.blocks[0].training
        seeds = () if self._draw_seeds is None else self._draw_seeds()
        self._result = self._function(self._together, seeds, *args, **kwargs)
        self._num_called = 1
        if len(self) == 1:
            return self._handed_on()
        self._between = between = _make_placeholder(self._result, self._refuse_gradient)
        # The next block must be called with these very objects.
        self._next_inputs = _with_first(between[0] if isinstance(between, tuple) else between, args, kwargs)
        return between

    def _go_on(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        inputs, keywords = self._next_inputs
        alike = len(args) == len(inputs) and kwargs.keys() == keywords.keys()
        # Other code between two blocks would be skipped: a block must get the result of the one before.
        if (
            self._together.blocks[self._num_called % len(self)] is not block
            or not alike
            or any(argument is not other for argument, other in zip(args, inputs, strict=True))
            or any(value is not keywords[name] for name, value in kwargs.items())
        ):
            raise self._call_order_error(block)
        self._num_called += 1
        return self._handed_on() if self._num_called == len(self) else self._between

    def _call_order_error(self, block: nn.Module) -> StepError:
        return StepError(
            f"checkpoint: chunk={len(self)} recomputes neighbouring blocks as one, which needs each to be called with the "
            f"result of the one before it, and otherwise with the same arguments; {with_article(block)} is not. Leave "
            "chunk out."
        )

    def _refuse_gradient(self, _: torch.Tensor) -> None:
        raise self._call_order_error(self._together.blocks[self._num_called % len(self)])

    def _handed_on(self) -> Any:
        result, self._result, self._between, self._next_inputs = self._result, None, None, ((), {})
        return result


def _with_first(
    value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    if args:
        return (value, *args[1:]), kwargs  # the hidden states are the first argument
    return (), {**kwargs, next(iter(kwargs)): value}


def _make_placeholder(result: Any, refuse: Callable[[torch.Tensor], None]) -> Any:
    """NaNs in the shape of a block's result: a tensor, or a tuple of one and of nothing else."""
    if isinstance(result, tuple) and all(other is None for other in result[1:]):
        return (_make_placeholder(result[0], refuse), *result[1:])
    if not isinstance(result, torch.Tensor):
        raise StepError(
            f"checkpoint: chunk recomputes neighbouring blocks as one, which needs them to return a tensor, but they return "
            f"{with_article(result)}. Leave chunk out."
        )
    nan = torch.full((), float("nan"), dtype=result.dtype, device=result.device)  # memory of one element
    placeholder = nan.requires_grad_(result.requires_grad).expand(result.shape)
    if result.requires_grad:
        placeholder.register_hook(refuse)
    return placeholder
