"""Products of linears in fewer bits: which share of a model they are, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.costs.collectives import Groups, collective_seconds
from atorch_ns.estimate import PlanTable, TimeParts, Workload
from atorch_ns.estimate.time.passes import low_bit_share
from atorch_ns.estimate.time.step import price_time
from atorch_ns.profile import (
    ForwardResult,
    Growth,
    OperatorCost,
    OptimizerSpec,
    ParameterSpec,
    PhaseCost,
    Segment,
    SegmentCost,
    Trace,
)
from atorch_ns.strategy import NarrowProducts, Plan
from opt_lib.fp8 import Fp8, Fp8Config

TFLOP, GB = 1e12, 1e9
NARROW = NarrowProducts(dtype="float8", exclude=("lm_head",), casts_per_operand=2.0)
CLUSTER = cluster_from_spec("1xH100-80GB").with_hardware()


def _cost(products: float, others: float) -> SegmentCost:
    forward = PhaseCost(
        flops=Growth(per_sample=(products + others) / 3 * TFLOP),
        moved=Growth(per_sample=GB),
        num_operators=1,
        peak=Growth(),
    )
    operators = (
        OperatorCost(
            name="aten.mm", count=3, flops=Growth(per_sample=products * TFLOP), moved=Growth(per_sample=GB)
        ),
        OperatorCost(
            name="aten.bmm", count=3, flops=Growth(per_sample=others * TFLOP), moved=Growth(per_sample=GB)
        ),
    )
    backward = replace(forward, flops=forward.flops * 2)
    return SegmentCost(
        forward=forward, backward=backward, saved=Growth(), output=Growth(), operators=operators
    )


def _segment(
    name: str, *matrices: tuple[str, tuple[int, ...]], block: bool = True, tied: str | None = None
) -> Segment:
    return Segment(
        name=name,
        paths=(name,) if block else (),
        fingerprint=name,
        parameters=tuple(
            ParameterSpec(name=path, shape=shape, dtype="float32", tied_to=tied) for path, shape in matrices
        ),
        costs={"float32/bfloat16": _cost(3.0, 1.0), "float32": _cost(3.0, 1.0)},
    )


BLOCK = _segment("layers.0", ("up.weight", (64, 32)), ("down.weight", (32, 64)), ("norm.weight", (32,)))
PLAN = Plan().changed(precision={"compute_dtype": "bfloat16", "narrow": NARROW})


@pytest.mark.parametrize(
    ("segment", "narrow", "share"),
    [
        (BLOCK, NARROW, 0.75),
        (BLOCK, replace(NARROW, include=("up",)), 0.375),
        (BLOCK, replace(NARROW, include=("layers.0",), exclude=("down",)), 0.375),
        (BLOCK, replace(NARROW, multiple=64), 0.0),
        (BLOCK, None, 0.0),
        (_segment("layers.0", ("up.weight", (64, 32)), ("odd.weight", (64, 24))), NARROW, 0.75 * 32 / 56),
        (_segment("after", ("lm_head.weight", (64, 32)), block=False), NARROW, 0.0),
        (_segment("after", ("out.weight", (64, 32)), block=False, tied="embed.weight"), NARROW, 0.0),
        (
            _segment("after", ("out.weight", (64, 32)), block=False, tied="embed.weight"),
            replace(NARROW, include=("out",)),
            0.75,
        ),
    ],
)
def test_the_share_of_products_is_that_of_the_layers(segment: Segment, narrow: Any, share: float) -> None:
    found = low_bit_share(PLAN.changed(precision={"narrow": narrow}), segment, 4, 1)
    assert found.flops == pytest.approx(share)
    # 1 GB of operands, moved twice, of which products read a third less, for 4 TFLOP of which products are 3.
    assert found.bytes_per_flop == pytest.approx((2 - 1 / 3) * GB * share / 0.75 / (4 * TFLOP))


def test_a_compiler_finds_the_largest_value_where_a_tensor_is_made() -> None:
    eager, compiled = (
        low_bit_share(replace(PLAN, compiler=name), BLOCK, 4, 1) for name in (None, "inductor")
    )
    assert compiled.bytes_per_flop / eager.bytes_per_flop == pytest.approx((1.2 - 1 / 3) / (2 - 1 / 3))


def _compute_seconds(plan: Plan) -> float:
    trace = Trace(segments=(BLOCK,), num_samples=4, optimizer=OptimizerSpec(name="AdamW"))
    (row,) = price_time(PlanTable.of([plan]), trace, CLUSTER, Workload(global_batch=1))
    return float(row[0])


def test_products_take_the_time_of_their_rate_and_of_their_casts() -> None:
    assert CLUSTER.hardware is not None
    device = CLUSTER.hardware.device
    wide = _compute_seconds(PLAN.changed(precision={"narrow": None}))
    peak, narrow = (device.products_of(key) for key in ("bfloat16", "float8"))
    saved = 3 * TFLOP * (1 / peak - 1 / narrow)
    casts = (2 - 1 / 3) * GB / device.memory_bytes_per_s
    assert _compute_seconds(PLAN) == pytest.approx(wide - saved + casts, rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "share", "rate", "casts"),
    [
        ("tensorwise", 1.0, 1.0, 1.7),
        # The row-wise kernel computes the forward product alone; results of the others are scaled after.
        ("rowwise", 1.0, 3 / (1 / 0.95 + 2), 1.7 + 2.0 * 2 / 3),
        ("rowwise_with_gw_hp", 2 / 3, 2 / (1 / 0.95 + 1), 1.7 + 2.0 / 2),
    ],
)
def test_a_scale_for_each_row_has_costs_of_its_own(
    recipe: str, share: float, rate: float, casts: float
) -> None:
    plan = Fp8().plan(Plan(), Fp8Config(recipe=recipe))  # type: ignore[arg-type]
    found = _compute_seconds(PLAN.changed(precision={"narrow": plan.precision.narrow}))
    assert CLUSTER.hardware is not None
    device = CLUSTER.hardware.device
    wide = _compute_seconds(PLAN.changed(precision={"narrow": None}))
    peak, narrow = (device.products_of(key) for key in ("bfloat16", "float8"))
    saved = share * 3 * TFLOP * (1 / peak - 1 / (rate * narrow))
    moved = share * (casts - 1 / 3) * GB / device.memory_bytes_per_s
    assert found == pytest.approx(wide - saved + moved, rel=1e-6)


def test_a_device_without_the_rate_gains_nothing() -> None:
    old = cluster_from_spec("1xA100-80GB").with_hardware()
    trace = Trace(segments=(BLOCK,), num_samples=4, optimizer=OptimizerSpec(name="AdamW"))
    with_it, without = (
        float(price_time(PlanTable.of([plan]), trace, old, Workload(global_batch=1))[0][0])
        for plan in (PLAN, PLAN.changed(precision={"narrow": None}))
    )
    assert with_it > without


def _phase_seconds(device: str, **phase: Growth) -> float:
    """Of one pass forward of a segment with causal attention in heads of 128."""
    growths = {"flops": Growth(), "moved": Growth(), **phase}
    forward = PhaseCost(num_operators=1, peak=Growth(), **growths)
    backward = PhaseCost(flops=Growth(), moved=Growth(), num_operators=1, peak=Growth())
    cost = SegmentCost(forward=forward, backward=backward, saved=Growth(), output=Growth())
    segment = replace(BLOCK, costs={"bfloat16": cost}, heads=(8, 8), head_width=128, is_causal=True)
    trace = Trace(segments=(segment,), num_samples=1, num_tokens=4096, optimizer=OptimizerSpec(name="AdamW"))
    plan, cluster = (
        Plan().changed(precision={"parameter_dtype": "bfloat16"}),
        cluster_from_spec(f"1x{device}"),
    )
    (row,) = price_time(PlanTable.of([plan]), trace, cluster, Workload(global_batch=1, num_tokens=4096))
    return float(row[0])


def test_attention_has_the_rate_of_its_kernel() -> None:
    flops = Growth(per_sample=TFLOP)
    assert _phase_seconds("H100", flops=flops, attention=flops) == pytest.approx(1 / 518), (
        "cuDNN, 4096 tokens"
    )
    assert _phase_seconds("H100", flops=flops) == pytest.approx(1 / 794.5)
    assert _phase_seconds("A100", flops=flops, attention=flops) == pytest.approx(370 / 319 / 230)
    # Devices whose attention nobody published follow H100's share of the products, by the library that torch takes there.
    slower = {"H200": 794.5 / 518, "B200": 794.5 / 518, "MI300X": 794.5 / 319, "A100-PCIe-80GB": 794.5 / 319}
    for device, expected in slower.items():
        products, attention = (
            _phase_seconds(device, flops=flops, **more) for more in ({}, {"attention": flops})
        )
        assert attention / products == pytest.approx(expected), device
    # Its own rate at 2048 tokens, along H100's curve over lengths and masks.
    for device, rate in (
        ("RTX-4090, FlashAttention-2", 169.3),
        ("A6000, FlashAttention-2", 114.1 * 362 / 370),
    ):
        assert _phase_seconds(device, flops=flops, attention=flops) == pytest.approx(362 / 319 / rate), device
    assert _phase_seconds("L4", flops=flops, attention=flops) == _phase_seconds("L4", flops=flops)


def test_a_cluster_names_the_library_of_attention() -> None:
    flops = Growth(per_sample=TFLOP)
    seconds = {
        name: _phase_seconds(f"H100, {name}", flops=flops, attention=flops)
        for name in ("cuDNN", "FlashAttention-2", "flashattention-1")
    }
    assert seconds["FlashAttention-2"] == pytest.approx(1 / 319)
    assert seconds["flashattention-1"] == pytest.approx(1.4 / 319)
    assert seconds["cuDNN"] == _phase_seconds("H100", flops=flops, attention=flops)


@pytest.mark.parametrize(
    ("device", "side", "measured"), [("B200", 8192, 1610), ("B200", 4096, 1532), ("H100", 8192, 720)]
)
def test_products_take_the_time_of_operations_and_operands(device: str, side: int, measured: float) -> None:
    """TFLOP/s of cuBLAS: pyptx's table of B200, and SemiAnalysis (December 2024) for H100."""
    flops = 2 * side**3
    seconds = _phase_seconds(
        device, flops=Growth(per_sample=flops), operands=Growth(per_sample=3 * 2 * side**2)
    )
    assert flops / seconds / TFLOP == pytest.approx(measured, rel=0.07)


def _result(name: str, number: int, tflop: float, gigabytes: float = 0.0) -> ForwardResult:
    return ForwardResult(
        name=name,
        number=number,
        flops=Growth(per_sample=tflop * TFLOP),
        moved=Growth(per_sample=gigabytes * GB),
        size=Growth(),
    )


def test_what_is_kept_is_not_computed_again() -> None:
    cost = replace(
        _cost(3.0, 1.0),
        results=(
            _result("aten.mm", 0, 0.25),
            _result("aten.mm", 1, 0.5),
            _result("aten._scaled_dot_product_flash_attention", 0, 0.25),
            _result("aten.mm", 2, 0.25),
            _result("aten.gelu", 0, 0.0, 0.5),
        ),
    )
    cost = replace(cost, forward=replace(cost.forward, attention=Growth(per_sample=0.25 * TFLOP)))
    block = replace(BLOCK, costs=dict.fromkeys(BLOCK.costs, cost), head_width=128)
    trace = Trace(segments=(block,), num_samples=4, optimizer=OptimizerSpec(name="AdamW"))
    assert CLUSTER.hardware is not None
    device = CLUSTER.hardware.device

    def recompute(saved: Any) -> float:
        plan = Plan().changed(recomputation={"kind": "selective", "saved_operators": saved})
        return float(price_time(PlanTable.of([plan]), trace, CLUSTER, Workload(global_batch=1))[0][1])

    flops, moved = TFLOP / device.products_of("float32"), GB / device.memory_bytes_per_s / 0.87
    slower = 794.5 / 497  # of fused attention by cuDNN, of 512 tokens and fewer
    whole = (4.0 / 3 - 0.25 + 0.25 * slower) * flops + moved
    assert recompute(()) == pytest.approx(whole)
    assert recompute("every_second_product") == pytest.approx(whole - (0.5 + 0.25 * slower) * flops)
    assert recompute("all_but_attention") == pytest.approx(whole - flops - 0.5 * moved)
    assert recompute(("aten.mm.default",)) == pytest.approx(whole - flops)


NODES = cluster_from_spec("8xH100-80GB, 2 nodes, ib400").with_hardware()


def _exchange(
    tensor: int, num_columns: int, asynchronous: bool, *, width: int = 65536, **changes: Any
) -> float:
    """Seconds of exchanges of a block [16384, 4096] with wide columns and a row, by tensor parallelism on two nodes."""
    wide, narrow = (width, 4096), (4096, width)
    parameters = [
        ParameterSpec(name=f"{name}.weight", shape=shape, dtype="bfloat16", tensor_dim=dim)
        for name, shape, dim in (("up", wide, 0), ("gate", wide, 0), ("down", narrow, 1))
        if name != "gate" or num_columns == 2
    ]
    cost = replace(_cost(3, 1), output=Growth(per_token=2.0 * 4096))
    segment = replace(BLOCK, parameters=tuple(parameters), costs={"bfloat16": cost}, num_rows=1)
    trace = Trace(segments=(segment,), num_samples=1, num_tokens=16384, optimizer=OptimizerSpec(name="AdamW"))
    plan = Plan(axes=(("tensor", tensor), ("data", 16 // tensor)), compiler="inductor").changed(
        precision={"parameter_dtype": "bfloat16"}, tensor={"sequence": True, "asynchronous": asynchronous}
    )
    workload = Workload(global_batch=16 // tensor, num_tokens=16384)
    (row,) = price_time(PlanTable.of([plan.changed(**changes)]), trace, NODES, workload)
    return float(row[TimeParts._fields.index("exchange")])


@pytest.mark.parametrize(
    ("num_columns", "waited", "num_weights", "num_sums"), [(1, 0.0, 4, 2), (2, 0.25, 4, 1)]
)
def test_asynchronous_exchanges_hide_behind_long_products(
    num_columns: int, waited: float, num_weights: int, num_sums: int
) -> None:
    """All but the scattered sum of several columns' gradients; each piece reads its weight, and partial sums are added."""
    assert NODES.hardware is not None
    whole, hidden = (_exchange(8, num_columns, asynchronous) for asynchronous in (False, True))
    weight, output = 2 * 65536 * 4096 / 8, 2 * 4096 * 16384
    moved = 7 * weight * num_weights + num_sums * output * (1 + 1 / 8)
    expected = waited * whole + moved / NODES.hardware.device.memory_bytes_per_s
    assert hidden == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("num_columns", "gathered", "waited", "num_weights", "num_sums"),
    [(1, True, 0.0, 4, 2), (2, True, 0.25, 4, 1), (2, False, 0.75, 1, 1)],
)
def test_asynchronous_exchanges_of_layers_in_fp8(
    num_columns: int, gathered: bool, waited: float, num_weights: int, num_sums: int
) -> None:
    """Weights are read anew in a byte an element; gathers in a byte follow the exchange of the largest value; others, as with
    one scale a row, are waited for."""
    assert NODES.hardware is not None
    narrow = {"precision": {"narrow": replace(NARROW, gathered=gathered)}}
    whole, hidden = (_exchange(8, num_columns, asynchronous, **narrow) for asynchronous in (False, True))
    weight, output = 65536 * 4096 / 8, 2 * 4096 * 16384
    moved = 7 * weight * num_weights + num_sums * output * (1 + 1 / 8)
    expected = waited * whole + moved / NODES.hardware.device.memory_bytes_per_s
    expected += 2 * _largest() if gathered else 0.0
    assert hidden == pytest.approx(expected, rel=1e-6)


def test_gathers_of_layers_in_fp8_move_half_of_the_bytes() -> None:
    """Where products are too short to hide much: two of four exchanges are gathers."""
    assert NODES.hardware is not None
    narrow = {"precision": {"narrow": replace(NARROW, gathered=True)}}
    output = 2 * 4096 * 16384
    each = _along_eight("all_gather", output) + _along_eight("all_gather", output / 2) + _largest()
    added = output * (1 + 1 / 8) / NODES.hardware.device.memory_bytes_per_s
    assert _exchange(8, 2, True, width=16, **narrow) == pytest.approx(2 * each + added, rel=1e-3)


def _along_eight(kind: str, num_bytes: float) -> float:
    """Seconds of a collective in a node."""
    assert NODES.hardware is not None
    eight = np.asarray([8])
    return float(collective_seconds(kind, num_bytes, Groups(eight, eight), NODES.hardware)[0])


def _largest() -> float:
    return _along_eight("all_reduce", 4)


@pytest.mark.parametrize(
    ("tensor", "changes"),
    [(16, {}), (8, {"compiler": "aot_eager"})],
    ids=["over nodes", "not compiled by inductor"],
)
def test_exchanges_are_waited_for_elsewhere(tensor: int, changes: Any) -> None:
    assert _exchange(tensor, 2, True, **changes) == _exchange(tensor, 2, False, **changes)
