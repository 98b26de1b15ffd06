"""Predictions for plans that divide the model: against what ranks really hold, and against what must hold."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.estimate import MemoryParts, PlanTable, TimeParts, Workload, price
from atorch_ns.estimate.memory.peak import price_memory
from atorch_ns.estimate.memory.reserved import workspace_bytes
from atorch_ns.estimate.model_shard import Memo
from atorch_ns.estimate.stages import stages_of
from atorch_ns.job import PeakMemory
from atorch_ns.pipeline import StageCosts, get_schedule, simulate
from atorch_ns.profile import Profile, SegmentCost, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import PipelineParallelism, Plan
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import ADAMW, accelerate_case
from atorch_ns.testing.workers import run_ranks
from benchmarks._memory_cases import LAYOUTS, MIXTURES, SIZED_CASES, axes_of, sized_case
from benchmarks._storages import measure_peak
from benchmarks.estimate_memory import (
    MEDIAN_LIMIT,
    WORST_LIMIT,
    compare,
    kept_by,
    measured,
    plan_of,
    profile_of,
)
from opt_lib._model_axes.pipeline_plan import PipelineParallelConfig
from opt_lib.pipeline_parallel import PipelineParallel
from tests.estimate.clusters import started_at_once

BATCH = 8
STATES = ("parameters", "gradients", "optimizer")


def _mesh(**sizes: int) -> tuple[str, Any]:
    return ("parallel_mode", (list(sizes.items()), None))


PASSES = ("gradient_accumulation", 4)
ON_TWO: list[list[Any]] = [
    [_mesh(tensor=2)],
    [_mesh(tensor=2), ("tensor_parallel", {"parallel_loss": False})],
    [_mesh(tensor=2), "checkpoint"],
    [_mesh(pipeline=2), PASSES],
    [_mesh(pipeline=2), "checkpoint"],
]
SEQUENCES: list[list[Any]] = [
    [_mesh(sequence=2)],
    [_mesh(sequence=2), "checkpoint"],
    [_mesh(sequence=2), ("sequence_parallel", {"kind": "ring"}), "fsdp"],
    [_mesh(sequence=2), ("sequence_parallel", {"parallel_loss": False}), "fsdp"],
    [_mesh(sequence=2), "zero2", "checkpoint"],
]
SCHEDULES: list[list[Any]] = [
    [_mesh(pipeline=2), PASSES, ("pipeline_parallel", {"schedule": "GPipe"})],
    [_mesh(pipeline=2), PASSES, ("pipeline_parallel", {"schedule": "Interleaved1F1B"})],
]
ON_FOUR: list[list[Any]] = [
    [_mesh(tensor=2, data=2)],
    [_mesh(tensor=2, data=2), "fsdp"],
    [_mesh(data=2, pipeline=2), PASSES],
    [_mesh(data=2, pipeline=2), "fsdp", PASSES],
    [_mesh(tensor=2, pipeline=2), PASSES],
    [_mesh(tensor=2, sequence=2), ("tensor_parallel", {"sequence": True}), "checkpoint"],
    [_mesh(sequence=2, pipeline=2), PASSES, "checkpoint"],
]


def _case(name: str) -> Case:
    return next((one.case for one in SIZED_CASES if one.name == name), None) or get_case(name)


def _profile(name: str) -> Profile:
    case = _case(name)
    return profile_model(
        case.build(),
        case.make_batch(BATCH, 0),
        lambda model, batch: case.loss_func(batch, case.call(model, batch)),
        find_dims,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, **ADAMW),
    )


def _measured(name: str, strategies: Sequence[Any]) -> list[PeakMemory]:
    """On one rank: what each strategy holds."""
    case = _case(name)
    found = []
    for strategy in strategies:
        num_data = dict(strategy[0][1][0]).get("data", 1)
        rows = BATCH // num_data

        def batches(rows: int = rows) -> Iterator[Any]:
            for step in range(6):
                yield case.make_batch(rows, step)

        def make(strategy: Any = strategy, rows: int = rows) -> Any:
            sample = case.make_batch(rows, 0)
            return accelerate_case(case, strategy, dataset=None, dataloader_args=None, sample_batch=sample)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(measure_peak(make, batches()))
        gc.collect()
    return found


def _kept(plan: Plan, profile: Profile) -> set[tuple[int, ...]]:
    """Bytes of states on every kind of rank."""
    assert profile.trace is not None
    kept = kept_by(plan, profile.trace, Workload(global_batch=BATCH))
    return set(zip(*(getattr(kept, name).astype(int).tolist() for name in STATES), strict=True))


def _check(name: str, strategies: list[list[Any]], num_ranks: int) -> None:
    _case(name).build()
    ranks = run_ranks(_measured, num_ranks, args=(name, strategies), timeout_s=200)
    profile = _profile(name)
    assert profile.trace is not None
    work = Workload(global_batch=BATCH, num_tokens=profile.trace.num_tokens)
    for index, strategy in enumerate(strategies):
        plan = plan_of(strategy, profile, num_ranks=num_ranks)
        seen = [rank[index] for rank in ranks]
        true = {tuple(getattr(one.states, state) for state in STATES) for one in seen}
        assert _kept(plan, profile) == true, strategy
        memory, *_ = price_memory(PlanTable.of([plan]), profile.trace, work)
        peak = max(one.peak_bytes for one in seen)
        assert abs(memory[0].sum() / peak - 1) <= WORST_LIMIT, (strategy, memory[0], peak)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["tied_llama", pytest.param("llama, small", marks=pytest.mark.slow)])
def test_two_ranks_hold_what_was_predicted(name: str) -> None:
    _check(name, [*ON_TWO, *SCHEDULES] if name == "llama, small" else ON_TWO[::3], 2)


@pytest.mark.timeout(120)
def test_owners_hold_the_states_that_were_predicted() -> None:
    strategies = [
        [_mesh(tensor=2, data=2), "zero1"],
        [_mesh(tensor=2, data=2), "zero1", ("half", "fp16")],
        [_mesh(data=2, pipeline=2), "zero1", PASSES],
    ]
    _case("tied_llama").build()
    ranks = run_ranks(_measured, 4, args=("tied_llama", strategies), timeout_s=100)
    profile = _profile("tied_llama")
    assert profile.trace is not None
    work = Workload(global_batch=BATCH, num_tokens=profile.trace.num_tokens)
    for index, strategy in enumerate(strategies):
        seen = [rank[index] for rank in ranks]
        table = PlanTable.of([plan_of(strategy, profile, num_ranks=4)])
        memory, *_ = price_memory(table, profile.trace, work)
        # Of a stage that is not at its peak, a step counter or two more.
        assert memory[0][2] == pytest.approx(max(one.states.optimizer for one in seen), rel=0.01), strategy
        assert abs(memory[0].sum() / max(one.peak_bytes for one in seen) - 1) <= WORST_LIMIT, strategy


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["llama, small", pytest.param("llama, large", marks=pytest.mark.slow)])
def test_ranks_along_sequence_hold_what_was_predicted(name: str) -> None:
    _check(name, SEQUENCES, 2)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_four_ranks_hold_what_was_predicted() -> None:
    _check("llama, small", ON_FOUR, 4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("qwen3-moe", 2),
        *(
            pytest.param(case.name, num_ranks, marks=pytest.mark.slow)
            for case in MIXTURES
            for num_ranks in LAYOUTS
            if (case.name, num_ranks) != ("qwen3-moe", 2)
        ),
    ],
)
def test_ranks_hold_the_experts_that_were_predicted(name: str, num_ranks: int) -> None:
    """Alone, sharded over the ranks that have the same ones, and replicated there."""
    sized = sized_case(name)
    layouts = [one for one in LAYOUTS[num_ranks] if num_ranks > 2 or "expert" in axes_of(one)]
    sized.case.build()
    ranks = run_ranks(measured, num_ranks, args=(name, layouts), timeout_s=500)
    rows = compare(sized, layouts, ranks, profile_of(sized, num_ranks))
    for layout, row in zip(layouts, rows, strict=True):
        assert abs(row["error"]) <= WORST_LIMIT, (layout, row)
    assert statistics.median(abs(row["error"]) for row in rows) <= MEDIAN_LIMIT


def test_experts_are_gathered_over_the_ranks_that_have_the_same_ones() -> None:
    """An axis of experts divides what zero2 and fsdp gather; alone, a rank gathers none."""
    profile = _profile("hf_mixtral")
    assert profile.trace is not None
    work = Workload(global_batch=8, num_tokens=profile.trace.num_tokens)
    layouts = ({"data": 8}, {"expert": 2, "data": 4}, {"expert": 4, "data": 2})
    for method in ("zero2", "fsdp"):
        plans = [plan_of([_mesh(**axes), method], profile, num_ranks=8) for axes in layouts]
        memory, *_ = price_memory(PlanTable.of(plans), profile.trace, work)
        whole, half, quarter = memory[:, MemoryParts._fields.index("temporaries")]
        assert whole > 1.3 * half > 1.5 * quarter, method


@pytest.fixture(scope="module")
def llama() -> Profile:
    return _profile("llama, small")


def _plan(**sizes: int) -> Plan:
    sync = "all_reduce" if sizes.get("data", 1) > 1 else "none"
    return Plan(axes=tuple(sizes.items()), gradient_sync=sync)  # type: ignore[arg-type]


CLUSTER = cluster_from_spec("8xH100-80GB, 2 nodes, ib400")
AT_ONCE = started_at_once(CLUSTER)


def _times(profile: Profile, plan: Plan, batch: int = 64, cluster: Cluster = CLUSTER) -> TimeParts:
    assert profile.trace is not None
    work = Workload(global_batch=batch, num_tokens=profile.trace.num_tokens)
    return price(PlanTable.of([plan]), profile, cluster, work).estimate(0).time


def test_what_a_tensor_axis_divides(llama: Profile) -> None:
    """Of a block's matrices a t-th; norms are whole. Work is divided, and each row layer's results are summed."""
    assert llama.trace is not None
    one, two, four = (_times(llama, _plan(tensor=size)) for size in (1, 2, 4))
    assert one.compute > two.compute > four.compute > one.compute / 4
    assert one.exchange == 0 < two.exchange < four.exchange
    (whole,), (half,) = _kept(_plan(tensor=1), llama), _kept(_plan(tensor=2), llama)
    specs = [(spec, one.count) for one in llama.trace.segments for spec in one.parameters]
    divided = sum(count * spec.num_elements for spec, count in specs if spec.tensor_dim is not None)
    assert whole[0] - half[0] == 4 * divided // 2


def test_a_loss_on_parts_holds_and_exchanges_less(llama: Profile) -> None:
    """Of logits, logarithms and gradients [B, T, V] a t-th; three numbers a token are exchanged for V."""
    assert llama.trace is not None
    work = Workload(global_batch=BATCH, num_tokens=llama.trace.num_tokens)
    plans = [_plan(tensor=2).changed(tensor={"parallel_loss": parts}) for parts in (False, True)]
    (whole, parts), *_ = price_memory(PlanTable.of(plans), llama.trace, work)
    logits = 4 * BATCH * llama.trace.num_tokens * llama.trace.vocabulary_size
    assert 0.5 * logits < whole.sum() - parts.sum() < 2 * logits
    times = [_times(llama, plan, 2**12) for plan in plans]
    assert times[1].exchange < times[0].exchange
    assert times[1].compute < times[0].compute


def test_a_loss_on_parts_of_samples_and_states_over_sequence_hold_less(llama: Profile) -> None:
    """Of logits [B, T, V] an n-th; of states a share for all ranks of data and sequence."""
    assert llama.trace is not None
    work = Workload(global_batch=BATCH, num_tokens=llama.trace.num_tokens)
    plans = [_plan(sequence=4).changed(sequence={"parallel_loss": parts}) for parts in (False, True)]
    (whole, parts), *_ = price_memory(PlanTable.of(plans), llama.trace, work)
    logits = 4 * BATCH * llama.trace.num_tokens * llama.trace.vocabulary_size
    assert 0.75 * logits < whole.sum() - parts.sum() < 4 * logits
    sharded = {"sharding": dict.fromkeys(("parameters_over", "gradients_over", "optimizer_over"), ("data",))}
    (one,), (eight,) = (
        _kept(_plan(**sizes).changed(gradient_sync="reduce_scatter", **sharded), llama)
        for sizes in ({"data": 2}, {"data": 2, "sequence": 4})
    )
    assert one[2] / eight[2] == pytest.approx(4, rel=0.05)


def test_head_and_loss_are_divided_beside_other_axes_too(llama: Profile) -> None:
    """Also of a pipeline's last stage; of logits [B, T, V / 2] a fourth."""
    assert llama.trace is not None
    samples = 16 * BATCH
    work = Workload(global_batch=samples, num_tokens=llama.trace.num_tokens)
    logits = 4 * samples * llama.trace.num_tokens * llama.trace.vocabulary_size // 2
    for sizes in ({"tensor": 2}, {"tensor": 2, "pipeline": 2}):
        plans = [
            _plan(sequence=4, **sizes).changed(
                sequence={"parallel_loss": parts}, recomputation={"kind": "blocks"}
            )
            for parts in (False, True)
        ]
        (whole, parts), *_ = price_memory(PlanTable.of(plans), llama.trace, work)
        assert 0.75 * logits < whole.sum() - parts.sum() < 8 * logits
        times = [_times(llama, plan, 2**12) for plan in plans]
        assert times[1].compute < times[0].compute


def test_slow_links_are_dearer_to_a_tensor_axis(llama: Profile) -> None:
    """Inside a node or across."""
    inside = _times(llama, Plan(axes=(("tensor", 8), ("data", 2)), gradient_sync="all_reduce"), 2**16)
    across = _times(llama, Plan(axes=(("data", 2), ("tensor", 8)), gradient_sync="all_reduce"), 2**16)
    assert across.exchange > 1.5 * inside.exchange


def _without_saved(cost: SegmentCost) -> SegmentCost:
    return replace(
        cost, saved=cost.saved * 0.5, forward=replace(cost.forward, moved=cost.forward.moved * 0.5)
    )


def test_rows_are_priced_as_alone(llama: Profile) -> None:
    """Whatever of the computation differs: prices of parts are shared between rows that have them in common."""
    assert llama.trace is not None
    segments = tuple(
        replace(segment, replaced_costs={key: _without_saved(cost) for key, cost in segment.costs.items()})
        for segment in llama.trace.segments
    )
    llama = replace(llama, trace=replace(llama.trace, segments=segments))
    plans = [
        _plan(**sizes).changed(num_micro_batches=passes, recomputation={"kind": recompute}, **computing)
        for sizes in (
            {"data": 8},
            {"tensor": 2, "data": 4},
            {"tensor": 2, "data": 2, "pipeline": 2},
            {"data": 2, "pipeline": 4},
            {"sequence": 2, "data": 4},
        )
        for passes in (4, 8)
        for recompute in ("none", "blocks")
        for computing in (
            {},
            {"replaced": True},
            {"compiled": True},
            {"precision": {"compute_dtype": "bfloat16"}},
        )
    ]
    assert llama.trace is not None
    work = Workload(global_batch=64, num_tokens=llama.trace.num_tokens)
    together = price(PlanTable.of(plans), llama, CLUSTER, work)
    for row, plan in enumerate(plans):
        alone = price(PlanTable.of([plan]), llama, CLUSTER, work)
        np.testing.assert_allclose(together.memory[row], alone.memory[0], rtol=1e-12)
        np.testing.assert_allclose(together.time[row], alone.time[0], rtol=1e-12)


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_the_bubble_is_that_of_a_simulation(name: str, llama: Profile) -> None:
    """Without sends, and with the host's part of the time left out."""
    assert llama.trace is not None
    plan = _plan(pipeline=2).changed(num_micro_batches=8, pipeline={"schedule": name})
    stages = stages_of(plan.pipeline, llama.trace, 2)
    info = get_schedule(name)
    v = info.usual_stages
    timeline = simulate(info.orders(2, 8, v), StageCosts.equal(2 * v))
    found = _times(llama, plan, cluster=AT_ONCE)
    share = found.bubble / (found.bubble + found.compute)
    assert stages.counts.sum() == 6
    assert share == pytest.approx(timeline.bubble_share, abs=0.06)


def test_more_micro_batches_make_the_bubble_smaller(llama: Profile) -> None:
    bubbles = [
        _times(llama, replace(_plan(pipeline=4), num_micro_batches=count), cluster=AT_ONCE).bubble
        for count in (4, 8, 16)
    ]
    assert bubbles[0] > bubbles[1] > bubbles[2] > 0


def test_a_pipeline_of_small_stages_is_as_slow_as_the_hosts_that_start_them(llama: Profile) -> None:
    """A stage in two passes is started as often as a model in one; what the others' hosts take is bubble."""
    whole, two = _times(llama, _plan(data=2)), replace(_plan(data=2, pipeline=2), num_micro_batches=2)
    cut = _times(llama, two)
    assert cut.compute + cut.overhead > 0.8 * (whole.compute + whole.overhead)
    assert cut.bubble > 10 * _times(llama, two, cluster=AT_ONCE).bubble


def test_stages_hold_the_micro_batches_that_their_schedule_keeps(llama: Profile) -> None:
    assert llama.trace is not None
    of_1f1b = stages_of(_plan(pipeline=4).pipeline, llama.trace, 4)
    assert of_1f1b.live(8, Memo()).tolist() == [4, 3, 2, 1]
    assert of_1f1b.live(2, Memo()).tolist() == [2, 2, 2, 1]
    gpipe = stages_of(PipelineParallelism(schedule="GPipe"), llama.trace, 4)
    assert gpipe.live(8, Memo()).tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("schedule", "grows"), [("1F1B", False), ("Interleaved1F1B", False), ("GPipe", True)]
)
def test_memory_grows_with_micro_batches_only_as_the_schedule_holds_them(
    schedule: str, grows: bool, llama: Profile
) -> None:
    """Buffers between stages are as many as are in flight, whatever their number; only the batch itself grows."""
    assert llama.trace is not None
    plans = [
        _plan(pipeline=2).changed(num_micro_batches=count, pipeline={"schedule": schedule})
        for count in (16, 128)
    ]
    works = [
        Workload(global_batch=2 * plan.num_micro_batches, num_tokens=llama.trace.num_tokens) for plan in plans
    ]
    few, many = (
        price(PlanTable.of([plan]), llama, CLUSTER, work).estimate(0).allocated_bytes
        - workspace_bytes((9, 0))
        for plan, work in zip(plans, works, strict=True)
    )
    inputs = [float(llama.trace.batch_bytes.at(work.global_batch, llama.trace.num_tokens)) for work in works]
    if grows:
        assert many > 5 * few
    else:
        assert many - few == pytest.approx(inputs[1] - inputs[0])


@pytest.mark.parametrize(
    ("config", "pieces"),
    [({"split_method": "uniform"}, [2, 2, 1, 1]), ({"split_method": "uniform_floor"}, [1, 2, 2, 1])],
)
def test_the_cut_that_is_priced_is_the_one_asked_for(
    config: dict[str, Any], pieces: list[int], llama: Profile
) -> None:
    assert llama.trace is not None
    plan = PipelineParallel().plan(_plan(pipeline=4), PipelineParallelConfig.model_validate(config))
    stages = stages_of(plan.pipeline, llama.trace, 4)
    assert stages.counts.sum(axis=(1, 2)).tolist() == pieces


def test_a_sequence_axis_divides_blocks_and_sums_their_gradients(llama: Profile) -> None:
    whole, half = _times(llama, _plan(tensor=1)), _times(llama, _plan(sequence=2))
    assert half.compute < whole.compute
    assert half.exchange > 0
    assert half.reduce > 0
    assert _kept(_plan(sequence=2), llama) == _kept(_plan(), llama)


def test_experts_are_divided_and_tokens_travel() -> None:
    profile = _profile("hf_mixtral")
    assert profile.trace is not None
    assert profile.trace.num_experts == 4
    assert profile.trace.experts_per_token == 2
    (whole,), (half,) = _kept(_plan(), profile), _kept(_plan(expert=2), profile)
    experts = sum(
        one.count * spec.num_elements
        for one in profile.trace.segments
        for spec in one.parameters
        if spec.is_expert
    )
    assert experts > 0
    assert whole[0] - half[0] == 4 * experts // 2
    assert _times(profile, _plan(expert=2)).exchange > 0
