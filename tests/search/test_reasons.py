from __future__ import annotations

import pytest

from atorch_ns.search.reasons import time_against


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (2.04, "takes 2.04× as long"),
        (1.996, "takes 2.00× as long"),
        (1.31, "is 31% slower"),
        (1.004, "is as fast within the noise"),
        (0.8, "takes 20% less time"),
    ],
)
def test_one_way_to_say_how_much_slower(ratio: float, text: str) -> None:
    assert time_against(ratio) == text
