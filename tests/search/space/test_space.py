from __future__ import annotations

import functools
import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.errors import InputError, StrategyError
from atorch_ns.estimate import PlanTable, Prices, Workload, price
from atorch_ns.estimate.intervals import UNKNOWN
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Profile, profile_model
from atorch_ns.search import Candidate, SearchSettings, explore, from_json, memory_limit, to_json
from atorch_ns.search.space.equivalence import canonical
from atorch_ns.search.space.priced import _reduce_where_too_large
from atorch_ns.search.space.space import Space
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing.models import SyntheticDataset, get_case
from tests.estimate.clusters import started_at_once

REGISTRY = load_registry()
WORK = Workload(global_batch=16, num_tokens=8)
WHOLE = ("tensor_parallel", "operator_parallel", "pipeline_parallel")
"""Excluded, they leave strategies in which every rank has the whole model and data of its own."""


@functools.cache
def profile() -> Profile:
    """Of a small Llama with tied weights."""
    case = get_case("tied_llama")

    def forward_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = case.loss_func(batch, case.call(model, batch))
        return loss

    batch = SyntheticDataset(case, 4).batch(0, 4)
    return profile_model(case.build(), batch, forward_loss, find_dims, make_optimizer=torch.optim.AdamW)


def cluster(spec: str = "2xcpu") -> Cluster:
    return cluster_from_spec(spec)


def space(
    spec: str = "2xcpu", *, settings: dict[str, Any] | None = None, work: Workload = WORK, **more: Any
) -> Space:
    return explore(
        profile(), cluster(spec), work, REGISTRY, settings=SearchSettings(**settings or {}), **more
    )


def names(one: Candidate) -> set[str]:
    return {name for name, _ in one.steps}


def free(found: Space) -> list[Candidate]:
    return [one for one in found.candidates if one.pruned is None]


def test_the_space_holds_what_the_methods_offer() -> None:
    found = free(space())
    used = set().union(*map(names, found))
    assert {"ddp", "fsdp", "zero1", "zero2", "checkpoint", "gradient_accumulation"} <= used
    assert sum(one.is_baseline for one in found) == 1
    assert next(one for one in found if one.is_baseline).label == "ddp"
    assert len({one.key for one in found}) == len(found)


def test_every_candidate_can_be_applied() -> None:
    for one in space().candidates:
        resolve(one.strategy, cluster(), REGISTRY, profile=profile())


def test_no_two_candidates_amount_to_the_same() -> None:
    for spec in ("2xcpu", "4xcpu", "8xH100-80GB, 2 nodes, ib400"):
        plans = [canonical(resolve(one.strategy, cluster(spec), REGISTRY).plan) for one in free(space(spec))]
        assert len(set(plans)) == len(plans), spec


def test_one_process_has_nothing_to_shard() -> None:
    alone = cluster_from_spec("1xcpu")
    torchrun = replace(alone, distributed=True)
    for where in (alone, torchrun):
        found = explore(profile(), where, WORK, REGISTRY, settings=SearchSettings())
        assert not any({"fsdp", "zero1", "zero2"} & names(one) for one in free(found))


def test_sharding_asked_for_on_one_rank_is_the_plain_strategy() -> None:
    torchrun = replace(cluster_from_spec("1xcpu"), distributed=True)
    found = explore(profile(), torchrun, WORK, REGISTRY, settings=SearchSettings(), included=["fsdp"])
    assert all("fsdp" in names(one) for one in found.candidates)
    baseline = next(one for one in found.candidates if one.is_baseline)
    assert names(baseline) == {"parallel_mode", "fsdp"}
    assert baseline.pruned is None


def test_candidates_are_ordered_by_predicted_time_with_pruned_ones_last() -> None:
    peaks = sorted(one.estimate.peak_bytes for one in free(space()) if one.estimate)
    limit = peaks[len(peaks) // 3] / 2**30
    found = space(settings={"memory_limit_gib": limit}).candidates
    pruned = [one.pruned is not None for one in found]
    assert pruned == sorted(pruned)
    assert any(pruned)
    times = [one.estimate.step_seconds for one in found if one.pruned is None and one.estimate]
    assert times == sorted(times)


def test_estimates_equal_a_fresh_pricing_of_the_strategy() -> None:
    where = cluster("8xH100-80GB, 2 nodes, ib400")
    for one in free(space("8xH100-80GB, 2 nodes, ib400"))[:20]:
        plan = resolve(one.strategy, where, REGISTRY, profile=profile()).plan
        fresh = price(PlanTable.of([plan]), profile(), where, WORK).estimate(0)
        assert one.estimate is not None
        assert one.estimate.step_seconds == pytest.approx(fresh.step_seconds, rel=1e-9)
        assert one.estimate.peak_bytes == pytest.approx(fresh.peak_bytes, rel=1e-9)


def test_micro_batches_divide_a_ranks_batch() -> None:
    found = free(space(work=Workload(global_batch=12, num_tokens=8), excluded=WHOLE))
    used = {resolve(one.strategy, cluster(), REGISTRY).plan.num_micro_batches for one in found}
    assert used <= {1, 2, 3, 6}
    assert {1, 3, 6} <= used
    few = free(space(settings={"max_micro_batches": 4}, excluded=WHOLE))
    assert max(resolve(one.strategy, cluster(), REGISTRY).plan.num_micro_batches for one in few) == 4


def test_excluded_and_included() -> None:
    found = free(space(excluded=["recompute", "zero1"], included=["optimizer_sharding"]))
    assert all({"fsdp", "zero2"} & names(one) for one in found)
    assert not any("checkpoint" in names(one) for one in found)
    fixed = free(space(included=[("checkpoint", {"every_n": 2})]))
    assert all(("checkpoint", {"every_n": 2}) in one.steps for one in fixed)
    assert sum(one.is_baseline for one in fixed) == 1


def test_micro_batches_and_meshes_can_be_asked_for() -> None:
    four = free(space(included=[("gradient_accumulation", 4)]))
    assert all(("gradient_accumulation", {"num_micro_batches": 4}) in one.steps for one in four)
    some = free(space(included=["gradient_accumulation"]))
    assert all("gradient_accumulation" in names(one) for one in some)
    mesh = free(space("4xcpu", included=[("parallel_mode", [("zero", 2)])]))
    assert all(dict(one.steps)["parallel_mode"] == {"axes": [["zero", 2], ["data", 2]]} for one in mesh)


def test_an_excluded_config_leaves_the_method_its_others() -> None:
    found = space(excluded=[("checkpoint", {"every_n": 2})])
    configs = {str(dict(one.steps).get("checkpoint", "absent")) for one in free(found)}
    assert configs == {"None", "absent", "{'share': 'auto'}"}
    assert not any("checkpoint" in note for note in found.notes)


def test_finetuning_against_the_wishes_is_refused() -> None:
    with pytest.raises(InputError, match="fsdp is excluded"):
        space(base=["fsdp"], excluded=["fsdp"])


def test_16_bit_weights_alone_only_if_they_are_asked_for() -> None:
    spec = "8xH100-80GB"
    usual = [one for one in free(space(spec)) if "half" in names(one)]
    assert usual
    assert all(dict(one.steps)["half"].get("master_weights") for one in usual)
    asked = free(space(spec, included=[("half", "bf16")]))
    assert all(dict(one.steps)["half"] == {"dtype": "bfloat16"} for one in asked)


def test_fp16_only_where_there_is_no_bf16() -> None:
    def dtypes(spec: str) -> set[str]:
        configs = [
            dict(one.steps).get("amp_native") for one in free(space(spec)) if "amp_native" in names(one)
        ]
        return {(config or {}).get("dtype", "float16") for config in configs}

    assert dtypes("8xH100-80GB") == {"bfloat16"}
    assert dtypes("8xV100-32GB") == {"float16"}


def test_nothing_left_is_an_error_that_says_why() -> None:
    with pytest.raises(InputError, match="no strategy is left"):
        space(excluded=["gradient_sync", *WHOLE])


def test_finetuning_keeps_the_methods_and_reopens_their_configs() -> None:
    base = ["fsdp", ("checkpoint", {"every_n": 2})]
    found = free(space(base=base))
    assert all(names(one) == {"parallel_mode", "fsdp", "checkpoint"} for one in found)
    assert {str(dict(one.steps)["checkpoint"]) for one in found} == {"None", "{'every_n': 2}"}
    baseline = next(one for one in found if one.is_baseline)
    assert dict(baseline.steps)["checkpoint"] == {"every_n": 2}
    with pytest.raises(StrategyError):
        space(base=["no_such"])


def test_what_does_not_fit_is_pruned_with_its_numbers_and_near_misses_are_kept() -> None:
    plain = next(one for one in space().candidates if one.is_baseline)
    assert plain.estimate is not None
    peak = plain.estimate.peak_bytes / 2**30

    def baseline(limit: float) -> Candidate:
        found = space(settings={"memory_limit_gib": limit}).candidates
        return next(one for one in found if one.is_baseline)

    assert baseline(peak * 0.97).pruned is None
    tight = baseline(peak * 0.7).pruned
    assert tight is not None
    assert tight.kind == "memory"
    assert " MiB (" in tight.reason
    assert " MiB (predicted; " in tight.reason


def test_an_excluded_method_that_would_help_is_named() -> None:
    smallest = min(one.estimate.peak_bytes for one in free(space(excluded=WHOLE)) if one.estimate)
    limit = {"memory_limit_gib": smallest * 1.1 / 2**30}
    allowed = free(space(settings=limit, excluded=WHOLE))
    assert allowed
    needed = set.intersection(*map(names, allowed)) - {"parallel_mode"}
    found = space(settings=limit, excluded=[*sorted(needed), *WHOLE])
    assert not free(found)
    hints = [one.pruned.hint for one in found.candidates if one.pruned and one.pruned.hint]
    assert len(hints) == 1
    assert "(excluded)" in hints[0]


def test_the_largest_batch_is_the_objective_if_asked() -> None:
    limit = {"memory_limit_gib": 0.02, "objective": "batch"}
    found = free(space(settings=limit))
    batches = [one.largest_batch or 0 for one in found]
    assert batches == sorted(batches, reverse=True)
    assert batches[0] > batches[-1] >= WORK.global_batch


def test_least_memory_is_the_objective_if_asked() -> None:
    peaks = [one.estimate.peak_bytes for one in free(space(settings={"objective": "memory"})) if one.estimate]
    assert peaks == sorted(peaks)


def test_without_a_trace_there_are_candidates_without_figures() -> None:
    bare = replace(profile(), trace=None)
    found = explore(bare, cluster(), WORK, REGISTRY, settings=SearchSettings())
    assert free(found)
    assert all(one.estimate is None for one in found.candidates)


def test_candidates_travel_as_json_and_are_the_same_every_time() -> None:
    first, second = space("4xcpu").candidates, space("4xcpu").candidates
    assert first == second
    assert from_json(tuple[Candidate, ...], to_json(first)) == first  # type: ignore[arg-type]


def test_zero_groups_lie_in_nodes_or_hold_whole_nodes() -> None:
    found = free(space("6xH100-80GB, 4 nodes, ib400", work=Workload(global_batch=48, num_tokens=8)))
    sizes = {
        dict(dict(one.steps)["parallel_mode"]["axes"]).get("zero", 1)
        for one in found
        if dict(one.steps)["parallel_mode"]
    }
    assert {2, 3, 6, 12} <= sizes
    assert not sizes & {4, 8}


def test_every_mesh_of_1024_devices_is_ranked_quickly() -> None:
    space("8xH100-80GB, 128 nodes, ib400", work=Workload(global_batch=4096, num_tokens=8))
    began = time.process_time()
    found = space("8xH100-80GB, 128 nodes, ib400", work=Workload(global_batch=4096, num_tokens=8))
    assert time.process_time() - began < 5
    assert found.num_priced > 2000
    assert len(free(found)) <= 161


def test_a_method_without_its_axis_is_told_what_to_include() -> None:
    with pytest.raises(
        InputError, match="sequence_parallel is included and needs an axis sequence, but no mesh"
    ):
        space("4xcpu", included=["sequence_parallel"])  # samples of 8 tokens


def test_models_are_divided_where_the_ranks_have_no_more_samples() -> None:
    found = free(space(work=Workload(global_batch=1, num_tokens=8)))
    assert found
    for one in found:
        assert dict(one.steps)["parallel_mode"] == {"axes": [["tensor", 2]]}
    assert {name for one in found for name in names(one)} >= {"tensor_parallel", "operator_parallel"}
    assert all(len(names(one) & {"tensor_parallel", "operator_parallel"}) == 1 for one in found)


def test_meshes_that_divide_the_model() -> None:
    def axes(spec: str, **more: Any) -> set[tuple[str, ...]]:
        shapes = [dict(one.steps)["parallel_mode"]["axes"] for one in free(space(spec, **more))]
        return {tuple(f"{name}{size}" for name, size in shape) for shape in shapes}

    work = Workload(global_batch=64, num_tokens=8)
    found = axes("8xH100-80GB, 2 nodes, ib400", work=work, included=["tensor_parallel"])
    # Two key and value heads; features divide by no more than 4.
    assert found
    assert all(shape[0] in ("tensor2", "tensor4") for shape in found)
    cut = axes("8xH100-80GB, 2 nodes, ib400", work=work, included=["pipeline_parallel"])
    assert cut
    assert all(shape[-1] in ("pipeline2", "pipeline4") for shape in cut)


def test_a_pipeline_has_as_many_micro_batches_as_its_schedule_needs() -> None:
    found = free(space("4xcpu", included=["pipeline_parallel"], settings={"max_micro_batches": 2}))
    assert found
    for one in found:
        plan = resolve(one.strategy, cluster("4xcpu"), REGISTRY).plan
        assert plan.size("pipeline") <= plan.num_micro_batches <= 4 * plan.size("pipeline")


def test_finetuning_adds_no_axis() -> None:
    found = free(space("4xcpu", base=["fsdp"]))
    assert found
    for one in found:
        assert not set(WHOLE) & names(one)


def test_the_order_of_the_wishes_makes_no_other_candidates() -> None:
    constraints = ["fsdp", "checkpoint", ("gradient_accumulation", 2)]
    first, second = (space(included=order).candidates for order in (constraints, constraints[::-1]))
    assert first == second
    base = space(base=constraints[::-1]).candidates
    plans = [canonical(resolve(one.strategy, cluster(), REGISTRY).plan) for one in base if one.pruned is None]
    assert len(set(plans)) == len(plans)
    assert sum(one.is_baseline for one in base) == 1


def test_methods_of_one_phase_stand_in_the_registrys_order() -> None:
    phases: dict[Any, list[str]] = {}
    for method in REGISTRY:
        phases.setdefault(method.phase, []).append(method.name)
    order = {name: index for index, name in enumerate(method.name for method in REGISTRY)}
    for constraints in ([*names_of_two(phases)], [*names_of_two(phases)][::-1]):
        for one in space(base=constraints).candidates:
            for members in phases.values():
                found = [order[name] for name, _ in one.steps if name in members]
                assert found == sorted(found)


def names_of_two(phases: dict[Any, list[str]]) -> tuple[str, str]:
    """Two methods of one phase that stand together on two CPU ranks."""
    for members in phases.values():
        for first in members:
            for second in members:
                if first == second:
                    continue
                try:
                    resolve(Strategy([first, second]), cluster(), REGISTRY, profile=profile())
                except StrategyError:
                    continue
                return first, second
    pytest.skip("no two methods of one phase stand together")


@pytest.mark.parametrize(
    ("batch", "constraints", "message"),
    [
        (15, {"excluded": WHOLE}, "15 samples evenly over 2 ranks.* are 14 and 16"),
        (
            16,
            {"included": [("gradient_accumulation", 3)], "excluded": WHOLE},
            "into 6 equal parts.* are 12 and 18",
        ),
        (15, {"base": ["fsdp"]}, "are 14 and 16"),
        (1, {"excluded": WHOLE}, "nearest batch size that can be divided is 2"),
    ],
)
def test_a_batch_that_cannot_be_shared_out_is_refused(batch: int, constraints: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        space(work=Workload(global_batch=batch, num_tokens=8), **constraints)


def test_the_sizes_named_are_those_that_a_search_accepts() -> None:
    spec = "8xH100-80GB, 4 nodes, ib400"
    with pytest.raises(InputError, match="batch of 63 samples evenly over 32 ranks") as refused:
        space(spec, work=Workload(global_batch=63, num_tokens=8))
    named = re.search(r"are (\d+) and (\d+)", str(refused.value))
    assert named is not None
    below, above = map(int, named.groups())
    for batch in (below, above):
        assert space(spec, work=Workload(global_batch=batch, num_tokens=8)).candidates
    assert below < 63 < above
    for batch in {*range(below + 1, above)} - {63}:
        with pytest.raises(InputError):
            space(spec, work=Workload(global_batch=batch, num_tokens=8))


def _axes(one: Candidate) -> dict[str, int]:
    return dict((dict(one.steps).get("parallel_mode") or {}).get("axes", ()))


def test_how_axes_are_used_is_searched() -> None:
    """Schedules with several stages on a rank, and a divided residual stream, where they are predicted faster."""
    work = Workload(global_batch=64, num_tokens=8)
    spec = "8xH100-80GB"
    devices = started_at_once(
        cluster(spec)
    )  # a host that starts operators of microseconds is what limits otherwise
    cut = free(
        explore(profile(), devices, work, REGISTRY, settings=SearchSettings(), included=["axis:pipeline"])
    )
    schedules = {(dict(one.steps)["pipeline_parallel"] or {}).get("schedule", "1F1B") for one in cut}
    assert {"Interleaved1F1B", "InterleavedZeroBubble"} <= schedules
    for one in cut:
        plan = resolve(one.strategy, cluster(spec), REGISTRY, profile=profile()).plan
        if plan.pipeline.schedule == "InterleavedZeroBubble":
            assert not plan.whole_backward
    divided = free(space(spec, work=work, included=["axis:tensor"]))
    assert any((dict(one.steps)["tensor_parallel"] or {}).get("sequence") for one in divided)
    plain = free(space(spec, work=work, excluded=[("tensor_parallel", {"sequence": True})]))
    assert not any((dict(one.steps).get("tensor_parallel") or {}).get("sequence") for one in plain)


def test_a_wish_for_a_schedule_is_kept() -> None:
    constraint = ("pipeline_parallel", {"schedule": "GPipe"})
    found = free(space("4xcpu", included=[constraint]))
    assert found
    for one in found:
        assert dict(one.steps)["pipeline_parallel"]["schedule"] == "GPipe"


def test_rows_are_priced_as_their_strategies() -> None:
    """However the columns of a table are put together: each candidate alone costs the same."""
    spec, work = "8xH100-80GB, 2 nodes, ib400", Workload(global_batch=64, num_tokens=8)
    for one in free(space(spec, work=work))[:40]:
        plan = resolve(one.strategy, cluster(spec), REGISTRY, profile=profile()).plan
        alone = price(PlanTable.of([plan]), profile(), cluster(spec), work).estimate(0)
        assert one.estimate is not None
        assert one.estimate.step_seconds == pytest.approx(alone.step_seconds, rel=1e-9), one.label
        assert one.estimate.peak_bytes == pytest.approx(alone.peak_bytes, rel=1e-9), one.label


def test_the_user_is_told_that_a_pipeline_cannot_be_called() -> None:
    told = [note for note in space("4xcpu").notes if "pipeline" in note]
    assert len(told) == 1
    assert "result.train_step(batch)" in told[0]
    assert "excluded=['pipeline_parallel']" in told[0]
    assert not any("train_step" in note for note in space("4xcpu", excluded=["pipeline_parallel"]).notes)


def test_what_communicates_in_every_layer_stays_in_a_node() -> None:
    """A model of many heads on two nodes of eight, and on the same sixteen processes as four nodes."""
    trace = profile().trace
    assert trace is not None
    wide = replace(
        trace,
        num_heads=32,
        num_key_value_heads=32,
        segments=tuple(replace(one, heads=(32,)) if one.heads else one for one in trace.segments),
    )
    for spec, node in (("8xH100-80GB, 2 nodes, ib400", 8), ("4xH100-80GB, 4 nodes, ib400", 4)):
        many = cluster(spec)
        found = explore(replace(profile(), trace=wide), many, WORK, REGISTRY, settings=SearchSettings())
        for one in found.candidates:
            sizes = list(_axes(one).items())
            inner = [size for name, size in sizes if name in ("tensor", "sequence")]
            assert all(size <= node for size in inner)
            assert all(name in ("tensor", "sequence") for name, _ in sizes[: len(inner)])


def test_rows_that_reducing_often_makes_no_smaller_keep_their_prices() -> None:
    plan = Plan(axes=(("data", 2),), num_micro_batches=2).changed(sharding={"reduces_each": None})
    table = PlanTable.of([plan] * 3)

    def prices(*rows: tuple[float, float]) -> Prices:
        memory, seconds = (np.asarray(column)[:, None] for column in zip(*rows, strict=True))
        return Prices(memory, seconds, np.zeros(len(rows), dtype=int), ("",), UNKNOWN)

    whole = prices((10.0, 1.0), (30.0, 1.0), (40.0, 1.0))
    often = prices((30.0, 2.0), (35.0, 2.0))  # of the two that are too large
    after, reduces_each = _reduce_where_too_large(table, whole, 20, lambda table: often)
    assert reduces_each.tolist() == [False, False, True]
    assert after.peak_bytes.tolist() == [10.0, 30.0, 35.0]
    assert after.step_seconds.tolist() == [1.0, 1.0, 2.0]


def test_gradients_are_reduced_after_each_micro_batch_where_whole_ones_do_not_fit() -> None:
    wanted: dict[str, Any] = {"included": ["fsdp", ("gradient_accumulation", 4)], "excluded": WHOLE}
    roomy = free(space(**wanted))
    assert all("reduce_each_micro_batch" not in str(one.steps) for one in roomy)
    peak = min(one.predicted_bytes or 0.0 for one in roomy)
    limit = SearchSettings(memory_limit_gib=0.94 * peak / 2**30, memory_reserve=0.0)
    tight = explore(profile(), cluster(), WORK, REGISTRY, settings=limit, **wanted)
    best = free(tight)[0]
    assert dict(best.steps)["fsdp"]["reduce_each_micro_batch"] is True
    assert (best.predicted_bytes or 0.0) < peak  # within the estimate's error of the limit
    plan = resolve(best.strategy, cluster(), REGISTRY).plan
    again = price(PlanTable.of([plan]), profile(), cluster(), WORK)
    assert again.peak_bytes[0] == pytest.approx(best.predicted_bytes)
    assert again.step_seconds[0] == pytest.approx(best.predicted_seconds)
    kept = {"included": [("fsdp", {"reduce_each_micro_batch": False}), ("gradient_accumulation", 4)]}
    assert all(
        one.pruned
        for one in explore(
            profile(), cluster(), WORK, REGISTRY, settings=limit, **{**wanted, **kept}
        ).candidates
    )
    smallest = free(space(settings={"objective": "memory"}, **wanted))[0]
    assert dict(smallest.steps)["fsdp"]["reduce_each_micro_batch"] is True


@pytest.mark.parametrize(
    ("device", "memory_reserve", "share"),
    [("cuda", None, 1.0), ("cuda", 0.25, 0.75), ("cpu", None, 0.9), ("cpu", 0.0, 1.0)],
)
def test_what_is_left_free_of_the_memory(device: str, memory_reserve: float | None, share: float) -> None:
    place = Cluster(device_type=device, device_memory_bytes=1000)
    settings = SearchSettings(memory_reserve=memory_reserve)
    assert memory_limit(place, settings).num_bytes == share * 1000


# ---- plain strategies


def test_plain_strategies_differ_in_precision_and_sharding_alone() -> None:
    found = free(space("2xA100-80GB"))
    plain = [one for one in found if one.is_plain]
    data = {"parallel_mode", "ddp", "fsdp", "zero1", "zero2"}
    assert {one.precision for one in plain} > {"", "amp_native(bfloat16)"}
    assert all(names(one) <= data for one in plain if not one.precision)
    for one in found:
        assert ("amp_native" in names(one)) == ("amp_native" in one.precision)
        assert one.is_plain or not one.is_baseline
        assert not (one.is_plain and names(one) & {"checkpoint", "compile", "gradient_accumulation", *WHOLE})


def test_what_is_included_is_in_plain_strategies() -> None:
    plain = [one for one in free(space(included=["checkpoint"])) if one.is_plain]
    assert plain
    assert all("checkpoint" in names(one) for one in plain)


def test_one_process_must_hold_the_whole_batch() -> None:
    two = [one for one in free(space()) if one.is_plain]
    assert all(one.fits_alone for one in two)
    alone = next(one for one in free(space("1xcpu")) if one.is_baseline)
    assert alone.estimate is not None
    assert not alone.fits_alone, "there is nothing to compare it with"
    limit = {"memory_limit_gib": 0.9 * alone.estimate.peak_bytes / 2**30}
    assert not any(one.fits_alone for one in space(settings=limit).candidates if not one.precision)
