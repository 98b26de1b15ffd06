"""Recorded spaces: searches in them can be replayed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import search_quality
from benchmarks._search_worlds import Truth, made_up, recorded, replay


def test_a_recorded_space_replays_the_same_searches() -> None:
    truth = made_up(seed=1, method_error=0.1, own_error=0.05, jitter=0.05, drift=0.02)
    again = recorded(truth.as_json())
    assert again.best == truth.best
    assert again.rank_correlation == truth.rank_correlation
    first, second = replay(truth, seed=3), replay(again, seed=3)
    assert (first.num_trials, first.regret) == (second.num_trials, second.regret)


def test_the_machines_drift_is_taken_out_of_the_truth_and_put_back_into_trials() -> None:
    truth = made_up(seed=1, method_error=0.1, own_error=0.05, jitter=0.0, drift=0.0)
    candidates = truth.candidates[:3]
    slow = {(candidates[1].key, 0): 1.5, (candidates[2].key, 1): 0.5}
    pairs = {
        one.key: [
            [(factor * step, factor * 0.1) for step in run]
            for factor, run in zip(
                [slow.get((one.key, number), 1.0) for number in range(2)], truth.runs[one.key], strict=True
            )
        ]
        for one in candidates
    }
    steady = search_quality._without_drift(candidates, pairs)
    for one in candidates:
        assert steady.seconds(one.key) == pytest.approx(truth.seconds(one.key))
        assert steady.drift[one.key] == pytest.approx([slow.get((one.key, n), 1.0) for n in range(2)])
    assert recorded(steady.as_json()) == steady
    assert _fastest_trial(steady, drifting=True) < 0.6 * _fastest_trial(steady, drifting=False)


def _fastest_trial(truth: Truth, *, drifting: bool) -> float:
    """Relative to the truth about its strategy, of a few searches."""
    rows = [row for seed in range(4) for row in replay(truth, seed=seed, drifting=drifting).outcome.rows]
    return min(
        row.trial.median_seconds / truth.seconds(row.candidate.key) for row in rows if row.trial is not None
    )


def test_a_run_that_was_stopped_goes_on_from_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = made_up(seed=1, method_error=0.1, own_error=0.05, jitter=0.05, drift=0.02)
    measured: list[str] = []
    most = 2

    def measure(case: Any, num_ranks: int, *_: Any, **__: Any) -> Truth:
        if len(measured) == most:
            raise KeyboardInterrupt
        measured.append(f"{case.name}_{num_ranks}")
        return truth

    def row(space: str, *_: Any) -> dict[str, Any]:
        return {"space": space, "num_candidates": 180, "right": 1.0}

    kept = tmp_path / "spaces"
    monkeypatch.setattr(search_quality, "KEPT", kept)
    monkeypatch.setattr(search_quality, "measure", measure)
    monkeypatch.setattr(search_quality, "_row", row)
    with pytest.raises(KeyboardInterrupt):
        search_quality.run(quick=False, report=measured.count)
    assert {one.stem for one in kept.iterdir()} == set(measured)
    most = 6
    rows = search_quality.run(quick=False, report=measured.count).rows
    assert len(rows) == 4 + 6
    assert len(set(measured)) == len(measured) == 6
    assert not kept.exists()
