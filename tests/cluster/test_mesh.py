"""Groups of ranks along axes, as pure functions and as meshes."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.cluster import AXES, Mesh, fit, layout
from atorch_ns.errors import LayoutError
from atorch_ns.testing.workers import run_ranks


def test_the_specifications_example() -> None:
    groups = layout([("tensor", 4), ("pipeline", 2), ("data", 2)], 16)
    assert groups == {
        "tensor": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        "data": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    }
    assert list(groups) == ["tensor", "pipeline", "data"]


def test_the_size_of_data_is_fitted() -> None:
    assert fit([("data", 8)], 16) == (("data", 16),)
    assert fit([("tensor", 2), ("pipeline", 2), ("data", 2)], 16)[-1] == ("data", 4)
    assert fit([], 16) == (("data", 16),)
    assert fit([("zero", 4)], 16) == (("zero", 4), ("data", 4))
    assert fit([("zero", 16)], 16) == (("zero", 16),)
    assert fit([("pipe", 2)], 2) == (("pipeline", 2),)


def test_rank_order() -> None:
    order = [0, 2, 1, 3]
    assert layout([("tensor", 2), ("data", 2)], 4, order) == {
        "tensor": [[0, 2], [1, 3]],
        "data": [[0, 1], [2, 3]],
    }


@pytest.mark.parametrize(
    ("axes", "world", "order", "words"),
    [
        ([("tensor", 3)], 8, None, r"tensor=3 does not divide 8 processes. Use tensor in \{1, 2, 4, 8\}"),
        ([("tensor", 4), ("pipeline", 4)], 8, None, "= 16"),
        ([("tensr", 2)], 8, None, "unknown axis 'tensr'"),
        ([("data", 2), ("data", 4)], 8, None, "named twice"),
        (
            [("pipe", 2), ("pipeline", 0), ("x", 1), ("y", 1)],
            8,
            None,
            r"'pipeline' is named twice\. pipeline=0 is not a size: .* unknown axis 'x', 'y'\.",
        ),
        ([("data", 0)], 8, None, "positive integer"),
        ([("data", True)], 8, None, "positive integer"),
        ([("data", 8)], 8, [0] * 8, "once"),
        ([("data", 8)], 8, [0, 1], "ranks 0 to 7"),
    ],
)
def test_bad_layouts(axes: list[tuple[str, int]], world: int, order: list[int] | None, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        layout(axes, world, order)


_axes = st.lists(
    st.tuples(st.sampled_from([a for a in AXES if a != "data"]), st.sampled_from([1, 2, 3, 4])),
    unique_by=lambda axis: axis[0],
    max_size=4,
)


@given(axes=_axes, data=st.integers(1, 4), shuffled=st.randoms())
def test_groups_partition_the_ranks(axes: list[tuple[str, int]], data: int, shuffled: object) -> None:
    world = math.prod(size for _, size in axes) * data
    order = list(range(world))
    shuffled.shuffle(order)  # type: ignore[attr-defined]
    groups = layout([*axes, ("data", 1)], world, order)
    for name, lines in groups.items():
        assert sorted(rank for line in lines for rank in line) == list(range(world)), name
    names = list(groups)
    for one in names:
        for other in names:
            if one != other:  # ranks that share a group along one axis share none along another
                assert all(len(set(a) & set(b)) <= 1 for a in groups[one] for b in groups[other])


def test_4096_ranks_are_quick() -> None:
    groups = layout([("tensor", 8), ("pipeline", 16), ("zero", 8), ("data", 4)], 4096)
    assert {name: (len(lines), len(lines[0])) for name, lines in groups.items()} == {
        "tensor": (512, 8),
        "pipeline": (256, 16),
        "zero": (512, 8),
        "data": (1024, 4),
    }
    assert groups["tensor"][511] == list(range(4088, 4096))


def _sharding_groups() -> tuple[list[str], list[int]]:
    mesh = Mesh([("sequence", 2), ("zero", 2), ("data", 2)], device_type="cpu")
    both = mesh.replicate_and_shard
    return list(both.mesh_dim_names or ()), dist.get_process_group_ranks(both.get_group(1))


def test_fully_sharded_states_are_divided_over_sequence_ranks_too() -> None:
    for rank, (names, group) in enumerate(run_ranks(_sharding_groups, 8)):
        assert names == ["data", "zero_sequence"]
        assert group == ([0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7])
