"""Packages that are not installed with this one: imported where they are used, and nowhere else."""

from __future__ import annotations

import importlib
from types import ModuleType

from atorch_ns.errors import MissingPackageError, Problem

__all__ = ["missing_problem", "require"]


def require(package: str, *, needed_by: str, install: str) -> ModuleType:
    """Imports an optional package.

    Args:
        package: its import name.
        needed_by: what needs it, as the subject of a sentence.
        install: the command that installs it.

    Raises:
        MissingPackageError: if it is absent, or its import fails in any way: packages built for another
            machine raise RuntimeError and OSError as well.
    """
    try:
        return importlib.import_module(package)
    except Exception as error:  # see the docstring
        reason = f"{type(error).__name__}: {error}"
        raise MissingPackageError(package, needed_by=needed_by, install=install, reason=reason) from error


def missing_problem(method: str, package: str, *, install: str) -> list[Problem]:
    """The problem of a method whose backend cannot be imported; none if it can be."""
    try:
        require(package, needed_by="this backend", install=install)
    except MissingPackageError as error:
        return [Problem(message=str(error), method=method)]
    return []
