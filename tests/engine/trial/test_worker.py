"""Trials in processes of their own: what they measure, what they leave alone, what they leave behind."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.costs.collectives import NUM_REPORTED
from atorch_ns.engine.trial.worker import TrialWorker
from atorch_ns.search import StopRule
from atorch_ns.testing.conformance import nothing_changes
from atorch_ns.testing.workers import run_ranks
from tests.child_processes import child_processes
from tests.engine.inputs import case_inputs
from tests.engine.trials import DONE, SHORT, Ran, run_tasks, task

pytestmark = pytest.mark.usefixtures("cold_python")

STEP_BYTES = 173_184
"""Parameters of tied_llama: 43,296 of 4 bytes."""

ALONE = Cluster()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[TrialWorker]:
    inputs = case_inputs()
    with TrialWorker(inputs, ALONE, rendezvous=None, log_dir=folder) as made:
        yield made


def never() -> bool:
    return False


def test_one_process_measures(worker: TrialWorker, folder: Path) -> None:
    with nothing_changes():
        report = worker.run(task(1), never)
    assert report.status == "ok"
    assert 2 <= len(report.step_seconds) <= 4
    assert all(0 < seconds < 5 for seconds in report.step_seconds)
    # Parameters, gradients and two moments of AdamW; 38 tensors with a step count of 4 bytes each.
    assert report.state_bytes == 4 * STEP_BYTES + 38 * 4
    assert report.peak_bytes is not None
    assert report.peak_bytes > report.state_bytes
    assert report.collectives == {}
    assert report.loss is not None
    # Guessing gives log(64); the weights that stand for the model's own behave as they do.
    assert abs(report.loss - math.log(64)) < 1.0
    assert 0 < report.setup_seconds < report.total_seconds
    assert report.log == ""
    assert not list(folder.glob("trial-1-*"))


def test_the_strategy_is_applied(worker: TrialWorker) -> None:
    rule = replace(SHORT, min_steps=2, max_steps=2)  # a loss is that of the last step: as many in both
    plain = worker.run(task(2, rule=rule), never)
    recomputed = worker.run(task(3, "checkpoint", rule=rule), never)
    assert len(plain.step_seconds) == len(recomputed.step_seconds)
    assert plain.peak_bytes is not None
    assert recomputed.peak_bytes is not None
    assert recomputed.peak_bytes < 0.8 * plain.peak_bytes
    assert recomputed.loss == pytest.approx(plain.loss, abs=1e-5)


def test_a_strategy_that_cannot_be_applied_is_refused(worker: TrialWorker) -> None:
    report = worker.run(task(4, ("checkpoint", {"nosuch": 1})), never)
    assert report.status == "refused"
    assert "checkpoint.nosuch" in report.reason
    assert "StrategyError" in Path(report.log).read_text()


def test_a_slower_trial_stops_early(worker: TrialWorker) -> None:
    rule = StopRule(max_steps=1000, best_seconds=1e-4, best_noise=1e-6)  # beside a load the steps vary
    report = worker.run(task(5, rule=rule), never)
    assert report.status == "stopped early"
    assert len(report.step_seconds) < 1000


def test_cancelling_kills_within_half_a_second(worker: TrialWorker) -> None:
    rule = StopRule(min_steps=10**6, max_steps=10**6, max_seconds=1e6)
    cancelled = threading.Event()
    timer = threading.Timer(1.5, cancelled.set)
    timer.start()
    set_at = time.monotonic() + 1.5
    report = worker.run(task(6, rule=rule), cancelled.is_set)
    late = time.monotonic() - set_at
    timer.join()
    assert report.status == "cancelled"
    assert late < 0.5
    (helper,) = child_processes()
    assert not helper.children()


def test_a_killed_helper_is_started_again(worker: TrialWorker, folder: Path) -> None:
    rule = StopRule(min_steps=10**6, max_steps=10**6, max_seconds=1e6)
    (helper,) = child_processes()
    killer = threading.Timer(1.0, helper.kill)
    killer.start()
    report = worker.run(task(7, rule=rule), never)
    killer.join()
    assert report.status == "died"
    assert "SIGKILL" in report.reason
    assert not child_processes()
    assert worker.run(task(8), never).status == "ok"
    worker.close()
    assert not child_processes()
    # What was printed, and what became of the trial that could not tell its end.
    names = {path.name for path in folder.iterdir()}  # other tests of this file have left theirs, if they ran
    assert "trial-7-0-rank0.log" in names
    assert "trial-8-0-rank0.log" not in names
    assert "died" in (folder / "trial-7-0-rank0.log").read_text()


STRATEGIES = {
    "ddp": task(1, "ddp"),
    "fsdp": task(2, "fsdp"),
    "zero1": task(3, "ddp", "zero1"),
    "zero2": task(4, "zero2", "checkpoint"),
    "probe": replace(task(6, "fsdp"), kind="probe"),
    "amp": task(5, "fsdp", ("amp_native", {"dtype": "bf16"})),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ran]]:
    tasks = {**STRATEGIES, "single": replace(task(7, "ddp"), kind="single")}
    return run_ranks(run_tasks, 2, args=(tmp_path_factory.mktemp("two"), tasks), timeout_s=110)


def test_rank_0_alone_runs_the_whole_batch(two_ranks: list[dict[str, Ran]]) -> None:
    first, second = (ran["single"].report for ran in two_ranks)
    assert first.status in DONE, first.reason
    assert (second.status, second.step_seconds) == ("ok", ())
    assert first.step_seconds
    assert not first.collectives
    both = two_ranks[0]["ddp"].report
    assert first.state_bytes == pytest.approx(both.state_bytes, rel=0.01)
    assert first.peak_bytes is not None
    assert both.peak_bytes is not None
    assert first.peak_bytes > both.peak_bytes  # twice the activations


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_report_alike(name: str, two_ranks: list[dict[str, Ran]]) -> None:
    first, second = (ran[name].report for ran in two_ranks)
    assert first.status in DONE, first.reason
    assert first.step_seconds == second.step_seconds
    assert bool(first.step_seconds) == (name != "probe")
    assert first.loss == second.loss
    assert first.collectives == second.collectives
    assert (first.rank, second.rank) == (0, 1)


def test_what_is_communicated_is_counted(two_ranks: list[dict[str, Ran]]) -> None:
    found = {name: ran.report.collectives for name, ran in two_ranks[0].items()}
    # The gradients in one bucket, and the mean of the loss.
    assert found["ddp"] == {"all_reduce": (2, STEP_BYTES + 4 * (38 + NUM_REPORTED) + 4)}
    # 4 blocks and the rest; the rest is gathered once, blocks again for the backward pass.
    assert {kind: calls for kind, (calls, _) in found["fsdp"].items()} == {
        "all_gather": 9,
        "reduce_scatter": 5,
        "all_reduce": 1,
    }
    assert found["zero1"]["broadcast"] == (38, STEP_BYTES)
    # bfloat16 halves what is gathered; gradients are reduced as wide as before or narrower.
    assert found["amp"]["all_gather"][1] <= found["fsdp"]["all_gather"][1]


def test_states_are_sharded(two_ranks: list[dict[str, Ran]]) -> None:
    whole = two_ranks[0]["ddp"].report.state_bytes
    shard = two_ranks[0]["fsdp"].report.state_bytes
    assert whole is not None
    assert shard is not None
    assert shard == pytest.approx(whole / 2, rel=0.01)


def _survivors(pids: set[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def _hold_a_trial(folder: Path) -> None:
    """A user's process in the middle of a trial that does not end."""
    rule = StopRule(min_steps=10**6, max_steps=10**6, max_seconds=1e6)
    with TrialWorker(case_inputs(), ALONE, rendezvous=None, log_dir=folder) as made:
        threading.Thread(target=_tell_pids, args=(folder,), daemon=True).start()
        made.run(task(1, rule=rule), never)


def _tell_pids(folder: Path) -> None:
    while len(children := psutil.Process().children(recursive=True)) < 2:
        time.sleep(0.05)
    time.sleep(0.5)
    text = " ".join(str(child.pid) for child in children)
    (folder / "partial").write_text(text)
    (folder / "partial").rename(folder / "pids")


def _gone(condition: Callable[[], Any], limit_s: float = 5.0) -> bool:
    limit = time.monotonic() + limit_s
    while condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return not condition()


def test_nothing_outlives_a_killed_user(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            _hold_a_trial(tmp_path)
        finally:
            os._exit(1)
    try:
        assert _gone(lambda: not (tmp_path / "pids").exists(), 60.0)
        pids = {int(text) for text in (tmp_path / "pids").read_text().split()}
        assert len(pids) == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert _gone(lambda: _survivors(pids))
