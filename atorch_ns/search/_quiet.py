"""Optuna without a word on the terminal."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

from atorch_ns.errors import MissingPackageError

__all__ = ["load_optuna", "quiet"]


def load_optuna(needed_by: str, *more: str) -> Any:
    """Imports Optuna, which takes half a second, so only where it is used.

    Args:
        needed_by: what for, as the subject of a sentence.
        more: packages that this use of Optuna needs beside it.

    Raises:
        MissingPackageError: if it or one of the others is not installed.
    """
    for package in ("optuna", *more):
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(package, needed_by=needed_by, install=f"pip install {package}")
    return importlib.import_module("optuna")


@contextlib.contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Holds back Optuna's log lines and its warnings about experimental parts, and restores its level."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
