"""User code: modules, the model and the sample batch by name, and the code of functions."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from atorch_ns.errors import InputError
from atorch_ns.text import did_you_mean, error_text, with_article, with_period

if TYPE_CHECKING:
    from torch import nn


def import_once(name: str) -> ModuleType:
    """Imports a module by its dotted name, or returns it if its file was imported under another name.

    Raises:
        ModuleNotFoundError: if there is no such module.
        Exception: whatever the module raises while it is executed.
    """
    if name in sys.modules:
        return sys.modules[name]
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None and spec.has_location:
        there = _module_with(Path(spec.origin))
        if there is not None:
            return there
    return importlib.import_module(name)


def imported_file(path: Path) -> ModuleType:
    """Imports the module of a file, which is executed once per process.

    Other files import it by its name: ``pkg.mod`` inside a package, else the file's stem. Its folder is
    searched for modules last. If the stem means another module, such as ``json``, it gets a unique name.

    Raises:
        FileNotFoundError: if there is no such file.
        Exception: whatever the file raises while it is executed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    path = path.absolute()
    there = _module_with(path)
    if there is not None:
        return there
    name, folder = _name_and_root(path)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that it shadows nothing
    importlib.invalidate_caches()
    if _is_found_at(name, path):
        return importlib.import_module(name)
    digest = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()
    return _execute_file(f"_{path.stem}_{digest[:12]}", path)  # its stem is the name of another module


def _module_with(path: Path) -> ModuleType | None:
    for name, module in list(sys.modules.items()):  # a copy, since imports add modules
        # Not getattr: modules that import their parts when asked would do so.
        file = getattr(module, "__dict__", {}).get("__file__")
        # __main__ does not count: under its own name the program is another module.
        if name != "__main__" and isinstance(file, str) and _is_same(file, path):
            return module
    return None


def _is_same(path: str, other: Path) -> bool:
    try:
        return Path(path).samefile(other)  # links followed
    except OSError:  # a module in an archive, or whose file is gone
        return False


def _name_and_root(path: Path) -> tuple[str, Path]:
    """The dotted name of a file, and the folder from which Python finds it by that name."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:  # up through packages
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts if path.stem != "__init__" else parts[:-1] or parts), folder


def _is_found_at(name: str, path: Path) -> bool:
    if name in sys.modules:
        return False  # it is another file's: this one's module would have been found by its file
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a parent's name is another module's
        return False
    origin = spec.origin if spec is not None else None
    return origin is not None and _is_same(origin, path)


def _execute_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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
    """The object of ``pkg.mod:name``, ``pkg.mod.name`` or ``file.py:name``, found here or where Python looks.

    All names in one file are looked up in one module, which is executed once.

    Args:
        name: the name as the user wrote it.
        option: the option's name, for messages.

    Raises:
        InputError: if there is no such module or name, or importing it fails.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if not module or not attribute or (name.endswith(".py") and not colon):
        raise InputError(f"{option}={name!r} {_without_name(name)}")
    target: Any = _import_user_module(module, option)
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [each for each in dir(target) if not each.startswith("_")]
            raise InputError(f"{option}={name!r}: {module} has no {part!r}.{did_you_mean(part, public)}")
        target = getattr(target, part)
    return target


def build_model(name: str, *, on_meta: bool = True) -> tuple[nn.Module, str]:
    """The model, and a sentence on how it was built.

    Args:
        on_meta: build on the meta device where the model's code allows it.

    Raises:
        InputError: if it cannot be built, or is not a module.
    """
    import torch
    from torch import nn

    target = load_object(name, option="--model")
    if isinstance(target, nn.Module):
        return target, "the model was there already"
    if not callable(target):
        raise InputError(f"--model={name!r} is {with_article(target)}; it must be a module, or build one.")
    model, how = None, "the model was built with memory"
    if on_meta:
        try:
            with torch.device("meta"):
                model = target()
            how = "the model was built on meta, without memory"
        except (Exception, SystemExit) as error:  # a script may call sys.exit
            how = f"the model was built with memory, since on meta: {error_text(error)}"
    if model is None:
        try:
            model = target()
        except (Exception, SystemExit) as error:
            raise InputError(
                with_period(f"--model={name!r} could not be built: {error_text(error)}")
                + " It is called without arguments; write a function that makes the model."
            ) from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--model={name!r} returned {with_article(model)}; it must return a torch.nn.Module."
        )
    return model, how


def load_sample(name: str) -> Any:
    """Loads the batch, calling it if it is a function.

    Raises:
        InputError: if the function fails, or its result is not a batch or has no samples.
    """
    sample = load_object(name, option="--sample")
    if callable(sample):
        try:
            sample = sample()
        except (Exception, SystemExit) as error:
            raise InputError(with_period(f"--sample={name!r} failed: {error_text(error)}")) from error
    _check_batch(name, sample)
    return sample


def _check_batch(name: str, sample: Any) -> None:
    from atorch_ns.capture.nests import batch_sizes

    sizes = batch_sizes(sample)
    if not sizes:
        text = (
            repr(sample) if sample is None or isinstance(sample, (int, float, str)) else with_article(sample)
        )
        raise InputError(
            f"--sample={name!r} is {text}, which holds no tensor with a batch dimension. It must be one batch: a "
            "tensor, or a dictionary, list or tuple of tensors; or a function without arguments that returns one."
        )
    if 0 in sizes:
        raise InputError(
            f"--sample={name!r} is an empty batch: one of its tensors has no rows. Give at least one sample."
        )


def _without_name(name: str) -> str:
    path = name.removesuffix(":")
    if not path.endswith(".py"):
        return "is not a place in code. Write pkg.mod:name or file.py:name."
    names = _defined_in(Path(path))
    there = f" It defines {', '.join(names)}." if names else ""
    return f"names a file, and nothing in it. Write {path}:NAME.{there}"


def _defined_in(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())  # read, and not run
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [each.name for each in tree.body if isinstance(each, kinds) and not each.name.startswith("_")]


def gibibytes(text: str | None) -> float | None:
    """``"70GiB"`` or ``"512 MiB"`` as GiB; a bare number is GiB.

    Raises:
        InputError: if it is not an amount of memory.
    """
    if text is None:
        return None
    match = _MEMORY.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--memory-limit={text!r} is not an amount of memory. Write it as 70GiB or 512MiB.")
    return float(match[1]) * _GIBIBYTES[(match[2] or "GiB").lower()]


def constraint(text: str) -> str | tuple[str, Any]:
    """An ``--include`` or ``--exclude``: a name, or ``name=config`` whose config is JSON or a word."""
    name, equals, config = text.partition("=")
    if not equals:
        return text
    try:
        return name, json.loads(config)
    except ValueError:
        return name, config


def _import_user_module(target: str, option: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return imported_file(Path(target)) if target.endswith(".py") else import_once(target)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{target}.".startswith(
            f"{error.name}."
        ):  # not a module that it imports
            raise InputError(
                f"{option}: there is no module {target!r} here ({folder}) or on Python's path. Check the name, "
                "or run the command in the folder that holds it."
            ) from None
        raise InputError(with_period(f"{option}: importing {target} failed: {error}")) from error
    except (Exception, SystemExit) as error:
        raise InputError(with_period(f"{option}: importing {target} failed: {error_text(error)}")) from error


def nested_codes(code: CodeType | None) -> list[CodeType]:
    """The code of a function, if it has any, and of the functions defined in it."""
    codes = [] if code is None else [code]
    for parent in codes:  # codes grows while it is walked
        codes += [constant for constant in parent.co_consts if isinstance(constant, CodeType)]
    return codes


def names_in_method(method: Callable[..., Any], kind: type, base: type) -> set[str]:
    """Names in the code of a method of ``kind`` and of methods that it calls, except those of ``base``."""
    names, methods = set[str](), [method]
    for function in methods:  # grows by methods named in the code
        for code in nested_codes(getattr(unwrap(function), "__code__", None)):
            new = set(code.co_names) - names
            names |= new
            callees = (getattr(kind, name, None) for name in new if not hasattr(base, name))
            methods += [each for each in callees if callable(each)]
    return names
