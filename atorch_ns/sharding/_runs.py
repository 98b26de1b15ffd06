"""Runs: consecutive blocks between which nothing but a block sees the hidden states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from atorch_ns.errors import InputError
from atorch_ns.torch_compat import tree_leaves

__all__ = ["find_runs"]

_KINDS = (
    "dtype",
    "device",
    "requires_grad",
    "is_cuda",
    "is_leaf",
    "layout",
    "grad_fn",
    "is_meta",
    "is_sparse",
)


def find_runs(
    blocks: Sequence[nn.Module], forward: Callable[[], object], *, shared_parameters: bool = False
) -> list[list[int]]:
    """Which blocks hand their output to the next one untouched.

    Inside a run hidden states may stay divided. Code between two blocks that reads them, changes them or adds a
    parameter (a mean over the sequence, a learned scale, ``.item()``) must see them whole, so a run ends there.

    Args:
        blocks: in any order.
        forward: runs the model once, undivided; with the loss, where there is one.
        shared_parameters: whether parameters of blocks may be used outside of them, because what is done with
            their gradients leaves alone what each rank computes whole, as a mean over ranks does.

    Returns:
        Indices of ``blocks`` in the order of their calls, run by run. A block that is called twice is alone, each
        time; blocks that are not called are missing.

    Raises:
        InputError: if something outside of a block uses a value that it keeps, of which each rank would see its own
            part; or one of its parameters, whose two gradients a sum over ranks could not tell apart, unless
            ``shared_parameters``.
    """
    watch = _Watch(blocks, shared_parameters)
    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(watch.enter(index), with_kwargs=True, prepend=True))
        handles.append(block.register_forward_hook(watch.leave(index), always_call=True))
    try:
        with watch:
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return watch.runs()


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
        self._kept = _Seen()
        self._given: set[int] = set()
        self._depth = 0
        self._calls: list[int] = []
        self._continues: list[bool] = []
        self._outputs = _Seen()
        self._last: set[int] = set()
        self._read: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._depth > 0:
            self._keep(result)
        elif not _asks_for_its_kind(func):
            self._note((args, kwargs))
            self._refuse((args, kwargs), result)
        return result

    def enter(self, index: int) -> Callable[..., None]:
        """Before a block: does it get what the block before it gave, and nobody else?"""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1
            if self._depth > 1:
                return
            given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            self._given = given
            self._calls.append(index)
            self._continues.append(bool(self._last & given))
            self._note((args, kwargs), but=self._last)

        return hook

    def leave(self, index: int) -> Callable[..., None]:
        """After a block: what it gave is followed from here on."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth:
                return
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._last = {id(tensor) for tensor in tensors}
            place = len(self._calls) - 1
            for tensor in tensors:
                self._outputs.add(tensor, place)
                self._kept.drop(tensor)

        return hook

    def runs(self) -> list[list[int]]:
        """The calls, cut where hidden states do not go on untouched, or a block is called again."""
        found: list[list[int]] = []
        repeated = {index for index in self._calls if self._calls.count(index) > 1}
        for place, (index, continues) in enumerate(zip(self._calls, self._continues, strict=True)):
            untouched = continues and place - 1 not in self._read
            if found and untouched and index not in repeated and found[-1][-1] not in repeated:
                found[-1].append(index)
            else:
                found.append([index])
        return found

    def _note(self, values: Any, but: Collection[int] = ()) -> None:
        """Calls whose outputs are among ``values`` are read by something else than the next block."""
        for leaf in tree_leaves(values):
            place = self._outputs.get(leaf)
            if place is not None and id(leaf) not in but:
                self._read.add(place)

    def _keep(self, result: Any) -> None:
        """Remembers what a block computes for itself."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._given | self._parameters.keys():
                self._kept.add(leaf, self._calls[-1])

    def _refuse(self, values: Any, result: Any) -> None:
        for leaf in tree_leaves(values):
            index = self._kept.get(leaf)
            if index is not None:
                raise InputError(
                    f"the model uses a value that {self._block(index)} computes and does not return, as an attribute "
                    "of the block or by a hook. With the sequence divided each rank would see its own part of it. "
                    "Return it from the block, or do not divide the sequence."
                )
            if self._shared_parameters or id(leaf) not in self._parameters:
                continue
            if _has_tensor(result):
                owner, name = self._parameters[id(leaf)]
                raise InputError(
                    f"{name} of {self._block(owner)} is used outside of that block, in the model's own code or in the "
                    "loss. With the sequence divided its gradient there cannot be told from that of its own part. Use the "
                    "optimizer's weight_decay for penalties, or do not divide the sequence."
                )

    def _block(self, index: int) -> str:
        return f"block {index} ({type(self._blocks[index]).__qualname__})"


class _Seen:
    """A number for each of some tensors, which are not kept alive by it."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def add(self, tensor: torch.Tensor, number: int) -> None:
        self._entries[id(tensor)] = (weakref.ref(tensor), number)

    def drop(self, tensor: torch.Tensor) -> None:
        self._entries.pop(id(tensor), None)

    def get(self, value: Any) -> int | None:
        """The number; ``None`` for any other value. An id may have been given again to another tensor."""
        tensor, number = self._entries.get(id(value), (None, 0))
        return number if tensor is not None and tensor() is value else None


def _asks_for_its_kind(func: Any) -> bool:
    """Whether a tensor is only asked for its dtype, device and the like, which are the same for a part of it."""
    return getattr(getattr(func, "__self__", None), "__name__", "") in _KINDS


def _has_tensor(result: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
