"""``init``, the grid of ranks and its getters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch_ns.merak as merak_package
from atorch_ns.errors import InputError
from atorch_ns.merak import get_grid, get_topo, init, mpu, reset
from atorch_ns.merak.mpu import AXES, Grid
from atorch_ns.testing.workers import catch_ranks, run_ranks

SIZES = (2, 2, 1, 2)
"""pipe, data, sequence, model."""


@pytest.fixture(autouse=True)
def _no_grid_left() -> Iterator[None]:
    yield
    reset()


def test_ranks_lie_as_merak_lays_them_out() -> None:
    grid = Grid(SIZES, rank=5)
    assert grid.world_size() == 8
    # Stages outermost, ranks that divide layers next to each other.
    assert grid.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.get_axis_comm_lists("sequence") == [[rank] for rank in range(8)]
    assert grid.get_coord(5) == {"pipe": 1, "data": 0, "sequence": 0, "model": 1}
    assert (grid.get_stage_id(), grid.get_data_parallel_id(), grid.position("model")) == (1, 0, 1)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4, 1, 2, 1), (2, 3, 2, 2)])
def test_a_place_gives_back_its_rank(sizes: tuple[int, int, int, int]) -> None:
    grid = Grid(sizes, rank=0)
    for rank in range(grid.world_size()):
        assert grid.get_rank(**grid.get_coord(rank)) == rank
    for axis in AXES:
        members = sorted(rank for group in grid.get_axis_comm_lists(axis) for rank in group)
        assert members == list(range(grid.world_size()))


def test_the_rank_of_a_stage_keeps_the_other_places() -> None:
    grid = Grid(SIZES, rank=3)  # data 1, model 1
    assert grid.stage_to_global(1) == 7
    assert grid.stage_to_global(1, data=0) == 5
    assert grid.stage_to_global(0, model=0) == 2


def test_places_outside_the_grid_are_refused() -> None:
    grid = Grid(SIZES, rank=0)
    with pytest.raises(InputError, match="sequence=1, model=2 has no position pipe=2"):
        grid.get_rank(pipe=2)
    with pytest.raises(InputError, match="rank 8 is not in a grid"):
        grid.get_coord(8)
    with pytest.raises(InputError, match="tensor=0"):
        grid.get_rank(tensor=0)


def test_positions_are_refused_with_both_orders() -> None:
    with pytest.raises(InputError) as caught:
        init(4, 1, 2)
    assert "init(4, 1, 2)" in str(caught.value)
    assert "(dp, tp, pp)" in str(caught.value)
    assert "(pp, tp, dp)" in str(caught.value)
    assert not mpu.is_decided()


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"dp": 0}, "dp must be a number of ranks or 'auto'; got 0"),
        ({"tp": True}, "tp must be a number of ranks or 'auto'; got True"),
        ({"pp": "all"}, "pp must be a number of ranks or 'auto'; got 'all'"),
        ({"tp": 2.0}, "tp must be a number of ranks or 'auto'; got 2.0"),
    ],
)
def test_degrees_are_numbers(degrees: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        init(**degrees)


def test_nothing_is_there_before_init() -> None:
    with pytest.raises(InputError, match="call init"):
        get_grid()
    with pytest.raises(InputError, match="call init"):
        mpu.get_model_parallel_rank()


def test_a_rank_has_the_groups_of_its_place() -> None:
    for rank, found in enumerate(run_ranks(_groups, 8, timeout_s=60)):
        pipe, data, model = rank // 4, rank // 2 % 2, rank % 2
        assert found["sizes"] == [2, 2, 1, 2]
        assert found["places"] == [pipe, data, 0, model]
        assert found["named"] == [model, 2, data, 2, pipe, 2, 0, 1]
        assert found["sums"] == [
            data * 4 + model * 2 + 4,  # rank and rank of the other stage
            pipe * 8 + model * 2 + 2,
            rank,
            pipe * 8 + data * 4 + 1,
        ]
        assert found["topology is the grid"]


def _groups() -> dict[str, Any]:
    init(dp=2, tp=2, pp=2)
    grid = get_grid()
    sums = []
    for group in (
        mpu.get_pipe_parallel_group(),
        mpu.get_data_parallel_group(),
        mpu.get_sequence_parallel_group(),
        mpu.get_model_parallel_group(),
    ):
        mine = torch.tensor(grid.get_global_rank())
        dist.all_reduce(mine, group=group)
        sums.append(int(mine))
    return {
        "sizes": [grid.get_dim(axis) for axis in AXES],
        "places": [grid.position(axis) for axis in AXES],
        "named": [
            mpu.get_model_parallel_rank(),
            mpu.get_model_parallel_world_size(),
            mpu.get_data_parallel_rank(),
            mpu.get_data_parallel_world_size(),
            mpu.get_pipe_parallel_rank(),
            mpu.get_pipe_parallel_world_size(),
            mpu.get_sequence_parallel_rank(),
            mpu.get_sequence_parallel_world_size(),
        ],
        "sums": sums,
        "topology is the grid": get_topo() is grid,
    }


def test_a_second_job_has_a_grid_of_its_own() -> None:
    for rank, (first, second, third) in enumerate(run_ranks(_jobs, 4, timeout_s=60)):
        assert first == ([2, 2, 1, 1], [rank // 2, rank % 2])  # dp is what tp and pp leave
        assert second == ([1, 2, 2, 1], [0, rank // 2])
        assert third == "call init(dp=…, tp=…, pp=…) first: it lays out the ranks."


def _jobs() -> list[Any]:
    found: list[Any] = []
    for degrees in ({"pp": 2}, {"sp": 2}):
        init(**degrees)
        grid = get_grid()
        found.append(
            ([grid.get_dim(axis) for axis in AXES], [mpu.get_pipe_parallel_rank(), grid.position("data")])
        )
    reset()
    try:
        get_grid()
    except InputError as error:
        found.append(str(error))
    return found


def test_degrees_that_do_not_fit_are_refused_on_all_ranks() -> None:
    for outcome in catch_ranks(_init_with, 4, args=({"tp": 3},), timeout_s=60):
        assert isinstance(outcome.error, InputError)
        assert "tp=3" in str(outcome.error)
        assert "4 process(es)" in str(outcome.error)
        assert "(dp=2, tp=1, pp=2)" in str(outcome.error)  # what would fit
    for outcome in catch_ranks(_init_with, 2, args=({"dp": 1},), timeout_s=60):
        assert isinstance(outcome.error, InputError)  # a rank would be left over


def test_open_degrees_leave_the_grid_to_a_search() -> None:
    for found in run_ranks(_open, 2, timeout_s=60):
        assert (
            found
            == ["MerakTrainer searches for the degrees when training starts; the grid does not exist before."]
            * 2
        )


def _init_with(degrees: dict[str, Any]) -> None:
    init(**degrees)


def _open() -> list[str]:
    found = []
    for degrees in ({}, {"tp": 2, "pp": "auto"}):
        init(**degrees)  # type: ignore[arg-type]
        try:
            get_grid()
        except InputError as error:
            found.append(str(error))
    return found


def test_one_process_needs_no_degrees() -> None:
    assert run_ranks(_alone, 1, init_process_group=False) == [(1, 0)]


def _alone() -> tuple[int, int]:
    init()
    return get_grid().world_size(), mpu.get_data_parallel_rank()


def test_the_package_has_what_scripts_of_merak_use() -> None:
    for name in (
        "init",
        "MerakArguments",
        "MerakTrainer",
        "set_tp_layer_lists",
        "get_grid",
        "get_topo",
        "mpu",
    ):
        assert name in merak_package.__all__
        assert hasattr(merak_package, name)
