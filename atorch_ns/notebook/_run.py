"""Starting workers from a cell, showing what rank 0 prints, and bringing back what came of it."""

from __future__ import annotations

import codecs
import math
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from atorch_ns.errors import InputError, RankError
from atorch_ns.launch import RankEnd, Ranks
from atorch_ns.notebook._task import ADVICE, SHOWN, Failure, Task, has_ended, load

__all__ = ["run"]

T = TypeVar("T")

_POLL_S: Final = 0.05
_STOPPING_S: Final = 3.0


def run(
    fn: Callable[..., T], args: Sequence[Any] = (), nproc: int = 2, *, timeout_s: float | None = None
) -> T:
    """Calls ``fn(*args)`` on ``nproc`` new processes of this machine that train together, from a notebook or anywhere.

    Each process is a fresh interpreter with the environment of a launcher, so that ``auto_accelerate`` inside
    ``fn`` uses all of them: with NCCL where there are GPUs, with gloo elsewhere. Nothing is forked, so it does not
    matter what the notebook has done with a GPU or with threads. The function, classes of the notebook and what
    they refer to are sent by value; large data is better read inside ``fn``.

    What rank 0 prints appears in the cell while it runs. An interrupt (the Stop button) ends all processes. Once
    one has failed, the others have ten seconds to end.

    Args:
        fn: a function, of the notebook or of a module.
        args: its arguments.
        nproc: processes; with GPUs, at most as many as there are.
        timeout_s: seconds after which all processes are ended; ``None`` for no limit.

    Returns:
        What ``fn`` returned on rank 0. CPU tensors and plain values travel best.

    Raises:
        InputError: if an argument makes no sense, or ``fn`` cannot be sent to the processes.
        RankError: if a rank failed, with the traceback of the one that failed first; at the time limit; or if
            what rank 0 returned cannot be sent back.
    """
    _check(fn, args, nproc, timeout_s)
    with tempfile.TemporaryDirectory(prefix="atorch_ns_notebook_") as name:
        folder = Path(name)
        task = Task.of(fn, tuple(args))
        task.write(folder)
        (folder / "search_path").write_text("\n".join(task.search_path))
        ends = _watched(folder, nproc, timeout_s)
        _raise_failure(folder, ends, timeout_s)
        value: T = _value(folder)
        return value


def _check(fn: object, args: object, nproc: object, timeout_s: object) -> None:
    """Raises :class:`InputError` for what no process needs to be started to see."""
    if not callable(fn):
        raise InputError(
            f"fn is {fn!r}, which cannot be called. Give a function: notebook.run(train, args=(10,))."
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InputError(
            f"args is {str(args)[:80]!r}, of type {type(args).__qualname__}. Give a tuple with an entry for each argument; "
            "for a single one that is args=(value,), with the comma."
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise InputError(f"nproc={nproc!r}: at least one process is needed. Use 2, or the number of GPUs.")
    if timeout_s is None:
        return
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s < math.inf:  # type: ignore[operator]
        raise InputError(
            f"timeout_s={timeout_s!r} is no time. Give seconds, a number above 0, or None for no limit."
        )


def _value(folder: Path) -> Any:
    try:
        return load(folder, "value")
    except Exception as error:  # whatever an object's own code raises
        reason = f"what rank 0 returned cannot be read here: {type(error).__name__}: {error}. {ADVICE}"
        raise RankError(reason, failures={0: reason}) from error


def _watched(folder: Path, nproc: int, timeout_s: float | None) -> list[RankEnd]:
    """Runs the workers to their end, and shows what rank 0 prints meanwhile."""
    ended: Future[list[RankEnd]] = Future()
    shown = _Shown(folder / SHOWN)
    with Ranks("atorch_ns.notebook._worker", [str(folder)], nproc, shown=False) as ranks:

        def wait() -> None:
            try:
                ended.set_result(ranks.wait(timeout_s=timeout_s))
            except BaseException as error:  # raised where the cell waits
                ended.set_exception(error)

        waiting = threading.Thread(target=wait, name="atorch_ns notebook", daemon=True)
        waiting.start()
        try:
            # Here and not in the thread: what a cell prints belongs to the thread that runs it.
            while waiting.is_alive():
                shown.more()
                time.sleep(_POLL_S)
        except BaseException:  # an interrupt
            _stop(ranks, waiting)
            raise
        waiting.join()
    shown.more(last=True)
    return ended.result()


def _stop(ranks: Ranks, waiting: threading.Thread) -> None:
    """Lets workers end what they have started, for a moment, and then ends them."""
    try:
        ranks.send(signal.SIGINT)
        waiting.join(_STOPPING_S)
    finally:
        ranks.close_ranks()
        waiting.join()


class _Shown:
    """Copies to ``sys.stdout`` what a file gets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def more(self, *, last: bool = False) -> None:
        """What has come since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        text = self._decoder.decode(data, last)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def _raise_failure(folder: Path, ends: Sequence[RankEnd], timeout_s: float | None) -> None:
    told = {end.rank: load(folder, f"failure-{end.rank}") for end in ends}
    raised = {rank: failure for rank, failure in told.items() if isinstance(failure, Failure)}
    died = {
        end.rank: _death(end)
        for end in ends
        if end.rank not in raised
        and not end.ended_by_us
        and not (end.code == 0 and has_ended(folder, end.rank))
    }
    failures = {rank: failure.text for rank, failure in raised.items()} | died
    # A rank that was killed says nothing; what the others raise then is that they have lost it.
    first = min(died) if died else min(raised, key=lambda rank: raised[rank].when_s, default=None)
    if first is not None:
        raise RankError(f"rank {first} of {len(ends)} failed:\n{failures[first]}", failures=failures)
    late = [end.rank for end in ends if end.ended_by_us]
    if late:
        raise RankError(
            f"the ranks {late} still ran after timeout_s={timeout_s} seconds and were ended. Give more time, or "
            "print in the function to see where it waits."
        )


def _death(end: RankEnd) -> str:
    if end.code < 0:
        name = signal.Signals(-end.code).name if -end.code in set(signal.Signals) else str(-end.code)
        how = f"it was ended by the signal {name}"
        if name == "SIGKILL":
            how += ", as the system does when memory runs out"
    elif end.code == 0:
        how = "it left with exit code 0 before the function had returned, as os._exit does"
    else:
        how = f"it left with exit code {end.code}"
    tail = f"\n... printed last:\n{end.output}" if end.output else ""
    return f"{how}, without a traceback.{tail}"
