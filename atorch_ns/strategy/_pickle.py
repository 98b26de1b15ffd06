"""Reading ATorch's pickled strategy files without running what they carry."""

from __future__ import annotations

import builtins
import io
import pickle
from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.errors import StrategyFileError
from atorch_ns.strategy._strategy import Strategy

__all__ = ["convert_pickle"]

_BUILTINS = frozenset({"list", "dict", "tuple", "set", "frozenset", "str", "int", "float", "bool", "bytes"})
_STRATEGY_CLASSES = frozenset(
    {("atorch.auto.strategy", "Strategy"), ("atorch.auto.strategy", "OptimizationMethod")}
)


class _PickledObject:
    """Stands for an ATorch object; keeps its state and does nothing with it."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _KnownNamesUnpickler(pickle.Unpickler):
    """Resolves a short list of names; classes that the caller allows become their names, never code."""

    def __init__(self, content: bytes, allowed: Collection[str]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = frozenset(allowed)

    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in _BUILTINS:
            return getattr(builtins, name)
        if (module, name) in _STRATEGY_CLASSES:
            return _PickledObject
        if f"{module}.{name}" in self._allowed:
            return f"{module}.{name}"
        if module == "torch" and name in _dtype_names():
            return name
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not on the list of known names")


def convert_pickle(path: str | PathLike[str], *, classes: Collection[str] = ()) -> Strategy:
    """Reads the pickle that ATorch wrote and returns it as a strategy. Nothing in the file is executed.

    Args:
        path: the file that ATorch's ``save_strategy_to_file`` wrote.
        classes: qualified names of module classes that the configs may refer to, as
            ``{"transformers.models.gpt2.modeling_gpt2.GPT2Block"}``. They become names; none is imported.

    Raises:
        StrategyFileError: if the file is missing, is not a pickle, refers to anything else, or does not
            hold a list of methods.
    """
    place = Path(path)
    try:
        content = place.read_bytes()
        value = _KnownNamesUnpickler(content, classes).load()
    except OSError as error:
        raise StrategyFileError(f"cannot read {place}: {error}", source=str(place)) from error
    except Exception as error:  # a damaged pickle may raise anything; nothing of it has been executed
        raise StrategyFileError(
            f"not converted: {error}. If the name is a module class you trust, pass it in classes=",
            source=str(place),
        ) from error
    return Strategy(_entries(value, str(place)), provenance={"converted_from": "atorch pickle"})


def _dtype_names() -> frozenset[str]:
    return frozenset({"float16", "bfloat16", "float32", "float64"})


def _entries(value: Any, source: str) -> list[Any]:
    if isinstance(value, _PickledObject):
        state = value.state if isinstance(value.state, dict) else {}
        value = state.get("opt_list", value.items)
    if not isinstance(value, (list, tuple)):
        raise StrategyFileError(
            f"holds a {type(value).__name__} where a list of methods is expected", source=source
        )
    return [_entry(item) for item in value]


def _entry(item: Any) -> Any:
    if isinstance(item, _PickledObject):
        state = item.state if isinstance(item.state, dict) else {}
        return (state.get("name"), state.get("config"))
    return _decoded(item)


def _decoded(item: Any) -> Any:
    # ATorch pickles each config a second time, inside the list, as bytes.
    if isinstance(item, (list, tuple)) and len(item) >= 2 and isinstance(item[1], bytes):
        config = _KnownNamesUnpickler(item[1], ()).load() if item[1] else None
        return (item[0], config)
    return item
