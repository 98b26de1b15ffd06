"""New modules from old ones: settings are read off, parameters are moved, never copied.

A class made at run time is a module's own class with another forward pass. The module keeps its attributes,
is still selected by the old class's name and initialised by the model's own rules. Classes are changed for
one module at a time: no class or function of the model is altered.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import stand_for
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.errors import RegistrationError

Forward = Callable[..., Any]
"""A forward pass, ``self`` first."""

MakeForward = Callable[..., Forward]
"""Makes the forward pass from the old class and settings; a module-level function, so it can be pickled."""


class Derived(nn.Module):
    """Marker base of run-time subclasses."""


def derive(module: nn.Module, prefix: str, make: MakeForward, *settings: Any) -> nn.Module:
    """A module with the attributes of ``module`` and the forward pass ``make(type(module), *settings)``.

    Args:
        module: the old module; the two share everything but the forward pass.
        prefix: the beginning of the new class's name.
        make: makes the forward pass; called once for each class and settings.
        settings: hashable values, picklable where the module is to be.
    """
    source: Any = type(module)
    return take_over(module, _make_class(source, prefix, make, settings))


# Cached, so that modules of one class stay of one class: repeated blocks are found by that.
@functools.cache
def _make_class(source: Any, prefix: str, make: MakeForward, settings: tuple[Any, ...]) -> type[nn.Module]:
    # pickle cannot find a class that is made at run time.
    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _rebuild_module, (source, prefix, make, settings), vars(self)

    contents = {
        "__doc__": f"{source.__name__} with a fused forward pass.",
        "__module__": __name__,
        "__reduce__": reduce,
        "forward": make(source, *settings),
    }
    return type(f"{prefix}{source.__name__}", (Derived, source), contents)


def _rebuild_module(source: Any, prefix: str, make: MakeForward, settings: tuple[Any, ...]) -> nn.Module:
    kind = _make_class(source, prefix, make, settings)
    return kind.__new__(kind)  # without __init__: pickle and copy fill it


Convert = Callable[..., nn.Module]
"""Makes the new module from the old one and, by keyword, settings."""

_ABSENT = object()


def converter(source: type[nn.Module], target: type[nn.Module]) -> Convert:
    """Returns a function that makes a ``target`` from a ``source``, the first of these that applies.

    Settings go to the class method or the constructor, or are set as attributes.

    1. ``target.from_module(module)``, a class method.
    2. A subclass of the source: it takes over all attributes. Its ``__init__`` is not called.
    3. The constructor, each parameter read off the attribute of that name. A parameter that is True or
       False where the attribute is a tensor or None (as ``bias`` of Linear) asks whether there is one.
    """
    if callable(getattr(target, "from_module", None)):
        return target.from_module  # type: ignore[attr-defined,no-any-return]
    if issubclass(target, source):
        return functools.partial(_take_over_with, target)
    return functools.partial(_construct_module, target)


def settings_of(convert: Convert, module: nn.Module | None = None) -> tuple[str, ...] | None:
    """The settings that ``convert`` takes; ``None`` for any, or if they depend on ``module``, the old one."""
    made_by = getattr(convert, "func", None)
    if made_by is _take_over_with:
        if module is None:
            return None
        target = convert.args[0]  # type: ignore[attr-defined]
        members = {name for kind in target.__mro__[: target.__mro__.index(nn.Module)] for name in vars(kind)}
        names = {*vars(module), *members} - {*vars(nn.Module()), "forward"}
        return tuple(sorted(name for name in names if not name.startswith("__")))
    try:
        factory = convert.args[0] if made_by is _construct_module else convert  # type: ignore[attr-defined]
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # written in C
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    first = 0 if made_by is _construct_module else 1  # the old module
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(each.name for each in parameters[first:] if each.kind in by_name)


def _take_over_with(target: type[nn.Module], module: nn.Module, **settings: Any) -> nn.Module:
    new = take_over(module, target)
    for name, value in settings.items():
        if not hasattr(new, name):
            raise RegistrationError(f"{target.__name__} has no attribute {name!r} to set.")
        setattr(new, name, value)
    return new


def take_over(module: nn.Module, target: type[nn.Module]) -> nn.Module:
    """A ``target`` with the attributes of ``module``; they share everything."""
    new: nn.Module = target.__new__(target)
    vars(new).update(vars(module))  # parameters, buffers, children and hooks too
    return new


def move_state(old: nn.Module, new: nn.Module) -> None:
    """Gives the parameters and buffers of ``old`` to ``new``, the same objects, by name.

    The mode (training or not) and the class names by which modules are selected move with them.

    Raises:
        RegistrationError: if the two do not have the same ones, of the same shapes.
    """
    theirs, ours = old.state_dict(keep_vars=True), new.state_dict(keep_vars=True)
    missing, extra = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    if missing or extra:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"adds {', '.join(extra)}"] if extra else []
        raise RegistrationError(
            f"the new {type(new).__name__} {' and '.join(parts)}. It must have the parameters and "
            f"buffers of {type(old).__name__} under the same names, or checkpoints would not fit."
        )
    for path, part in old.named_modules(remove_duplicate=False):
        _move_own(part, new, path)
    # By path: inner modules take over the mode and the class names for selectors.
    olds = dict(old.named_modules(remove_duplicate=False))
    for path, part in new.named_modules():
        part.training = olds.get(path, old).training
        if path in olds and olds[path] is not part:
            stand_for(part, olds[path])


def _move_own(part: nn.Module, new: nn.Module, path: str) -> None:
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is None:  # as the bias of Linear(bias=False)
            continue
        target = _find_submodule(new, path)
        there = getattr(target, name, None)
        if isinstance(there, torch.Tensor) and _same_kind(there, tensor):
            setattr(target, name, tensor)
        elif name not in part._non_persistent_buffers_set:  # the new module may work without those
            raise RegistrationError(
                f"{f'{path}.{name}'.lstrip('.')} is {_describe_value(there)} in the new {type(new).__name__} and "
                f"{_describe_value(tensor)} in the {type(part).__name__} it replaces."
            )


def _find_submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _same_kind(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) == isinstance(other, nn.Parameter) and tensor.shape == other.shape


def _describe_value(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "absent"
    what = "a parameter" if isinstance(value, nn.Parameter) else "a buffer"
    return f"{what} of shape {tuple(value.shape)}"


def _construct_module(target: type[nn.Module], module: nn.Module, **settings: Any) -> nn.Module:
    arguments, missing = _constructor_arguments(module, target)
    arguments, missing = {**arguments, **settings}, [name for name in missing if name not in settings]
    if missing:
        raise RegistrationError(
            f"{target.__name__} needs {', '.join(missing)}, but {type(module).__name__} has no such "
            f"attribute. Add a class method from_module(module) to {target.__name__}, or pass convert=."
        )
    tensor = next((t for t in (*module.parameters(), *module.buffers())), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    # Drawn initial values are thrown away, so the random states are kept as they were.
    with random_states_kept(device), device:
        return target(**arguments)


def _constructor_arguments(module: nn.Module, target: type[nn.Module]) -> tuple[dict[str, Any], list[str]]:
    """The constructor's arguments that the module's attributes answer, and the names they do not."""
    arguments: dict[str, Any] = {}
    missing: list[str] = []
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = getattr(module, name, _ABSENT)
        # ``bias`` of a constructor may ask whether there is one, and the attribute is the tensor.
        if _is_yes_or_no(parameter) and (value is None or isinstance(value, torch.Tensor)):
            value = value is not None
        if value is _ABSENT or inspect.isroutine(value) or isinstance(value, torch.Tensor):
            if parameter.default is parameter.empty:
                missing.append(name)
        else:
            arguments[name] = value
    return arguments, missing


def _is_yes_or_no(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool")
