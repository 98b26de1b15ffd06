"""Training from a notebook: :func:`run` starts workers from a cell, and returns their outputs and values."""

from __future__ import annotations

import codecs
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from atorch_ns.errors import InputError, RankError
from atorch_ns.processes import RankEnd, Ranks, scratch_folder
from atorch_ns.processes.calls import ADVICE, CALL_MODULE, read_outcome, send_call
from atorch_ns.text import error_text, signal_text

__all__ = ["run"]

T = TypeVar("T")

_STOPPING_S: Final = 3.0


def run(
    fn: Callable[..., T], args: Sequence[Any] = (), nproc: int = 2, *, timeout_s: float | None = None
) -> T:
    """Calls ``fn(*args)`` on ``nproc`` new processes of this machine that train together, as from a notebook.

    Each process is a fresh interpreter with the environment of a launcher, so that ``auto_accelerate`` inside
    ``fn`` uses all of them: with NCCL where there are GPUs, else with gloo. Nothing is forked, so it does not
    matter what the notebook has done with a GPU or with threads. The function, and classes of the
    notebook that it refers to, are sent by value; large data is better read inside ``fn``.

    Output of rank 0 appears in the cell while it runs. An interrupt (the Stop button) ends all processes.
    Once one has failed, the others have ten seconds to end.

    Args:
        fn: a function, of the notebook or of a module.
        args: its arguments.
        nproc: processes; with GPUs, at most as many as there are.
        timeout_s: seconds after which all processes are ended; ``None`` for no limit.

    Returns:
        The result of ``fn`` on rank 0. CPU tensors and plain values travel best.

    Raises:
        InputError: if an argument makes no sense, or ``fn`` cannot be sent to the processes.
        RankError: if a rank failed, with the traceback of the one that failed first; at the time limit; or if
            what rank 0 returned cannot be sent back.
    """
    _check_arguments(fn, args, nproc, timeout_s)
    with scratch_folder() as folder:
        send_call(folder, fn, tuple(args))
        ends = _run_ranks(folder, nproc, timeout_s)
        _raise_failure(folder, ends, timeout_s)
        outcome = read_outcome(folder, 0)
    assert outcome is not None
    try:
        value: T = outcome.value()
    except Exception as error:  # whatever an object's own code raises
        reason = f"what rank 0 returned cannot be read here: {error_text(error)}. {ADVICE}"
        raise RankError(reason, failures={0: reason}) from error
    return value


def _check_arguments(fn: object, args: object, nproc: object, timeout_s: object) -> None:
    """Raises :class:`InputError` for arguments that make no sense, before a process is started."""
    if not callable(fn):
        raise InputError(
            f"fn is {fn!r}, which is not callable. Give a function: notebook.run(train, args=(10,))."
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InputError(
            f"args is {str(args)[:80]!r}, of type {type(args).__qualname__}. Give a tuple with an entry for each argument; "
            "for a single argument, write args=(value,) with the comma."
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise InputError(f"nproc={nproc!r}: at least one process is needed. Use 2, or the number of GPUs.")
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and 0 < timeout_s < math.inf):  # type: ignore[operator]
        raise InputError(
            f"timeout_s={timeout_s!r} is not a time. Give a number of seconds above 0, or None for no limit."
        )


def _run_ranks(folder: Path, nproc: int, timeout_s: float | None) -> list[RankEnd]:
    """Runs the workers to their end, and copies output of rank 0 to ``sys.stdout`` meanwhile."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0

    def show(*, last: bool = False) -> None:
        nonlocal offset
        data = ranks.read_output(0, offset)
        offset += len(data)
        sys.stdout.write(decoder.decode(data, last))
        sys.stdout.flush()

    variables = {"PYTHONUNBUFFERED": "1"}
    with Ranks(CALL_MODULE, [str(folder)], nproc, shown=False, variables=variables) as ranks:
        try:
            ends = ranks.wait(timeout_s=timeout_s, on_poll=show)
        except KeyboardInterrupt:
            ranks.stop(signal.SIGINT, within_s=_STOPPING_S)
            ranks.wait()
            raise
        show(last=True)
    return ends


def _raise_failure(folder: Path, ends: Sequence[RankEnd], timeout_s: float | None) -> None:
    outcomes = {end.rank: read_outcome(folder, end.rank) for end in ends}
    errors = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and outcome.problem}
    dead = {end.rank: _exit_reason(end) for end in ends if outcomes[end.rank] is None and not end.ended_by_us}
    failures = {rank: outcome.trace for rank, outcome in errors.items()} | dead
    # A rank that was killed leaves no traceback; the others then raise that they have lost it.
    first = min(dead) if dead else min(errors, key=lambda rank: errors[rank].when_s, default=None)
    if first is not None:
        raise RankError(f"rank {first} of {len(ends)} failed:\n{failures[first]}", failures=failures)
    late = [end.rank for end in ends if end.ended_by_us]
    if late:
        raise RankError(
            f"ranks {late} were still running after timeout_s={timeout_s} seconds and were ended. Give more time, or "
            "print in the function to see where it waits."
        )


def _exit_reason(end: RankEnd) -> str:
    if end.code < 0:
        name = signal_text(-end.code)
        how = f"it was ended by {name}"
        if name == "SIGKILL":
            how += ", as the system does when memory runs out"
    elif end.code == 0:
        how = "it left with exit code 0 before the function had returned, as os._exit does"
    else:
        how = f"it left with exit code {end.code}"
    tail = f"\n... printed last:\n{end.output}" if end.output and end.rank else ""  # the cell shows rank 0's
    return f"{how}, without a traceback.{tail}"
