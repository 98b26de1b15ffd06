"""Run a function on several gloo ranks, forked from this warm process.

A forked rank starts in milliseconds because everything is imported already; a launched one needs seconds.
The price is one rule: no operator may have run on several threads in the parent, because a fork copies the
locks of such threads but not the threads. So both functions insist on one thread (``OMP_NUM_THREADS=1``).

::

    losses = run_ranks(train, 2, args=(case,))           # a list, or WorkerFailure with every traceback
    outcomes = catch_ranks(train_wrongly, 2)             # an Outcome for each rank, whatever it did
    assert all(isinstance(outcome.error, InputError) for outcome in outcomes)

What a rank prints lands in its :class:`Outcome` and, when the run fails, in the error's text. Every rank
leads a process group of its own, so that whatever it started (data-loading workers) ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.errors import BackendError, InputError
from atorch_ns.testing.rank_pool import Ended, RankPool, Setup

T = TypeVar("T")
Status = Literal["returned", "raised", "died", "timed_out", "stopped"]

_MAX_OUTPUT_CHARS: Final = 4000


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """How one rank ended.

    Attributes:
        rank: which.
        status: "returned"; "raised" an exception; "died" without a word (a crash, a signal, an exit);
            "timed_out"; or "stopped" by us since another rank had failed.
        value: what the function returned; None unless ``status`` is "returned".
        error: the exception, when it can be rebuilt in this process.
        error_type: the name of the exception's class; empty when there is none.
        message: the exception's text, or how the rank died.
        traceback: where it happened; for a rank that was stopped or timed out, the stacks of its threads.
        output: what the rank wrote to stdout and stderr.
        seconds: from the start of all ranks to this one's end.
    """

    rank: int
    status: Status
    value: T | None = None
    error: BaseException | None = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    output: str = ""
    seconds: float = 0.0

    def describe(self) -> str:
        """Some lines for a person: what happened, where, and what the rank printed last."""
        what = {"raised": f"raised {self.error_type}", "timed_out": "timed out", "stopped": "was stopped"}
        head = f"--- rank {self.rank} {what.get(self.status, self.status)} after {self.seconds:.1f} s"
        told = self.traceback or self.message
        printed = self.output[-_MAX_OUTPUT_CHARS:].strip()
        tail = f"\n... printed by rank {self.rank}:\n{printed}" if printed else ""
        return f"{head}\n{told.rstrip()}{tail}"


class WorkerFailure(AssertionError):
    """A rank raised, died or overran the time limit.

    Attributes:
        failures: for each failed rank what happened there, as text. Ranks that were stopped only because
            another had failed are in the error's text and in ``outcomes``, not here.
        outcomes: how every rank ended, by rank.
    """

    def __init__(self, outcomes: list[Outcome[Any]]) -> None:
        self.outcomes = outcomes
        failed = [outcome for outcome in outcomes if outcome.status in ("raised", "died", "timed_out")]
        stopped = [outcome for outcome in outcomes if outcome.status == "stopped"]
        self.failures = {outcome.rank: outcome.describe() for outcome in failed}
        late = [outcome.rank for outcome in failed if outcome.status == "timed_out"]
        head = f"{len(failed)} of {len(outcomes)} ranks failed: {', '.join(map(str, self.failures))}."
        if late:
            head += f" Still running at the time limit: {', '.join(map(str, late))}."
        super().__init__("\n".join([head, *(outcome.describe() for outcome in failed + stopped)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outcomes,)


def run_ranks(
    fn: Callable[..., T],
    num_ranks: int,
    *,
    timeout_s: float = 60.0,
    args: tuple[Any, ...] = (),
    env: Mapping[str, str] | None = None,
    init_process_group: bool = True,
) -> list[T]:
    """Call ``fn(*args)`` on every rank and return the values by rank.

    Args:
        fn: any callable, a closure too; what it returns must pickle (CPU tensors do, DTensors do not).
        num_ranks: the world size, all on this machine.
        timeout_s: seconds until the ranks that still run are stopped.
        args: given to ``fn`` on every rank.
        env: added to the environment of every rank, which has ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and
            ``LOCAL_WORLD_SIZE``.
        init_process_group: start the default process group (gloo, over a file) before ``fn``. When False,
            ``fn`` may do so itself: ``MASTER_ADDR`` and a free ``MASTER_PORT`` are set.

    Raises:
        WorkerFailure: a rank raised, died or overran the limit; the others were stopped.
        BackendError: this process cannot be forked from.
        InputError: a number is out of range.
    """
    outcomes: list[Outcome[T]] = _outcomes(
        fn, num_ranks, timeout_s, args, env, init_process_group=init_process_group, stop_on_failure=True
    )
    if any(outcome.status != "returned" for outcome in outcomes):
        raise WorkerFailure(outcomes)
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]  # None only if T allows it


def catch_ranks(
    fn: Callable[..., T],
    num_ranks: int,
    *,
    timeout_s: float = 60.0,
    args: tuple[Any, ...] = (),
    env: Mapping[str, str] | None = None,
    init_process_group: bool = True,
) -> list[Outcome[T]]:
    """Like :func:`run_ranks`, but every rank ends on its own and nothing it does raises here.

    A rank that raised keeps its connections for two seconds and then leaves; a peer that waits for it in a
    collective then sees a broken connection. A rank still running at the limit is "timed_out".
    """
    return _outcomes(
        fn, num_ranks, timeout_s, args, env, init_process_group=init_process_group, stop_on_failure=False
    )


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """A port of 127.0.0.1 that is nobody else's while the block runs.

    It stays bound, not listening, with SO_REUSEADDR, so that the system gives it to nobody who asks for any
    port, while a server that names it and sets SO_REUSEADDR (as torch's store does) can listen on it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        yield port


def _outcomes(
    fn: Callable[..., T],
    num_ranks: int,
    timeout_s: float,
    args: tuple[Any, ...],
    env: Mapping[str, str] | None,
    *,
    init_process_group: bool,
    stop_on_failure: bool,
) -> list[Outcome[T]]:
    _check_inputs(num_ranks, timeout_s)
    _check_process()
    _warm_up()
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        port = None if init_process_group else stack.enter_context(reserve_port())
        setup = Setup(
            num_ranks=num_ranks, folder=folder, timeout_s=timeout_s, env=dict(env or {}), master_port=port
        )
        pool = stack.enter_context(RankPool(fn, args, setup))
        pool.wait(stop_on_failure=stop_on_failure)
        return [_outcome(ended) for ended in pool.finish()]


def _outcome(ended: Ended) -> Outcome[Any]:
    """What a rank left, made into what the caller sees."""
    report, status = ended.report, ended.stopped or "died"
    seen = Outcome[Any](rank=ended.rank, status=status, output=ended.output, seconds=ended.seconds)
    if report is None:
        if ended.stopped is None:
            return replace(seen, message=ended.how_it_died())
        return replace(seen, traceback=ended.stacks)
    if report.value is None:
        return replace(
            seen,
            status="raised",
            error=_rebuilt(report.error),
            error_type=report.error_type,
            message=report.message,
            traceback=report.traceback,
        )
    try:
        return replace(seen, status="returned", value=pickle.loads(report.value))
    except Exception as error:
        text = f"the return value cannot be rebuilt outside the rank: {error!r}. Return CPU tensors."
        return replace(seen, status="raised", error=error, error_type=type(error).__name__, message=text)


def _rebuilt(error: bytes | None) -> BaseException | None:
    if error is None:
        return None
    try:
        rebuilt: BaseException = pickle.loads(error)
    except Exception:
        return None
    return rebuilt


def _check_inputs(num_ranks: int, timeout_s: float) -> None:
    if num_ranks < 1:
        raise InputError(f"num_ranks={num_ranks}: at least one rank is needed.")
    if timeout_s <= 0:
        raise InputError(f"timeout_s={timeout_s}: the time limit must be positive.")


def _check_process() -> None:
    if (num_threads := torch.get_num_threads()) > 1:
        raise BackendError(
            f"torch uses {num_threads} threads in this process, and ranks forked from it could hang on a "
            "lock of a thread they do not have. Start Python with OMP_NUM_THREADS=1."
        )
    if dist.is_initialized():
        raise BackendError(
            "this process holds a process group, which forked ranks would share. "
            "Call torch.distributed.destroy_process_group() first."
        )


def _warm_up() -> None:
    """Import here, once, what every rank would import again: that is what makes forked ranks start fast."""
    if "torch.distributed.fsdp" in sys.modules and "torch.distributed.checkpoint" in sys.modules:
        return
    for module in ("checkpoint", "fsdp", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{module}")
    # The first step of an optimizer imports much as well. No backward here: where there is a GPU it would
    # start threads that a forked rank misses.
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()
