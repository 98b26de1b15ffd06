"""The calls of the protocol, in the words of :class:`Coordinator`. Knows messages, no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.engine.coordinator.events import event_to_json
from atorch_ns.engine.coordinator.trial import NotJoinedError, Over
from atorch_ns.engine.proto import coordinator_pb2 as pb
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.errors import CoordinatorError, InputError
from atorch_ns.search import Candidate, SearchSettings, Setting, from_json, to_json

SERVICE = "atorch_ns.engine.v1.Coordinator"
_MAX_WAIT_S = 10.0
_ASK_AGAIN_S = 0.5
_MAX_NAME_CHARACTERS = 200


class NoSuchJobError(CoordinatorError):
    """A call for a job that this server does not have."""


class Jobs(Protocol):
    """The coordinators of a server."""

    def get(self, job: str) -> Coordinator:
        """The coordinator of a job.

        Raises:
            NoSuchJobError: there is none.
        """

    def create(
        self,
        job: str,
        world_size: int,
        setting: Setting,
        settings: SearchSettings,
        candidates: list[Candidate],
    ) -> int:
        """Makes a job; the same again gives the one there is. Returns how many trials of it are known.

        Raises:
            CoordinatorError: this server makes none, or has another one of this name.
        """

    def tick(self) -> None:
        """Moves all coordinators when nobody calls."""

    def close(self, timeout_s: float) -> None:
        """Waits until all ranks know of the end."""


class OneJob:
    """The one search of an ordinary run; its job has no name."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def get(self, job: str) -> Coordinator:
        """The coordinator, if no other job is asked for."""
        if job:
            raise NoSuchJobError(f"there is no job '{job}' here: this coordinator serves one search only")
        return self._coordinator

    def create(
        self,
        job: str,
        world_size: int,
        setting: Setting,
        settings: SearchSettings,
        candidates: list[Candidate],
    ) -> int:
        """Refuses: the search is there from the start."""
        raise CoordinatorError(
            "this coordinator serves one search only; jobs are made on `atorch-ns engine serve`"
        )

    def tick(self) -> None:
        """Moves the coordinator."""
        self._coordinator.tick()

    def close(self, timeout_s: float) -> None:
        """Waits until all ranks have said goodbye, if the search is over."""
        if self._coordinator.over is not None:
            self._coordinator.wait_told(timeout_s)


class Calls:
    """One method a call. Raises ``NotJoinedError``, ``CoordinatorError`` and ``InputError``.

    Args:
        jobs: what is served.
        room: bounds how many callers wait at once.
        wanted: whether somebody still waits for the answer.
    """

    def __init__(self, jobs: Jobs, room: threading.BoundedSemaphore, wanted: Callable[[], bool]) -> None:
        self._jobs, self._room, self._wanted = jobs, room, wanted

    def create_job(self, request: pb.CreateJobRequest) -> pb.CreateJobReply:
        """Makes a job on a standalone engine."""
        if not 0 < len(request.job) <= _MAX_NAME_CHARACTERS or request.world_size < 1:
            raise InputError(f"a job needs a name of 1 to {_MAX_NAME_CHARACTERS} characters, and ranks")
        known = self._jobs.create(
            request.job,
            request.world_size,
            from_json(Setting, request.setting),
            from_json(SearchSettings, request.settings),
            from_json(list[Candidate], request.candidates),
        )
        return pb.CreateJobReply(known_trials=known)

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Enters a rank."""
        joined = self._jobs.get(request.job).join(request.rank, request.session, request.last_task_id)
        return pb.JoinReply(
            incarnation=joined.incarnation, world_size=joined.world_size, heartbeat_s=joined.heartbeat_s
        )

    def next_task(self, request: pb.NextTaskRequest) -> pb.NextTaskReply:
        """Waits for a task, where there is room for one that waits."""
        coordinator = self._of(request.caller)
        room = self._room.acquire(blocking=False)
        try:
            answer = coordinator.next_task(
                request.caller.rank,
                request.done_id,
                wait_s=min(max(request.wait_s, 0.0), _MAX_WAIT_S) if room else 0.0,
                wanted=self._wanted,
            )
        finally:
            if room:
                self._room.release()
        if answer is None:
            return pb.NextTaskReply(ask_again_s=0.0 if room else _ASK_AGAIN_S)
        if isinstance(answer, Over):
            return pb.NextTaskReply(over=_over_message(answer))
        return pb.NextTaskReply(task=to_json(answer).encode())

    def report(self, request: pb.ReportRequest) -> pb.ReportReply:
        """Takes a report."""
        coordinator = self._of(request.caller)
        report = from_json(RankReport, request.report)
        if report.rank != request.caller.rank:
            raise InputError(f"rank {request.caller.rank} reports for rank {report.rank}")
        return pb.ReportReply(verdict=coordinator.report(report))

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        """Takes a heartbeat."""
        coordinator = self._of(request.caller)
        beat = coordinator.heartbeat(request.caller.rank)
        events = coordinator.log.after(request.num_events) if request.watch else []
        return pb.HeartbeatReply(cancel=beat.cancel, over=beat.over, events=map(event_to_json, events))

    def cancel(self, request: pb.CancelRequest) -> pb.CancelReply:
        """Ends the search with the best so far."""
        self._of(request.caller).cancel(request.reason)
        return pb.CancelReply()

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        """A rank's goodbye."""
        self._of(request.caller).leave(request.caller.rank, request.reason)
        return pb.LeaveReply()

    def _of(self, caller: pb.Caller) -> Coordinator:
        coordinator = self._jobs.get(caller.job)
        if caller.incarnation != coordinator.incarnation:
            raise NotJoinedError("the coordinator was started again: join once more")
        return coordinator


def _over_message(over: Over) -> pb.Over:
    outcome = to_json(over.outcome).encode() if over.outcome is not None else b""
    return pb.Over(outcome=outcome, error=over.error, failures=dict(over.failures))


CALLS: dict[str, tuple[type[Any], Callable[[Calls, Any], Any]]] = {
    "CreateJob": (pb.CreateJobRequest, Calls.create_job),
    "Join": (pb.JoinRequest, Calls.join),
    "NextTask": (pb.NextTaskRequest, Calls.next_task),
    "Report": (pb.ReportRequest, Calls.report),
    "Heartbeat": (pb.HeartbeatRequest, Calls.heartbeat),
    "Cancel": (pb.CancelRequest, Calls.cancel),
    "Leave": (pb.LeaveRequest, Calls.leave),
}
"""By name: the request's type, and what answers it."""
