"""Where the ranks of a job meet for a search: the coordinator, in rank 0's process or elsewhere."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from atorch_ns.cluster import Cluster
from atorch_ns.engine._agent import Client
from atorch_ns.engine._auth import new_token
from atorch_ns.engine._client import CoordinatorClient
from atorch_ns.engine._client_local import LocalClient
from atorch_ns.engine._coordinator import Coordinator
from atorch_ns.engine._problem import SearchProblem
from atorch_ns.engine._request import SearchRequest
from atorch_ns.engine._server import CoordinatorServer
from atorch_ns.search import History, Note, Search

__all__ = ["Address", "Meeting", "join"]

_GONE_S = 8.0
"""A coordinator in rank 0's process that is silent for this long is gone."""


class Address(NamedTuple):
    """What a rank needs to take part.

    Attributes:
        address: ``host:port`` of the coordinator; empty if it is in this process.
        token: that it asks for.
        job: the job's name on a standalone engine.
    """

    address: str = ""
    token: str = ""
    job: str = ""


class Meeting:
    """Rank 0's side: it keeps coordinator, server and history until the search is over.

    Args:
        cluster: the setting.
        request: what the caller asked for.
        problem: what is searched for.

    Attributes:
        address: to be given to all ranks.

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
        if request.history is not None:
            self._history = History(request.history, on_note=lambda text: request.observer(Note(text)))
        self._coordinator = _coordinator(request, problem, self._history)
        self.address = self._serve(cluster, self._coordinator) if cluster.distributed else Address()

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
        """Ends the server; ranks that do not know of the end yet are waited for a moment."""
        self._stack.close()

    def _serve(self, cluster: Cluster, coordinator: Coordinator) -> Address:
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
        # A coordinator of this job's own tells the observer itself.
        on_event=request.observer if cluster.rank == 0 else None,
    )


def _coordinator(request: SearchRequest, problem: SearchProblem, history: History | None) -> Coordinator:
    known = history.known(problem.setting.fingerprint) if history is not None else None
    search = Search(problem.setting, request.settings, problem.candidates, known=known, recorder=history)
    if history is not None and known is None:
        history.replay(search)
    return Coordinator(
        search, problem.setting.world_size, candidates=problem.candidates, on_event=request.observer
    )


def _create_job(cluster: Cluster, request: SearchRequest, problem: SearchProblem) -> Address:
    engine = request.engine
    assert engine is not None
    job = f"{problem.setting.fingerprint}-{new_token()[:8]}"
    client = CoordinatorClient(engine.address, engine.token, 0, job=job, tls=engine.tls)
    with contextlib.closing(client):
        client.create_job(cluster.world_size, problem.setting, request.settings, list(problem.candidates))
    return Address(engine.address, engine.token, job)
