"""The user's model without the wrappers inside it, while the user's own functions look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from atorch_ns.torch_compat import WRAPPER_PREFIXES

__all__ = ["bare"]


@contextmanager
def bare(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, ``model`` has the modules and the parameter names that the user gave them.

    Wrappers around modules below ``model`` (of recomputation, of sharding) stand aside; they are back at the
    end. Nothing may be run inside.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and _inner(child) is not child:
                replaced.append((parent, name, child))
    for parent, name, child in replaced:
        parent._modules[name] = _inner(child)
    try:
        yield model
    finally:
        for parent, name, child in replaced:
            parent._modules[name] = child


def _inner(module: nn.Module) -> nn.Module:
    for prefix in WRAPPER_PREFIXES:
        inner = module._modules.get(prefix.removesuffix("."))
        if inner is not None:
            return _inner(inner)
    return module
