"""Text of estimates, searches and reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atorch_ns.estimate import Intervals
from atorch_ns.report import estimate_text, estimates_text, search_text
from atorch_ns.report.text.text import fits_text, report_text
from tests.report.outcomes import MIB, estimated, searched


@pytest.mark.parametrize(
    ("limit_mib", "words"),
    [
        (1000, "It fits: peak 400 MiB (predicted), limit 1000 MiB per rank, 600 MiB free."),
        (300, "100 MiB over. The largest part is activations, 200 MiB"),
        (0, "The memory of the device is unknown"),
    ],
)
def test_whether_an_estimate_fits(limit_mib: int, words: str) -> None:
    assert words in fits_text(estimated(20, 400), limit_mib * MIB)


@pytest.mark.parametrize(
    ("limit_mib", "words"),
    [
        (
            600,
            "It fits: peak 550 MiB (predicted; tensors need 400 MiB, for which torch reserves 450 MiB), limit 600 MiB per rank",
        ),
        (520, "It fits only if torch's allocator releases cached memory"),
        (450, "It does not fit: peak 550 MiB (predicted; tensors"),
    ],
)
def test_whether_an_estimate_fits_on_a_gpu(limit_mib: int, words: str) -> None:
    plain = estimated(20, 400)
    on_gpu = replace(plain, memory=plain.memory._replace(reserve=50.0 * MIB, outside=100.0 * MIB))
    assert words in fits_text(on_gpu, limit_mib * MIB)
    assert "allocated" in estimate_text(on_gpu, limit_mib * MIB)
    assert "allocated" not in estimate_text(plain, limit_mib * MIB)


def test_an_estimate_without_collectives_says_nothing_of_them() -> None:
    text = estimate_text(estimated(20, 400), 1000 * MIB)
    assert "One step takes 20.0 ms (predicted)." in text
    assert "Communication" not in text


def test_two_estimates_side_by_side_name_what_is_new() -> None:
    lines = estimates_text(estimated(20, 400), estimated(28, 300, recompute_ms=4)).splitlines()
    (recompute,) = (line for line in lines if "recompute" in line)
    assert recompute.split()[-1] == "new"
    (peak,) = (line for line in lines if "peak" in line)
    assert peak.split()[-1] == "-25%"


def test_nothing_at_all_is_said() -> None:
    assert report_text(None, None, None) == "nothing was applied and nothing was searched"


def test_a_search_that_measured_nothing_has_no_trials_and_no_accuracy() -> None:
    rows = tuple(replace(row, trial=None, trial_number=0) for row in searched().rows)
    text = search_text(replace(searched(), rows=rows))
    assert "Trials in order" not in text
    assert "Predicted against measured" not in text
    assert "and measured" not in text


def test_predictions_are_shown_with_their_intervals() -> None:
    sure = Intervals(time=(0.9, 1.25), memory=(0.95, 1.1))
    text = estimate_text(replace(estimated(20, 400), intervals=sure), 420 * MIB)
    assert (
        "It probably fits: peak 400 MiB (predicted, 380–440), limit 420 MiB per rank, 20.0 MiB free." in text
    )
    assert "One step takes 20.0 ms (18.0–25.0, predicted)." in text
    assert " 400 MiB (380–440)" in text
    assert "It probably does not fit: " in fits_text(replace(estimated(20, 400), intervals=sure), 390 * MIB)
    first, *others = searched().rows
    candidate = replace(first.candidate, estimate=replace(estimated(20, 400), intervals=sure))
    text = search_text(replace(searched(), rows=(replace(first, candidate=candidate), *others)))
    assert "(18.0–25.0)" in text
    assert "400 MiB (380–440)" in text
