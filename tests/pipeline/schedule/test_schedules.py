"""The schedules' rules and orders, held against what torch accepts and runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from atorch_ns.errors import InputError
from atorch_ns.pipeline import ScheduleInfo, actions, get_schedule
from atorch_ns.pipeline.schedule.actions import Action, live_micro_batches
from atorch_ns.pipeline.schedule.schedules import SCHEDULES
from tests.warm import COLD_PYTHON

NAMES = [info.name for info in SCHEDULES]
MULTI = [info for info in SCHEDULES if not info.is_single]


def _stages(num_ranks: int, rank: int, on_rank: int) -> list[Any]:
    """As much of a stage as a schedule's constructor looks at."""
    return [
        SimpleNamespace(
            num_stages=num_ranks * on_rank,
            group_size=num_ranks,
            group_rank=rank,
            submod=None,
            stage_index=rank,
        )
        for _ in range(on_rank)
    ]


def _constructed(info: ScheduleInfo, num_ranks: int, num_micro_batches: int, on_rank: int) -> Any:
    stages = _stages(num_ranks, 0, on_rank)
    first = stages[0] if info.is_single else stages
    return info.torch_class()(first, num_micro_batches)


def _is_refused(info: ScheduleInfo, num_ranks: int, num_micro_batches: int, on_rank: int) -> bool:
    try:
        _constructed(info, num_ranks, num_micro_batches, on_rank)
    except ValueError:
        return True
    return False


class _Recorder:
    """A stage that notes what a schedule for one stage does with it."""

    def __init__(self, rank: int, num_stages: int) -> None:
        self.stage_index, self.num_stages, self.passes = rank, num_stages, list[Action]()
        self.is_first, self.is_last, self.group_size, self.group_rank = False, False, num_stages, rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):  # sends and receives
            return lambda index: []
        return lambda *args, **kwargs: None

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> None:
        self.passes.append(Action("F", self.stage_index, index))

    def backward_one_chunk(self, index: int, **kwargs: Any) -> None:
        self.passes.append(Action("B", self.stage_index, index))


def _flat(operations: list[Any]) -> Iterator[Action]:
    for operation in operations:
        if operation is not None and operation.is_compute_op:
            for part in operation.sub_actions or (operation,):
                yield Action(part.computation_type.value, part.stage_index, part.microbatch_index)


@pytest.mark.parametrize("info", SCHEDULES, ids=NAMES)
def test_torch_accepts_and_refuses_the_same_pipelines(info: ScheduleInfo) -> None:
    for num_ranks in (1, 2, 3, 4):
        for on_rank in (1, 2, 3):
            if info.is_single and on_rank > 1:
                assert "needs exactly 1 stage" in info.problem(num_ranks, 8, on_rank)
                continue
            for num_micro_batches in range(1, 3 * num_ranks * on_rank):
                problem = info.problem(num_ranks, num_micro_batches, on_rank)
                assert bool(problem) == _is_refused(info, num_ranks, num_micro_batches, on_rank), problem


@pytest.mark.parametrize("info", MULTI, ids=[info.name for info in MULTI])
def test_orders_are_those_of_torch(info: ScheduleInfo) -> None:
    for num_ranks, num_micro_batches, on_rank in (
        (1, 4, 2),
        (2, 4, 2),
        (2, 7, 2),
        (4, 8, 2),
        (3, 9, 1),
        (4, 12, 3),
    ):
        if info.problem(num_ranks, num_micro_batches, on_rank):
            continue
        schedule = _constructed(info, num_ranks, num_micro_batches, on_rank)
        ours = actions(info, num_ranks, num_micro_batches, on_rank)
        planned = [schedule.pipeline_order[rank] for rank in range(num_ranks)]
        run = [schedule.pipeline_order_with_comms[rank] for rank in range(num_ranks)]
        assert [list(order) for order in ours] == [list(_flat(order)) for order in planned]
        assert [list(order) for order in ours] == [list(_flat(order)) for order in run]
        mapping = schedule.stage_index_to_group_rank
        assert {stage: info.rank_of(stage, num_ranks) for stage in mapping} == mapping


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9)])
def test_orders_of_one_stage_a_rank_are_what_torch_runs(
    name: str, num_ranks: int, num_micro_batches: int
) -> None:
    info = get_schedule(name)
    ours = actions(info, num_ranks, num_micro_batches)
    for rank in range(num_ranks):
        stage = _Recorder(rank, num_ranks)
        schedule = info.torch_class()(stage, num_micro_batches)
        schedule._initialize_stage = lambda *args, **kwargs: None  # meets the neighbours
        schedule._step_microbatches([()] * num_micro_batches, [{}] * num_micro_batches)
        assert list(ours[rank]) == stage.passes


@pytest.mark.parametrize("info", SCHEDULES, ids=NAMES)
def test_every_micro_batch_passes_every_stage_once_each_way(info: ScheduleInfo) -> None:
    num_ranks, num_micro_batches, on_rank = 4, 8, info.usual_stages
    orders = actions(info, num_ranks, num_micro_batches)
    passes = sorted((a.stage, a.micro_batch, a.kind.replace("I", "B")) for order in orders for a in order)
    backwards = [one for one in passes if one[2] != "W"]
    every = [(stage, index) for stage in range(num_ranks * on_rank) for index in range(num_micro_batches)]
    assert backwards == sorted((*one, kind) for one in every for kind in "BF")
    split = sorted((a.stage, a.micro_batch) for order in orders for a in order if a.kind == "I")
    assert split == sorted((a.stage, a.micro_batch) for order in orders for a in order if a.kind == "W")
    assert bool(split) == info.splits_backward
    for rank, order in enumerate(orders):
        assert {action.stage for action in order} == set(info.stages_of(rank, num_ranks))


def test_live_micro_batches() -> None:
    assert live_micro_batches(actions(get_schedule("GPipe"), 4, 8)) == (8, 8, 8, 8)
    assert live_micro_batches(actions(get_schedule("1F1B"), 4, 8)) == (4, 3, 2, 1)
    assert max(live_micro_batches(actions(get_schedule("LoopedBFS"), 2, 6))) == 6


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("gpipe", "GPipe"),
        ("1F1B", "1F1B"),
        ("Schedule1F1B", "1F1B"),
        ("interleaved_1f1b", "Interleaved1F1B"),
        ("looped_bfs", "LoopedBFS"),
        ("interleaved-zero-bubble", "InterleavedZeroBubble"),
        ("zbv", "ZBVZeroBubble"),
        ("DUALPIPEV", "DualPipeV"),
    ],
)
def test_names(given: str, name: str) -> None:
    info = get_schedule(given)
    assert (info.name, info.note) == (name, "")
    assert info.torch_class().__name__ == info.torch_name


@pytest.mark.parametrize(
    "given",
    [
        "ds_default",
        "pre_recompute_1f1b",
        "last_no_recompute_1f1b",
        "shifted_critical_path",
        "full_critical_path_1f1b",
    ],
)
def test_names_of_merak_say_what_is_different(given: str) -> None:
    info = get_schedule(given)
    assert info.name == "1F1B"
    assert info.note.startswith(f"'{given}' is run as 1F1B: ")


def test_an_unknown_name_is_answered_with_the_choices() -> None:
    with pytest.raises(
        InputError, match=r"no pipeline schedule 'gpip'\. Did you mean GPipe\? Known: 1F1B, GPipe, .*auto"
    ):
        get_schedule("gpip")


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("1F1B", (4, 3), r"3 micro-batches and 4 stages \(4 ranks × 1\)\. Use 4 or 5 micro-batches"),
        (
            "Interleaved1F1B",
            (4, 11, 2),
            r"in 2 equal rounds, but 11 is no multiple of 2\. Use 8, 10, 12 or 15",
        ),
        ("DualPipeV", (2, 3), r"3 micro-batches and 4 stages \(2 ranks × 2\)"),
        (
            "ZBVZeroBubble",
            (2, 4, 1),
            r"exactly 2 stages on a rank, but stages_per_rank is 1\. Use .*=2 or one of 1F1B",
        ),
        ("GPipe", (2, 4, 2), r"exactly 1 stage on a rank, but stages_per_rank is 2\..*Interleaved1F1B"),
        ("GPipe", (2, 0), r"0 micro-batches is none"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_can(name: str, numbers: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        actions(get_schedule(name), *numbers)


def test_planning_a_simple_schedule_does_not_load_the_runtime_of_torch() -> None:
    code = (
        "import sys\n"
        "from atorch_ns.pipeline import *\n"
        "orders = actions(get_schedule('1F1B'), 4, 8)\n"
        "simulate(orders, StageCosts.equal(4)), partition([1] * 8, 4)\n"
        "sys.exit('torch.distributed.pipelining' in sys.modules)"
    )
    assert subprocess.run([COLD_PYTHON, "-c", code], check=False).returncode == 0
