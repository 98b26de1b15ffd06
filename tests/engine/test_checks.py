"""Self-checks pass what agrees and name the numbers of what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atorch_ns.cluster import Cluster, Device, Hardware, Link, Rate
from atorch_ns.engine.checks import Check, check_collectives, check_memory, check_price
from atorch_ns.estimate import Collective, Estimate, MemoryParts, TimeParts, Workload, estimate
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Growth, ParameterSpec, PhaseCost, Profile, Segment, SegmentCost, Trace
from atorch_ns.search import Candidate
from atorch_ns.strategy import Strategy

MIB = 2**20


def _collective(kind: str, count: int, num_bytes: int, axis: str = "data") -> Collective:
    return Collective(kind, axis, count, num_bytes)


def test_a_check_is_a_sentence() -> None:
    assert str(Check("price", True)) == "price: passed"
    assert str(Check("price", True, "3 ms")) == "price: passed (3 ms)"
    assert str(Check("price", False, "3 ms, not 4")) == "price: failed: 3 ms, not 4"


class TestCollectives:
    def test_axes_of_one_kind_are_added(self) -> None:
        predicted = (
            _collective("all_reduce", 2, 1000),
            _collective("all_reduce", 1, 24, axis="zero"),
            _collective("all_gather", 0, 0),
        )
        found = check_collectives(predicted, {"all_reduce": (3, 1024)})
        assert str(found) == "collectives as predicted: passed (all_reduce 3 × (1024 B in all))"

    @pytest.mark.parametrize(
        ("executed", "named"),
        [
            ({"all_reduce": (4, 4096)}, "all_reduce 4 × (4096 B in all) executed, 3 ×"),
            ({"all_reduce": (3, 8192)}, "all_reduce 3 × (8192 B in all) executed, 3 × (4096 B"),
            ({}, "all_reduce 0 ×"),
            ({"all_reduce": (3, 4096), "broadcast": (1, 8)}, "broadcast 1 × (8 B in all) executed, 0 ×"),
            (None, "counted none"),
        ],
    )
    def test_what_differs_is_named(self, executed: Any, named: str) -> None:
        found = check_collectives((_collective("all_reduce", 3, 4096),), executed)
        assert not found.passed
        assert named in str(found)

    def test_padding_is_forgiven(self) -> None:
        predicted = (_collective("all_gather", 2, 10_000_000),)
        assert check_collectives(predicted, {"all_gather": (2, 10_000_512)}).passed
        assert not check_collectives(predicted, {"all_gather": (2, 10_050_000)}).passed

    def test_nothing_predicted_and_nothing_executed_agree(self) -> None:
        assert check_collectives((), {}).passed
        assert check_collectives((), None).passed


def _estimate(peak_mib: float, reserve_mib: float = 0.0) -> Estimate:
    return Estimate(
        memory=MemoryParts(peak_mib * MIB, 0, 0, 0, 0, reserve_mib * MIB),
        time=TimeParts(1, 0, 0, 0, 0, 0, 0, 0),
    )


class TestMemory:
    @pytest.mark.parametrize(("measured", "passed"), [(95, True), (107, True), (118, False), (88, False)])
    def test_eight_percent_of_what_was_measured(self, measured: int, passed: bool) -> None:
        assert check_memory(_estimate(100), [10 * MIB, measured * MIB]).passed is passed

    def test_the_text_has_the_numbers(self) -> None:
        found = check_memory(_estimate(100), [50 * MIB])
        assert str(found) == (
            "memory as predicted: failed: 50.0 MiB measured, 100 MiB predicted: "
            "predicted 100.0% above measured, 8% allowed"
        )

    def test_what_the_framework_reserves_is_not_tensors(self) -> None:
        assert check_memory(_estimate(100, reserve_mib=500), [100 * MIB]).passed

    def test_a_tiny_model_may_be_off_by_a_few_kilobytes(self) -> None:
        found = check_memory(_estimate(0.1), [2**18])
        assert found.passed
        assert "predicted 60.0% below measured, but within 256 KiB" in found.text
        assert "KiB" not in check_memory(_estimate(100), [100 * MIB]).text

    def test_nothing_measured_is_no_pass(self) -> None:
        assert not check_memory(_estimate(100), []).passed


def _profile() -> Profile:
    phase = PhaseCost(
        flops=Growth(per_sample=1e6),
        moved=Growth(constant=1e4, per_sample=1e4),
        num_operators=10,
        peak=Growth(per_sample=4096),
    )
    cost = SegmentCost(
        forward=phase, backward=phase, saved=Growth(per_sample=2048), output=Growth(per_sample=512)
    )
    segment = Segment(
        name="model",
        parameters=(ParameterSpec(name="weight", shape=(256, 256), dtype="float32", trainable=True),),
        costs={"float32": cost},
    )
    return Profile(
        model_class="tests.Model",
        module_classes={},
        blocks=(),
        block_class="",
        num_parameters=256 * 256,
        num_trainable=256 * 256,
        parameter_dtypes=("float32",),
        trace=Trace(segments=(segment,), num_samples=2),
    )


def _cluster() -> Cluster:
    link = Link(name="gloo", rate=Rate(1e-5, 1e9))
    device = Device(
        name="cpu",
        type="cpu",
        memory_bytes=2**30,
        memory_bytes_per_s=1e10,
        flops_per_s={"float32": 1e10},
        launch_s=1e-6,
    )
    hardware = Hardware(device=device, within_node=link, between_nodes=link, to_host=link)
    return Cluster(world_size=2, local_world_size=2, distributed=True, hardware=hardware)


class TestPrice:
    def _candidate(self, workload: Workload) -> Candidate:
        strategy = Strategy(["ddp"])
        plan = resolve(strategy, _cluster(), load_registry(), profile=_profile()).plan
        steps = tuple((step.name, step.config) for step in strategy)
        priced = estimate(plan, _profile(), _cluster(), workload)
        return Candidate(key="ddp", steps=steps, label="ddp", estimate=priced)

    def _check(self, candidate: Candidate, **changes: Any) -> Check:
        given: dict[str, Any] = {
            "profile": _profile(),
            "cluster": _cluster(),
            "workload": Workload(global_batch=8),
            "registry": load_registry(),
        }
        return check_price(candidate, **{**given, **changes})

    def test_the_same_setting_gives_the_same_price(self) -> None:
        assert self._check(self._candidate(Workload(global_batch=8))).passed

    def test_another_workload_does_not(self) -> None:
        found = self._check(self._candidate(Workload(global_batch=8)), workload=Workload(global_batch=16))
        assert not found.passed
        assert "in the search" in found.text

    def test_a_part_in_a_hundred_million_is_seen(self) -> None:
        candidate = self._candidate(Workload(global_batch=8))
        assert candidate.estimate is not None
        off = candidate.estimate.time._replace(compute=candidate.estimate.time.compute * (1 + 1e-7))
        candidate = replace(candidate, estimate=replace(candidate.estimate, time=off))
        assert not self._check(candidate).passed

    def test_a_candidate_without_a_price_fails(self) -> None:
        candidate = replace(self._candidate(Workload(global_batch=8)), estimate=None)
        assert "never priced" in self._check(candidate).text

    def test_a_strategy_that_does_not_resolve_fails(self) -> None:
        candidate = replace(self._candidate(Workload(global_batch=8)), steps=(("fsdpp", None),))
        assert "MethodNotFoundError" in self._check(candidate).text
