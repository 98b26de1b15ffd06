"""What one forward pass shows of blocks: which hand on to which, what leaves them beside their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from atorch_ns.profile import repeated_blocks
from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.sharding._runs import find_runs
from atorch_ns.sharding._tensor_sequence import stream_of
from atorch_ns.torch_compat import TorchDispatchMode, plain_name

__all__ = ["BlockTrace", "follow_blocks"]


@dataclass
class BlockTrace:
    """Blocks that a model repeats, as one forward pass called them.

    Attributes:
        runs: paths of blocks between which nothing else sees the hidden states, in the order of calls.
        results: the first tensor that each block gave at its first call.
        users: for each parameter, by all its names, the paths of the blocks whose code uses it with gradients;
            an empty path stands for code outside blocks.
        kept: why hidden states of a block are seen outside it though it does not return them, by path.
    """

    runs: list[list[str]] = field(default_factory=list)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    users: dict[str, set[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def follow_blocks(
    model: nn.Module, forward: Callable[[], object], *, original: nn.Module | None = None, runs: bool = True
) -> BlockTrace:
    """Runs ``forward``, one undivided forward pass of ``model``, and follows what its blocks do.

    Args:
        model: whose blocks are followed.
        forward: runs it, and the loss where there is one.
        original: what ``model`` is a copy of: a loss that reaches for its parameters uses them too.
        runs: whether to look for runs.

    Raises:
        InputError: of :func:`find_runs`.
    """
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for block in repeated_blocks(model):
        blocks.setdefault(id(block.module), (plain_name(block.name), block.module))
    paths = [path for path, _ in blocks.values()]
    watch = _BlockWatch((model,) if original is None else (model, original))
    with watch.hooks(dict(blocks.values())), watch:
        found: list[list[int]] = []
        if runs:
            found = find_runs([module for _, module in blocks.values()], forward)
        else:
            forward()
    watch.look_at_buffers(model)
    # A block that is called again and again is alone each time, and one run.
    watch.trace.runs = [list(run) for run in dict.fromkeys(tuple(paths[i] for i in run) for run in found)]
    return watch.trace


class _BlockWatch(TorchDispatchMode):
    """Follows what is made of a block's input, by the memory it lies in."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = BlockTrace()
        self._block = ""
        self._given: set[int] = set()
        self._made: dict[int, str] = {}
        self._alive: list[Any] = []  # a freed storage's address would be used again
        self._names: dict[int, list[str]] = {}
        for model in models:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self._names.setdefault(_memory(parameter), []).append(plain_name(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        memories = [_memory(tensor) for tensor in tensors_in((args, kwargs))]
        self._note(func, memories)
        output = func(*args, **kwargs)
        hidden = bool(self._block) and any(m in self._given or m in self._made for m in memories)
        for tensor in (*tensors_in(output), *_written(func, args, kwargs)):
            memory = _memory(tensor)
            if hidden and memory not in self._given:
                self._made[memory] = self._block
                self._alive.append(tensor.untyped_storage())
        return output

    def _note(self, func: Any, memories: list[int]) -> None:
        for memory in memories:
            if (
                memory in self._names
                and torch.is_grad_enabled()
                and func is not torch.ops.aten.detach.default
            ):
                for name in self._names[memory]:
                    self.trace.users.setdefault(name, set()).add(self._block)
            maker = self._made.get(memory, self._block)
            if maker != self._block:
                where = f"in {self._block}" if self._block else "outside it"
                self.trace.kept.setdefault(maker, f"code {where} uses what it makes and does not return")

    @contextmanager
    def hooks(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follows the calls of ``blocks``."""
        handles = []
        for path, block in blocks.items():
            handles.append(block.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave(path), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def look_at_buffers(self, model: nn.Module) -> None:
        """Buffers that blocks write hidden states into stay beyond the pass."""
        for name, buffer in model.named_buffers():
            block = self._made.get(_memory(buffer))
            if block is not None:
                self.trace.kept.setdefault(block, f"it updates {plain_name(name)} from them")

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._block:
                return
            self._block = path
            stream = stream_of(args, kwargs, 0)
            self._given = set() if stream is None else {_memory(stream)}

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._block != path:
                return
            self._block, self._given = "", set()
            tensors = tensors_in(output)
            for tensor in tensors:
                self._made.pop(_memory(tensor), None)
            if tensors:
                self.trace.results.setdefault(path, tensors[0])

        return hook


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator changes; those of batch norm are not declared."""
    schema = func._schema
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    names = {argument.name for argument in schema.arguments if _is_changed(argument)}
    if values.get("training", values.get("train")) is True:
        names |= {"running_mean", "running_var"}
    return [value for name, value in values.items() if name in names and isinstance(value, torch.Tensor)]


def _is_changed(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
