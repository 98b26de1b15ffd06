"""A function in a process of its own: what it breaks, it breaks there, and it has a time limit."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

__all__ = ["Isolated", "isolated"]

T = TypeVar("T")
_ENDING_S = 5.0


class Isolated(NamedTuple):
    """How it ended: with a value, or with why there is none."""

    value: Any
    problem: str


def isolated(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Isolated:
    """Calls ``function(*arguments)`` in a fresh interpreter.

    Fresh, and not a fork: a driver that was touched, or a thread pool, does not survive a fork.

    Args:
        function: of a module, so that it can be found by name.
        arguments: plain values.
        timeout_s: seconds until it is ended.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(writer, function, arguments), daemon=True)
    process.start()
    writer.close()
    try:
        if not reader.poll(timeout_s):
            return Isolated(None, f"no answer within {timeout_s:.0f} s")
        found: Isolated = reader.recv()
        return found
    except EOFError:
        process.join(_ENDING_S)
        return Isolated(None, f"the process ended with code {process.exitcode} and without a word")
    finally:
        reader.close()
        if process.is_alive():
            process.join(_ENDING_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _run(writer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # What packages print when they are imported is not the command's output.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        answer = Isolated(function(*arguments), "")
    except BaseException as error:
        answer = Isolated(None, f"{type(error).__name__}: {error}")
    writer.send(answer)
    writer.close()
