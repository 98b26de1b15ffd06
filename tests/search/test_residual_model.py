from __future__ import annotations

import numpy as np

from atorch_ns.search import Candidate
from atorch_ns.search.residual_model import Posterior, fit_posterior, read_features
from tests.search.fakes import candidate

CANDIDATES = [
    candidate(f"{kind}{n}", kind, ("x", {"n": n}), seconds=0.02 + 0.001 * n)
    for kind in ("a", "b")
    for n in range(4)
]


def posterior(
    tried: dict[int, float], candidates: list[Candidate] = CANDIDATES, noise: float = 0.01
) -> Posterior:
    """After trials that took ``factor`` times the prediction."""
    predicted = np.log([one.estimate.step_seconds for one in candidates if one.estimate])
    indices = np.asarray(list(tried), dtype=np.int64)
    measured = predicted[indices] + np.log(list(tried.values())) if tried else np.zeros(0)
    return fit_posterior(
        read_features(candidates), predicted, indices, measured, noise=np.full(len(tried), noise)
    )


def factors(one: Posterior) -> np.ndarray:
    predicted = np.log([one.estimate.step_seconds for one in CANDIDATES if one.estimate])
    found: np.ndarray = np.exp(one.mean - predicted)
    return found


def test_before_any_trial_the_prediction_stands_and_little_is_sure() -> None:
    before = posterior({})
    assert np.allclose(factors(before), 1)
    assert (before.deviation > 0.5).all()


def test_one_trial_corrects_the_scale_of_all() -> None:
    after = posterior({0: 3.0})
    assert np.all(factors(after) > 2.5)
    assert np.all(after.deviation[1:] < 0.5)
    assert after.deviation[0] < 0.05


def test_a_method_that_is_slower_than_predicted_is_so_everywhere() -> None:
    after = factors(posterior({0: 1.0, 4: 2.0, 5: 2.0}))
    assert after[6] > 1.4
    assert after[6] > 1.3 * after[2]


def test_consistent_trials_make_it_sure_and_contradictory_ones_unsure() -> None:
    consistent = posterior({0: 1.0, 1: 1.0, 4: 1.0, 5: 1.0})
    scattered = posterior({0: 1.0, 1: 2.0, 4: 0.6, 5: 1.7})
    assert scattered.deviation[2] > 1.5 * consistent.deviation[2]


def test_draws_have_the_mean_and_the_spread_and_are_the_same_for_a_seed() -> None:
    after = posterior({0: 1.2, 5: 0.9})
    drawn = after.samples(3)
    assert np.array_equal(drawn, after.samples(3))
    assert np.allclose(drawn.mean(axis=0), after.mean, atol=0.08)
    assert np.allclose(drawn.std(axis=0), after.deviation, rtol=0.25, atol=0.01)


def test_without_predictions_trials_still_teach() -> None:
    features = read_features(CANDIDATES)
    predicted = np.full(len(CANDIDATES), np.nan)
    after = fit_posterior(
        features, predicted, np.asarray([0, 4]), np.log([0.02, 0.05]), noise=np.asarray([0.01, 0.01])
    )
    assert after.mean[7] > after.mean[3]
