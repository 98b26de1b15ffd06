"""The schedules' rules and orders, held against what torch accepts and runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import pipelining

from atorch_ns.errors import InputError
from atorch_ns.pipeline import ScheduleInfo, StageCosts, checked_orders, get_schedule, simulate
from atorch_ns.pipeline.schedule.actions import Action, check_orders, live_micro_batches
from atorch_ns.pipeline.schedule.schedules import SCHEDULES
from tests.pipeline.schedule import own_schedules
from tests.warm import COLD_PYTHON

NAMES = [info.name for info in SCHEDULES]
MULTI = [info for info in SCHEDULES if not info.is_single]
TORCHS = [info for info in SCHEDULES if hasattr(pipelining, f"Schedule{info.name}")]


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
    return getattr(pipelining, f"Schedule{info.name}")(first, num_micro_batches)


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


@pytest.mark.parametrize("info", TORCHS, ids=[info.name for info in TORCHS])
def test_torch_accepts_and_refuses_the_same_pipelines(info: ScheduleInfo) -> None:
    for num_ranks in (1, 2, 3, 4):
        for on_rank in (1, 2, 3):
            if info.is_single and on_rank > 1:
                assert "needs exactly 1 stage" in info.problem(num_ranks, 8, on_rank)
                continue
            for num_micro_batches in range(1, 3 * num_ranks * on_rank):
                problem = info.problem(num_ranks, num_micro_batches, on_rank)
                if info.name == "1F1B" and num_micro_batches < num_ranks:  # which torch refuses
                    assert not problem
                    continue
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
        ours = info.orders(num_ranks, num_micro_batches, on_rank)
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
    ours = info.orders(num_ranks, num_micro_batches)
    for rank in range(num_ranks):
        stage = _Recorder(rank, num_ranks)
        schedule = getattr(pipelining, f"Schedule{info.name}")(stage, num_micro_batches)
        schedule._initialize_stage = lambda *args, **kwargs: None  # meets the neighbours
        schedule._step_microbatches([()] * num_micro_batches, [{}] * num_micro_batches)
        assert list(ours[rank]) == stage.passes


@pytest.mark.parametrize("info", SCHEDULES, ids=NAMES)
def test_every_micro_batch_passes_every_stage_once_each_way(info: ScheduleInfo) -> None:
    num_ranks, num_micro_batches, on_rank = 4, 8, info.usual_stages
    orders = info.orders(num_ranks, num_micro_batches)
    assert len({action.stage for order in orders for action in order}) == num_ranks * on_rank
    places = tuple(info.rank_of(stage, num_ranks) for stage in range(num_ranks * on_rank))
    assert not check_orders(orders, num_micro_batches, places)
    assert any(action.kind == "I" for order in orders for action in order) == info.splits_backward
    for rank, order in enumerate(orders):
        assert {action.stage for action in order} == set(info.stages_of(rank, num_ranks))


def test_live_micro_batches() -> None:
    assert live_micro_batches(get_schedule("GPipe").orders(4, 8)) == (8, 8, 8, 8)
    assert live_micro_batches(get_schedule("1F1B").orders(4, 8)) == (4, 3, 2, 1)
    assert max(live_micro_batches(get_schedule("LoopedBFS").orders(2, 6))) == 6


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
        ("pre_recompute_1f1b", "PreRecompute1F1B"),
        ("early_recompute_1f1b", "PreRecompute1F1B"),
        ("last_no_recompute_1f1b", "LastNoRecompute1F1B"),
        ("shifted_critical_path", "ShiftedCriticalPath"),
        ("full_critical_path_1f1b", "ShiftedCriticalPath"),
    ],
)
def test_names(given: str, name: str) -> None:
    info = get_schedule(given)
    assert (info.name, info.note) == (name, "")


def test_deepspeeds_default_is_one_forward_one_backward() -> None:
    info = get_schedule("ds_default")
    assert info.name == "1F1B"
    assert info.note.startswith("'ds_default' is run as 1F1B: ")


MERAK = {
    "1f1b": (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ),
    "pre_recompute_1f1b": (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 R5 B5 R6 B6 R7 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 R6 B6 R7 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 R7 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ),
    "last_no_recompute_1f1b": (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 R5 B5 R6 B6 R7 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 R6 B6 R7 B7",
        "F0 F1 R0 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ),
    "shifted_critical_path": (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 R5 B5 R6 B6 R7 B7",
        "F0 F1 F2 R0 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 R6 B6 R7 B7",
        "F0 F1 F2 R0 B0 R1 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ),
}
"""The passes of 4 stages with 8 micro-batches, as Merak's schedules have them."""


@pytest.mark.parametrize("name", MERAK)
def test_orders_of_merak(name: str) -> None:
    orders = get_schedule(name).orders(4, 8)
    assert tuple(" ".join(f"{a.kind}{a.micro_batch}" for a in order) for order in orders) == MERAK[name]


@pytest.mark.parametrize(
    ("name", "peaks", "seconds"),
    [
        ("1f1b", (4, 3, 2, 1), (20, 44, 76, 92)),
        ("pre_recompute_1f1b", (4, 3, 2, 1), (19, 41, 73, 85)),
        ("last_no_recompute_1f1b", (4, 3, 2, 1), (17, 39, 71, 83)),
        ("shifted_critical_path", (4, 3, 3, 1), (16, 38, 70, 82)),
    ],
)
def test_peaks_and_seconds_of_merak(name: str, peaks: tuple[int, ...], seconds: tuple[int, ...]) -> None:
    """Forward and recomputation take 1, a backward pass 2; nothing is recomputed in a last stage that keeps all."""
    info = get_schedule(name)
    assert live_micro_batches(info.orders(4, 8)) == peaks
    for (num_ranks, num), expected in zip(((2, 4), (4, 8), (4, 16), (8, 16)), seconds, strict=True):
        again = (*[1.0] * (num_ranks - 1), 0.0 if info.keeps_last else 1.0)
        costs = StageCosts(
            forward=(1.0,) * num_ranks,
            backward_input=tuple(2.0 + more for more in again),
            backward_weight=(0.0,) * num_ranks,
            recompute=again,
        )
        assert simulate(info.orders(num_ranks, num), costs).step_seconds == expected


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([["F0", "B0"], ["F0", "F0"]], "stage 1 does F, F with micro-batch 0"),
        ([["F0", "B0"], ["F0"]], "stage 1 does only F with micro-batch 0"),
        ([["F0", "B0"], ["B0", "F0"]], "stage 1 does B with micro-batch 0"),
        ([["F0", "B0"], ["F0", "B0", "R0"]], "stage 1 does F, B, R with micro-batch 0"),
        ([["F0", "B0"], ["F0", "I0"]], "stage 1 does only F, I with micro-batch 0"),
        ([["F0", "B0"], ["F0", "B0", "F1"]], "there is no stage 1 or no micro-batch 1"),
    ],
)
def test_orders_that_are_not_whole_are_found(orders: list[list[str]], words: str) -> None:
    made = [
        [Action(text[0], stage, int(text[1])) for text in order]  # type: ignore[arg-type]
        for stage, order in enumerate(orders)
    ]
    assert check_orders(made, 1, (0, 1)) == words


def test_an_unknown_name_is_answered_with_the_choices() -> None:
    with pytest.raises(
        InputError, match=r"no pipeline schedule 'gpip'\. Did you mean GPipe\? Known: 1F1B, GPipe, .*auto"
    ):
        get_schedule("gpip")


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("DualPipeV", (2, 1), r"1 micro-batch and 4 stages \(2 ranks × 2\)\. Use 4 or 5 micro-batches"),
        ("ShiftedCriticalPath", (2, 2), r"at least 3 micro-batches\. Use 3 or 4 micro-batches"),
        (
            "Interleaved1F1B",
            (4, 11, 2),
            r"in 2 equal rounds, but 11 is not a multiple of 2\. Use 8, 10, 12 or 15",
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
        get_schedule(name).orders(*numbers)


def test_planning_a_simple_schedule_does_not_load_the_runtime_of_torch() -> None:
    code = (
        "import sys\n"
        "from atorch_ns.pipeline import *\n"
        "orders = get_schedule('1F1B').orders(4, 8)\n"
        "simulate(orders, StageCosts.equal(4)), partition([1] * 8, 4)\n"
        "sys.exit('torch.distributed.pipelining' in sys.modules)"
    )
    assert subprocess.run([COLD_PYTHON, "-c", code], check=False).returncode == 0


OWN = "tests.pipeline.schedule.own_schedules"


def test_a_schedule_of_ones_own_is_named_with_its_module() -> None:
    orders = checked_orders(get_schedule(f"{OWN}:PAIRS"), 2, 3)
    assert [" ".join(f"{a.kind}{a.micro_batch}" for a in order) for order in orders] == [
        "F0 F1 B0 B1 F2 B2"
    ] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "CROSSED",
            "wait for each other and never end: rank 0 with the backward of micro-batch 0 in stage 0",
        ),
        ("FORGETFUL", "stage 0 does only F with micro-batch 0"),
        ("ENDLESS", "on rank 0 it has more than the 12 possible passes"),
        ("RAISING", "on rank 0 it fails with KeyError: 'of the user'"),
        ("BACKWARDS", "stage 0 does B with micro-batch 0"),
        ("NO_ORDER", "on rank 0 it fails with TypeError: 'int' object is not iterable"),
    ],
)
def test_an_order_that_cannot_end_is_refused(name: str, words: str) -> None:
    with pytest.raises(
        InputError, match=f"{OWN}:{name} cannot be run on 2 ranks with 3 micro-batches: .*{words}"
    ):
        checked_orders(get_schedule(f"{OWN}:{name}"), 2, 3)
    with pytest.raises(InputError, match=f"cannot be run on 2 ranks with 3 micro-batches: .*{words}"):
        checked_orders(getattr(own_schedules, name), 2, 3)  # the object, as the guide previews it


def test_an_order_of_ours_under_other_rules_is_checked() -> None:
    """One stage's passes do not make a whole order of two stages on a rank."""
    mine = replace(get_schedule("1F1B"), name="mine", most_stages=2, usual_stages=2)
    with pytest.raises(InputError, match="the order of the schedule mine cannot be run on 2 ranks"):
        checked_orders(mine, 2, 4)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{OWN}:NONE", "cannot be imported: .*NONE"),
        ("no_such_package:X", "cannot be imported: No module"),
        (f"{OWN}:OTHER", "is a str, not a ScheduleInfo"),
    ],
)
def test_what_is_no_schedule_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        get_schedule(name)
