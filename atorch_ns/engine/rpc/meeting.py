"""Coordinator session of a job's ranks, in rank 0's process or with a standalone engine."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import NamedTuple

from atorch_ns.cluster import Cluster
from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.engine.coordinator.trial import Over
from atorch_ns.engine.problem import SearchProblem
from atorch_ns.engine.request import SearchRequest
from atorch_ns.engine.rpc.auth import new_token
from atorch_ns.engine.rpc.client import CoordinatorClient
from atorch_ns.engine.rpc.server import CoordinatorServer
from atorch_ns.engine.trial.report import RankReport, Worker
from atorch_ns.errors import RankError
from atorch_ns.search import History, Search, SearchNote, SearchOutcome, TrialTask
from atorch_ns.text import error_text


class LocalClient:
    """The interface of :class:`CoordinatorClient` by direct calls, for jobs of one process and for tests."""

    def __init__(self, coordinator: Coordinator, rank: int = 0) -> None:
        self._coordinator = coordinator
        self._rank = rank
        self._done_id = 0
        self._has_joined = False

    def join(self) -> None:
        """Joins the job."""
        self._coordinator.join(self._rank, session=f"local-{id(self)}")
        self._has_joined = True

    def next_task(self) -> TrialTask | Over:
        """Waits for the next task or the end."""
        while True:
            if (answer := self._coordinator.next_task(self._rank, self._done_id, wait_s=10.0)) is not None:
                return answer

    def report(self, report: RankReport) -> None:
        """Reports a trial."""
        self._coordinator.report(report)
        self._done_id = report.task_id

    def cancelled(self, task_id: int) -> bool:
        """Returns whether a running task is to be ended."""
        beat = self._coordinator.heartbeat(self._rank)  # the only signs of life while a trial runs
        return beat.over or task_id in beat.cancel

    def cancel(self, reason: str) -> None:
        """Ends the search with the best so far."""
        self._coordinator.cancel(reason)

    def leave(self, reason: str = "") -> None:
        """Leaves the search; with a reason, it ends on all ranks."""
        if self._has_joined:
            self._coordinator.leave(self._rank, reason)

    def close(self) -> None:
        """Does nothing, as there is nothing to close."""


Client = CoordinatorClient | LocalClient


def run_agent(client: Client, worker: Worker, *, rank: int) -> SearchOutcome:
    """Takes part in a search until it is over. Closes client and worker, however it ends.

    Ctrl-C on any rank ends the search for all with the best so far; a second one ends this rank.

    Returns:
        The outcome of the search; the same on every rank.

    Raises:
        RankError: another rank failed or vanished; names it.
        CoordinatorError: the coordinator cannot be reached, or refuses this rank.
    """
    try:
        over = _take_part(client, worker, rank)
        with contextlib.suppress(Exception):  # the outcome is here already
            client.leave()
    except BaseException as error:
        with contextlib.suppress(Exception):
            client.leave(error_text(error))  # ends the search on the other ranks, which would wait
        raise
    finally:
        try:
            worker.close()
        finally:
            client.close()
    if over.outcome is None:
        raise RankError(over.error, failures=dict(over.failures))
    return over.outcome


def _take_part(client: Client, worker: Worker, rank: int) -> Over:
    client.join()
    is_interrupted = False
    while True:
        task: TrialTask | None = None
        try:
            step = client.next_task()
            if isinstance(step, Over):
                return step
            task = step
            client.report(worker.run(task, partial(client.cancelled, task.id)))
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            client.cancel(f"Ctrl-C on rank {rank}")
            if task is not None:  # the worker has killed the trial, and the others wait for a report
                client.report(RankReport(task_id=task.id, rank=rank, status="cancelled", reason="Ctrl-C"))


_GONE_S = 8.0  # a coordinator in rank 0's process that is silent for this long is gone


class Address(NamedTuple):
    """The coordinator of a job, as its ranks reach it.

    Attributes:
        address: ``host:port`` of the coordinator; empty if it is in this process.
        token: the coordinator's token.
        job: the job's name on a standalone engine.
    """

    address: str = ""
    token: str = ""
    job: str = ""


class Meeting:
    """Rank 0's side: it keeps coordinator, server and history until the search is over.

    Attributes:
        address: the coordinator's address for all ranks.

    Raises:
        CoordinatorError: if the port cannot be opened, or the standalone engine cannot be reached.
    """

    def __init__(self, cluster: Cluster, request: SearchRequest, problem: SearchProblem) -> None:
        self._stack = contextlib.ExitStack()
        self._coordinator: Coordinator | None = None
        self._history: History | None = None
        if request.engine is not None:  # it keeps a history of its own
            self.address = _create_job(cluster, request, problem)
            return
        if request.search_history is not None:
            self._history = History(
                request.search_history, on_note=lambda text: request.observer(SearchNote(text))
            )
        self._coordinator = _make_coordinator(request, problem, self._history)
        self.address = self._start_server(cluster, self._coordinator) if cluster.distributed else Address()

    def client(self) -> Client:
        """The client of a job of one process."""
        assert self._coordinator is not None
        return LocalClient(self._coordinator)

    def conclude(self) -> None:
        """Notes in the history that the search has come to its end, unless somebody interrupted it."""
        if self._history is None or self._coordinator is None or self._coordinator.cancelled:
            return
        over = self._coordinator.over
        if over is not None and over.outcome is not None:
            self._history.conclude(over.outcome)

    def close(self) -> None:
        """Ends the server, after a moment for ranks that have not left yet."""
        self._stack.close()

    def _start_server(self, cluster: Cluster, coordinator: Coordinator) -> Address:
        token = new_token()
        if cluster.num_nodes == 1:
            server = CoordinatorServer(coordinator, token=token)
        else:
            # The network between the nodes is trusted as torch's own store and collectives trust it.
            host = os.environ.get("MASTER_ADDR", "0.0.0.0")
            server = CoordinatorServer(coordinator, host=host, token=token, allow_plain_remote=True)
        self._stack.enter_context(server)
        return Address(server.address, token)


def join(address: Address, cluster: Cluster, request: SearchRequest) -> Client:
    """A rank's client of the coordinator at ``address``."""
    if request.engine is None:
        # It lives in rank 0's process and does not come back.
        return CoordinatorClient(address.address, address.token, cluster.rank, reconnect_s=_GONE_S)
    return CoordinatorClient(
        address.address,
        address.token,
        cluster.rank,
        job=address.job,
        tls=request.engine.tls,
        # A coordinator in rank 0's process has the observer itself.
        on_event=request.observer if cluster.rank == 0 else None,
    )


def _make_coordinator(request: SearchRequest, problem: SearchProblem, history: History | None) -> Coordinator:
    arguments = (problem.setting, request.settings, problem.candidates)
    search = Search(*arguments) if history is None else history.begin(*arguments)[0]
    return Coordinator(
        search, problem.setting.world_size, candidates=problem.candidates, on_event=request.observer
    )


def _create_job(cluster: Cluster, request: SearchRequest, problem: SearchProblem) -> Address:
    engine = request.engine
    assert engine is not None
    job = f"{problem.setting.fingerprint}-{new_token()[:8]}"  # jobs of one setting may run at once
    client = CoordinatorClient(engine.address, engine.token, 0, job=job, tls=engine.tls)
    with contextlib.closing(client):
        client.create_job(cluster.world_size, problem.setting, request.settings, problem.candidates)
    return Address(engine.address, engine.token, job)
