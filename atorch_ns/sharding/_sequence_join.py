"""Which blocks hand divided hidden states to the next one, seen in a forward pass in which none does.

Each block is first a run of its own: it gathers what it gives, so that the code between blocks sees it whole. Such
a pass shows between which blocks that code does nothing, and there hidden states may stay divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.sharding._nested import Path, leaves
from atorch_ns.sharding._runs import find_runs
from atorch_ns.sharding._sequence_plan import find_hidden
from atorch_ns.sharding._sequence_run import SequenceRun, SequenceSettings

__all__ = ["join_at_first_call", "join_blocks"]

Pair = tuple[int, int]
Links = tuple[tuple[Path, Path], ...]
"""Where in a block's results, and where in the next one's arguments, the same tensors are."""


def join_blocks(
    module: nn.Module, runs: Sequence[SequenceRun], settings: SequenceSettings, forward: Callable[[], object]
) -> None:
    """Joins blocks that in ``forward`` take the very tensor that the block before gave; collective.

    ``forward`` runs as in training and as in evaluation, without gradients. Modes, buffers and random states are
    as before afterwards.

    Args:
        module: the model that ``forward`` calls.
        runs: attached, and their blocks not joined.
        settings: of the runs.
        forward: runs the model on the same data on all ranks of the group.
    """
    blocks = [block.module for run in runs for block in run.blocks]
    apart: set[Pair] = set()
    together: set[Pair] = set()
    handed: dict[Pair, Links] = {}
    for training in (True, False):
        with _unchanged(module, settings.device), torch.no_grad():
            module.train(training)
            found, seen = _look(blocks, settings.dim, forward)
        handed.update(seen)
        called = {index for run in found for index in run}
        pairs = {pair for run in found for pair in itertools.pairwise(run)} & seen.keys()
        together |= pairs
        apart |= {
            (index, index + 1)
            for index in range(len(blocks) - 1)
            if {index, index + 1} & called and (index, index + 1) not in pairs
        }
    agreed = _agreed(together - apart, len(blocks), settings)
    first = 0
    for run in runs:
        last = first + len(run.blocks) - 1
        run.join(
            {index - first: handed.get((index, index + 1), ()) for index in agreed if first <= index < last}
        )
        first = last + 1


def join_at_first_call(module: nn.Module, runs: Sequence[SequenceRun], settings: SequenceSettings) -> None:
    """:func:`join_blocks` with the first batch that ``module`` is called with."""

    def before(called: nn.Module, args: Any, kwargs: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        if called is not module:  # a copy
            return
        handle.remove()
        with torch.compiler.set_stance("force_eager"):
            join_blocks(module, runs, settings, lambda: module(*args, **kwargs))
        if isinstance(module, FSDPModule):
            module.unshard()  # as it was before this hook

    handle = module.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True)


def _look(
    blocks: Sequence[nn.Module], dim: int, forward: Callable[[], object]
) -> tuple[list[list[int]], dict[Pair, Links]]:
    """The runs of a pass, and for blocks that gave others their hidden states all that they gave them."""
    handed: dict[Pair, Links] = {}
    last: tuple[int, list[tuple[Path, Any]]] = (-1, [])

    def entering(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = find_hidden((args, kwargs), dim)
            if hidden is not None and any(hidden[1] is leaf for _, leaf in last[1]):
                given = [
                    (path, leaf) for path, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
                ]
                handed[last[0], index] = tuple(
                    (source, path) for path, leaf in given for source, made in last[1] if made is leaf
                )

        return hook

    def leaving(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal last
            last = (index, list(leaves(output)))

        return hook

    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(entering(index), with_kwargs=True, prepend=True))
        handles.append(block.register_forward_hook(leaving(index)))
    try:
        return find_runs(blocks, forward, shared_parameters=True), handed
    finally:
        for handle in handles:
            handle.remove()


def _agreed(pairs: set[Pair], num_blocks: int, settings: SequenceSettings) -> list[int]:
    """The first blocks of the neighbours that all ranks of the group have found."""
    joined = torch.zeros(max(num_blocks, 1), dtype=torch.int32, device=settings.device)
    for index, following in pairs:
        joined[index] = int(following == index + 1)
    dist.all_reduce(joined, op=dist.ReduceOp.MIN, group=settings.group)
    return [index for index, value in enumerate(joined.tolist()) if value]


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Modes and buffers are as before after the block, and random states, which are equal on all ranks in it."""
    modes = {child: child.training for child in module.modules()}
    buffers = [
        (child, name, buffer, buffer.detach().clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(0)
            if devices:
                torch.cuda.manual_seed(0)
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode
        with torch.no_grad():
            for child, name, buffer, value in buffers:
                child._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
