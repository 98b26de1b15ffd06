"""Sequence parallelism between divided layers, as Megatron-LM does it.

Between the regions of a block every rank holds a piece of the sequence. An all-gather leads into a region and
a reduce-scatter out of it, in place of two all-reduces. Norms and dropouts work on pieces, so activations
between regions take 1/n of the memory, and gradients of norms are partial sums.

The stream is divided where the first block of a chain begins, and whole again where the last ends:
embeddings, masks, positions, heads and losses see whole sequences.

Legend: B batch, T tokens, D model width, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.errors import InputError, StepError
from atorch_ns.sharding.rank_context import Gather, RankRandomness, Region, TensorGroup


@dataclass(frozen=True)
class StreamSpec:
    """Blocks that are called one after the other on a divided sequence.

    Attributes:
        chains: paths of the blocks of each chain, in order.
        dim: the dimension of the sequence.
        tight: whether the gather at a region's entry also sums gradients (a reduce-scatter in the backward
            pass). Else each column-parallel layer sums them, which is right for any code before it.
    """

    chains: tuple[tuple[str, ...], ...]
    dim: int = 1
    tight: bool = True

    def holds(self, path: str) -> bool:
        """Returns whether the module at ``path`` is one of the blocks or lies in one."""
        return any(not b or path == b or path.startswith(f"{b}.") for chain in self.chains for b in chain)


def divide_stream(modules: Mapping[str, nn.Module], spec: StreamSpec, group: TensorGroup) -> None:
    """Adds the hooks that divide the stream before each chain, and make it whole after it."""
    for chain in spec.chains:
        for index, path in enumerate(chain):
            _BlockHooks(path, group, spec.dim, first=index == 0, last=index == len(chain) - 1).attach(
                modules[path]
            )


def gather_into(
    module: nn.Module, region: Region, group: TensorGroup, spec: StreamSpec, *, gather: Gather | None = None
) -> None:
    """Gathers the sequence before ``module``, with columns of ``region``; ``gather``: in compiled graphs."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        def whole(x: torch.Tensor) -> torch.Tensor:
            # Columns sum the gradient then: in the backward pass this gather takes its piece alone.
            if not spec.tight:
                return group.gather(x, spec.dim)
            output = group.enter_whole(x, spec.dim, gather)
            if not region.traced:
                region.entered(output)  # columns take it as it is
            return output

        return _on_stream(whole, args, kwargs, spec.dim)

    region.gathers = False
    hook = enter if region.traced else torch.compiler.disable(enter)
    module.register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(eq=False)
class _BlockHooks:
    """The hooks of a block whose stream is divided."""

    path: str
    group: TensorGroup
    dim: int
    first: bool
    last: bool
    random: RankRandomness | None = None

    def attach(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        # Inside of what divides samples, which is there before: its division comes first and goes last.
        block.register_forward_hook(self._leave_block, always_call=True, prepend=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.first:
            args, kwargs = _on_stream(self._scatter_sequence, args, kwargs, self.dim)
        if block.training:  # random numbers of this rank's own: it works on other tokens
            stream = stream_of(args, kwargs, self.dim)
            device = torch.device("cpu") if stream is None else stream.device
            self.random = RankRandomness(self.group.rank, device)
            self.random.enter()
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave_block(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        if self.random is not None:
            self.random.leave()
            self.random = None
        if not self.last or output is None:  # None: the pass failed
            return None
        # Hidden states come first among tensors that have the dimension: a loss of a router has none.
        least = self.dim + 1 if self.dim >= 0 else -self.dim
        hidden = next((tensor for tensor in tensors_of(output) if tensor.dim() >= least), None)
        if hidden is None:
            raise StepError(
                f"the last block returned {type(output).__name__} without a tensor of hidden states."
            )
        whole = self.group.gather(hidden, self.dim)
        return map_tensors(lambda tensor: whole if tensor is hidden else tensor, output)

    def _scatter_sequence(self, x: torch.Tensor) -> torch.Tensor:
        size, degree = x.size(self.dim), self.group.size
        if size % degree:
            raise InputError(
                f"tensor_parallel with sequence=True divides the sequence that enters {self.path or 'the model'} over {degree} "
                f"ranks, but its length {size} (dimension {self.dim} of {tuple(x.shape)}) is not a multiple of "
                f"{degree}. Pad to {size + degree - size % degree}, or set sequence=False."
            )
        return self.group.scatter(x, self.dim)


def _is_stream(value: Any, dim: int) -> bool:
    # Features lie after the sequence: a mask [B, T] is not a stream.
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > dim + 1


def stream_of(args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> torch.Tensor | None:
    """The first floating tensor among the arguments that has the dimension of the sequence."""
    return next((value for value in (*args, *kwargs.values()) if _is_stream(value, dim)), None)


def _on_stream(
    function: Callable[[torch.Tensor], torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], dim: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    stream = stream_of(args, kwargs, dim)
    if stream is None:
        return tuple(args), dict(kwargs)
    output = function(stream)
    options = {name: output if value is stream else value for name, value in kwargs.items()}  # all its places
    return tuple(output if value is stream else value for value in args), options
