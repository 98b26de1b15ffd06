"""Whatever happens in a trial is one report with its reason, on every rank, in time, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from atorch_ns.testing.workers import run_ranks
from tests.engine.faults import Fault, fault
from tests.engine.trials import DONE, Ran, run_tasks, task

HANG_S = 4.0
FIRST, LAST = 0, 99

FAULTS: dict[str, tuple[Fault, str, str]] = {
    "an exception in the loss": (
        fault("raise", rank=1, at="dryrun:2", trial=1),
        "raised",
        "InjectedFault: injected in the loss",
    ),
    "an exception in the forward pass": (
        fault("raise", rank=1, at="forward:3", trial=2),
        "raised",
        "InjectedFault: injected in the forward",
    ),
    "an exception in the dataset": (
        fault("raise", rank=1, at="dataset", trial=3),
        "raised",
        "InjectedFault: injected in the dataset",
    ),
    "out of memory on one rank": (
        fault("oom", rank=1, at="dryrun:3", trial=4),
        "out of memory",
        "can't allocate memory",
    ),
    "SIGKILL": (fault("kill", rank=1, at="dryrun:3", trial=5), "died", "ended by SIGKILL in the phase"),
    "a segmentation fault": (fault("crash", rank=1, at="dryrun:1", trial=6), "died", "ended by SIGSEGV"),
    "a process that leaves": (fault("exit", rank=1, at="forward:2", trial=7), "died", "exit code 3"),
    "a loss that is not finite": (fault("nonfinite", rank=1, at="dryrun:2", trial=8), "non-finite", "is nan"),
    "a hang in a collective": (fault("hang", rank=1, at="dryrun:2", trial=9), "hung", "no report within 4 s"),
}
SLOW = fault("slow", rank=1, at="dryrun", trial=10, seconds=0.1)


def _run(num_ranks: int, folder: Path, names: list[str]) -> list[dict[str, Ran]]:
    tasks = {"none": task(FIRST, "fsdp")}
    for name in names:
        number = FAULTS[name][0].trial
        assert number is not None
        limit = HANG_S if FAULTS[name][0].kind == "hang" else 60.0
        tasks[name] = task(number, "ddp" if number % 2 else "fsdp", deadline_s=limit)
    tasks |= {"a slow rank": task(10, "ddp"), "none again": task(LAST, "fsdp")}
    faults = (*(FAULTS[name][0] for name in names), SLOW)
    return run_ranks(run_tasks, num_ranks, args=(folder, tasks, faults), timeout_s=110)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ran]]:
    return _run(2, tmp_path_factory.mktemp("two"), list(FAULTS))


@pytest.mark.parametrize("name", FAULTS)
def test_two_ranks(name: str, two_ranks: list[dict[str, Ran]]) -> None:
    _check(name, [ran[name] for ran in two_ranks])


def test_a_slow_rank_slows_all(two_ranks: list[dict[str, Ran]]) -> None:
    for ran in two_ranks:
        assert ran["a slow rank"].report.status in DONE
        assert min(ran["a slow rank"].report.step_seconds) > 0.1


def test_the_next_trial_is_sound(two_ranks: list[dict[str, Ran]]) -> None:
    for ran in two_ranks:
        assert ran["none again"].report.status in DONE, ran["none again"].report.reason


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    names = ["an exception in the loss", "out of memory on one rank", "SIGKILL", "a hang in a collective"]
    runs = _run(4, tmp_path, names)
    for name in names:
        _check(name, [ran[name] for ran in runs])
    assert all(ran["none again"].report.status in DONE for ran in runs)


def _check(name: str, ran: list[Ran]) -> None:
    injected, status, words = FAULTS[name]
    if (
        injected.kind == "nonfinite"
    ):  # it reaches every rank through the mean, and the first to say so ends all
        told = [one.report for one in ran if one.report.status == status]
        assert told
        assert all(words in report.reason for report in told)
        assert all(one.report.status in (status, "cancelled") for one in ran)
        return
    culprit = ran[1].report
    assert culprit.status == status
    assert words in culprit.reason
    if injected.kind in ("raise", "oom"):
        assert "Traceback" in Path(culprit.log).read_text()
    for other in (one for one in ran if one.report.rank != 1):
        expected = status if injected.kind == "hang" else "cancelled"  # a hang is one for all
        assert other.report.status == expected, other.report.reason
        assert other.after_failure_s < 1.0  # half a second on a machine that has the time
        assert other.seconds < HANG_S + 3
