"""Reading ATorch's pickled strategy files without running what they carry."""

from __future__ import annotations

import builtins
import io
import pickle
import sys
from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.errors import InputError, StrategyFileError
from atorch_ns.strategy.strategy import Strategy
from atorch_ns.text import with_article

_BUILTINS = frozenset({"list", "dict", "tuple", "set", "frozenset", "str", "int", "float", "bool", "bytes"})
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})  # which become their names
_STRATEGY_CLASSES = frozenset(
    {("atorch.auto.strategy", "Strategy"), ("atorch.auto.strategy", "OptimizationMethod")}
)


class _PickledObject:
    """Placeholder of an ATorch object, which only keeps the object's state."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _KnownNamesUnpickler(pickle.Unpickler):
    """Resolves a short list of names; classes that the caller allows become their names, never code."""

    def __init__(self, content: bytes, names: Collection[str]) -> None:
        super().__init__(io.BytesIO(content))
        self._class_names = frozenset(names)

    def find_class(self, module: str, name: str) -> Any:
        # Every name in a pickle is looked up here; only constructors of plain values come back themselves.
        if module in ("builtins", "__builtin__") and name in _BUILTINS:
            return getattr(builtins, name)  # constructors of plain values
        if (module, name) in _STRATEGY_CLASSES:
            return _PickledObject
        if f"{module}.{name}" in self._class_names:
            return f"{module}.{name}"  # a name, which is never resolved
        if module == "torch" and name in _DTYPES:
            return name
        if (reason := _no_module_class(module, name)) is not None:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, and {reason}. No ATorch strategy contains this; do not trust this file"
            )
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which is not on the list of known names. If it is one of your module "
            f"classes, allow its name: --class {module}.{name}, or classes={{'{module}.{name}'}} of convert_pickle"
        )


def convert_pickle(path: str | PathLike[str], *, classes: Collection[str] = ()) -> Strategy:
    """Reads the pickle that ATorch wrote and returns it as a strategy. Nothing in the file is executed.

    Args:
        path: the file that ATorch's ``save_strategy_to_file`` wrote.
        classes: qualified names of module classes that the configs may refer to, as
            ``{"transformers.models.gpt2.modeling_gpt2.GPT2Block"}``. They become names; none is imported.

    Raises:
        InputError: if one of ``classes`` is a function, or of Python's own library.
        StrategyFileError: if the file is missing, is not a pickle, refers to anything else, or lists no method.
    """
    file_path = Path(path)
    for each in classes:
        _check_class(each)
    try:
        value = _KnownNamesUnpickler(file_path.read_bytes(), classes).load()
        entries = _read_entries(value, str(file_path), classes)
    except OSError as error:
        raise StrategyFileError(f"cannot read {file_path}: {error}", source=str(file_path)) from error
    except StrategyFileError:
        raise
    except Exception as error:  # a damaged pickle may raise anything; nothing of it has been executed
        raise StrategyFileError(f"not converted: {error}", source=str(file_path)) from error
    return Strategy(entries, provenance={"converted_from": "atorch pickle"})


def _check_class(name: str) -> None:
    """Raises InputError for a name that can be no module class; nothing is imported."""
    module, _, last = name.rpartition(".")
    reason = _no_module_class(module, last) if module else "it names no module: write package.module.Class"
    if reason is not None:
        raise InputError(f"{name} cannot be allowed: {reason}. Name only subclasses of torch.nn.Module.")


def _no_module_class(module: str, name: str) -> str | None:
    """The reason why a name cannot be a subclass of ``torch.nn.Module``; ``None`` if it may be one."""
    if module.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:  # a script may define modules
        return f"{module} belongs to Python's own library, which has no torch.nn.Module"
    if module not in sys.modules:
        return None  # nothing is imported to find out
    from torch import nn

    attribute = vars(sys.modules[module]).get(name)
    if attribute is None or (isinstance(attribute, type) and issubclass(attribute, nn.Module)):
        return None
    kind = f"{with_article(attribute)}" if not isinstance(attribute, type) else "a class of another kind"
    return f"it is {kind}"


def _read_entries(value: Any, source: str, classes: Collection[str]) -> list[Any]:
    if isinstance(value, _PickledObject):
        state = value.state if isinstance(value.state, dict) else {}
        value = state.get("opt_list", value.items)  # of ATorch's Strategy
    if not isinstance(value, (list, tuple)):
        raise StrategyFileError(
            f"holds {with_article(value)} where a list of methods is expected", source=source
        )
    return [_read_entry(item, classes) for item in value]


def _read_entry(item: Any, classes: Collection[str]) -> Any:
    if isinstance(item, _PickledObject):
        state = item.state if isinstance(item.state, dict) else {}
        return (state.get("name"), state.get("config"))
    # ATorch pickles each config a second time, inside the list, as bytes.
    if isinstance(item, (list, tuple)) and len(item) >= 2 and isinstance(item[1], bytes):
        return (item[0], _KnownNamesUnpickler(item[1], classes).load() if item[1] else None)
    return item
