"""Recorded spaces: searches in them can be replayed elsewhere."""

from __future__ import annotations

from benchmarks._search_worlds import made_up, recorded, replay, share_right


def test_a_recorded_space_replays_the_same_searches() -> None:
    truth = made_up(seed=1, method_error=0.1, own_error=0.05, jitter=0.05, drift=0.02)
    again = recorded(truth.as_json())
    assert again.best == truth.best
    assert again.rank_correlation == truth.rank_correlation
    first, second = replay(truth, seed=3), replay(again, seed=3)
    assert (first.num_trials, first.regret) == (second.num_trials, second.regret)
    assert share_right([first, second]) in (0.0, 1.0)
