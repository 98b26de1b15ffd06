"""Objects of the user's code, by name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from atorch_ns.cli._words import a_kind, ended
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build_model", "gibibytes", "load_object", "load_sample", "wish"]

_MEMORY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(TiB|GiB|MiB|TB|GB|MB)?\s*", re.IGNORECASE)
_GIBIBYTES = {
    "tib": 1024.0,
    "gib": 1.0,
    "mib": 1 / 1024,
    "tb": 1e12 / 2**30,
    "gb": 1e9 / 2**30,
    "mb": 1e6 / 2**30,
}


def load_object(name: str, *, option: str) -> Any:
    """What ``pkg.mod:name``, ``pkg.mod.name`` or ``file.py:name`` means, looked for here and where Python looks.

    Args:
        name: as the user wrote it.
        option: for messages.

    Raises:
        InputError: if there is no such module or name, or importing it fails.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        place, _, attribute = name.rpartition(".")
    if not place or not attribute:
        raise InputError(f"{option}={name!r} is no place in code. Write pkg.mod:name or file.py:name.")
    found: Any = _module(place, option)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [each for each in dir(found) if not each.startswith("_")]
            near = difflib.get_close_matches(part, public, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise InputError(f"{option}={name!r}: {place} has no {part!r}.{hint}")
        found = getattr(found, part)
    return found


def build_model(name: str) -> tuple[nn.Module, str]:
    """The model, on meta where it can be built there, and a sentence on where it was.

    Raises:
        InputError: if it cannot be built, or is no module.
    """
    import torch
    from torch import nn

    built = load_object(name, option="--model")
    if isinstance(built, nn.Module):
        return built, "the model was there already"
    if not callable(built):
        raise InputError(f"--model={name!r} is {a_kind(built)}; it must be a module, or build one.")
    try:
        with torch.device("meta"):
            model = built()
        how = "the model was built on meta, without memory"
    except Exception as on_meta:
        try:
            model = built()
        except Exception as error:
            raise InputError(
                ended(f"--model={name!r} could not be built: {type(error).__name__}: {error}")
                + " It is called without arguments; write a function that makes the model."
            ) from error
        how = f"the model was built with memory, since on meta: {type(on_meta).__name__}: {on_meta}"
    if not isinstance(model, nn.Module):
        raise InputError(f"--model={name!r} returned {a_kind(model)}; it must return a torch.nn.Module.")
    return model, how


def load_sample(name: str) -> Any:
    """The batch, or what the function returns.

    Raises:
        InputError: if the function fails.
    """
    sample = load_object(name, option="--sample")
    if not callable(sample):
        return sample
    try:
        return sample()
    except Exception as error:
        raise InputError(ended(f"--sample={name!r} failed: {type(error).__name__}: {error}")) from error


def gibibytes(text: str | None) -> float | None:
    """``"70GiB"`` or ``"512 MiB"`` as GiB; a bare number is GiB.

    Raises:
        InputError: if it is no amount of memory.
    """
    if text is None:
        return None
    match = _MEMORY.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--memory-limit={text!r} is no amount of memory. Write it as 70GiB or 512MiB.")
    return float(match[1]) * _GIBIBYTES[(match[2] or "GiB").lower()]


def wish(text: str) -> str | tuple[str, Any]:
    """A name, or ``name=config`` whose config is JSON or a word."""
    name, equals, config = text.partition("=")
    if not equals:
        return text
    try:
        return name, json.loads(config)
    except ValueError:
        return name, config


def _module(place: str, option: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.startswith(error.name):
            raise InputError(
                f"{option}: there is no module {place!r} here ({folder}) or where Python looks. Check the name, "
                "or run the command in the folder that holds it."
            ) from None
        raise InputError(ended(f"{option}: importing {place} failed: {error}")) from error
    except Exception as error:
        raise InputError(
            ended(f"{option}: importing {place} failed: {type(error).__name__}: {error}")
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by name.
    ours = sys.modules.setdefault(path.stem, module) is module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if ours:
            del sys.modules[path.stem]
        raise
    return module
