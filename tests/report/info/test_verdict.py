"""Verdict: what one process takes, and gains over plain strategies of the same precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atorch_ns.report.info.verdict import verdict
from atorch_ns.search import Row, SearchOutcome, TrialOutcome
from atorch_ns.search.outcome import SingleProcess
from tests.report.outcomes import AMP, CHECKPOINT, DDP, FSDP, estimated, measured, row, searched

IN_AMP = "amp_native(bfloat16)"


def _with_single(trial: TrialOutcome, *, is_as_fast: bool) -> SearchOutcome:
    return replace(searched(), single_process=SingleProcess(trial=trial, is_as_fast=is_as_fast))


def _row(key: str, *steps: tuple[str, Any], milliseconds: float, tried: bool = True, **of: Any) -> Row:
    made = row(key, steps, "won" if key == "win" else "lost", "", estimate=estimated(milliseconds, 400))
    trial = measured(milliseconds, 400) if tried else None
    precision = IN_AMP if AMP in steps else ""
    return replace(made, trial=trial, candidate=replace(made.candidate, precision=precision, **of))


def _gain(*rows: Row) -> str:
    (sentence,) = [one for one in verdict(replace(searched(), rows=rows)) if one.startswith("One step")]
    return sentence.split(". It is ", 1)[1]


BASE = _row("base", DDP, milliseconds=40, is_baseline=True, is_plain=True)
PLAIN = _row("amp", DDP, AMP, milliseconds=30, is_plain=True)
WINNER = _row("win", FSDP, AMP, CHECKPOINT, milliseconds=25)


def test_one_process_that_is_as_fast_is_the_first_sentence() -> None:
    first, second, *_ = verdict(_with_single(measured(21, 400), is_as_fast=True))
    assert first == (
        "Use one process: it takes 21.0 ms ±0.2 ms (measured, n=5) for the same batch. The best strategy on 2 ranks "
        "takes 25.0 ms ±0.2 ms (measured, n=5)."
    )
    assert second.startswith("Chosen: ")


def test_one_process_within_the_noise_is_said_to_be() -> None:
    first, *_ = verdict(_with_single(measured(25.2, 400), is_as_fast=True))
    assert first.startswith("Use one process: ")
    assert first.endswith(", the same within the noise.")


def test_one_process_that_is_slower_stands_behind_the_choice() -> None:
    first, _, third, *_ = verdict(_with_single(measured(60, 400), is_as_fast=False))
    assert first.startswith("Chosen: ")
    assert third == "One process takes 60.0 ms ±0.5 ms (measured, n=5) for the same batch."


def test_one_process_that_was_not_measured_is_not_compared() -> None:
    failed = TrialOutcome(status="out of memory", reason="a step holds 9 GiB")
    said = "It is not known whether one process is as fast: a step holds 9 GiB."
    assert said in verdict(_with_single(failed, is_as_fast=False))
    assert not [sentence for sentence in verdict(searched()) if "ne process" in sentence]


def test_the_precision_of_one_process_is_said() -> None:
    single = SingleProcess(trial=measured(21, 400), is_as_fast=True)
    outcome = replace(searched(), rows=(WINNER, PLAIN, BASE), single_process=single)
    assert f"for the same batch with {IN_AMP}. The" in verdict(outcome)[0]


def test_the_gain_of_the_precision_is_said_apart() -> None:
    assert _gain(WINNER, PLAIN, BASE) == (
        f"1.20× as fast as the plain {PLAIN.candidate.label}, which takes 30.0 ms ±0.2 ms (measured, n=5) in the same "
        f"precision. {IN_AMP} alone is 1.33× as fast as the baseline ddp, which takes 40.0 ms ±0.3 ms (measured, n=5)."
    )


def test_the_best_plain_strategy_counts() -> None:
    better = _row("zero", FSDP, milliseconds=32, is_plain=True)
    winner = _row("win", FSDP, CHECKPOINT, milliseconds=20)
    assert _gain(winner, BASE).startswith("2.00× as fast as the baseline ddp, which takes 40.0 ms")
    assert _gain(winner, better, BASE).startswith("1.60× as fast as the plain fsdp, which takes 32.0 ms")


def test_what_was_measured_counts_before_predictions_which_are_called_so() -> None:
    guessed = _row("guess", FSDP, AMP, milliseconds=26, tried=False, is_plain=True)
    assert _gain(WINNER, guessed, PLAIN, BASE).startswith("1.20× as fast as the plain")
    assert " takes 26.0 ms (predicted) in the same precision" in _gain(WINNER, guessed, BASE)


@pytest.mark.parametrize(
    "rows",
    [(replace(WINNER, candidate=replace(WINNER.candidate, is_plain=True)), PLAIN, BASE), (WINNER, BASE)],
)
def test_a_gain_of_precision_that_is_not_known_apart_is_said_to_be_included(rows: tuple[Row, ...]) -> None:
    """The winner is the best plain strategy of its precision itself; or no other was tried."""
    assert _gain(*rows) == (
        f"1.60× as fast as the baseline ddp, which takes 40.0 ms ±0.3 ms (measured, n=5). This includes the gain of {IN_AMP}."
    )
