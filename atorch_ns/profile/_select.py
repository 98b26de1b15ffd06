"""Choosing modules of a model by class or by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from torch import nn

from atorch_ns.profile._blocks import NamedModule
from atorch_ns.torch_compat import is_stand_in, pipeline_unit, plain_name, unwrap_checkpoint

__all__ = ["class_names", "matches", "select_modules", "stand_for"]

_STANDS_FOR = "_stands_for_classes"


def select_modules(
    model: nn.Module, selectors: Iterable[str], *, outermost: bool = False
) -> list[NamedModule]:
    """The modules that any selector matches, in the order of ``model.named_modules()``, the root excluded.

    Args:
        model: where to look. Wrapped modules are matched by what is inside; the wrapper is returned.
        selectors: class names (``"LlamaDecoderLayer"``), qualified class names, or dotted paths, which may
            hold ``*`` (``"layers.*"``). A base class selects its subclasses.
        outermost: leave out what lies inside a module already selected.
    """
    wanted = tuple(selectors)
    found: list[NamedModule] = []
    for name, module in model.named_modules():
        if not name or name.endswith("_checkpoint_wrapped_module") or _belongs_to_pipeline(module):
            continue
        if outermost and any(name.startswith(f"{chosen.name}.") for chosen in found):
            continue
        if matches(plain_name(name), unwrap_checkpoint(module), wanted):
            found.append(NamedModule(name, module))
    return found


def _belongs_to_pipeline(module: nn.Module) -> bool:
    """Whether it is a wrapper whose inside will be found too, or stands for a module of another rank."""
    return pipeline_unit(module)[1] is not module or is_stand_in(module)


def matches(name: str, module: nn.Module, selectors: Iterable[str]) -> bool:
    """Whether one of the selectors means this module."""
    classes = class_names(module)
    return any(
        selector in classes or (fnmatch.fnmatchcase(name, selector) and not _selects_all(selector))
        for selector in selectors
    )


def class_names(module: nn.Module) -> set[str]:
    """Names of a module's class and its bases below ``nn.Module``: bare, qualified, and with the module's name.

    Those of a module that it was made to stand for are among them.
    """
    names: set[str] = set(vars(module).get(_STANDS_FOR, ()))
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        names |= {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
    return names


def stand_for(new: nn.Module, old: nn.Module) -> None:
    """Lets ``new``, put in the place of ``old``, be selected by the class names of ``old`` too.

    A strategy is written, and checked, against the classes of the user's model; methods that replace modules
    must not make the selectors of later methods miss them.
    """
    vars(new)[_STANDS_FOR] = tuple(sorted(class_names(old)))


def _selects_all(selector: str) -> bool:
    """A bare ``*`` would select every module inside every other, which nobody means."""
    return selector.strip("*") == ""
