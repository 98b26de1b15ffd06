"""The fully automatic mode: from the user's objects to the outcome of a search on the real ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from atorch_ns.cluster import Cluster, Hardware, calibrate
from atorch_ns.cluster.memory_limit import return_freed_memory
from atorch_ns.engine.calibration import read_calibration
from atorch_ns.engine.problem import build_problem
from atorch_ns.engine.request import SearchRequest
from atorch_ns.engine.rpc.channel import UnreachableError
from atorch_ns.engine.rpc.meeting import Client, Meeting, join, run_agent
from atorch_ns.engine.trial.in_process import make_worker
from atorch_ns.engine.trial.pickling import describe_unpicklable
from atorch_ns.engine.trial.process import Rendezvous, open_rendezvous
from atorch_ns.engine.trial.report import Worker
from atorch_ns.engine.trial.worker import log_folder, new_log_folder
from atorch_ns.errors import RankError, SearchError
from atorch_ns.job import Inputs
from atorch_ns.job.sampling import Sample, sample_inputs
from atorch_ns.method import Registry
from atorch_ns.search import SearchNote, SearchOutcome
from atorch_ns.text import first_few

_CALIBRATION_S = 4.0  # for measuring devices and links before a search; takes a third of it usually


def find_strategy(
    inputs: Inputs, cluster: Cluster, registry: Registry, request: SearchRequest
) -> SearchOutcome:
    """Searches for the best strategy. The outcome is the same on every rank. Collective.

    Model, data and random states stay as before: trials run on the model's structure and a few samples.

    Raises:
        InputError: if the arguments do not allow a search.
        SearchError: if no candidate could be run; it carries the outcome.
        RankError: if a rank failed or vanished.
    """
    sample = cluster.agree(
        lambda: sample_inputs(
            inputs,
            num_data_ranks=cluster.world_size,
            sample_batch=request.sample_batch,
            batch_size=request.batch_size,
        ),
        what="sampling the data",
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept_environment())  # undone last, when workers have ended
        full_cluster = _with_measured_hardware(cluster, request)
        outcome = _run_search(stack, sample, full_cluster, registry, request=request)
    if outcome.best is None:
        raise SearchError(_why_nothing(outcome), outcome=outcome)
    if request.settings.memory_limit_gib is not None and cluster.device_type == "cpu":
        return_freed_memory()  # trials under a limit ran like that, and took less for it
    return outcome


def _with_measured_hardware(cluster: Cluster, request: SearchRequest) -> Cluster:
    calibration, path = None, request.search_calibration
    if path is not None:
        calibration = cluster.agree(lambda: read_calibration(path, cluster), what="reading the calibration")
    # Figures that atorch-ns calibrate measured on this cluster: nothing is measured again.
    if isinstance(calibration, Hardware):
        return replace(cluster, hardware=calibration, device_memory_bytes=calibration.device.memory_bytes)
    full_cluster = cluster.with_hardware()  # calibrate keeps the figures that it does not measure
    group = dist.group.WORLD if cluster.distributed else None
    hardware = calibrate(full_cluster, group=group, seconds=_CALIBRATION_S)
    if calibration is not None:  # factors of earlier trials are relative to measured figures
        hardware = calibration.factors(cluster.device_name, cluster.world_size).on(hardware)
    return replace(full_cluster, hardware=hardware)


def _run_search(
    stack: contextlib.ExitStack,
    sample: Sample,
    cluster: Cluster,
    registry: Registry,
    *,
    request: SearchRequest,
) -> SearchOutcome:
    rendezvous = _share_rendezvous(stack, cluster)
    states = registry.carried()
    # Trials are collective: where one rank cannot send its objects, all run trials in process.
    obstacles = cluster.gathered(describe_unpicklable(sample.inputs, states))
    obstacle = next(filter(None, obstacles), None)
    logs = _make_log_folder(stack, cluster, request)
    # Workers start before the profile, as each needs seconds to import the modules of trials by itself.
    worker = cluster.agree(
        lambda: make_worker(
            stack,
            sample.inputs,
            cluster,
            request,
            rendezvous=rendezvous,
            log_dir=logs,
            obstacle=obstacle,
            states=states,
        ),
        what="starting the trial workers",
    )
    first = cluster.rank == 0  # it alone profiles and prices; the others get tasks
    problem = cluster.agree(
        lambda: build_problem(sample, cluster, registry, request) if first else None,
        what="profiling the model",
    )
    meeting = cluster.agree(
        lambda: Meeting(cluster, request, problem) if problem is not None else None,
        what="opening the coordinator",
    )
    if meeting is not None:
        stack.callback(meeting.close)
    address = cluster.from_first(None if meeting is None else meeting.address)
    if meeting is not None and not address.address:  # a job of one process needs no socket
        client = meeting.client()
    else:
        client = join(address, cluster, request)
    outcome = _take_part(client, worker, cluster, request)
    if meeting is not None and problem is not None:
        meeting.conclude()
        # The checks need the profile, which rank 0 has.
        outcome = replace(outcome, checks=(*outcome.checks, *problem.checks(outcome)))
    result: SearchOutcome = cluster.from_first(outcome)
    return result


@contextlib.contextmanager
def _kept_environment() -> Iterator[None]:
    # Torch writes into the environment when it looks for compilers and devices.
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)  # variables that were removed or changed


def _take_part(client: Client, worker: Worker, cluster: Cluster, request: SearchRequest) -> SearchOutcome:
    try:
        return run_agent(client, worker, rank=cluster.rank)
    except UnreachableError as error:
        if request.engine is not None:  # a service, not a process of this job
            raise
        reason = f"it coordinates the search and no longer answers: {error}"
        raise RankError(f"rank 0 has failed or vanished. {reason}", failures={0: reason}) from error


def _share_rendezvous(stack: contextlib.ExitStack, cluster: Cluster) -> Rendezvous | None:
    if not cluster.distributed:
        return None
    store = cluster.agree(
        lambda: open_rendezvous(cluster) if cluster.rank == 0 else None,
        what="opening the store of the trials",
    )
    stack.callback(lambda: store)  # the store listens as long as it is referenced
    address: Rendezvous = cluster.from_first(None if store is None else store[1])
    return address


def _make_log_folder(stack: contextlib.ExitStack, cluster: Cluster, request: SearchRequest) -> Path:
    # Rank 0 chooses the name; below, the ranks of every other machine make a folder of that name.
    shared, problem = cluster.on_first(
        lambda: new_log_folder(request.log_dir), what="making a folder for logs"
    )
    if problem and cluster.rank == 0:
        request.observer(SearchNote(problem))
    return cluster.agree(lambda: stack.enter_context(log_folder(shared)), what="making a folder for logs")


def _why_nothing(outcome: SearchOutcome) -> str:
    lines = [f"no strategy could be run on {outcome.setting.world_size} process(es): {outcome.stop_reason}"]
    failures = [row for row in outcome.rows if row.fate in ("failed", "pruned")]
    if failures:
        reasons = first_few([f"{row.candidate.label}: {row.reason}" for row in failures], 8, "\n  ")
        lines.append(f"  {reasons}")
    if outcome.nearest_miss:
        lines.append(outcome.nearest_miss)
    return "\n".join(lines)
