"""gradient_accumulation gives the model parts of a batch, as many as it says."""

from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.capture.nests import num_rows, tensors_of
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case


@pytest.mark.parametrize(("given", "sizes"), [(1, [8]), (2, [4, 4]), (8, [1] * 8)])
def test_the_model_is_given_so_many_parts(given: int, sizes: list[int]) -> None:
    result = accelerate_case(get_case("mlp"), [("gradient_accumulation", given)], steps=1)
    seen: list[int | None] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        assert tensors_of((args, kwargs))
        seen.append(num_rows((args, kwargs)))

    result.model.register_forward_pre_hook(note, with_kwargs=True)
    for batch in result.dataloader or ():
        result.train_step(batch)
    assert seen == sizes
