"""Function call on ranks: task, outcome of each rank, and program (``-m atorch_ns.processes.calls FOLDER``).

::

    send_call(folder, function, (1, 2))
    with Ranks(CALL_MODULE, [str(folder)], 2) as ranks:
        ends = ranks.wait()
    outcomes = [read_outcome(folder, end.rank) for end in ends]
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import cloudpickle

from atorch_ns.errors import InputError
from atorch_ns.system import write_whole
from atorch_ns.text import error_text

CALL_MODULE: Final = "atorch_ns.processes.calls"
ADVICE: Final = "Return plain values and CPU tensors; save a model with atorch_ns.checkpoint and return the folder's name."
_TASK: Final = "task"


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """Outcome of a call on one rank.

    Attributes:
        data: the pickled return value, of rank 0 only.
        problem: the exception in a line; empty for a call that returned.
        trace: traceback of the exception.
        when_s: end of the call in seconds, by a clock that all processes of this machine share.
    """

    data: bytes = b""
    problem: str = ""
    trace: str = ""
    when_s: float

    def value(self) -> Any:
        """The function's return value on rank 0; raises whatever unpickling it raises."""
        return cloudpickle.loads(self.data)


def send_call(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Writes a call for the ranks.

    Functions and classes of ``__main__`` or a notebook are sent by value: no other process could import them.

    Raises:
        InputError: if the function or an object it refers to cannot be sent to another process.
    """
    try:
        data = cloudpickle.dumps((function, arguments))
    except Exception as error:  # whatever an object's own code raises
        name = getattr(function, "__qualname__", repr(function))
        raise InputError(
            f"{name} cannot be sent to the workers: {error_text(error)}. Create such objects "
            "(an open file, a lock, a process group) inside the function."
        ) from error
    # The search path is pickled separately: the call may be importable only with it.
    (folder / _TASK).write_bytes(cloudpickle.dumps((list(sys.path), data)))


def read_outcome(folder: Path, rank: int) -> CallOutcome | None:
    """A rank's outcome; ``None`` if it ended without one."""
    path = _outcome_path(folder, rank)
    if not path.is_file():
        return None
    return CallOutcome(**cloudpickle.loads(path.read_bytes()))


def main(folder: Path) -> int:
    """Calls the function and leaves the outcome in the folder; returns the exit code."""
    rank = int(os.environ["RANK"])
    try:
        search_path, data = cloudpickle.loads((folder / _TASK).read_bytes())
        sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
        function, arguments = cloudpickle.loads(data)
        value = function(*arguments)
        outcome = CallOutcome(data=_pickle_value(value) if rank == 0 else b"", when_s=time.monotonic())
    except BaseException as error:  # SystemExit too: the caller learns why a rank ended
        trace = "".join(traceback.format_exception(error)).rstrip()
        outcome = CallOutcome(problem=error_text(error), trace=trace, when_s=time.monotonic())
    write_whole(_outcome_path(folder, rank), cloudpickle.dumps(asdict(outcome)), durable=False)
    return 1 if outcome.problem else 0


def _outcome_path(folder: Path, rank: int) -> Path:
    return folder / f"outcome_{rank}"


def _pickle_value(value: object) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever an object's own code raises
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise InputError(
            f"the function returned a {kind} on rank 0, which cannot be sent back: {error_text(error)}. {ADVICE}"
        ) from None
    return data


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
