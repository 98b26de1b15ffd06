"""The standalone engine: many jobs, what it remembers, and its restart."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atorch_ns.engine import RankReport
from atorch_ns.engine.coordinator.jobs import EngineJobs, JobRecord
from atorch_ns.engine.rpc.auth import new_token, read_token
from atorch_ns.engine.rpc.client import CoordinatorClient
from atorch_ns.engine.rpc.meeting import run_agent
from atorch_ns.engine.rpc.server import CoordinatorServer
from atorch_ns.errors import CoordinatorError, RankError
from atorch_ns.search import Candidate, SearchOutcome, SearchSettings, TrialTask
from tests.engine.fake_search import FakeClock, FakeWorker, InThread, report
from tests.search.fakes import candidate, setting

TOKEN = new_token()
SECONDS = {"plain": 0.05, "quick": 0.02, "slow": 0.09, "middling": 0.04}
SETTINGS = SearchSettings(sampler="exhaustive", probe=False)


def options() -> list[Candidate]:
    return [
        candidate(key, f"method_{key}", seconds=seconds, is_baseline=key == "plain")
        for key, seconds in SECONDS.items()
    ]


RECORD = JobRecord(job="job", world_size=1, setting=setting(), settings=SETTINGS, candidates=tuple(options()))


def worker(rank: int, *, factor: float = 1.0, takes_s: float = 0.0) -> FakeWorker:
    def run(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        end = time.monotonic() + takes_s
        while time.monotonic() < end and not cancelled():
            time.sleep(0.01)
        if cancelled():
            return report(task.id, rank, "cancelled")
        return report(task.id, rank, seconds=SECONDS[task.key] * factor)

    return FakeWorker(rank, run)


def create(server_address: str, job: str, fingerprint: str = "f1", token: str = TOKEN, size: int = 2) -> int:
    with contextlib.closing(CoordinatorClient(server_address, token, 0, job=job, reconnect_s=5.0)) as client:
        return client.create_job(size, setting(fingerprint=fingerprint), SETTINGS, options())


def agents(address: str, job: str, workers: list[FakeWorker], token: str = TOKEN) -> list[InThread]:
    def run(one: FakeWorker) -> InThread:
        client = CoordinatorClient(address, token, one.rank, job=job, reconnect_s=30.0)
        return InThread(lambda: run_agent(client, one, rank=one.rank))

    return [run(one) for one in workers]


def outcome_of(calls: list[InThread], timeout_s: float = 30.0) -> SearchOutcome:
    for call in calls:
        assert call.wait(timeout_s).error is None
    first = calls[0].value
    assert isinstance(first, SearchOutcome)
    assert all(call.value == first for call in calls), "the same on all ranks"
    return first


@contextlib.contextmanager
def engine(folder: Path, port: int = 0) -> Iterator[CoordinatorServer]:
    with CoordinatorServer(EngineJobs(folder), token=TOKEN, port=port) as server:
        yield server


def search_once(address: str, job: str, *, factor: float = 1.0) -> tuple[SearchOutcome, list[str]]:
    create(address, job)
    workers = [worker(rank, factor=factor) for rank in (0, 1)]
    outcome = outcome_of(agents(address, job, workers))
    return outcome, workers[1].keys


def test_a_known_fingerprint_is_answered_by_one_trial(tmp_path: Path) -> None:
    with engine(tmp_path) as server:
        outcome, keys = search_once(server.address, "monday")
        assert outcome.best == "quick"
        assert set(keys) == set(SECONDS)
        time.sleep(0.7)  # the engine notes the end
        assert list((tmp_path / "jobs").iterdir()) == []
        outcome, keys = search_once(server.address, "tuesday")
        assert outcome.best == "quick"
        assert keys == ["quick"], "one trial checks what was found before"
        assert "one trial confirms it" in outcome.stop_reason


def test_a_known_strategy_that_has_become_slow_is_searched_anew(tmp_path: Path) -> None:
    with engine(tmp_path) as server:
        search_once(server.address, "monday")
        time.sleep(0.7)
        _, keys = search_once(server.address, "tuesday", factor=2.0)
        assert keys[0] == "quick"
        assert set(keys) == set(SECONDS)


def test_what_was_found_outlives_the_engine(tmp_path: Path) -> None:
    with engine(tmp_path) as server:
        search_once(server.address, "monday")
    with engine(tmp_path) as server:
        assert search_once(server.address, "tuesday")[1] == ["quick"]


def test_jobs_do_not_meet(tmp_path: Path) -> None:
    with engine(tmp_path) as server:
        create(server.address, "one", "f1")
        create(server.address, "two", "f2", size=1)
        one = [worker(rank, takes_s=0.05) for rank in (0, 1)]
        two = [worker(0, factor=3.0, takes_s=0.05)]
        first, second = agents(server.address, "one", one), agents(server.address, "two", two)
        assert outcome_of(first).setting.fingerprint == "f1"
        outcome = outcome_of(second)
        assert outcome.setting.fingerprint == "f2"
        assert outcome.winner is not None
        assert outcome.winner.trial is not None
        assert outcome.winner.trial.median_seconds == pytest.approx(0.06)


def test_a_job_goes_on_after_a_restart(tmp_path: Path) -> None:
    workers = [worker(rank, takes_s=0.2) for rank in (0, 1)]
    with engine(tmp_path) as server:
        create(server.address, "job")
        calls = agents(server.address, "job", workers)
        _until(lambda: len(workers[1].keys) >= 3)
    assert len(list((tmp_path / "jobs").iterdir())) == 1
    time.sleep(0.3)
    with engine(tmp_path, port=server.port):
        outcome = outcome_of(calls)
    assert outcome.best == "quick"
    assert outcome.resumed >= 2
    assert set(workers[1].keys) == set(SECONDS)
    assert len(workers[1].keys) <= len(SECONDS) + 2, "only what ran just then is run again"
    assert workers[1].ran == sorted(set(workers[1].ran))


@pytest.mark.slow
def test_the_process_can_be_killed_in_mid_search(tmp_path: Path) -> None:
    workers = [worker(rank, takes_s=0.4) for rank in (0, 1)]
    with _process(tmp_path) as (process, address):
        token = read_token(tmp_path / "token")
        create(address, "job", token=token)
        calls = agents(address, "job", workers, token)
        _until(lambda: len(workers[1].keys) >= 3)
        process.kill()
        process.wait()
    with _process(tmp_path) as (process, again):
        assert again == address, "it comes back where the ranks look for it"
        outcome = outcome_of(calls, 60.0)
        assert outcome.best == "quick"
        assert outcome.resumed >= 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(15.0) == 0


@contextlib.contextmanager
def _process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``atorch-ns engine serve`` and its address."""
    call = "from atorch_ns.cli import main; main()"
    command = [sys.executable, "-c", call, "engine", "serve", "--history-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def _until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.01)


def test_jobs_are_made_once(tmp_path: Path) -> None:
    with engine(tmp_path) as server:
        create(server.address, "job")
        create(server.address, "job")
        with pytest.raises(CoordinatorError, match="the name 'job' is taken"):
            create(server.address, "job", "f2")
        with pytest.raises(CoordinatorError, match="refuses CreateJob: a job needs a name"):
            create(server.address, "")
        error = agents(server.address, "other", [worker(0)])[0].wait().error
        assert isinstance(error, CoordinatorError)
        assert "job 'other' does not exist" in str(error)


def _fail_for(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = EngineJobs._start_coordinator

    def fail(self: EngineJobs, record: JobRecord, timeout_s: float) -> int:
        if record.job == job:
            raise RuntimeError("its sampler is not installed here")
        return start(self, record, timeout_s)

    monkeypatch.setattr(EngineJobs, "_start_coordinator", fail)


def test_a_job_whose_search_cannot_begin_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_for("job", monkeypatch)
    with engine(tmp_path) as server:
        with pytest.raises(CoordinatorError):
            create(server.address, "job")
        assert not list((tmp_path / "jobs").glob("*.json"))
        create(server.address, "other")
        assert list((tmp_path / "jobs").glob("*.json"))


def test_a_job_that_cannot_continue_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path) as server:
        create(server.address, "job")
    _fail_for("job", monkeypatch)
    with engine(tmp_path) as server:
        create(server.address, "other")
        error = agents(server.address, "job", [worker(0)])[0].wait().error
        assert "job 'job' does not exist" in str(error)
    assert "job job cannot continue and is skipped" in caplog.text


def test_ctrl_c_is_no_answer_for_the_next_job(tmp_path: Path) -> None:
    jobs = EngineJobs(tmp_path)
    jobs.create(RECORD)
    coordinator = jobs.get("job")
    coordinator.join(0)
    task = coordinator.next_task(0)
    assert isinstance(task, TrialTask)
    coordinator.report(report(task.id, 0, seconds=0.05))
    coordinator.cancel("Ctrl-C on rank 0")
    coordinator.report(report(task.id + 1, 0, "cancelled"))
    jobs.tick()
    assert jobs.names == ()
    assert jobs.create(replace(RECORD, job="again")) == 1, "its trial is taken over"
    coordinator = jobs.get("again")
    coordinator.join(0)
    following = coordinator.next_task(0)
    assert isinstance(following, TrialTask)
    assert following.key != task.key
    jobs.close(0.0)


def test_jobs_whose_ranks_went_away_are_forgotten(tmp_path: Path) -> None:
    clock = FakeClock()
    jobs = EngineJobs(tmp_path, clock=clock, heartbeat_timeout_s=0.2, keep_s=60.0)
    jobs.create(RECORD)
    coordinator = jobs.get("job")
    coordinator.join(0)
    end = time.monotonic() + 5.0
    while jobs.names and time.monotonic() < end:
        time.sleep(0.02)
        jobs.tick()
    over = coordinator.over
    assert over is not None
    assert "no sign of life" in over.error
    assert list((tmp_path / "jobs").iterdir()) == []
    clock.pass_(61.0, jobs.tick)
    with pytest.raises(CoordinatorError, match="ended long ago"):
        jobs.get("job")
    jobs.close(0.0)


def test_the_ranks_of_a_job_hear_of_one_that_vanished(tmp_path: Path) -> None:
    jobs = EngineJobs(tmp_path, heartbeat_timeout_s=1.0)
    with CoordinatorServer(jobs, token=TOKEN) as server:
        create(server.address, "job")
        gone = CoordinatorClient(server.address, TOKEN, 1, job="job")
        gone.join()
        gone.close()
        error = agents(server.address, "job", [worker(0, takes_s=30.0)])[0].wait().error
        assert isinstance(error, RankError)
        assert list(error.failures) == [1]


def test_a_folder_serves_one_engine(tmp_path: Path) -> None:
    jobs = EngineJobs(tmp_path)
    with pytest.raises(CoordinatorError, match="another engine serves the history folder"):
        EngineJobs(tmp_path)
    jobs.close(0.0)
    EngineJobs(tmp_path).close(0.0)
    (tmp_path / "file").touch()
    with pytest.raises(CoordinatorError, match="cannot be written: Not a directory"):
        EngineJobs(tmp_path / "file")


def test_a_broken_job_file_is_said_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "jobs").mkdir()
    broken = tmp_path / "jobs" / "x.json"
    broken.write_text('{"job": "trunc')
    with caplog.at_level(logging.WARNING):
        jobs = EngineJobs(tmp_path)
    assert jobs.names == ()
    assert broken.exists()
    assert "cannot be read and is skipped" in caplog.text
    jobs.close(0.0)
