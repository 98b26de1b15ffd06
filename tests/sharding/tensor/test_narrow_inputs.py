"""Attention whose code takes the width of its input for that of its results is divided, or stays whole."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from atorch_ns.errors import InputError
from atorch_ns.sharding import ChosenPlan, TensorGroup, TensorPlan, choose_plan, divide, trace_layers
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.tensor_cases import SEQUENCE, TENSOR, by_hand, check
from tests.sharding.tensor_models import HEADS, VOCAB, WIDTH, make, tokens
from tests.sharding.width_models import (
    Causal,
    Crossing,
    DropsWhileTraining,
    FiveDims,
    FlashCausal,
    Gated,
    HeadsBySize,
    ScaledByWidth,
    ScaledMlp,
)

DIVIDED = (Causal, FlashCausal, FiveDims, HeadsBySize, Crossing)
WHOLE = (ScaledByWidth, Gated, DropsWhileTraining)
Tried = dict[str, tuple[TensorPlan, list[float]]]
"""By name of the attention: the plan found, and errors on other batches."""

SHAPES = ((1, HEADS), (4, 5), (2, WIDTH), (WIDTH, 6))
"""[B, T] unlike those of the self-test, some equal to numbers of features or heads."""

PLAN = TensorPlan(
    styles={"c_attn": "colwise", "c_proj": "rowwise"},
    parts={"c_attn": (WIDTH,) * 3},
    attributes=("n_head", "n_embd"),
    narrow_inputs=("blocks.*.attention.x",),
)


def _chosen(model: nn.Module, plan: TensorPlan | None = None, *, degree: int = 2, **how: Any) -> ChosenPlan:
    graph = trace_layers(model, tokens(), lambda module, data: module(data))
    return choose_plan(model, degree, graph, plan=plan, undivided="keep", **how)


def _divided(model: nn.Module) -> ChosenPlan:
    ranks = torch.distributed.get_world_size()
    group = TensorGroup(init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",)))
    found = _chosen(model, degree=ranks)
    divide(model, found.layout, group, found.regions)
    return found


def _error(part: nn.Module, whole: nn.Module, batch: Tensor) -> float:
    """The largest deviation of the output and of the first norm's gradient."""
    out = [model(batch) for model in (part, whole)]
    for one in out:
        one.square().sum().backward()
    norms: list[Any] = [model.get_submodule("blocks.0.norm1").weight for model in (part, whole)]
    pairs = [out, [norm.grad for norm in norms]]
    for norm in norms:
        norm.grad = None
    return max(float((mine - its).abs().max() / its.abs().max()) for mine, its in pairs)


def _tried() -> Tried:
    generator = torch.Generator().manual_seed(8)
    batches = [torch.randint(VOCAB, shape, generator=generator) for shape in SHAPES]
    results = {}
    for attention in (*DIVIDED, *WHOLE):
        part = make(attention)
        plan = _divided(part).plan
        whole = make(attention)
        errors = [_error(part, whole, batch) for batch in batches if attention not in WHOLE]
        results[attention.__name__] = (plan, errors)
    return results


class TestFound:
    @pytest.fixture(scope="class")
    def tried(self) -> Tried:
        return run_ranks(_tried, 2, timeout_s=100)[0]

    def test_every_layer_is_divided_and_right_on_other_shapes(self, tried: Tried) -> None:
        for attention in DIVIDED:
            plan, errors = tried[attention.__name__]
            assert not plan.left, attention
            assert plan.narrow_inputs, attention
            assert max(errors) < 1e-5, attention

    def test_the_arguments_that_columns_take_are_narrow(self, tried: Tried) -> None:
        assert tried["FlashCausal"][0].narrow_inputs == ("blocks.*.attention.x",)
        assert set(tried["FlashCausal"][0].attributes) == {
            f"blocks.*.attention.n_{n}" for n in ("head", "embd")
        }
        assert set(tried["Crossing"][0].narrow_inputs) == {
            "blocks.*.attention.own.x",
            "blocks.*.attention.reader.x",
            "blocks.*.attention.reader.memory",
        }

    def test_code_that_uses_the_width_for_something_else_stays_whole(self, tried: Tried) -> None:
        for attention in (ScaledByWidth, Gated):
            plan, _ = tried[attention.__name__]
            assert plan.styles["blocks.*.down"] == "rowwise"
            assert not plan.narrow_inputs
            assert list(plan.left) == ["blocks.*.attention.{to_qkv,to_out}"]
            assert "uses the width or the values of x for something else too" in next(
                iter(plan.left.values())
            )

    def test_code_that_differs_in_training_stays_whole(self, tried: Tried) -> None:
        plan, _ = tried["DropsWhileTraining"]
        assert list(plan.left) == ["blocks.*.attention.{to_qkv,to_out}"]
        assert not plan.narrow_inputs


def _mlps() -> list[Any]:
    plans = []
    for hidden in (False, True):
        model = make(lambda hidden=hidden: ScaledMlp(hidden=hidden))  # type: ignore[arg-type]
        plans.append(_chosen(model).plan)
    return plans


def test_an_mlp_scaled_by_widths_is_right_or_whole() -> None:
    by_input, by_hidden = _mlps()
    assert by_input.styles["blocks.*.attention.down"] == "rowwise"
    assert not by_input.left
    assert not by_input.narrow_inputs
    assert list(by_hidden.left) == ["blocks.*.attention.{up,down}"]


class TestParity:
    def test_two_ranks(self) -> None:
        strategies = {
            "pieces, recomputed": [TENSOR, SEQUENCE, "checkpoint"],
            "given": [TENSOR, ("tensor_parallel", PLAN.as_config()), ("checkpoint", {"no_reentrant": False})],
            "compiled": [TENSOR, ("compile", {"backend": "aot_eager"})],
        }
        check(by_hand(Causal), 2, strategies)

    @pytest.mark.slow
    def test_four_ranks(self) -> None:
        strategies = {
            "one head a rank": [("parallel_mode", [("tensor", 4)])],
            "fsdp": [("parallel_mode", [("tensor", 2), ("zero", 2)]), "fsdp", "checkpoint"],
            "stages": [("parallel_mode", [("tensor", 2), ("pipeline", 2)])],
        }
        check(by_hand(FlashCausal), 4, strategies)


def _saved() -> tuple[dict[str, Any], str]:
    result = accelerate_case(by_hand(FlashCausal), [TENSOR])
    return result.job.resolved_settings["tensor_parallel"], str(result.applied)


def test_the_plan_is_shown_and_saved() -> None:
    config, report = run_ranks(_saved, 2, timeout_s=60)[0]
    assert config["narrow_inputs"] == ["blocks.*.attention.x"]
    assert "inputs as wide as one rank's results: blocks.*.attention.x" in report


def test_a_layout_is_seen_from_inside_and_from_outside() -> None:
    layout = PLAN.resolve(make(Causal))
    inner = layout.within("blocks.1")
    assert inner.narrow_inputs == ("attention.x",)
    assert inner.placed("blocks.1").narrow_inputs == ("blocks.1.attention.x",)
    joined = layout.within("blocks.0").placed("blocks.0").joined(inner.placed("blocks.1"))
    assert joined.layers == layout.layers
    assert set(joined.narrow_inputs) == set(layout.narrow_inputs)
    config = json.loads(json.dumps(PLAN.as_config()))
    assert tuple(config["narrow_inputs"]) == PLAN.narrow_inputs


def _failure(plan: TensorPlan) -> str:
    with pytest.raises(InputError) as caught:
        _chosen(make(Causal), plan, run_numerics=False)
    return str(caught.value)


def test_a_users_plan_without_them_is_told() -> None:
    assert _chosen(make(Causal), PLAN, run_numerics=False).layout.narrow_inputs == (
        "blocks.0.attention.x",
        "blocks.1.attention.x",
    )
    told = _failure(replace(PLAN, narrow_inputs=()))
    assert "The plan lacks narrow_inputs: blocks.0.attention.x" in told
    assert "names blocks.*.y, which matches nothing" in _failure(replace(PLAN, narrow_inputs=("blocks.*.y",)))


def test_another_course_in_training_is_an_error() -> None:
    """Given by the user such a plan passes the self-test, which runs in evaluation."""
    model = make(DropsWhileTraining)
    plan = TensorPlan(
        styles={"to_qkv": "colwise", "to_out": "rowwise"},
        parts={"to_qkv": (WIDTH,) * 3},
        attributes=("heads",),
        narrow_inputs=("attention.x",),
    )
    divide(model, plan.resolve(model), TensorGroup(2))
    model.eval()(tokens())
    model = copy.deepcopy(model)
    assert model.eval()(tokens()).isfinite().all()
    with pytest.raises(InputError, match=r"blocks.0.attention computes with its input x .* gets 8 features"):
        model.train()(tokens())
