"""Trial process: undoes what is the zygote's, joins the other ranks, runs the trial, reports and exits.

It is a fork of the zygote, so memory is fresh and everything is imported. It leaves by ``os._exit``: a
process that holds a DeviceMesh may abort while Python finalises.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from atorch_ns.capture.random_states import seed_all
from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.pickling import Unpacked
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.engine.trial.run import TrialRun, run_trial
from atorch_ns.engine.trial.worker_process import send
from atorch_ns.method import Registry
from atorch_ns.search import TrialTask
from atorch_ns.system import arm_stack_dumps, num_usable_cores, redirect_output
from atorch_ns.text import error_text

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch leaves it out of __all__

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 4096  # ranks that connect at the same time
_TIMEOUT: Final = timedelta(seconds=60)


@dataclass(frozen=True)
class Rendezvous:
    """The address of the store that rank 0 keeps; every trial uses keys of its own in it."""

    host: str
    port: int


def open_rendezvous(cluster: Cluster) -> tuple[Store, Rendezvous]:
    """Starts the store, on rank 0 only. It listens on loopback for ranks of one node, else on all interfaces.

    Returns:
        The store, which lives as long as it is referenced, and its address for all ranks.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch leaves it out of __all__

    one_node = cluster.num_nodes == 1
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_LOOPBACK if one_node else "", 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        # The address that the launcher gave all ranks reaches this one.
        host = _LOOPBACK if one_node else os.environ.get("MASTER_ADDR", socket.gethostname())
        store: Store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store closes it
    finally:
        listener.close()
    return store, Rendezvous(host, port)


TRIAL_VARIABLE: Final = "ATORCH_NS_TRIAL"
"""Environment variable of a trial process that holds the task's id."""

REPORT: Final = TypeAdapter(RankReport)
TASK: Final = TypeAdapter(TrialTask)

_SEED: Final = 0
_LINGER_S: Final = 2.0  # time for the other ranks to finish their last collective
_POLL_S: Final = 0.002
# The parent ends a trial at its deadline; this is for one whose parent is gone or stuck.
_ORPHAN_GRACE_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class TrialSetting:
    """Settings that all trials of a worker share. Plain values, sent with the user's objects.

    Attributes:
        cluster: cluster as the rank's own process sees it.
        rendezvous: address at which ranks meet; ``None`` for one rank.
        num_threads: threads that torch uses on the CPU.
        matmul_precision: precision of float32 matrix products.
        default_dtype: dtype of new floating tensors.
        memory_limit_bytes: a trial that needs more than this is "out of memory"; ``None`` for no limit.
        enforce_limit: whether the system enforces that limit on trials.
        begins_whole: whether the user has built the whole model, in the memory that the limit is for.
    """

    cluster: Cluster
    rendezvous: Rendezvous | None
    num_threads: int
    matmul_precision: str
    default_dtype: torch.dtype
    memory_limit_bytes: int | None
    enforce_limit: bool
    begins_whole: bool


def be_trial(
    job: Unpacked,
    setting: TrialSetting,
    registry: Registry,
    task: TrialTask,
    *,
    loading_bytes: int,
    log: Path,
    report_fd: int,
) -> NoReturn:
    """Runs ``task``, writes phases and the report to ``report_fd``, and ends the process.

    ``loading_bytes`` of host memory were taken by loading objects that a training process loads as well.
    """
    start = time.monotonic()
    if task.kind == "single":
        # Without a launcher a script has torch's default, a thread for each core. Launchers give each rank
        # its share of the cores, and torchrun a single thread.
        setting = replace(setting, cluster=setting.cluster.alone, num_threads=num_usable_cores())
    try:
        _prepare_process(setting, task, log)
        group = _Group()
        run = _join_and_run(
            group,
            job,
            setting,
            registry,
            task=task,
            report_fd=report_fd,
            start=start,
            loading_bytes=loading_bytes,
        )
        sys.stdout.flush()  # os._exit flushes nothing
        sys.stderr.flush()
        report = REPORT.dump_python(run.report, mode="json")
        send(report_fd, {"is": "report", "report": report, "secondary": run.secondary})
        if run.report.status in ("ok", "stopped early"):
            group.leave_together()
        os._exit(0)
    except Exception as error:
        traceback.print_exc()
        report = RankReport(
            task_id=task.id, rank=setting.cluster.rank, status="raised", reason=error_text(error)
        )
        send(
            report_fd, {"is": "report", "report": REPORT.dump_python(report, mode="json"), "secondary": False}
        )
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _join_and_run(
    group: _Group,
    job: Unpacked,
    setting: TrialSetting,
    registry: Registry,
    *,
    task: TrialTask,
    report_fd: int,
    start: float,
    loading_bytes: int,
) -> TrialRun:
    def enter(phase: str) -> None:
        send(report_fd, {"is": "phase", "text": phase})

    enter("meeting the other ranks")
    try:
        group.join(setting, task)
    except Exception as error:
        traceback.print_exc()
        reason = f"the other ranks were not met: {error_text(error)}"
        report = RankReport(task_id=task.id, rank=setting.cluster.rank, status="raised", reason=reason)
        return TrialRun(report, secondary=True)
    for tensor in job.on_device:
        tensor.data = tensor.data.to(setting.cluster.device)  # modules and closures hold this tensor
    return run_trial(
        job.inputs,
        setting.cluster,
        task,
        registry,
        memory_limit_bytes=setting.memory_limit_bytes,
        enforce_limit=setting.enforce_limit,
        begins_whole=setting.begins_whole and setting.enforce_limit,
        held_bytes=loading_bytes if setting.cluster.device_type == "cpu" else 0,
        on_phase=enter,
        start=start,
    )


class _Group:
    """The process group of one trial."""

    def __init__(self) -> None:
        self._store: Any = None
        self._world_size = 1

    def join(self, setting: TrialSetting, task: TrialTask) -> None:
        """Waits for the other ranks, where there is a process group."""
        cluster, endpoint = setting.cluster, setting.rendezvous
        if not cluster.distributed:
            return
        patience = timedelta(seconds=task.deadline_s)
        if endpoint is None:
            self._store = dist.HashStore()  # type: ignore[attr-defined]  # torch leaves it out of __all__
        else:
            shared = dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
            # A task may come again, from a coordinator that was restarted: then it has keys of its own.
            name = f"{task.id}/{task.attempt}"
            turn = shared.add(f"{name}/turns of rank {cluster.rank}", 1)
            self._store = dist.PrefixStore(f"{name}/{turn}", shared)  # type: ignore[attr-defined]
        self._world_size = cluster.world_size
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cluster.device_type == "cuda" else "gloo",
            store=self._store,
            rank=cluster.rank,
            world_size=cluster.world_size,
            timeout=patience,
        )

    def leave_together(self) -> None:
        """Keeps connections open until all ranks have finished their last collective, at most two seconds."""
        if self._world_size == 1:
            return
        limit = time.monotonic() + _LINGER_S
        with contextlib.suppress(RuntimeError):
            self._store.add("through", 1)
            # Adding 0 reads the count.
            while self._store.add("through", 0) < self._world_size and time.monotonic() < limit:
                time.sleep(_POLL_S)


def _prepare_process(setting: TrialSetting, task: TrialTask, log: Path) -> None:
    os.environ[TRIAL_VARIABLE] = str(task.id)
    redirect_output(log)
    arm_stack_dumps(task.deadline_s + _ORPHAN_GRACE_S)
    _prefer_as_oom_victim()
    torch.set_num_threads(setting.num_threads)
    torch.set_float32_matmul_precision(setting.matmul_precision)
    torch.set_default_dtype(setting.default_dtype)
    if setting.cluster.device_type == "cuda":
        torch.cuda.set_device(setting.cluster.local_rank)
    seed_all(_SEED)


def _prefer_as_oom_victim() -> None:
    with contextlib.suppress(OSError):
        # The highest score: where memory runs out, Linux kills this process and not the user's.
        Path("/proc/self/oom_score_adj").write_text("1000")
