"""Every method alone, every legal pair and some triples, on 2 ranks, against plain torch in one process.

`make test` runs every pair on one model and a sample of them on the others, `make test-all` every pair on every model.
"""

from __future__ import annotations

import importlib.util
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

import pytest

from atorch_ns.method import load_registry
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import Trajectory, accelerated_run, assert_parity, assert_ranks_agree, compare
from atorch_ns.testing.workers import run_ranks
from tests.parity.variants import (
    BACKENDS,
    CASES,
    TOLERANCES,
    TRIPLES,
    VARIANTS,
    Variant,
    global_batch,
    in_sample,
    package_of,
    pairs_from,
    partners,
    precision_of,
    reference,
)

REGISTRY = load_registry()


def _train_all(case_name: str, combinations: list[tuple[Variant, ...]]) -> list[Trajectory | str]:
    """One after the other in the same process, so each is also a test that the earlier ones left nothing."""
    results: list[Trajectory | str] = []
    for variants in combinations:
        strategy: list[Any] = [(variant.name, variant.config) for variant in variants]
        batch = global_batch(precision_of(variants))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results.append(accelerated_run(get_case(case_name), strategy, global_batch=batch))
            except Exception:
                # Reported per combination. A failure on one rank only would leave the ranks out of step, and
                # the time limit would say so.
                results.append(traceback.format_exc())
    return results


def _check(case_name: str, combinations: list[tuple[Variant, ...]], num_ranks: int = 2) -> None:
    ranks = run_ranks(_train_all, num_ranks, args=(case_name, combinations), timeout_s=300)
    failures = []
    for position, variants in enumerate(combinations):
        label = " + ".join(variant.label for variant in variants)
        runs = [rank[position] for rank in ranks]
        precision = precision_of(variants)
        try:
            trajectories = [run for run in runs if isinstance(run, Trajectory)]
            assert len(trajectories) == num_ranks, next(run for run in runs if isinstance(run, str))
            param_tol, loss_tol = TOLERANCES[precision]
            report = compare(reference(case_name, precision), trajectories[0])
            assert_parity(report, param_tol=param_tol, loss_tol=loss_tol)
            assert_ranks_agree(trajectories)
        except AssertionError as error:
            failures.append(f"{label}: {error}")
    assert not failures, "\n\n".join(failures)


SHARES = [pytest.param(False, id="sample"), pytest.param(True, id="rest", marks=pytest.mark.slow)]


def _share(case_name: str, combinations: Iterable[tuple[Variant, ...]], rest: bool) -> None:
    """Checks the combinations that a case stands for in every run of the tests, or all others."""
    chosen = [
        variants
        for position, variants in enumerate(combinations)
        if in_sample(case_name, position, variants) is not rest
    ]
    if chosen:
        _check(case_name, chosen)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rest", SHARES)
@pytest.mark.parametrize("first", VARIANTS, ids=lambda variant: variant.label)
@pytest.mark.parametrize("case_name", CASES)
def test_alone_and_in_every_legal_pair(case_name: str, first: Variant, rest: bool) -> None:
    _share(case_name, pairs_from(REGISTRY, first), rest)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rest", SHARES)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda variant: variant.label)
@pytest.mark.parametrize("case_name", CASES)
def test_other_backends_alone_and_in_every_legal_pair(case_name: str, backend: Variant, rest: bool) -> None:
    package = package_of(backend)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    _share(case_name, partners(REGISTRY, backend), rest)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case_name", CASES)
def test_triples(case_name: str) -> None:
    _check(case_name, list(TRIPLES))


def test_the_sample_holds_every_pair_on_some_model_and_every_variant_on_all() -> None:
    for first in VARIANTS:
        pairs = list(pairs_from(REGISTRY, first))
        assert all(in_sample("mlp", position, pair) for position, pair in enumerate(pairs))
        assert all(in_sample(case_name, 0, pairs[0]) for case_name in CASES)
    assert in_sample("hf_llama", 8, (VARIANTS[0], VARIANTS[1]))
    assert not in_sample("hf_llama", 3, (VARIANTS[0], VARIANTS[1]))
