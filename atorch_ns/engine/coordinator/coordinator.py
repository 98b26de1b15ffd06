"""Coordinator: hands the trials of one search to all ranks and gathers their reports.

A state machine without sockets: ranks call it from threads, directly or through a server. It moves when it
is called; :meth:`Coordinator.tick` moves it when nobody calls.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from atorch_ns.engine.coordinator.events import EventQueue
from atorch_ns.engine.coordinator.trial import Heartbeat, NotJoinedError, Over, TrialUnderWay, Verdict
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.errors import CoordinatorError
from atorch_ns.search import Candidate, Ended, Event, Search, SearchNote, TrialTask
from atorch_ns.text import error_text


@dataclass(kw_only=True)
class _Member:
    session: str  # of its process: a rank that was started again has another
    last_seen: float  # on the coordinator's clock
    left: bool = False


class Membership:
    """The ranks that take part in one job. Not thread-safe. Times are seconds of the coordinator's clock."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.last_task_id = 0
        self._members: dict[int, _Member] = {}

    def join(self, rank: int, session: str, last_task_id: int, now: float) -> None:
        """Adds a rank; the same session may join again.

        Raises:
            CoordinatorError: no such rank, or another process has this rank already.
        """
        if not 0 <= rank < self.world_size:
            raise CoordinatorError(f"rank {rank} is not one of the job's {self.world_size} ranks")
        member = self._members.get(rank)
        if member is not None and member.session != session:
            raise CoordinatorError(
                f"rank {rank} has joined already, from another process. Two processes have the same rank, or "
                "one was restarted: end all ranks and restart the job."
            )
        self._members[rank] = _Member(session=session, last_seen=now)
        self.last_task_id = max(self.last_task_id, last_task_id)

    def has(self, rank: int) -> bool:
        """Returns whether a rank has joined."""
        return rank in self._members

    def record_contact(self, rank: int, now: float) -> None:
        """Notes a sign of life of a rank."""
        self._members[rank].last_seen = now

    def leave(self, rank: int) -> None:
        """Notes that a rank will not call again."""
        self._members[rank].left = True

    @property
    def absent(self) -> list[int]:
        """The ranks that never joined."""
        return [rank for rank in range(self.world_size) if rank not in self._members]

    @property
    def present(self) -> list[int]:
        """The ranks that joined and have not left."""
        return [rank for rank, member in self._members.items() if not member.left]

    def silent(self, now: float) -> dict[int, float]:
        """The present ranks without a sign of life for longer than the time-out, with the seconds."""
        silence = {rank: now - self._members[rank].last_seen for rank in self.present}
        return {rank: seconds for rank, seconds in silence.items() if seconds > self.timeout_s}


def since(seconds: float) -> str:
    """Returns the time of day some seconds ago."""
    return (datetime.now() - timedelta(seconds=seconds)).strftime("%H:%M:%S")


_NOTE_EVERY_S = 10.0  # between notes on ranks that have not joined
_LOOK_EVERY_S = 0.25  # between two looks of a call that waits for a task


class Coordinator:
    """One search on all ranks. Thread-safe.

    Every task goes to all ranks. The failure of one cancels it on the others; once all have reported, the
    search gets the merged outcome. A rank that falls silent, leaves with an error or does not end a cancelled
    trial ends the search on all ranks.

    Args:
        search: the search whose trials are run.
        world_size: number of ranks; trials begin when all have joined.
        candidates: candidates of the search, for the events.
        clock: seconds, monotonic.
        heartbeat_timeout_s: a rank that is silent for longer has vanished.
        join_timeout_s: how long to wait for the first call of all ranks.
        grace_s: how long a rank may overrun a task's deadline, and how long it may take to end a trial.
        on_event: observer of all events, in order.

    Attributes:
        incarnation: identity of this coordinator; another one after a restart.
        counts: number of reports by verdict.
        events: the events so far, for observers in other processes.
    """

    def __init__(
        self,
        search: Search,
        world_size: int,
        *,
        candidates: Sequence[Candidate] = (),
        clock: Callable[[], float] = time.monotonic,
        heartbeat_timeout_s: float = 10.0,
        join_timeout_s: float = 300.0,
        grace_s: float = 15.0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.world_size = world_size
        self.incarnation = secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self._search, self._clock = search, clock
        self._join_timeout_s, self._grace_s = join_timeout_s, grace_s
        self._members = Membership(world_size, heartbeat_timeout_s)
        self._condition = threading.Condition(threading.RLock())
        self.events = EventQueue(candidates, on_event)
        self._trial: TrialUnderWay | None = None
        self._is_cancelled = False
        self._over: Over | None = None
        self._suspended_s = 0.0
        self._start = self._last_move = self._last_note = clock()

    @property
    def over(self) -> Over | None:
        """End of the search, once it has come."""
        return self._over

    @property
    def cancelled(self) -> bool:
        """True if somebody ended the search before its time."""
        return self._is_cancelled

    def join(self, rank: int, session: str = "", last_task_id: int = 0) -> float:
        """Takes a rank's first call, and its first one after the coordinator was restarted.

        Args:
            rank: the rank that calls.
            session: identity of its process, the same in all its calls.
            last_task_id: the highest task id that the rank has seen; new ids are higher.

        Returns:
            Seconds between two heartbeats.

        Raises:
            CoordinatorError: the rank is not of this job, or another process has it.
        """
        with self._condition:
            self._members.join(rank, session, last_task_id, self._read_clock())
            self._advance_search()
        self.events.deliver()  # without the lock, here and below: the observer is the user's code
        # At most 200 heartbeats a second of all ranks, and at least four of each within its time-out.
        return min(max(0.2, self.world_size / 200), 2.0, self._members.timeout_s / 4)

    def next_task(
        self, rank: int, done_id: int = 0, *, wait_s: float = 0.0, active: Callable[[], bool] = lambda: True
    ) -> TrialTask | Over | None:
        """The task that a rank is to run next.

        Args:
            rank: the rank that calls.
            done_id: the last task that the rank has reported.
            wait_s: how long to wait for one.
            active: whether the caller still waits; polled.

        Returns:
            The task; the end of the search; or ``None``: nothing yet, ask again.

        Raises:
            NotJoinedError: the rank has not joined.
        """
        until = time.monotonic() + wait_s  # real time, also where clock is a test's
        with self._condition:
            self._record_contact(rank)
            answer = self._pending_answer(rank, done_id)
        self.events.deliver()
        while answer is None and (rest_s := until - time.monotonic()) > 0 and active():
            with self._condition:
                self._condition.wait(min(rest_s, _LOOK_EVERY_S))  # gives the lock to other ranks
                self._advance_search()
                answer = self._pending_answer(rank, done_id)
            self.events.deliver()
        return answer

    def report(self, report: RankReport) -> Verdict:
        """Takes a rank's report of a trial; a duplicate or a stale one changes nothing.

        Raises:
            NotJoinedError: the rank has not joined.
        """
        with self._condition:
            self._record_contact(report.rank)
            verdict: Verdict = "stale"
            if self._trial is not None:
                verdict = self._trial.add(report, self._read_clock())
            self.counts[f"{verdict} reports"] += 1
            self._advance_search()
        self.events.deliver()
        return verdict

    def heartbeat(self, rank: int) -> Heartbeat:
        """Takes a rank's sign of life.

        Raises:
            NotJoinedError: the rank has not joined.
        """
        with self._condition:
            self._record_contact(rank)
            trial = self._trial
            to_end = trial is not None and trial.cancelled_at is not None and not trial.has_reported(rank)
            answer = Heartbeat(
                cancel=(trial.task.id,) if trial and to_end else (), over=self._over is not None
            )
        self.events.deliver()
        return answer

    def leave(self, rank: int, reason: str = "") -> None:
        """Takes a rank's last call. Before the end, it ends the search on all ranks for this reason."""
        with self._condition:
            if not self._members.has(rank):
                return
            self._members.leave(rank)
            if self._over is None:
                self._end_with_failures({rank: reason or "left before the search was over"})
            self._condition.notify_all()
        self.events.deliver()

    def cancel(self, reason: str) -> None:
        """Ends the search with the best so far, as soon as the ranks have ended the running trial."""
        with self._condition:
            if self._over is None:
                self._is_cancelled = True
                self._search.cancel(reason)
                if self._trial is not None:  # the end comes when all ranks have left its collectives
                    self._trial.cancel(self._read_clock())
                else:
                    self._finish_search()
        self.events.deliver()

    def tick(self) -> None:
        """Checks the clock for ranks that have vanished and trials that are late."""
        with self._condition:
            self._advance_search()
        self.events.deliver()

    def wait_until_left(self, timeout_s: float) -> bool:
        """Waits until every rank that joined has left; returns whether they all did."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._members.present, timeout_s)

    def _record_contact(self, rank: int) -> None:
        if not self._members.has(rank):
            raise NotJoinedError(f"rank {rank} has not joined")
        self._members.record_contact(rank, self._read_clock())
        self._advance_search()

    def _read_clock(self) -> float:
        now = self._clock() - self._suspended_s
        # This process was suspended or starved: that nobody joined, called or ended meanwhile says nothing.
        if now - self._last_move > self._members.timeout_s / 2:
            self._suspended_s += now - self._last_move
            now = self._last_move
        self._last_move = now
        return now

    def _pending_answer(self, rank: int, done_id: int) -> TrialTask | Over | None:
        if self._over is not None or self._trial is None:
            return self._over
        task = self._trial.task
        # A rank that has reported waits until the others have.
        return None if task.id <= done_id or self._trial.has_reported(rank) else task

    def _advance_search(self) -> None:
        if self._over is not None:
            return
        now = self._read_clock()
        if silence := self._members.silent(now):
            for rank in silence:
                self._members.leave(rank)  # its last call will not come
            self._end_with_failures({rank: self._silence_text(seconds) for rank, seconds in silence.items()})
        elif self._trial is not None:
            self._check_trial(self._trial, now)
        elif self._members.absent:
            self._wait_for_all(now)
        else:
            self._start_next_trial()

    def _check_trial(self, trial: TrialUnderWay, now: float) -> None:
        trial.look(now)
        if not trial.missing:
            self._conclude_trial(trial)
        elif stuck := trial.stuck(now):
            if self._is_cancelled:  # the best so far is known without the ranks that are stuck
                self._finish_search()
            else:
                self._end_with_failures(stuck)

    def _wait_for_all(self, now: float) -> None:
        delay = now - self._start
        if delay > self._join_timeout_s:
            self._end_with_failures(
                dict.fromkeys(self._members.absent, f"did not join the search within {delay:.0f} s")
            )
        elif now - self._last_note >= _NOTE_EVERY_S:
            self._last_note = now
            names = ", ".join(str(rank) for rank in self._members.absent)
            self.events.put(SearchNote(f"waiting for rank {names} to join the search, {delay:.0f} s so far"))

    def _start_next_trial(self) -> None:
        try:
            task = self._search.ask()
        except Exception as error:  # an error of the search ends it on all ranks, which would wait
            self._fail_search(error)
            return
        if task is None:
            self._finish_search()
            return
        self._members.last_task_id += 1
        # Ids are this coordinator's own: after a restart none may repeat one that a rank has seen.
        new_task = replace(task, id=self._members.last_task_id)
        self._trial = TrialUnderWay(
            task=new_task,
            search_id=task.id,
            world_size=self.world_size,
            started=self._read_clock(),
            grace_s=self._grace_s,
        )
        self.events.put_start(new_task)
        self._condition.notify_all()

    def _conclude_trial(self, trial: TrialUnderWay) -> None:
        outcome = trial.outcome()
        self._trial = None
        try:  # by the search's own id, which the coordinator's numbers replace for the ranks
            self._search.tell(trial.search_id, outcome)
            best = self._search.best
        except Exception as error:
            self._fail_search(error)
            return
        self.events.put_end(trial.task, outcome, best)
        self._start_next_trial()

    def _finish_search(self) -> None:
        try:
            outcome = self._search.outcome()
        except Exception as error:
            self._fail_search(error)
            return
        self._trial, self._over = None, Over(outcome=outcome)
        self.events.put(Ended(outcome))
        self._condition.notify_all()

    def _silence_text(self, seconds: float) -> str:
        where = f", in trial {self._trial.task.id}" if self._trial else ""
        return f"no sign of life since {since(seconds)} ({seconds:.1f} s{where})"

    def _end_with_failures(self, failures: dict[int, str]) -> None:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items()))
        self._stop_with_error(Over(error=f"The search was ended on all ranks. {reasons}.", failures=failures))

    def _fail_search(self, error: Exception) -> None:
        self._stop_with_error(Over(error=f"The search itself failed: {error_text(error)}", failures={}))

    def _stop_with_error(self, over: Over) -> None:
        self._trial, self._over = None, over
        self.events.put(SearchNote(over.error))
        self._condition.notify_all()
