"""Coordinator client: the calls of one rank, and its heartbeat."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from atorch_ns.engine.coordinator.events import EventStream
from atorch_ns.engine.coordinator.trial import NotJoinedError, Over
from atorch_ns.engine.proto import coordinator_pb2 as pb
from atorch_ns.engine.rpc.auth import Tls
from atorch_ns.engine.rpc.channel import CoordinatorChannel, UnreachableError
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.errors import AtorchError, CoordinatorError, InputError
from atorch_ns.search import (
    Candidate,
    Event,
    SearchNote,
    SearchOutcome,
    SearchSetting,
    SearchSettings,
    TrialTask,
    from_json,
    to_json,
)

T = TypeVar("T")

_MIN_BEAT_TIMEOUT_S = 2.0  # least time-out of one heartbeat; small jobs send them every 0.2 s


class CoordinatorClient:
    """Calls a coordinator for one rank; a thread sends heartbeats from :meth:`join` to :meth:`close`.

    It waits for a lost coordinator, joins again when it is back, and ends a trial that ran meanwhile.

    Args:
        address: ``host:port``.
        token: the server's token.
        rank: this rank.
        job: its name on a standalone engine; empty for a coordinator of one search.
        tls: the certificates to trust; without it nothing is encrypted.
        reconnect_s: how long a coordinator may be away; ten seconds at most where none was ever there.
        poll_s: how long one request for a task waits.
        call_timeout_s: deadline of every other call.
        max_message_mib: a larger message is not sent.
        on_event: one rank's observer of another process's events, in order, on the heartbeat's thread.
    """

    def __init__(
        self,
        address: str,
        token: str,
        rank: int,
        *,
        job: str = "",
        tls: Tls | None = None,
        reconnect_s: float = 60.0,
        poll_s: float = 10.0,
        call_timeout_s: float = 5.0,
        max_message_mib: int = 8,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._channel = CoordinatorChannel(address, token, tls=tls, max_message_mib=max_message_mib)
        self._rank, self._job = rank, job
        self._reconnect_s, self._poll_s, self._call_timeout_s = reconnect_s, poll_s, call_timeout_s
        self._events = EventStream(on_event) if on_event is not None else None
        self._session = secrets.token_hex(8)
        self._incarnation = ""
        self._heartbeat_s = 1.0
        self._last_id = self._done_id = 0
        self._to_end: frozenset[int] = frozenset()
        self._past_incarnation = ""  # the incarnation that has nothing more for this rank to run
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None

    def create_job(
        self,
        world_size: int,
        setting: SearchSetting,
        settings: SearchSettings,
        candidates: Sequence[Candidate],
    ) -> int:
        """Makes this job on a standalone engine; rank 0 does it before the others join.

        Returns:
            Number of trials of the same fingerprint that the engine knows.

        Raises:
            CoordinatorError: it cannot be reached, or refuses.
        """
        request = pb.CreateJobRequest(
            job=self._job,
            world_size=world_size,
            setting=to_json(setting).encode(),
            settings=to_json(settings).encode(),
            candidates=to_json(candidates).encode(),
        )
        return int(self._call_with_retries("CreateJob", request).known_trials)

    def join(self) -> None:
        """Joins the job and starts the heartbeat.

        Raises:
            CoordinatorError: it cannot be reached, or refuses this rank.
        """
        request = pb.JoinRequest(
            job=self._job, rank=self._rank, session=self._session, last_task_id=self._last_id
        )
        reply = self._call_with_retries("Join", request)
        self._heartbeat_s = max(reply.heartbeat_s, 0.05)
        if self._events is not None and self._incarnation not in ("", reply.incarnation):
            self._events.start_again()  # the new coordinator counts its events from 0
            self._publish_note("the coordinator was started again; the search goes on")
        self._incarnation = reply.incarnation
        if self._beats is None:
            self._beats = threading.Thread(
                target=self._send_heartbeats, name=f"heartbeat-{self._rank}", daemon=True
            )
            self._beats.start()

    def next_task(self) -> TrialTask | Over:
        """Waits for the next task or the end.

        Raises:
            CoordinatorError: the coordinator was away for longer than ``reconnect_s``, or refuses.
        """
        while True:
            request = pb.NextTaskRequest(
                caller=self._make_caller(), done_id=self._done_id, wait_s=self._poll_s
            )
            try:
                reply = self._call_with_retries(
                    "NextTask", request, timeout_s=self._poll_s + self._call_timeout_s
                )
            except NotJoinedError:
                self.join()
                continue
            match reply.WhichOneof("what"):
                case "task":
                    task = _parse_json(TrialTask, reply.task)
                    self._last_id = max(self._last_id, task.id)
                    return task
                case "over":
                    return _parse_over(reply.over)
            self._closing.wait(min(max(reply.ask_again_s, 0.0), 5.0))

    def report(self, report: RankReport) -> None:
        """Reports a trial. After a restart of the coordinator the report is void: the trial is run again.

        Raises:
            CoordinatorError: the coordinator was away for longer than ``reconnect_s``, or refuses.
        """
        try:
            self._call_with_retries(
                "Report", pb.ReportRequest(caller=self._make_caller(), report=to_json(report).encode())
            )
        except NotJoinedError:
            self.join()
        self._done_id = max(self._done_id, report.task_id)

    def cancelled(self, task_id: int) -> bool:
        """Returns whether the last heartbeat said to end this running task."""
        return self._past_incarnation == self._incarnation or task_id in self._to_end

    def cancel(self, reason: str) -> None:
        """Ends the search with the best so far.

        Raises:
            CoordinatorError: the coordinator was away for longer than ``reconnect_s``, or refuses.
        """
        try:
            self._call_with_retries("Cancel", pb.CancelRequest(caller=self._make_caller(), reason=reason))
        except NotJoinedError:
            self.join()
            self._call_with_retries("Cancel", pb.CancelRequest(caller=self._make_caller(), reason=reason))

    def leave(self, reason: str = "") -> None:
        """Leaves the search; with a reason, it ends on all ranks."""
        if self._incarnation:
            if not reason:  # the end of the search may be an event that no heartbeat has brought yet
                self._take_last_events()
            request = pb.LeaveRequest(caller=self._make_caller(), reason=reason)
            self._channel.call("Leave", request, timeout_s=self._call_timeout_s)

    def close(self) -> None:
        """Ends the heartbeat and the connection; may be called twice."""
        self._closing.set()
        self._channel.close()  # first: it ends a heartbeat that waits for an answer
        if self._beats is not None:
            self._beats.join()

    def _make_caller(self) -> pb.Caller:
        return pb.Caller(job=self._job, rank=self._rank, incarnation=self._incarnation)

    def _call_with_retries(self, name: str, request: object, timeout_s: float | None = None) -> Any:
        return self._channel.insist(
            name,
            request,
            timeout_s=timeout_s or self._call_timeout_s,
            within_s=self._reconnect_s,
            on_silence=self._publish_note,
        )

    def _publish_note(self, text: str) -> None:
        if self._events is not None:
            self._events.note(SearchNote(text))

    def _call_heartbeat(self, caller: pb.Caller) -> pb.HeartbeatReply:
        events = self._events
        number = 0 if events is None else events.num_events
        request = pb.HeartbeatRequest(caller=caller, watch=events is not None, num_events=number)
        timeout_s = max(_MIN_BEAT_TIMEOUT_S, self._heartbeat_s)
        reply: pb.HeartbeatReply = self._channel.call("Heartbeat", request, timeout_s=timeout_s)
        if events is not None:
            events.take(reply.events, number)
        return reply

    def _take_last_events(self) -> None:
        with contextlib.suppress(AtorchError):
            while self._events is not None and self._call_heartbeat(self._make_caller()).events:
                continue

    def _send_heartbeats(self) -> None:
        last_answer = time.monotonic()
        while not self._closing.wait(self._heartbeat_s):
            # Before the call, as the main thread may join anew meanwhile, or this process be suspended.
            caller, silence_s = self._make_caller(), time.monotonic() - last_answer
            try:
                reply = self._call_heartbeat(caller)
            except UnreachableError:
                is_over = silence_s > self._reconnect_s
            except (NotJoinedError, CoordinatorError):
                # Restarted, or the job is gone: the main thread finds out which, once its trial has ended.
                is_over = True
            else:
                last_answer = time.monotonic()
                self._to_end = frozenset(reply.cancel)
                is_over = reply.over
            self._past_incarnation = caller.incarnation if is_over else ""


def _parse_over(message: pb.Over) -> Over:
    outcome = _parse_json(SearchOutcome, message.outcome) if message.outcome else None
    return Over(outcome=outcome, error=message.error, failures=dict(message.failures))


def _parse_json(kind: type[T], data: bytes) -> T:
    try:
        return from_json(kind, data)
    except InputError as error:
        raise CoordinatorError(
            f"the coordinator's answer cannot be read; it may run another version: {error}"
        ) from None
