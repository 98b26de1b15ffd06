"""Choice of trial workers, and trials in the caller's process for objects that cannot be pickled."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.engine.request import SearchRequest
from atorch_ns.engine.trial.failures import Interrupted
from atorch_ns.engine.trial.pickling import ValueFiller, moments_of
from atorch_ns.engine.trial.process import Rendezvous
from atorch_ns.engine.trial.report import RankReport, Worker
from atorch_ns.engine.trial.run import run_trial
from atorch_ns.engine.trial.worker import TrialWorker
from atorch_ns.job import Inputs
from atorch_ns.method import Registry, load_registry
from atorch_ns.numerics.setup import structure_of
from atorch_ns.search import SearchNote, TrialTask, memory_limit
from atorch_ns.text import error_text
from atorch_ns.torch_compat import process_groups


def structure_with_values(model: nn.Module) -> nn.Module:
    """A copy with parameters on meta that, when materialised, have the statistics of the originals.

    Ties, buffers, hooks and settings are kept. Attributes that cannot be copied (locks, files) are shared.
    """
    copy, _ = structure_of(model, shallow=False)
    parameters = model.named_parameters(remove_duplicate=False)
    moments = {name: moments_of(tensor) for name, tensor in parameters if not tensor.is_meta}
    if moments:
        object.__setattr__(copy, "_init_weights", ValueFiller(copy, moments))
    return copy


class InProcessWorker:
    """Runs trials in this process, over its process group, on a copy of the model's structure.

    Weights, buffers, random states, threads and process groups are restored afterwards. Isolation is
    limited. Cancelling and the deadline take effect between blocks of steps, so a trial that hangs in a
    collective hangs the search until the group's timeout. One that crashes ends the process. Memory that the
    process holds reduces that of a trial. Nothing is logged to files.

    Args:
        inputs: the user's objects, with a small dataset.
        cluster: cluster as this rank sees it; its process group is joined already.
        memory_limit_bytes: a trial that needs more than this is "out of memory"; ``None`` for no limit.
    """

    def __init__(self, inputs: Inputs, cluster: Cluster, *, memory_limit_bytes: int | None = None) -> None:
        self._inputs = inputs
        self._cluster = cluster
        self._memory_limit_bytes = memory_limit_bytes
        self._registry: Registry = load_registry()

    def run(self, task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        """Runs a trial; see :class:`~atorch_ns.engine.Worker`. Collective."""
        start = time.monotonic()
        if task.kind == "single":
            reason = "a trial in one process cannot have the process group that this one is in"
            return RankReport(task_id=task.id, rank=self._cluster.rank, status="refused", reason=reason)

        def interrupt() -> Interrupted | None:
            if cancelled():
                return Interrupted("cancelled", "ended between two blocks of steps")
            if time.monotonic() - start > task.deadline_s:
                return Interrupted("hung", f"still running after {task.deadline_s:g} s")
            return None

        with _kept_settings(), _kept_groups(), random_states_kept(torch.device(self._cluster.device)):
            try:
                inputs = replace(self._inputs, model=structure_with_values(self._inputs.model))
            except Exception as error:
                reason = f"the model's structure cannot be copied: {error_text(error)}"
                return RankReport(task_id=task.id, rank=self._cluster.rank, status="refused", reason=reason)
            torch.manual_seed(0)  # as trial processes begin
            run = run_trial(
                inputs,
                self._cluster,
                task,
                self._registry,
                memory_limit_bytes=self._memory_limit_bytes,
                interrupt=interrupt,
                start=start,
            )
        return run.report

    def close(self) -> None:
        """Does nothing, as nothing is left running."""


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
    before = process_groups()
    try:
        yield
    finally:
        gc.collect()  # meshes and wrappers in reference cycles use the groups until they are freed
        for group in process_groups():
            if all(group is not other for other in before):
                _destroy_group(group)


def _destroy_group(group: Any) -> None:
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError):  # it ends with the process at the latest
        traceback.print_exc()


def make_worker(
    stack: contextlib.ExitStack,
    inputs: Inputs,
    cluster: Cluster,
    request: SearchRequest,
    *,
    rendezvous: Rendezvous | None,
    log_dir: Path,
    obstacle: str | None,
    states: Mapping[str, Any] | None = None,
) -> Worker:
    """The worker of this rank; it ends with ``stack``.

    Trials run in this process if ``obstacle`` says why some rank's arguments cannot be sent to another one.
    """
    limit = memory_limit(cluster, request.settings).num_bytes or None
    if obstacle is None:
        worker: Worker = TrialWorker(
            inputs,
            cluster,
            rendezvous=rendezvous,
            log_dir=log_dir,
            memory_limit_bytes=limit,
            enforce_limit=request.settings.memory_limit_gib is not None,
            keep_logs=False,
            carried=states,
        )
    else:
        worker = InProcessWorker(inputs, cluster, memory_limit_bytes=limit)
        if cluster.rank == 0:
            request.observer(
                SearchNote(
                    f"trials run in this process, because {obstacle}: a trial that crashes or hangs ends the "
                    "search, and its memory is measured together with that of this process."
                )
            )
    stack.callback(worker.close)
    return worker
