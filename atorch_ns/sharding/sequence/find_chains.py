"""Chains of blocks that may hand divided hidden states to each other, found in a pass in which none does.

Each block is a chain of its own at first: it gathers its results, so that the code between blocks sees them
whole. Such a pass shows where that code does nothing; there hidden states may stay divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from atorch_ns.capture.blocks import call_hooks
from atorch_ns.capture.nests import Path, leaves, tensors_of
from atorch_ns.capture.random_states import BatchNorm, buffers_and_generators_kept, modes_kept
from atorch_ns.errors import InputError
from atorch_ns.sharding.sequence.block_chain import BlockChain
from atorch_ns.sharding.sequence.plan import SequenceSettings, find_hidden

# Properties that tell nothing of a tensor's values: their getters may be called by code between blocks.
_METADATA = (
    "dtype", "device", "requires_grad", "is_cuda", "is_leaf", "layout", "grad_fn", "is_meta", "is_sparse",
)  # fmt: skip


def find_chains(
    blocks: Sequence[nn.Module], forward: Callable[[], object], *, shared_parameters: bool = False
) -> list[list[int]]:
    """Finds chains of blocks that pass their output unchanged to the next block.

    Inside a chain hidden states may stay divided. Code between two blocks that reads or changes them or adds
    a parameter (a mean, a learned scale, ``.item()``) must see them whole and ends a chain.

    Args:
        blocks: the blocks, in any order.
        forward: runs the model once, undivided; with the loss, where there is one.
        shared_parameters: whether parameters of blocks may be used outside of them, because their gradients
            are reduced so that whole computations stay unchanged, as by a mean over ranks.

    Returns:
        Indices of ``blocks`` in the order of their calls, chain by chain. A block that is called twice is a
            chain of its own each time; blocks that are not called are missing.

    Raises:
        InputError: if something outside of a block uses a value that it keeps, of which each rank would see
            its own part; or, without ``shared_parameters``, one of its parameters, whose two gradients a sum
            over ranks could not tell apart.
    """
    watch = _Watch(blocks, shared_parameters)
    with call_hooks(enumerate(blocks), watch.enter, watch.leave, prepend=True, always=True), watch:
        forward()
    return watch.chains()


class _Watch(TorchFunctionMode):
    """Follows the outputs of blocks through the code between them."""

    def __init__(self, blocks: Sequence[nn.Module], shared_parameters: bool) -> None:
        super().__init__()
        self._blocks = blocks
        self._shared_parameters = shared_parameters
        self._parameters = {
            id(parameter): (index, name)
            for index, block in enumerate(blocks)
            for name, parameter in block.named_parameters()
        }
        self._makers = WeakTensorKeyDictionary()  # the block that computed a tensor inside
        self._inputs: set[int] = set()  # ids of the running block's arguments
        self._depth = 0  # nesting depth of blocks; 0 between them
        self._calls: list[int] = []  # indices of the blocks called
        self._continues: list[bool] = []  # for each call, whether it takes a result of the one before
        self._outputs = WeakTensorKeyDictionary()  # the call that returned a tensor
        self._last: set[int] = set()  # ids of the last call's results
        self._read: set[int] = set()  # calls whose results other code has read

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._depth > 0:
            self._record_inner_tensors(result)
        elif getattr(getattr(func, "__self__", None), "__name__", "") not in _METADATA:
            self._mark_read_outputs((args, kwargs))
            self._refuse_outside_uses((args, kwargs), result)
        return result

    def enter(self, index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Pre-forward hook. Notes whether the block takes the previous output and what else read it."""
        self._depth += 1
        if self._depth > 1:
            return
        self._inputs = {id(tensor) for tensor in tensors_of((args, kwargs))}
        self._calls.append(index)
        self._continues.append(bool(self._last & self._inputs))
        self._mark_read_outputs((args, kwargs), but=self._last)

    def leave(self, _: int, __: nn.Module, args: Any, output: Any) -> None:
        """Forward hook. Follows the block's output from here on."""
        self._depth -= 1
        if self._depth:
            return
        tensors = tensors_of(output)
        self._last = {id(tensor) for tensor in tensors}
        for tensor in tensors:
            self._outputs[tensor] = len(self._calls) - 1
            self._makers.pop(tensor, None)  # it is returned

    def chains(self) -> list[list[int]]:
        """The calls, split where hidden states are not passed on unchanged or a block is called again."""
        segments: list[list[int]] = []
        repeats = {index for index in self._calls if self._calls.count(index) > 1}
        for position, (index, continues) in enumerate(zip(self._calls, self._continues, strict=True)):
            is_direct = continues and position - 1 not in self._read
            if segments and is_direct and index not in repeats and segments[-1][-1] not in repeats:
                segments[-1].append(index)
            else:
                segments.append([index])
        return segments

    def _mark_read_outputs(self, values: Any, but: Collection[int] = ()) -> None:
        for leaf in tensors_of(values):
            position = self._outputs.get(leaf)
            if position is not None and id(leaf) not in but:
                self._read.add(position)

    def _record_inner_tensors(self, result: Any) -> None:
        for leaf in tensors_of(result):
            if id(leaf) not in self._inputs | self._parameters.keys():  # a function may return its argument
                self._makers[leaf] = self._calls[-1]

    def _refuse_outside_uses(self, values: Any, result: Any) -> None:
        for leaf in tensors_of(values):
            index = self._makers.get(leaf)
            if index is not None:
                raise InputError(
                    f"the model uses a value that {self._block_label(index)} computes and does not return, as an attribute "
                    "of the block or by a hook. With the sequence divided each rank would see its own part of it. "
                    "Return it from the block, or do not divide the sequence."
                )
            if self._shared_parameters or id(leaf) not in self._parameters:
                continue
            if tensors_of(result):  # else it asked for a dtype or a shape
                owner, name = self._parameters[id(leaf)]
                raise InputError(
                    f"{name} of {self._block_label(owner)} is used outside of that block, in the model's own code or in the "
                    "loss. With the sequence divided, its gradient from there cannot be told apart from the block's own. Use the "
                    "optimizer's weight_decay for penalties, or do not divide the sequence."
                )

    def _block_label(self, index: int) -> str:
        return f"block {index} ({type(self._blocks[index]).__qualname__})"


Pair = tuple[int, int]
Links = tuple[tuple[Path, Path], ...]
"""Paths of the same tensors in a block's results and the next one's arguments, hidden states first."""


def join_blocks(
    module: nn.Module, chains: Sequence[BlockChain], settings: SequenceSettings, forward: Callable[[], object]
) -> None:
    """Joins blocks that take the exact tensor that the previous block returned. Collective.

    ``forward`` runs in training and in evaluation, without gradients.

    Args:
        chains: attached chains whose blocks are not joined.
        forward: runs the model on the same data on all ranks of the group.

    Raises:
        InputError: if no block that runs can be divided.
    """
    blocks = [block.module for chain in chains for block in chain.blocks]
    links = find_links(module, blocks, settings.dim, settings.device, forward=forward)
    refusals = [why for chain in chains for why in chain.left_whole().values()]
    if refusals and not any(chain.plans() for chain in chains):
        raise refusals[0]
    indices = _agree_on_pairs(links.keys(), len(blocks), settings)
    first = 0  # index of the chain's first block among those of all chains
    for chain in chains:
        last = first + len(chain.blocks) - 1
        chain.join({index - first: links[index, index + 1] for index in indices if first <= index < last})
        first = last + 1


def find_links(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    dim: int,
    device: torch.device,
    *,
    forward: Callable[[], object],
) -> dict[Pair, Links]:
    """Pairs of blocks in which the second takes the exact result of the first, in training and evaluation.

    Modes, buffers and random states are restored afterwards.

    Args:
        blocks: blocks of ``module``. Pairs hold their indices.
        dim: the hidden states' dimension of positions.
        forward: runs ``module``, undivided.
    """
    separate: set[Pair] = set()
    adjacent: set[Pair] = set()
    links: dict[Pair, Links] = {}
    for training in (True, False):
        with _preserve_state(module, device), torch.no_grad():
            module.train(training)
            for norm in module.modules():
                if isinstance(norm, BatchNorm):  # it refuses to train on a single value per channel
                    norm.eval()
            chains, new_links = _observe_chains(blocks, dim, forward)
        links.update(new_links)
        active = {index for chain in chains for index in chain}
        pairs = {pair for chain in chains for pair in itertools.pairwise(chain)} & new_links.keys()
        adjacent |= pairs
        # A pair is not joined in any mode if one mode calls one block without the other.
        separate |= {
            (index, index + 1)
            for index in range(len(blocks) - 1)
            if {index, index + 1} & active and (index, index + 1) not in pairs
        }
    return {pair: links[pair] for pair in adjacent - separate}


def join_at_first_call(module: nn.Module, chains: Sequence[BlockChain], settings: SequenceSettings) -> None:
    """Runs :func:`join_blocks` with the first batch that ``module`` is called with."""

    def before(instance: nn.Module, args: Any, kwargs: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        if instance is not module:  # a copy
            return
        handle.remove()
        with torch.compiler.set_stance("force_eager"):  # a compiled graph would hide functions and hooks
            join_blocks(module, chains, settings, lambda: module(*args, **kwargs))
        if isinstance(module, FSDPModule):
            module.unshard()  # as it was before this hook

    handle = module.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True)


def _observe_chains(
    blocks: Sequence[nn.Module], dim: int, forward: Callable[[], object]
) -> tuple[list[list[int]], dict[Pair, Links]]:
    links: dict[Pair, Links] = {}
    last: tuple[int, list[tuple[Path, Any]]] = (-1, [])

    def entering(index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = find_hidden((args, kwargs), dim)
        if hidden is not None and any(hidden[1] is leaf for _, leaf in last[1]):
            others = [(path, leaf) for path, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            # Hidden states come first, then other tensors that the block before has returned.
            inputs = [hidden, *(entry for entry in others if entry[0] != hidden[0])]
            links[last[0], index] = tuple(
                (source, path) for path, leaf in inputs for source, tensor in last[1] if tensor is leaf
            )

    def leaving(index: int, _: nn.Module, args: Any, output: Any) -> None:
        nonlocal last
        last = (index, list(leaves(output)))

    with call_hooks(enumerate(blocks), entering, leaving, prepend=True):
        return find_chains(blocks, forward, shared_parameters=True), links


def _agree_on_pairs(pairs: Iterable[Pair], num_blocks: int, settings: SequenceSettings) -> list[int]:
    flags = torch.zeros(max(num_blocks, 1), dtype=torch.int32, device=settings.device)
    for index, following in pairs:
        flags[index] = int(following == index + 1)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=settings.group)  # 1 where every rank has found it
    return [index for index, value in enumerate(flags.tolist()) if value]


@contextmanager
def _preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    with modes_kept(module), buffers_and_generators_kept(module, device):
        torch.default_generator.manual_seed(0)  # equal numbers on all ranks, and so equal branches
        if device.type == "cuda":
            torch.cuda.manual_seed(0)
        yield
