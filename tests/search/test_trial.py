"""The ledger of trials: repeated ones count as one, a failure above a success."""

from __future__ import annotations

import math

import pytest

from atorch_ns.search.trial import CandidateTrials, Ledger, TrialOutcome


def timed(*seconds: float, peaks: tuple[int, ...] = (), status: str = "ok") -> TrialOutcome:
    return TrialOutcome(status=status, step_seconds=seconds, peak_bytes=peaks, total_seconds=1.0)  # type: ignore[arg-type]


def test_repeated_trials_are_one_with_all_steps_and_the_largest_peaks() -> None:
    entry = CandidateTrials(
        1, [timed(0.1, 0.2, peaks=(5, 9)), timed(0.3, peaks=(7, 1), status="stopped early")]
    )
    merged = entry.merged
    assert merged.status == "ok"
    assert merged.step_seconds == (0.1, 0.2, 0.3)
    assert (merged.peak_bytes, merged.max_peak_bytes) == ((7, 9), 9)
    assert merged.total_seconds == 2.0


def test_a_failure_counts_above_a_success() -> None:
    entry = CandidateTrials(1, [timed(0.1), TrialOutcome(status="raised", reason="KeyError"), timed(0.1)])
    assert entry.merged.reason == "KeyError"


def test_what_is_no_fault_of_the_candidate_counts_when_it_comes_twice() -> None:
    ledger = Ledger()
    ledger.add("a", TrialOutcome(status="died"))
    assert not ledger.judged("a")
    assert (ledger.attempts("a"), ledger.num_run) == (1, 1)
    ledger.add("a", TrialOutcome(status="cancelled"))
    assert ledger.judged("a")
    ledger.add("b", timed(0.1), resumed=True)
    assert ledger.judged("b")
    assert (ledger.num_run, ledger.num_resumed) == (2, 1)
    assert not ledger.judged("c")


def test_wrong_numerics_reject_a_candidate() -> None:
    ledger = Ledger()
    ledger.probes = {
        "a": TrialOutcome(status="wrong", reason="w drifts"),
        "b": TrialOutcome(status="refused"),
    }
    assert ledger.rejected == {"a": "wrong: w drifts"}


def test_the_noise_of_a_median_and_of_too_few_steps() -> None:
    assert timed(0.1).noise_seconds == math.inf
    assert math.isnan(timed().median_seconds)
    assert timed().max_peak_bytes == 0
    # 1.2533 · 1.4826 · MAD / √n
    assert timed(0.1, 0.2, 0.3, 0.4).noise_seconds == pytest.approx(1.2533 * 1.4826 * 0.1 / 2)
