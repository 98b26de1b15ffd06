"""Caches of keys and values: left empty in training, where nothing reads them, and copies of what a call may write to."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_FLAG = "use_cache"
_PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def turn_off_caches(model: nn.Module) -> tuple[list[str], list[RemovableHandle]]:
    """Has modules whose config sets ``use_cache`` run without a cache wherever gradients are computed.

    Their configs stay as they are, for evaluation and generation, and so does what a caller passes for ``use_cache``.

    Returns:
        The paths of the modules, outermost first, and the handles of their hooks.
    """
    paths, handles = [], []
    for path, module in model.named_modules():
        if getattr(getattr(module, "config", None), _FLAG, None) is not True:
            continue
        names = list(inspect.signature(module.forward).parameters)
        if _FLAG in names:
            hook = partial(_without_cache, names.index(_FLAG))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            paths.append(path)
    return paths, handles


@contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """:func:`turn_off_caches` inside the block, for copies of the model that are made there too."""
    _, handles = turn_off_caches(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_cache(
    position: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled() or len(args) > position or kwargs.get(_FLAG) is not None:
        return None
    return args, {**kwargs, _FLAG: False}


def can_be_written(value: Any) -> bool:
    """Whether a call may change an argument other than a tensor: a list, a dictionary, or an object such as a cache."""
    if isinstance(value, tuple):
        return any(map(can_be_written, value))
    return not (isinstance(value, _PLAIN) or callable(value))


def copied_state(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of an argument down to its tensors, which are shared; functions and modules are shared too."""
    memo = {} if memo is None else memo
    if not can_be_written(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [copied_state(item, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    try:
        made = memo[id(value)] = copy.copy(value)
    except Exception:  # a class may refuse to be copied: then the object itself is used
        return value
    if isinstance(value, list):
        made[:] = [copied_state(item, memo) for item in value]
    elif isinstance(value, dict):
        made.update({key: copied_state(item, memo) for key, item in value.items()})
    attributes = getattr(made, "__dict__", None)
    if isinstance(attributes, dict):
        attributes.update({name: copied_state(item, memo) for name, item in attributes.items()})
    return made
