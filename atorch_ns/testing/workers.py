"""Calls of a function on several gloo ranks, forked from this warm process.

A forked rank starts in milliseconds because everything is imported already; a launched one needs seconds.
It has one condition: no operator may have run on several threads in the parent, because a fork copies the
locks of such threads but not the threads. So both functions require one thread (``OMP_NUM_THREADS=1``).

::

    losses = run_ranks(train, 2, args=(case,))           # a list, or WorkerFailure with every traceback
    outcomes = catch_ranks(train_wrongly, 2)             # an Outcome for each rank, whatever it did
    assert all(isinstance(outcome.error, InputError) for outcome in outcomes)

What a rank prints stands in its :class:`Outcome` and, when the run fails, in the error's text. Every rank
leads a process group of its own, so that whatever it started (data-loading workers) ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.errors import BackendError, InputError
from atorch_ns.processes.ranks import reserve_port
from atorch_ns.testing.rank_pool import Outcome, RankPool, Setup

T = TypeVar("T")


class WorkerFailure(AssertionError):
    """A rank raised, died or overran the time limit.

    Attributes:
        failures: descriptions of failed ranks, by rank; not of those stopped because another failed.
        outcomes: outcome of every rank, by rank.
    """

    def __init__(self, outcomes: list[Outcome[Any]]) -> None:
        self.outcomes = outcomes
        failures = [outcome for outcome in outcomes if outcome.status in ("raised", "died", "timed_out")]
        stops = [outcome for outcome in outcomes if outcome.status == "stopped"]
        self.failures = {outcome.rank: outcome.describe() for outcome in failures}
        late = [outcome.rank for outcome in failures if outcome.status == "timed_out"]
        head = f"{len(failures)} of {len(outcomes)} ranks failed: {', '.join(map(str, self.failures))}."
        if late:
            head += f" Still running at the time limit: {', '.join(map(str, late))}."
        super().__init__("\n".join([head, *(outcome.describe() for outcome in failures + stops)]))

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
    """Calls ``fn(*args)`` on every rank and returns the values by rank.

    Args:
        fn: any callable, a closure too; what it returns must pickle (CPU tensors do, DTensors do not).
        num_ranks: the world size, all on this machine.
        timeout_s: seconds until the ranks that still run are stopped.
        args: arguments of ``fn``, the same on every rank.
        env: additions to every rank's environment, beside ``RANK``, ``WORLD_SIZE`` and their ``LOCAL_`` pair.
        init_process_group: whether to start the default group (gloo, by file) before ``fn``. It else may:
            ``MASTER_ADDR`` and a free ``MASTER_PORT`` are set.

    Raises:
        WorkerFailure: a rank raised, died or overran the limit; the others were stopped.
        BackendError: this process cannot be forked from.
        InputError: a number is out of range.
    """
    outcomes: list[Outcome[T]] = _collect_outcomes(
        fn, num_ranks, timeout_s, args, env=env, init_process_group=init_process_group, stop_on_failure=True
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
    """Like :func:`run_ranks`, but every rank ends by itself, and failures are in outcomes, not raised.

    A rank that raised keeps its connections for two seconds and then exits; a peer that waits for it in a
    collective then sees a broken connection. A rank still running at the limit is "timed_out".
    """
    return _collect_outcomes(
        fn, num_ranks, timeout_s, args, env=env, init_process_group=init_process_group, stop_on_failure=False
    )


def _collect_outcomes(
    fn: Callable[..., T],
    num_ranks: int,
    timeout_s: float,
    args: tuple[Any, ...],
    *,
    env: Mapping[str, str] | None,
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
        pool = stack.enter_context(RankPool(fn, args, setup))  # ends before its folder goes
        pool.wait(stop_on_failure=stop_on_failure)
        return pool.finish()


def _check_inputs(num_ranks: int, timeout_s: float) -> None:
    if num_ranks < 1:
        raise InputError(f"num_ranks={num_ranks}: at least one rank is needed.")
    if timeout_s <= 0:
        raise InputError(f"timeout_s={timeout_s}: the time limit must be positive.")


def _check_process() -> None:
    if (num_threads := torch.get_num_threads()) > 1:
        raise BackendError(
            f"torch uses {num_threads} threads in this process, and ranks forked from it could hang on a "
            "lock of a thread that fork does not copy. Start Python with OMP_NUM_THREADS=1."
        )
    if dist.is_initialized():
        raise BackendError(
            "this process holds a process group, which forked ranks would share. "
            "Call torch.distributed.destroy_process_group() first."
        )


def _warm_up() -> None:
    # What is imported here, once, no rank imports again: so forked ranks start fast.
    if "torch.distributed.fsdp" in sys.modules and "torch.distributed.checkpoint" in sys.modules:
        return
    for module in ("checkpoint", "fsdp", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{module}")
    # The first step of an optimizer imports much as well. No backward here: where there is a GPU it would
    # start threads that a forked rank misses.
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()
