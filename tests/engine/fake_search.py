"""A search with known answers, workers without processes, and a clock that is set by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from atorch_ns.engine import RankReport
from atorch_ns.search import (
    Candidate,
    Row,
    SearchOutcome,
    SearchSetting,
    SearchSettings,
    StopRule,
    TrialOutcome,
    TrialStatus,
    TrialTask,
)

SETTING = SearchSetting(
    model="Tiny",
    num_parameters=10,
    world_size=2,
    num_nodes=1,
    device="cpu",
    memory_limit_bytes=2**30,
    global_batch=8,
    num_tokens=4,
    fingerprint="f00d",
)


def candidates(*keys: str) -> list[Candidate]:
    return [Candidate(key=key, steps=((key, {"level": 1}),), label=key) for key in keys]


class FakeSearch:
    """Tries the given candidates in order, once each."""

    def __init__(self, keys: Sequence[str] = ("a", "b", "c"), setting: SearchSetting = SETTING) -> None:
        self.candidates = candidates(*keys)
        self.setting = setting
        self.told: list[tuple[str, TrialOutcome]] = []
        self.cancelled = ""
        self._left = list(keys)
        self._asked: dict[int, str] = {}
        self._number = 0

    @property
    def best(self) -> str | None:
        timed = [(outcome.median_seconds, key) for key, outcome in self.told if outcome.succeeded]
        return min(timed)[1] if timed else None

    def ask(self) -> TrialTask | None:
        if self.cancelled or not self._left:
            return None
        key = self._left.pop(0)
        self._number += 1
        number = self._number
        self._asked[number] = key
        return TrialTask(id=number, key=key, steps=((key, {}),), rule=StopRule(), deadline_s=20.0)

    def tell(self, task_id: int, outcome: TrialOutcome) -> None:
        self.told.append((self._asked.pop(task_id), outcome))

    def outcome(self) -> SearchOutcome:
        tried = dict(self.told)
        return SearchOutcome(
            setting=self.setting,
            settings=SearchSettings(),
            rows=tuple(
                Row(candidate=one, fate="lost", reason="", trial=tried.get(one.key))
                for one in self.candidates
            ),
            best=self.best,
            stop_reason=self.cancelled or "all tried",
            num_trials=len(self.told),
            seconds=1.0,
        )

    def cancel(self, reason: str) -> None:
        self.cancelled = reason


class FakeWorker:
    """Reports what a table says; by default 10 ms steps at once."""

    def __init__(
        self, rank: int, behave: Callable[[TrialTask, Callable[[], bool]], RankReport] | None = None
    ) -> None:
        self.rank = rank
        self.ran: list[int] = []
        self.keys: list[str] = []
        self.closed = 0
        self._behave = behave

    def run(self, task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        self.ran.append(task.id)
        self.keys.append(task.key)
        if self._behave is not None:
            return self._behave(task, cancelled)
        return report(task.id, self.rank)

    def close(self) -> None:
        self.closed += 1


def report(
    task_id: int, rank: int, status: TrialStatus = "ok", *, seconds: float = 0.01, reason: str = ""
) -> RankReport:
    times = (seconds,) * 4 if status in ("ok", "stopped early") else ()
    return RankReport(
        task_id=task_id,
        rank=rank,
        status=status,
        step_seconds=times,
        peak_bytes=1000 + rank,
        loss=1.0,
        reason=reason,
        log=f"/tmp/log-{rank}" if reason else "",
    )


def until_cancelled(
    rank: int, limit_s: float = 10.0
) -> Callable[[TrialTask, Callable[[], bool]], RankReport]:
    """A worker that waits, as in a collective whose partner is gone, until it is told to end."""

    def behave(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        end = time.monotonic() + limit_s
        while not cancelled():
            if time.monotonic() > end:
                return report(task.id, rank, "hung", reason="never cancelled")
            time.sleep(0.01)
        return report(task.id, rank, "cancelled")

    return behave


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float, each: Callable[[], object] = lambda: None, step: float = 1.0) -> None:
        """Lets time pass in steps, with a call after each."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            each()


class InThread:
    """A call in a thread, with its result or its exception."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    def wait(self, timeout_s: float = 20.0) -> InThread:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "still running"
        return self
