"""Modules of the user's code: one file is one module, however it is named and by whomever it is imported."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["imported", "imported_file"]


def imported(name: str) -> ModuleType:
    """The module of a dotted name; the one that is there already if its file was imported under another name.

    Raises:
        ModuleNotFoundError: if there is none.
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
    """The module of a file, executed once in this process.

    Its name is the one by which other files import it: ``pkg.mod`` inside a package, else the file's stem. Its folder
    is searched for modules, after everything else. A stem that means another module, such as ``json``, stays that
    module's; the file then gets a name that nobody else has.

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
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    if _is_found_at(name, path):
        return importlib.import_module(name)
    digest = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()
    return _executed(f"_{path.stem}_{digest[:12]}", path)


def _module_with(path: Path) -> ModuleType | None:
    """The module whose file this is, if there is one; the program itself, ``__main__``, is none."""
    for name, module in list(sys.modules.items()):
        # Not getattr: modules that import their parts when asked would do so.
        file = getattr(module, "__dict__", {}).get("__file__")
        if name != "__main__" and isinstance(file, str) and _is_same(file, path):
            return module
    return None


def _is_same(one: str, other: Path) -> bool:
    """Whether two paths are one file, links followed."""
    try:
        return Path(one).samefile(other)
    except OSError:  # a module in an archive, or whose file is gone
        return False


def _name_and_root(path: Path) -> tuple[str, Path]:
    """The dotted name of a file, and the folder from which Python finds it by that name."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts if path.stem != "__init__" else parts[:-1] or parts), folder


def _is_found_at(name: str, path: Path) -> bool:
    """Whether importing ``name`` would execute this file."""
    if name in sys.modules:
        return False  # it is another file's: this one's module would have been found by its file
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a parent's name is another module's
        return False
    origin = spec.origin if spec is not None else None
    return origin is not None and _is_same(origin, path)


def _executed(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
