"""Running tasks in trial workers without a coordinator: ranks share flags in a folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.process import Rendezvous, open_rendezvous
from atorch_ns.engine.trial.report import RankReport, Worker
from atorch_ns.engine.trial.worker import TrialWorker
from atorch_ns.job import Inputs
from atorch_ns.search import StopRule, TrialTask
from tests.engine.faults import Fault, inject
from tests.engine.inputs import case_inputs

SHORT = StopRule(min_steps=2, max_steps=4)
DONE = ("ok", "stopped early")


def task(id: int, *steps: Any, rule: StopRule = SHORT, deadline_s: float = 60.0) -> TrialTask:
    pairs = tuple((step, None) if isinstance(step, str) else step for step in steps)
    return TrialTask(id=id, key=str(id), steps=pairs, rule=rule, deadline_s=deadline_s)


@dataclass(frozen=True)
class Ran:
    """One task on one rank.

    Attributes:
        report: what the worker reported.
        seconds: what it took.
        after_failure_s: from another rank's failure to this rank's report; 0 if none failed.
    """

    report: RankReport
    seconds: float
    after_failure_s: float = 0.0


Makers = Mapping[str, Callable[[], Inputs]]


def meet(cluster: Cluster) -> tuple[Any, Rendezvous | None]:
    """The store on rank 0, and its address on every rank."""
    store, places = None, [None]
    if cluster.distributed:
        if cluster.rank == 0:
            store, places[0] = open_rendezvous(cluster)  # type: ignore[assignment]
        dist.broadcast_object_list(places, src=0)
    return store, places[0]


def run_tasks(
    folder: Path, tasks: Mapping[str, TrialTask], faults: tuple[Fault, ...] = (), **changes: Any
) -> dict[str, Ran]:
    """Every task in turn on this rank; a rank that fails raises a flag at which the others are cancelled."""
    cluster = Cluster.detect()
    store, rendezvous = meet(cluster)
    inputs = inject(case_inputs(**changes), *faults) if faults else case_inputs(**changes)
    with TrialWorker(inputs, cluster, rendezvous=rendezvous, log_dir=folder) as worker:
        done = {name: _run_one(worker, item, folder) for name, item in tasks.items()}
    assert not psutil.Process().children(recursive=True), "a process is left"
    del store
    return done


def _run_one(worker: Worker, item: TrialTask, folder: Path) -> Ran:
    flag = folder / f"failed-{item.id}"
    started = time.monotonic()
    report = worker.run(item, flag.exists)
    ended = time.monotonic()
    late = 0.0
    if report.status == "cancelled":
        late = ended - float(flag.read_text())
    elif report.status not in DONE:
        flag_now = flag.with_suffix(f".{report.rank}")
        flag_now.write_text(str(ended))
        flag_now.rename(flag)
    if dist.is_initialized():
        dist.barrier()
    return Ran(report, ended - started, late)
