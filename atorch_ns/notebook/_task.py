"""What goes between the notebook's process and its workers: files in a folder of theirs."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cloudpickle

from atorch_ns.errors import InputError

__all__ = ["ADVICE", "SHOWN", "Failure", "Task", "end", "has_ended", "load", "store"]

SHOWN: Final = "shown"
"""What rank 0 prints."""

ADVICE: Final = "Return plain values and CPU tensors; save a model with atorch_ns.checkpoint and return the folder's name."


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every worker does.

    Attributes:
        function: called as ``function(*arguments)``.
        arguments: for it.
        search_path: ``sys.path`` of the notebook, so that the same modules are found.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    search_path: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Task:
        """The task as this process sees it."""
        return cls(function=function, arguments=arguments, search_path=tuple(sys.path))

    def write(self, folder: Path) -> None:
        """Writes it for the workers.

        Raises:
            InputError: if the function or what it refers to cannot be sent to another process.
        """
        try:
            # Functions and classes of a notebook are sent by value: no worker could import them.
            data = cloudpickle.dumps(self)
        except Exception as error:  # whatever an object's own code raises
            name = getattr(self.function, "__qualname__", repr(self.function))
            raise InputError(
                f"{name} cannot be sent to the workers: {type(error).__name__}: {error}. Make what cannot be sent "
                "(an open file, a lock, a process group) inside the function."
            ) from error
        (folder / "task").write_bytes(data)

    @classmethod
    def read(cls, folder: Path) -> Task:
        """In a worker: what :meth:`write` wrote."""
        task = cloudpickle.loads((folder / "task").read_bytes())
        assert isinstance(task, cls)
        return task


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a worker's function failed.

    Attributes:
        when_s: seconds of a clock that all processes of this machine share.
        text: the traceback.
    """

    when_s: float
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Now; the traceback begins with the user's function."""
        return cls(when_s=time.monotonic(), text="".join(traceback.format_exception(error)).rstrip())


def store(folder: Path, name: str, value: object) -> None:
    """Writes a value, whole or not at all."""
    made = folder / f".{name}"
    made.write_bytes(cloudpickle.dumps(value))
    made.rename(folder / name)


def end(folder: Path, rank: int) -> None:
    """Notes that the function has returned on a rank, and what it returned is stored."""
    (folder / f"ended-{rank}").touch()


def has_ended(folder: Path, rank: int) -> bool:
    """Whether :func:`end` was called."""
    return (folder / f"ended-{rank}").exists()


def load(folder: Path, name: str) -> Any:
    """What :func:`store` wrote; ``None`` if it wrote nothing."""
    path = folder / name
    return cloudpickle.loads(path.read_bytes()) if path.is_file() else None
