"""How many micro-batches a pipeline takes by itself."""

from __future__ import annotations

import pytest

from atorch_ns.errors import BatchSizeError
from atorch_ns.pipeline import get_schedule
from opt_lib._model_axes.pipeline_plan import fitting_micro_batches, number_problem


@pytest.mark.parametrize(("rows", "wanted"), [(4, 4), (6, 3), (8, 4), (12, 4), (64, 4), (7, 7), (3, 3)])
def test_about_twice_the_stages_and_a_divisor_of_the_batch(rows: int, wanted: int) -> None:
    assert fitting_micro_batches(get_schedule("1F1B"), 2, 1, rows) == wanted


def test_a_batch_that_no_number_suits_is_refused_with_remedies() -> None:
    with pytest.raises(BatchSizeError, match=r"a batch of 1 rows .*drop_last=True.*GPipe"):
        fitting_micro_batches(get_schedule("PreRecompute1F1B"), 2, 1, 1)


def test_suggested_numbers_divide_the_batch() -> None:
    info = get_schedule("PreRecompute1F1B")
    assert "num_micro_batches=2 or 4 or 8," in number_problem(info, 2, 1, 1, rows=8)
    assert "num_micro_batches=2 or 3 or 6," in number_problem(info, 2, 1, 4, rows=6)
