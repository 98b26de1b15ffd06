"""Objects of the user's code, by name."""

from __future__ import annotations

import ast
import difflib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from atorch_ns.cli._modules import imported, imported_file
from atorch_ns.cli._words import a_kind, ended, told
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build_model", "gibibytes", "load_object", "load_sample", "not_built", "wish"]

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

    All names in one file are looked up in one module, which is executed once.

    Args:
        name: as the user wrote it.
        option: for messages.

    Raises:
        InputError: if there is no such module or name, or importing it fails.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        place, _, attribute = name.rpartition(".")
    if not place or not attribute or (name.endswith(".py") and not colon):
        raise InputError(f"{option}={name!r} {_without_name(name)}")
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
    except (Exception, SystemExit) as on_meta:
        try:
            model = built()
        except (Exception, SystemExit) as error:
            raise not_built(name, error) from error
        how = f"the model was built with memory, since on meta: {told(on_meta)}"
    if not isinstance(model, nn.Module):
        raise InputError(f"--model={name!r} returned {a_kind(model)}; it must return a torch.nn.Module.")
    return model, how


def not_built(name: str, error: BaseException) -> InputError:
    """What is said of a ``--model`` that failed, or that ended the process."""
    return InputError(
        ended(f"--model={name!r} could not be built: {told(error)}")
        + " It is called without arguments; write a function that makes the model."
    )


def load_sample(name: str) -> Any:
    """The batch, or what the function returns.

    Raises:
        InputError: if the function fails, or what it returns is no batch or has no samples.
    """
    sample = load_object(name, option="--sample")
    if callable(sample):
        try:
            sample = sample()
        except (Exception, SystemExit) as error:
            raise InputError(ended(f"--sample={name!r} failed: {told(error)}")) from error
    _check_batch(name, sample)
    return sample


def _check_batch(name: str, sample: Any) -> None:
    from atorch_ns.data import batch_sizes

    sizes = batch_sizes(sample)
    if not sizes:
        given = repr(sample) if sample is None or isinstance(sample, (int, float, str)) else a_kind(sample)
        raise InputError(
            f"--sample={name!r} is {given}, which holds no tensor with a dim for samples. It must be one batch: a "
            "tensor, or a dictionary, list or tuple of tensors; or a function without arguments that returns one."
        )
    if 0 in sizes:
        raise InputError(
            f"--sample={name!r} is an empty batch: a tensor of it has no rows. Give it a sample or more."
        )


def _without_name(name: str) -> str:
    """What is wrong with a place that names no object, with the names in the file where there is one."""
    path = name.removesuffix(":")
    if not path.endswith(".py"):
        return "is no place in code. Write pkg.mod:name or file.py:name."
    names = _defined_in(Path(path))
    there = f" It defines {', '.join(names)}." if names else ""
    return f"names a file, and nothing in it. Write {path}:NAME.{there}"


def _defined_in(path: Path) -> list[str]:
    """The public functions and classes of a file, which is read and not run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [each.name for each in tree.body if isinstance(each, kinds) and not each.name.startswith("_")]


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
        return imported_file(Path(place)) if place.endswith(".py") else imported(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.startswith(error.name):
            raise InputError(
                f"{option}: there is no module {place!r} here ({folder}) or where Python looks. Check the name, "
                "or run the command in the folder that holds it."
            ) from None
        raise InputError(ended(f"{option}: importing {place} failed: {error}")) from error
    except (Exception, SystemExit) as error:
        raise InputError(ended(f"{option}: importing {place} failed: {told(error)}")) from error
