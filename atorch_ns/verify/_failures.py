"""What failed in a run: whose code, on which rank, in which line."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

import atorch_ns
from atorch_ns.errors import AtorchError, InputError, RankError

__all__ = ["told"]

_OURS: Final = str(Path(atorch_ns.__file__).parent)
_TORCH: Final = str(Path(torch.__file__).parent)
_METHODS: Final = str(Path(atorch_ns.__file__).parents[1] / "opt_lib")
_STDLIB: Final = sysconfig.get_paths()["stdlib"]


@contextmanager
def told(run: str, *, rank: int, remedy: str) -> Iterator[None]:
    """What the block raises that is no error of this package becomes one that says where it comes from.

    Args:
        run: which run it is: ``"training in one process"``.
        rank: where.
        remedy: what to do.

    Raises:
        RankError: if a collective broke off because another rank has gone.
        InputError: for anything else.
    """
    try:
        yield
    except AtorchError:
        raise
    except Exception as error:
        what = f"{run} failed on rank {rank}: {type(error).__name__}: {error}".rstrip(".")
        if _is_broken_connection(error):
            raise RankError(f"{what}. Another rank has gone.") from error
        raise InputError(f"{what}. {_where(error)} {remedy}") from error


def _is_broken_connection(error: Exception) -> bool:
    if isinstance(error, torch.distributed.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("closed by peer" in text or "reset by peer" in text)


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not _is_library(frame.filename)]
    if users:
        last = users[-1]
        return f"It is raised by your code or what that calls: {last.filename}, line {last.lineno}, in {last.name}."
    last = frames[-1]
    return (
        f"No line of your own is in it; it comes from {last.filename}, line {last.lineno}, in {last.name}, "
        "called with your model and batch."
    )


def _is_library(file: str) -> bool:
    in_stdlib = file.startswith(_STDLIB) and "site-packages" not in file
    return file.startswith(("<", _OURS, _TORCH, _METHODS)) or in_stdlib
