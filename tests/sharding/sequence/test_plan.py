"""Every position is on one rank, and dividing undoes gathering."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.capture.nests import leaves, map_leaves, path_text
from atorch_ns.sharding.sequence.plan import SequenceLayout


@given(st.integers(1, 60), st.integers(2, 5), st.booleans())
def test_every_position_is_on_one_rank(length: int, ranks: int, zigzag: bool) -> None:
    layout = SequenceLayout(length, ranks, 0, zigzag)
    held = [position for rank in range(ranks) for position in layout.positions(rank)]
    assert sorted(held) == list(range(layout.padded))
    for rank in range(ranks):
        mine = layout.positions(rank)
        assert len(mine) == layout.local
        assert mine == sorted(mine)
        assert sum(position < length for position in mine) == layout.num_real(rank)
    assert layout.local != length  # by their lengths, parts are told from wholes
    assert layout.padded - length < (4 if zigzag or length == 2 else 2) * ranks


@given(st.integers(1, 40), st.integers(2, 4), st.booleans())
def test_in_order_undoes_by_rank(length: int, ranks: int, zigzag: bool) -> None:
    layout = SequenceLayout(length, ranks, 0, zigzag)
    x = torch.arange(3 * length).view(3, length)
    parts = layout.by_rank(x, 1)
    assert torch.equal(layout.in_order(parts, 1), x)
    for rank, part in enumerate(parts.chunk(ranks, 1)):
        own = SequenceLayout(length, ranks, rank, zigzag)
        assert torch.equal(part, own.select(x, 1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_zigzag_shares_the_work_of_a_causal_mask(ranks: int) -> None:
    layout = SequenceLayout(8 * ranks, ranks, 0, zigzag=True)
    work = {sum(position + 1 for position in layout.positions(rank)) for rank in range(ranks)}
    assert len(work) == 1


def test_nested_arguments_keep_their_form_and_have_paths() -> None:
    arguments = ((1, [2]), {"pair": (3, 4), "deep": {"x": 5}})
    assert map_leaves(lambda _, leaf: leaf + 1, arguments) == ((2, [3]), {"pair": (4, 5), "deep": {"x": 6}})
    assert [path_text(path) for path, _ in leaves(arguments)] == [
        "argument 0",
        "argument 1[0]",
        "pair[0]",
        "pair[1]",
        "deep['x']",
    ]
