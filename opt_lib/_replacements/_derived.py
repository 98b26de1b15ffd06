"""Classes made at run time: a module's own class with another forward pass.

A module whose class derives from its old one keeps its attributes, is still chosen by the old class's name and
initialised by the model's own rules. Classes are changed for one module at a time: no class of the model, and no
function of its module, is altered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from opt_lib._replacements._making import take_over

__all__ = ["Derived", "Forward", "MakeForward", "derive"]

Forward = Callable[..., Any]
"""A forward pass, ``self`` first."""

MakeForward = Callable[..., Forward]
"""Makes the forward pass from the old class and settings; a function of a module, so that it can be pickled."""


class Derived(nn.Module):
    """Marks the classes made here."""


def derive(module: nn.Module, prefix: str, make: MakeForward, *settings: Any) -> nn.Module:
    """A module with the attributes of ``module`` and the forward pass ``make(type(module), *settings)``.

    Args:
        module: gives everything but its forward pass; the two share it.
        prefix: what is put before the name of its class.
        make: makes the forward pass; called once for each class and settings.
        settings: hashable, and picklable where the module is to be.
    """
    source: Any = type(module)
    return take_over(module, _class(source, prefix, make, settings))


@functools.cache
def _class(source: Any, prefix: str, make: MakeForward, settings: tuple[Any, ...]) -> type[nn.Module]:
    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _rebuild, (source, prefix, make, settings), vars(self)

    contents = {
        "__doc__": f"{source.__name__} with a fused forward pass.",
        "__module__": __name__,
        "__reduce__": reduce,
        "forward": make(source, *settings),
    }
    return type(f"{prefix}{source.__name__}", (Derived, source), contents)


def _rebuild(source: Any, prefix: str, make: MakeForward, settings: tuple[Any, ...]) -> nn.Module:
    """An empty module for pickle and copy, which cannot find a class that is made at run time."""
    kind = _class(source, prefix, make, settings)
    return kind.__new__(kind)
