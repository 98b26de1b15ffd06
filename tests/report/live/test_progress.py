"""State of a search that its events add up to."""

from __future__ import annotations

from atorch_ns.report.live.progress import Progress, event_lines, predicted_text, trial_text
from atorch_ns.search import Priced, StopRule, TrialEnded, TrialOutcome, TrialStarted, TrialTask
from tests.report.outcomes import DDP, SETTING, measured, row, searched

_WIN, _AMP, *_ = (each.candidate for each in searched().rows)


def _task(kind: str = "trial", attempt: int = 0) -> TrialTask:
    return TrialTask(id=1, key="k", steps=(), rule=StopRule(), kind=kind, attempt=attempt)  # type: ignore[arg-type]


def test_the_best_so_far_is_the_coordinator_s() -> None:
    progress = Progress(clock=lambda: 0.0)
    progress.note(TrialStarted(1, _AMP, _task()))
    assert progress.running is _AMP
    assert progress.doing == f"trial 1: {_AMP.label}"
    progress.note(TrialEnded(1, _AMP, measured(30, 720), "amp"))
    assert progress.running is None
    assert progress.best_seconds() == measured(30, 720).median_seconds


def test_a_second_attempt_says_so() -> None:
    progress = Progress(clock=lambda: 0.0)
    progress.note(TrialStarted(2, _AMP, _task(attempt=1)))
    assert progress.doing.endswith("(attempt 2)")


def test_a_probe_that_passes_leaves_the_trial_s_time_and_one_that_fails_replaces_it() -> None:
    progress = Progress(clock=lambda: 0.0)
    progress.note(TrialEnded(1, _WIN, measured(25, 410), "win"))
    progress.note(TrialStarted(1, _WIN, _task("probe")))
    progress.note(TrialEnded(1, _WIN, TrialOutcome(status="ok"), "win"))
    assert progress.best_seconds() == measured(25, 410).median_seconds
    failed = TrialOutcome(status="raised", reason="drifts")
    progress.note(TrialStarted(1, _WIN, _task("probe")))
    progress.note(TrialEnded(1, _WIN, failed, None))
    assert progress.trials["win"] is failed
    assert progress.best_seconds() is None


def test_time_is_counted_from_the_beginning_and_by_activity() -> None:
    now = [100.0]
    progress = Progress(clock=lambda: now[0], time_limit_s=60)
    now[0] = 112.0
    progress.note(Priced(SETTING, (_WIN,)))
    now[0] = 115.0
    assert (progress.elapsed_s, progress.doing_for_s) == (15.0, 3.0)
    assert progress.elapsed_text() == "15.0 s of 60.0 s"


def test_a_long_list_of_candidates_is_counted() -> None:
    candidates = tuple(row(str(number), (DDP,), "untried", "").candidate for number in range(12))
    lines = list(event_lines(Priced(SETTING, candidates), Progress(), verbose=False))
    assert lines[-1].strip() == "… and 4 more"
    assert len(list(event_lines(Priced(SETTING, candidates), Progress(), verbose=True))) == 2 + 12


def test_texts_of_predictions_and_failures() -> None:
    assert predicted_text(_WIN) == "predicted 20.0 ms, 400 MiB"
    assert predicted_text(row("x", (DDP,), "untried", "").candidate) == "not priced"
    lost = TrialOutcome(status="raised", reason="no disk", rank=1, log="/l.txt")
    assert trial_text(lost) == "raised on rank 1: no disk (log: /l.txt)"


def test_a_trial_in_one_process_leaves_the_candidate_s_time() -> None:
    progress = Progress(clock=lambda: 0.0)
    progress.note(TrialEnded(1, _WIN, measured(25, 410), "win"))
    started = TrialStarted(2, _WIN, _task("single"))
    progress.note(started)
    assert list(event_lines(started, progress, verbose=False)) == [
        f"trial in one process, for comparison with {_WIN.label} …"
    ]
    ended = TrialEnded(2, _WIN, measured(60, 800), "win")
    progress.note(ended)
    assert progress.best_seconds() == measured(25, 410).median_seconds
    (line,) = event_lines(ended, progress, verbose=False)
    assert line.startswith("one process with the whole batch: 60.0 ms")
