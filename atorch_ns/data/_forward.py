"""Which items of a dictionary the user's ``forward`` takes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch import nn

__all__ = ["forward_signature", "taken_items"]

_log = logging.getLogger(__name__)

_WRAPPED_AS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_WRAPPERS: Final = ("torch", "deepspeed", "peft", "atorch_ns")
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Taken(NamedTuple):
    """Of one ``forward``: the names that it takes, ``None`` for all, and what was said about those it does not."""

    names: frozenset[str] | None
    said: set[tuple[str, ...]]


_READ: Final[weakref.WeakKeyDictionary[Any, _Taken]] = weakref.WeakKeyDictionary()


def taken_items(model: Callable[..., Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The items of ``data`` that the model's ``forward`` names; all of them where it has ``**kwargs``.

    Wrappers (DDP, FSDP, compiled modules, engines) are looked through. Where the signature cannot be read, all items
    are passed. It is read once; the keys that stay out are logged once, at info level.
    """
    taken = _taken_by(model)
    if taken.names is None or taken.names.issuperset(data):
        return data
    left_out = tuple(key for key in data if key not in taken.names)
    if left_out not in taken.said:
        taken.said.add(left_out)
        _log.info(
            "%s of the batch are not passed to the model: forward of %s does not take them. The loss is given the "
            "whole batch.",
            ", ".join(map(repr, left_out)),
            type(_inside(model)).__name__,
        )
    return {key: value for key, value in data.items() if key in taken.names}


def forward_signature(model: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of the user's ``forward``, without ``self``; ``None`` if it cannot be read."""
    try:
        return inspect.signature(_forward(model))
    except (TypeError, ValueError):  # a forward that is not written in Python
        return None


def _taken_by(model: Callable[..., Any]) -> _Taken:
    forward = _forward(model)
    key = forward.func if isinstance(forward, functools.partial) else getattr(forward, "__func__", forward)
    try:
        return _READ[key]
    except (KeyError, TypeError):  # not seen before, or nothing that can be referred to weakly
        taken = _Taken(_names(forward_signature(model)), set())
    with contextlib.suppress(TypeError):
        _READ[key] = taken
    return taken


def _names(signature: inspect.Signature | None) -> frozenset[str] | None:
    if signature is None:
        return None
    parameters = signature.parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters if each.kind in _BY_NAME)


def _forward(model: Callable[..., Any]) -> Callable[..., Any]:
    inside = _inside(model)
    return inside.forward if isinstance(inside, nn.Module) else inside


def _inside(model: Any) -> Any:
    """The user's module inside wrappers of the libraries; a module of the user's that wraps another is the user's."""
    while isinstance(model, nn.Module):
        own = type(model).forward
        package = (getattr(own, "__module__", None) or "").partition(".")[0]
        if package not in _WRAPPERS or not _is_variadic(own):
            return model
        base = getattr(model, "get_base_model", None)  # peft's
        inner = base() if callable(base) else _first(model)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner
    return model


def _first(model: nn.Module) -> Any:
    return next((getattr(model, name) for name in _WRAPPED_AS if name in model._modules), None)


def _is_variadic(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
