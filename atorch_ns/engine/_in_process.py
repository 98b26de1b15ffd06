"""Trials in the user's own process, for objects that cannot be sent to another one."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.cluster import Cluster
from atorch_ns.engine._failures import Interrupted
from atorch_ns.engine._rank_report import RankReport
from atorch_ns.engine._sampling import kept_random_state
from atorch_ns.engine._structure import structure_of
from atorch_ns.engine._trial_run import run_trial
from atorch_ns.job import Inputs
from atorch_ns.method import Registry, load_registry
from atorch_ns.search import TrialTask
from atorch_ns.torch_compat import process_groups

__all__ = ["InProcessWorker"]


class InProcessWorker:
    """Runs trials in this process, over its process group, on a copy of the model's structure.

    Weights, buffers, random states, threads and process groups are afterwards as before. Other rules hold as
    far as one process allows: cancelling and the deadline take effect between blocks of steps, so a trial
    that hangs in a collective hangs the search until the group's own timeout, one that crashes ends the
    process, and what the process holds besides limits what a trial can hold. Nothing is logged to files.

    Args:
        inputs: the user's objects, with a small dataset.
        cluster: the rank's setting; its process group is joined already.
        memory_limit_bytes: a trial whose peak is above this is "out of memory"; ``None`` for no limit.
    """

    def __init__(self, inputs: Inputs, cluster: Cluster, *, memory_limit_bytes: int | None = None) -> None:
        self._inputs = inputs
        self._cluster = cluster
        self._memory_limit_bytes = memory_limit_bytes
        self._registry: Registry = load_registry()

    def run(self, task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        """Runs a trial; see :class:`~atorch_ns.engine.Worker`. Collective."""
        started = time.monotonic()

        def interrupt() -> Interrupted | None:
            if cancelled():
                return Interrupted("cancelled", "ended between two blocks of steps")
            if time.monotonic() - started > task.deadline_s:
                return Interrupted("hung", f"still running after {task.deadline_s:g} s")
            return None

        with self._kept():
            try:
                inputs = replace(self._inputs, model=structure_of(self._inputs.model))
            except Exception as error:
                reason = f"the model's structure cannot be copied: {type(error).__name__}: {error}"
                return RankReport(task_id=task.id, rank=self._cluster.rank, status="refused", reason=reason)
            torch.manual_seed(0)
            run = run_trial(
                inputs,
                self._cluster,
                task,
                self._registry,
                memory_limit_bytes=self._memory_limit_bytes,
                interrupt=interrupt,
                started=started,
            )
        return run.report

    def close(self) -> None:
        """Nothing is left running."""

    @contextmanager
    def _kept(self) -> Iterator[None]:
        devices = [self._cluster.local_rank] if self._cluster.device_type == "cuda" else []
        with ExitStack() as stack:
            stack.enter_context(_kept_settings())
            stack.enter_context(_kept_groups())
            stack.enter_context(kept_random_state())
            stack.enter_context(torch.random.fork_rng(devices=devices))
            yield


@contextmanager
def _kept_settings() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


@contextmanager
def _kept_groups() -> Iterator[None]:
    """Ends the process groups that are made inside the block, once what used them is gone."""
    before = process_groups()
    try:
        yield
    finally:
        gc.collect()
        for group in process_groups():
            if all(group is not known for known in before):
                _end(group)


def _end(group: Any) -> None:
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError):  # it ends with the process at the latest
        traceback.print_exc()
