"""Exceptions carry what a caller needs, also from one process to another."""

from __future__ import annotations

import pickle

import pytest

from atorch_ns import errors
from atorch_ns.errors import (
    AtorchError,
    MissingPackageError,
    Problem,
    RankError,
    StrategyError,
    StrategyFileError,
)

PROBLEM = Problem(message="must be a power of two", method="fsdp", key="size", value="3", accepted="2, 4")


def test_every_exception_is_of_the_tree() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert all(issubclass(kind, AtorchError) for kind in kinds)
    assert all(f"{kind.__name__}" in (errors.__doc__ or "") for kind in kinds), "the docstring draws it"


def test_a_problem_says_where_what_and_what_else() -> None:
    assert str(PROBLEM) == "fsdp.size=3: must be a power of two. Accepted: 2, 4."
    assert str(Problem(message="Nothing to do.")) == "Nothing to do."
    assert str(Problem(message="why?", method="ddp", accepted="x")) == "ddp: why? Accepted: x."


def test_all_problems_of_a_strategy_are_numbered() -> None:
    one, two = StrategyError([PROBLEM], source="s.json"), StrategyError([PROBLEM, Problem(message="No.")])
    assert str(one) == f"{PROBLEM} (s.json)"
    assert str(two).splitlines() == ["2 problems in the strategy:", f"  1. {PROBLEM}", "  2. No."]


@pytest.mark.parametrize("kind", [StrategyError, StrategyFileError])
def test_a_strategy_error_survives_pickling(kind: type[StrategyError]) -> None:
    error = kind([PROBLEM], source="s.json")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.problems, again.source) == (str(error), error.problems, error.source)


def test_others_name_the_package_and_the_ranks() -> None:
    missing = MissingPackageError(
        "optuna", needed_by="the sampler", install="pip install optuna", reason="no libc"
    )
    assert str(missing).endswith("cannot be imported (no libc). Install it with: pip install optuna")
    assert isinstance(missing, ImportError)
    failures = {1: "died"}
    error = RankError("rank 1 failed", failures=failures)
    failures.clear()
    assert error.failures == {1: "died"}
