"""Coordinator: hands one search's trials to all ranks and gathers what comes of them.

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

from atorch_ns.engine.coordinator.events import EventLog, EventQueue, OutcomeHook
from atorch_ns.engine.coordinator.trial import (
    Heartbeat,
    Joined,
    NotJoinedError,
    Over,
    SearchLike,
    TrialUnderWay,
    Verdict,
)
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.errors import CoordinatorError
from atorch_ns.search import Candidate, Ended, Event, Note, TrialTask


@dataclass(kw_only=True)
class _Member:
    session: str
    last_seen: float
    gone: bool = False


class Roll:
    """The ranks of one job. Not thread-safe; times are those of the coordinator's clock, in seconds."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.last_task_id = 0
        self._members: dict[int, _Member] = {}

    def join(self, rank: int, session: str, last_task_id: int, now: float) -> None:
        """Enters a rank; the same session may enter again.

        Raises:
            CoordinatorError: no such rank, or another process has this rank already.
        """
        if not 0 <= rank < self.world_size:
            raise CoordinatorError(f"rank {rank} is not one of the job's {self.world_size} ranks")
        member = self._members.get(rank)
        if member is not None and member.session != session:
            raise CoordinatorError(
                f"rank {rank} has joined already, from another process. Two processes have the same rank, or "
                "one was started again: end all ranks and start the job anew."
            )
        if member is None:
            self._members[rank] = _Member(session=session, last_seen=now)
        member = self._members[rank]
        member.last_seen, member.gone = now, False
        self.last_task_id = max(self.last_task_id, last_task_id)

    def has(self, rank: int) -> bool:
        """Whether a rank has joined."""
        return rank in self._members

    def seen(self, rank: int, now: float) -> None:
        """Takes note that a rank lives."""
        self._members[rank].last_seen = now

    def leave(self, rank: int) -> None:
        """Takes note of a goodbye."""
        self._members[rank].gone = True

    def forgive(self, now: float) -> None:
        """Counts silence from now on: the coordinator itself could not listen before."""
        for member in self._members.values():
            member.last_seen = now

    @property
    def absent(self) -> list[int]:
        """The ranks that never joined."""
        return [rank for rank in range(self.world_size) if rank not in self._members]

    @property
    def present(self) -> list[int]:
        """The ranks that joined and did not say goodbye."""
        return [rank for rank, member in self._members.items() if not member.gone]

    def silent(self, now: float) -> dict[int, float]:
        """The present ranks that were not heard of for longer than the time-out, with the seconds."""
        silence = {rank: now - self._members[rank].last_seen for rank in self.present}
        return {rank: seconds for rank, seconds in silence.items() if seconds > self.timeout_s}


def since(seconds: float) -> str:
    """A time ago, as a time of day."""
    return (datetime.now() - timedelta(seconds=seconds)).strftime("%H:%M:%S")


_NOTE_EVERY_S = 10.0
_LOOK_EVERY_S = 0.25


class Coordinator:
    """One search on all ranks. Thread-safe.

    Every task goes to all ranks. A rank that fails has it cancelled on the others; once all have reported,
    the merged outcome is told to the search. A rank that falls silent, says goodbye with an error or does not
    end a trial when told to ends the search on all ranks.

    Args:
        search: what to try.
        world_size: how many ranks take part; trials begin when all have joined.
        candidates: of the search, so that events can show them.
        clock: seconds, monotonic.
        heartbeat_timeout_s: a rank that is silent for longer has vanished.
        join_timeout_s: how long to wait for the first call of all ranks.
        grace_s: how long a rank may overrun a task's deadline, and how long it may take to end a trial.
        on_event: is told what happens, in order.
        on_outcome: is given each merged outcome with its task: the history.

    Attributes:
        counts: reports by what became of them.
        log: the latest events, for those who watch from afar.
    """

    def __init__(
        self,
        search: SearchLike,
        world_size: int,
        *,
        candidates: Sequence[Candidate] = (),
        clock: Callable[[], float] = time.monotonic,
        heartbeat_timeout_s: float = 10.0,
        join_timeout_s: float = 300.0,
        grace_s: float = 15.0,
        on_event: Callable[[Event], None] | None = None,
        on_outcome: OutcomeHook | None = None,
    ) -> None:
        self.world_size = world_size
        self.incarnation = secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self._search, self._clock = search, clock
        self._join_timeout_s, self._grace_s = join_timeout_s, grace_s
        self._roll = Roll(world_size, heartbeat_timeout_s)
        self._changed = threading.Condition(threading.RLock())
        self.log = EventLog()
        self._events = EventQueue(candidates, on_event, on_outcome, self.log)
        self._trial: TrialUnderWay | None = None
        self._cancelled = False
        self._over: Over | None = None
        self._begun = self._last_move = self._last_note = clock()

    @property
    def over(self) -> Over | None:
        """The end, once it has come."""
        return self._over

    @property
    def cancelled(self) -> bool:
        """Whether somebody ended the search before its time."""
        return self._cancelled

    def join(self, rank: int, session: str = "", last_task_id: int = 0) -> Joined:
        """A rank's first call, and its first one after the coordinator was restarted.

        Args:
            rank: whose.
            session: the same for all calls of one process.
            last_task_id: the highest task id that the rank has seen; new ids are higher.

        Raises:
            CoordinatorError: the rank is not of this job, or another process has it.
        """
        with self._changed:
            self._roll.join(rank, session, last_task_id, self._clock())
            self._move()
        self._events.hand_on()
        interval = min(max(0.2, self.world_size / 200), 2.0, self._roll.timeout_s / 4)
        return Joined(incarnation=self.incarnation, world_size=self.world_size, heartbeat_s=interval)

    def next_task(
        self,
        rank: int,
        done_id: int = 0,
        *,
        wait_s: float = 0.0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> TrialTask | Over | None:
        """The task that a rank is to run next.

        Args:
            rank: whose.
            done_id: the last task that the rank has reported.
            wait_s: how long to wait for one.
            wanted: asked while waiting; once it is false, nobody waits for the answer.

        Returns:
            The task; the end of the search; or ``None``: nothing yet, ask again.

        Raises:
            NotJoinedError: the rank has not joined.
        """
        until = time.monotonic() + wait_s
        with self._changed:
            self._hear(rank)
            answer = self._answer(rank, done_id)
        self._events.hand_on()
        while answer is None and (left := until - time.monotonic()) > 0 and wanted():
            with self._changed:
                self._changed.wait(min(left, _LOOK_EVERY_S))
                self._move()
                answer = self._answer(rank, done_id)
            self._events.hand_on()
        return answer

    def report(self, report: RankReport) -> Verdict:
        """Takes a rank's report of a trial; a duplicate or a stale one changes nothing.

        Raises:
            NotJoinedError: the rank has not joined.
        """
        with self._changed:
            self._hear(report.rank)
            verdict: Verdict = "stale"
            if self._trial is not None:
                verdict = self._trial.add(report, self._clock())
            self.counts[f"{verdict} reports"] += 1
            self._move()
        self._events.hand_on()
        return verdict

    def heartbeat(self, rank: int) -> Heartbeat:
        """A rank says that it lives.

        Raises:
            NotJoinedError: the rank has not joined.
        """
        with self._changed:
            self._hear(rank)
            trial = self._trial
            to_end = trial is not None and trial.cancelled_at is not None and not trial.has_reported(rank)
            answer = Heartbeat(
                cancel=(trial.task.id,) if trial and to_end else (), over=self._over is not None
            )
        self._events.hand_on()
        return answer

    def leave(self, rank: int, reason: str = "") -> None:
        """A rank's last call. Before the end it ends the search on all ranks, for the reason given."""
        with self._changed:
            if not self._roll.has(rank):
                return
            self._roll.leave(rank)
            if self._over is None:
                self._fail({rank: reason or "left before the search was over"})
            self._changed.notify_all()
        self._events.hand_on()

    def cancel(self, reason: str) -> None:
        """Ends the search with the best so far, as soon as the ranks have ended the running trial."""
        with self._changed:
            if self._over is None:
                self._cancelled = True
                self._search.cancel(reason)
                if self._trial is not None:
                    self._trial.cancel(self._clock())
                else:
                    self._end()
        self._events.hand_on()

    def tick(self) -> None:
        """Looks at the clock: who has vanished, what is late."""
        with self._changed:
            self._move()
        self._events.hand_on()

    def wait_told(self, timeout_s: float) -> bool:
        """Waits until every rank that joined has said goodbye; whether they all did."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._roll.present, timeout_s)

    def _hear(self, rank: int) -> None:
        if not self._roll.has(rank):
            raise NotJoinedError(f"rank {rank} has not joined")
        self._roll.seen(rank, self._clock())
        self._move()

    def _answer(self, rank: int, done_id: int) -> TrialTask | Over | None:
        if self._over is not None or self._trial is None:
            return self._over
        task = self._trial.task
        return None if task.id <= done_id or self._trial.has_reported(rank) else task

    def _move(self) -> None:
        """Everything that follows from what is known now."""
        if self._over is not None:
            return
        now = self._clock()
        if now - self._last_move > self._roll.timeout_s / 2:
            self._roll.forgive(now)
        self._last_move = now
        if lost := self._roll.silent(now):
            for rank in lost:
                self._roll.leave(rank)  # nobody waits for its goodbye
            self._fail({rank: self._lost(seconds) for rank, seconds in lost.items()})
        elif self._trial is not None:
            self._watch(self._trial, now)
        elif self._roll.absent:
            self._wait_for_all(now)
        else:
            self._ask()

    def _watch(self, trial: TrialUnderWay, now: float) -> None:
        trial.look(now)
        if not trial.missing:
            self._conclude(trial)
        elif stuck := trial.stuck(now):
            if self._cancelled:
                self._end()
            else:
                self._fail(stuck)

    def _wait_for_all(self, now: float) -> None:
        waited = now - self._begun
        if waited > self._join_timeout_s:
            self._fail(dict.fromkeys(self._roll.absent, f"never joined the search, in {waited:.0f} s"))
        elif now - self._last_note >= _NOTE_EVERY_S:
            self._last_note = now
            names = ", ".join(str(rank) for rank in self._roll.absent)
            self._events.put(Note(f"waiting for rank {names} to join the search, {waited:.0f} s so far"))

    def _ask(self) -> None:
        try:
            task = self._search.ask()
        except Exception as error:
            self._fail_search(error)
            return
        if task is None:
            self._end()
            return
        self._roll.last_task_id += 1
        # Ids are this coordinator's own: after a restart none may repeat one that a rank has seen.
        numbered = replace(task, id=self._roll.last_task_id)
        self._trial = TrialUnderWay(
            task=numbered,
            search_id=task.id,
            world_size=self.world_size,
            started=self._clock(),
            grace_s=self._grace_s,
        )
        self._events.started(numbered)
        self._changed.notify_all()

    def _conclude(self, trial: TrialUnderWay) -> None:
        outcome = trial.outcome()
        self._trial = None
        try:
            self._search.tell(trial.search_id, outcome)
            best = self._search.best
        except Exception as error:
            self._fail_search(error)
            return
        self._events.ended(replace(trial.task, id=trial.search_id), outcome, best)
        self._ask()

    def _end(self) -> None:
        try:
            outcome = self._search.outcome()
        except Exception as error:
            self._fail_search(error)
            return
        self._trial, self._over = None, Over(outcome=outcome)
        self._events.put(Ended(outcome))
        self._changed.notify_all()

    def _lost(self, seconds: float) -> str:
        where = f", in trial {self._trial.task.id}" if self._trial else ""
        return f"no sign of life since {since(seconds)} ({seconds:.1f} s{where})"

    def _fail(self, failures: dict[int, str]) -> None:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items()))
        self._stop(Over(error=f"The search was ended on all ranks. {reasons}.", failures=failures))

    def _fail_search(self, error: Exception) -> None:
        self._stop(Over(error=f"The search itself failed: {type(error).__name__}: {error}", failures={}))

    def _stop(self, over: Over) -> None:
        self._trial, self._over = None, over
        self._events.put(Note(over.error))
        self._changed.notify_all()
