"""The loop of one rank: next task, run it, report, until the search is over."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Protocol

from atorch_ns.engine._coordinator_types import Over
from atorch_ns.engine._rank_report import RankReport, Worker
from atorch_ns.errors import RankError
from atorch_ns.search import SearchOutcome, TrialTask

__all__ = ["Client", "run_agent"]


class Client(Protocol):
    """How a rank talks to the coordinator: :class:`CoordinatorClient` or :class:`LocalClient`."""

    def join(self) -> None:
        """Enters the job."""

    def next_task(self) -> TrialTask | Over:
        """Waits for the next task or the end."""

    def report(self, report: RankReport) -> None:
        """Reports a trial."""

    def cancelled(self, task_id: int) -> bool:
        """Whether a running task is to be ended; answers at once."""

    def cancel(self, reason: str) -> None:
        """Ends the search with the best so far."""

    def leave(self, reason: str = "") -> None:
        """Says goodbye; with a reason, the search ends on all ranks."""

    def close(self) -> None:
        """Ends threads and connections; may be called twice."""


def run_agent(client: Client, worker: Worker, *, rank: int) -> SearchOutcome:
    """Takes part in a search until it is over. Closes client and worker, however it ends.

    Ctrl-C on any rank ends the search for all with the best so far; a second one ends this rank.

    Returns:
        What the search found; the same on every rank.

    Raises:
        RankError: another rank failed or vanished; names it.
        CoordinatorError: the coordinator cannot be reached, or refuses this rank.
    """
    try:
        over = _take_part(client, worker, rank)
        with contextlib.suppress(Exception):
            client.leave()
    except BaseException as error:
        with contextlib.suppress(Exception):
            client.leave(f"{type(error).__name__}: {error}")
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
    interrupted = False
    while True:
        task: TrialTask | None = None
        try:
            step = client.next_task()
            if isinstance(step, Over):
                return step
            task = step
            client.report(worker.run(task, partial(client.cancelled, task.id)))
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            client.cancel(f"Ctrl-C on rank {rank}")
            if task is not None:
                client.report(RankReport(task_id=task.id, rank=rank, status="cancelled", reason="Ctrl-C"))
