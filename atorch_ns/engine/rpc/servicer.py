"""Servicer: translates calls of the protocol to those of :class:`Coordinator`. Knows messages, no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.engine.coordinator.events import event_to_json
from atorch_ns.engine.coordinator.jobs import EngineJobs, JobRecord, OneJob
from atorch_ns.engine.coordinator.trial import NotJoinedError, Over
from atorch_ns.engine.proto import coordinator_pb2 as pb
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.errors import InputError
from atorch_ns.search import Candidate, SearchSetting, SearchSettings, from_json, to_json

SERVICE = "atorch_ns.engine.v1.Coordinator"
_MAX_WAIT_S = 10.0  # limit of one call for a task; then the rank calls again
_ASK_AGAIN_S = 0.5  # pause before the next call if too many calls wait
_MAX_NAME_CHARACTERS = 200


class Calls:
    """One method for each call. Raises ``NotJoinedError``, ``CoordinatorError`` and ``InputError``.

    Args:
        jobs: the coordinators by job.
        room: bound of the callers that wait at once.
        active: whether the caller still waits for the answer.
    """

    def __init__(
        self, jobs: EngineJobs | OneJob, room: threading.BoundedSemaphore, active: Callable[[], bool]
    ) -> None:
        self._jobs, self._room, self._active = jobs, room, active

    def create_job(self, request: pb.CreateJobRequest) -> pb.CreateJobReply:
        """Makes a job on a standalone engine."""
        if not 0 < len(request.job) <= _MAX_NAME_CHARACTERS or request.world_size < 1:
            raise InputError(f"a job needs a name of 1 to {_MAX_NAME_CHARACTERS} characters, and ranks")
        record = JobRecord(
            job=request.job,
            world_size=request.world_size,
            setting=from_json(SearchSetting, request.setting),
            settings=from_json(SearchSettings, request.settings),
            candidates=from_json(tuple[Candidate, ...], request.candidates),
        )
        return pb.CreateJobReply(known_trials=self._jobs.create(record))

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Adds a rank."""
        coordinator = self._jobs.get(request.job)
        interval = coordinator.join(request.rank, request.session, request.last_task_id)
        return pb.JoinReply(
            incarnation=coordinator.incarnation, world_size=coordinator.world_size, heartbeat_s=interval
        )

    def next_task(self, request: pb.NextTaskRequest) -> pb.NextTaskReply:
        """Waits for a task, where there is room for one that waits."""
        coordinator = self._find_coordinator(request.caller)
        room = self._room.acquire(blocking=False)  # a call that waits keeps one of the server's threads
        try:
            answer = coordinator.next_task(
                request.caller.rank,
                request.done_id,
                wait_s=min(max(request.wait_s, 0.0), _MAX_WAIT_S) if room else 0.0,
                active=self._active,
            )
        finally:
            if room:
                self._room.release()
        if answer is None:
            return pb.NextTaskReply(ask_again_s=0.0 if room else _ASK_AGAIN_S)
        if isinstance(answer, Over):
            outcome = b"" if answer.outcome is None else to_json(answer.outcome).encode()
            return pb.NextTaskReply(
                over=pb.Over(outcome=outcome, error=answer.error, failures=dict(answer.failures))
            )
        return pb.NextTaskReply(task=to_json(answer).encode())

    def report(self, request: pb.ReportRequest) -> pb.ReportReply:
        """Takes a report."""
        coordinator = self._find_coordinator(request.caller)
        report = from_json(RankReport, request.report)
        if report.rank != request.caller.rank:
            raise InputError(f"rank {request.caller.rank} reports for rank {report.rank}")
        return pb.ReportReply(verdict=coordinator.report(report))

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        """Takes a heartbeat."""
        coordinator = self._find_coordinator(request.caller)
        beat = coordinator.heartbeat(request.caller.rank)
        events = coordinator.events.after(request.num_events) if request.watch else []
        return pb.HeartbeatReply(cancel=beat.cancel, over=beat.over, events=map(event_to_json, events))

    def cancel(self, request: pb.CancelRequest) -> pb.CancelReply:
        """Ends the search with the best so far."""
        self._find_coordinator(request.caller).cancel(request.reason)
        return pb.CancelReply()

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        """Takes a rank's last call."""
        self._find_coordinator(request.caller).leave(request.caller.rank, request.reason)
        return pb.LeaveReply()

    def _find_coordinator(self, caller: pb.Caller) -> Coordinator:
        coordinator = self._jobs.get(caller.job)
        if caller.incarnation != coordinator.incarnation:
            raise NotJoinedError("the coordinator was restarted: join again")
        return coordinator


CALLS: dict[str, Callable[[Calls, Any], Any]] = {
    "CreateJob": Calls.create_job,
    "Join": Calls.join,
    "NextTask": Calls.next_task,
    "Report": Calls.report,
    "Heartbeat": Calls.heartbeat,
    "Cancel": Calls.cancel,
    "Leave": Calls.leave,
}
"""The answer to each call by name; the messages of ``X`` are ``XRequest`` and ``XReply``."""
