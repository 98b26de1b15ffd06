"""Which elements a rank holds, against torch's own division."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.estimate.memory.shards import Parameters, flat_share, row_share, whole_share
from atorch_ns.sharding import unit_dim

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=8)


def _parameters(shapes: list[list[int]], copies: int = 1) -> Parameters:
    num = len(shapes)
    return Parameters(
        shapes=tuple(map(tuple, shapes)),
        elements=np.asarray([int(np.prod(shape)) for shape in shapes]),
        rows=np.asarray([shape[0] if shape else 0 for shape in shapes]),
        itemsize=np.full(num, 4),
        is_float=np.ones(num, dtype=bool),
        trainable=np.ones(num, dtype=bool),
        copies=np.full(num, copies),
        unit=np.zeros(num, dtype=np.int64),
        segment=np.zeros(num, dtype=np.int64),
        divisible=np.zeros(num, dtype=np.int64),
        by_rows=np.zeros(num, dtype=bool),
        is_expert=np.zeros(num, dtype=bool),
        owner=np.full(num, -1),
    )


@given(SHAPES, st.integers(1, 8), st.booleans())
def test_units_hold_torchs_chunks(shapes: list[list[int]], num_ranks: int, are_experts: bool) -> None:
    parameters = replace(_parameters(shapes), is_expert=np.full(len(shapes), are_experts))
    share = row_share(parameters, np.asarray([num_ranks]))
    dims = [int(unit_dim(shape, num_ranks, is_divided=are_experts)) for shape in shapes]
    parts = [torch.chunk(torch.empty(s), num_ranks, dim) for s, dim in zip(shapes, dims, strict=True)]
    assert share.stored[0].tolist() == [chunks[0].numel() for chunks in parts]


@pytest.mark.parametrize(
    ("shape", "num_ranks", "are_experts", "dim"),
    [
        ([8, 14, 32], 8, False, 0),  # each rank has a row
        ([8, 14, 32], 9, False, 0),  # nothing divides
        ([8, 14, 32], 32, False, 2),  # rows would leave ranks with nothing
        ([8, 14, 32], 2, True, 1),  # an axis of experts has divided the rows
        ([8, 15], 2, True, 0),
    ],
)
def test_the_dim_of_a_unit(shape: list[int], num_ranks: int, are_experts: bool, dim: int) -> None:
    assert unit_dim(shape, num_ranks, is_divided=are_experts) == dim


def test_torch_takes_the_rows_of_what_the_tensor_axis_has_divided() -> None:
    """A part of 2 x 16 elements of 2 x 32 stays on the first two of four ranks."""
    part = replace(_parameters([[2, 32]]), elements=np.asarray([[32]]), rows=np.asarray([[2]]))
    assert row_share(part, np.asarray([4])).stored.tolist() == [[16]]


def test_a_number_is_kept_by_all() -> None:
    assert row_share(_parameters([[]]), np.asarray([4])).stored.tolist() == [[1]]


@given(SHAPES, st.integers(1, 8))
def test_flat_pieces_are_equal_and_hold_everything(shapes: list[list[int]], num_ranks: int) -> None:
    parameters = _parameters(shapes)
    share = flat_share(parameters, np.asarray([num_ranks]))
    piece = int(share.stored.sum())
    assert piece * num_ranks >= parameters.elements.sum()
    assert share.elements.sum() <= piece
    if num_ranks == 1:
        assert share.elements[0].tolist() == parameters.elements.tolist()
    assert (piece - 1) * num_ranks < parameters.elements.sum()


@given(SHAPES, st.integers(1, 5), st.integers(1, 3))
def test_whole_parameters_are_dealt_as_the_optimizer_deals_them(
    shapes: list[list[int]], num_ranks: int, copies: int
) -> None:
    parameters = _parameters(shapes, copies)
    share = whole_share(parameters, np.asarray([num_ranks]), parameters.elements)
    # ZeroRedundancyOptimizer: sorted by size, largest first, each to the rank with the least so far.
    totals = [0] * num_ranks
    for size in sorted(np.repeat(parameters.elements, copies).tolist(), reverse=True):
        totals[totals.index(min(totals))] += size
    assert share.elements[0] @ parameters.copies == pytest.approx(max(totals))
