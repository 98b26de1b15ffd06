"""Resolving: defaults, order, composition, and every problem at once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import MethodNotFoundError, StrategyError
from atorch_ns.method import Registry, Resolved, load_registry, resolve
from atorch_ns.profile import Profile
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import get_case

REGISTRY = load_registry()
FOUR = Cluster(world_size=4, local_world_size=4, distributed=True, torch="2.13.0")
ALONE = Cluster(torch="2.13.0")


def _resolve(strategy: list[Any], cluster: Cluster = FOUR, model: nn.Module | None = None) -> Resolved:
    profile = None if model is None else Profile.of(model)
    return resolve(Strategy(strategy), cluster, REGISTRY, profile=profile)


def _mesh(*axes: tuple[str, int]) -> tuple[str, Any]:
    return ("parallel_mode", (list(axes), None))


def _names(resolved: Resolved) -> list[str]:
    return [item.method.name for item in resolved.chosen]


def test_mesh_and_gradient_synchronisation_are_added() -> None:
    assert _names(_resolve([])) == ["parallel_mode", "ddp"]
    assert _names(_resolve(["amp_native"])) == ["parallel_mode", "ddp", "amp_native"]
    assert _names(_resolve(["fsdp"])) == ["parallel_mode", "fsdp"]
    assert _names(_resolve(["zero1"])) == ["parallel_mode", "ddp", "zero1"]
    kinds = {(note.kind, note.method) for note in _resolve([]).notes}
    assert kinds == {("added", "parallel_mode"), ("added", "ddp")}


def test_a_zero_axis_alone_is_synchronised() -> None:
    resolved = _resolve([("parallel_mode", ([("zero", 4)], None))])
    assert _names(resolved) == ["parallel_mode", "ddp"]
    assert resolved.plan.gradient_sync == "all_reduce"
    assert resolved.plan.num_data_ranks == 4


def test_order_is_that_of_application_whatever_the_user_writes() -> None:
    written = ["amp_native", "fsdp", ("compile", "eager"), "checkpoint", "module_replace", "parallel_mode"]
    expected = ["parallel_mode", "module_replace", "checkpoint", "compile", "fsdp", "amp_native"]
    assert _names(_resolve(written)) == expected
    assert _names(_resolve(written[::-1])) == expected


def test_the_size_of_data_is_fitted_and_said() -> None:
    resolved = _resolve([("parallel_mode", ([("data", 2)], None))])
    assert resolved.plan.axes == (("data", 4),)
    assert any(note.kind == "fitted" for note in resolved.notes)
    again = resolve(resolved.strategy, FOUR, REGISTRY)
    assert again.strategy == resolved.strategy
    assert not again.notes


def test_one_process_leaves_out_what_needs_ranks() -> None:
    resolved = _resolve(["parallel_mode", "fsdp", ("amp_native", "bf16"), "checkpoint"], ALONE)
    assert _names(resolved) == ["checkpoint", "amp_native"]
    assert resolved.strategy.names == ("parallel_mode", "checkpoint", "fsdp", "amp_native")
    assert [note.method for note in resolved.notes if note.kind == "left out"] == ["parallel_mode", "fsdp"]


@pytest.mark.parametrize("strategy", [["fsdp", "zero1"], [("parallel_mode", ([("foo", 2)], None))]], ids=str)
def test_one_process_finds_the_mistakes_that_more_would(strategy: Any) -> None:
    with pytest.raises(StrategyError):
        _resolve(strategy, ALONE)


def test_plan() -> None:
    mesh = ("parallel_mode", ([("data", 2), ("zero", 2)], None))
    plan = _resolve([mesh, "fsdp", ("half", "fp16"), ("checkpoint", {"every_n": 2})]).plan
    assert plan.sharding.parameters_over == plan.sharding.optimizer_over == ("zero",)
    assert plan.precision.parameter_dtype == "float16"
    assert plan.precision.master_dtype == "float32"
    assert plan.precision.loss_scaling
    assert (plan.recomputation.kind, plan.recomputation.every) == ("blocks", 2)
    assert plan.num_data_ranks == 4
    gathered = _resolve(["zero2"]).plan
    assert gathered.sharding.keeps_gathered
    assert gathered.sharding.parameters_over == ("data",)


@pytest.mark.parametrize(
    "pair",
    [
        ("fsdp", "zero1"),
        ("fsdp", "zero2"),
        ("zero1", "zero2"),
        ("ddp", "fsdp"),
        ("ddp", "zero2"),
        ("amp_native", "half"),
        (("zero1", {"use_ds_zero": True}), "ddp"),
    ],
)
def test_illegal_pairs(pair: tuple[Any, Any]) -> None:
    for strategy in ([*pair], [*pair][::-1]):
        with pytest.raises(StrategyError, match="cannot be combined"):
            _resolve(strategy)


def test_a_duplicate_by_alias() -> None:
    with pytest.raises(StrategyError, match=r"ddp: named twice, once as 'auto_ddp'"):
        _resolve(["ddp", "auto_ddp"])


def test_an_axis_that_no_method_can_use() -> None:
    registry = Registry(type(method) for method in REGISTRY if "axis:tensor" not in method.provides)
    with pytest.raises(StrategyError, match=r"axis:tensor.*tensor=2"):
        resolve(Strategy([_mesh(("tensor", 2), ("data", 2))]), FOUR, registry)


@pytest.mark.parametrize("axis", ["tensor", "sequence", "pipeline", "expert"])
def test_a_degree_alone_brings_the_method_that_uses_it(axis: str) -> None:
    assert f"{axis}_parallel" in _names(_resolve([_mesh((axis, 2), ("data", 2))]))
    assert f"{axis}_parallel" not in _names(_resolve([_mesh((axis, 1), ("data", 4))]))


def test_a_divided_model_wants_groups_in_ascending_order() -> None:
    axes = [("tensor", 2), ("data", 2)]
    with pytest.raises(StrategyError, match=r"rank_order: .*along 'tensor' are \[3, 1\]"):
        _resolve([("parallel_mode", (axes, [3, 1, 0, 2]))])
    _resolve([("parallel_mode", (axes, [0, 2, 1, 3]))])
    _resolve([("parallel_mode", ([("data", 4)], [3, 1, 0, 2]))])


def test_unknown_names_only() -> None:
    with pytest.raises(MethodNotFoundError, match="Did you mean 'fsdp'") as caught:
        _resolve(["fsdpp", "zerro1"])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (("checkpoint", {"no_reentrent": False}), r"no_reentrent: unknown key. Did you mean 'no_reentrant'"),
        (("checkpoint", {"every_n": "two"}), r"checkpoint.every_n='two'"),
        (("checkpoint", {"every_n": 0}), r"checkpoint.every_n=0"),
        (("checkpoint", {"no_reentrant": "yes"}), r"checkpoint.no_reentrant='yes'"),
        (("checkpoint", {"save_operators": ["aten.no_such"]}), "not a torch operator"),
        (("checkpoint", {"save_operators": ["aten.mm"], "no_reentrant": False}), "non-reentrant"),
        (("amp_native", "fp4"), "not a valid dtype"),
        (("amp_native", "fp32"), "full precision"),
        (("amp_native", {"dtyp": "bf16"}), r"Did you mean 'dtype'"),
        (("half", {"dtype": "fp16", "master_weights": False}), "NaN"),
        (("fsdp", {"sharding_strategy": "NO_SHARD"}), "use the method ddp"),
        (("fsdp", {"sharding_strategy": "FULL"}), "accepted: "),
        (("fsdp", {"atorch_wrap_cls": ["A"], "atorch_size_based_min_num_params": 9}), "not both"),
        (("fsdp", {"cpu_offload": "always"}), "cpu_offload"),
        (("zero1", {"backend": "fairscale", "use_ds_zero": True}), "choose one"),
        (("zero2", {"not_use_fsdp": True, "use_ds_zero": True}), "choose one"),
        (("zero1", {"use_ds_zero": True, "cpu_offload": True}), r"\('zero2', {'cpu_offload': True}\)"),
        (("zero2", {"use_ds_zero": True, "cpu_offload": True}), "only torch supports cpu_offload"),
        (("compile", "no_such_backend"), r"compile.backend=no_such_backend: no such backend"),
        (("parallel_mode", ([("tensor", 3)], None)), "tensor=3 does not divide 4 processes"),
        (("parallel_mode", ([("data", 4)], [0, 0, 1, 2])), "rank order"),
        (("parallel_mode", ([("dta", 4)], None)), "unknown axis 'dta'"),
        (("parallel_mode", 4), r"\(name, size\)"),
        (("ddp", {"bucket_cap_mb": -1}), "bucket_cap_mb"),
    ],
)
def test_bad_configs_name_method_key_and_value(step: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=words) as caught:
        _resolve([step])
    assert step[0] in str(caught.value)


def test_all_problems_together() -> None:
    with pytest.raises(StrategyError) as caught:
        _resolve(["fsdpp", ("checkpoint", {"evry_n": 1}), ("half", "fp8"), ("amp_native", {"dtype": 3})])
    assert len(caught.value.problems) == 4


def test_missing_classes_name_what_the_model_has() -> None:
    model = get_case("mlp").build()
    with pytest.raises(StrategyError, match=r"NoBlock.*no module of .*Accepted: .*LayerNorm") as caught:
        _resolve([("checkpoint", ("NoBlock",)), ("fsdp", {"atorch_wrap_cls": "Nothing"})], model=model)
    assert len(caught.value.problems) == 2


def test_a_model_that_repeats_nothing_must_say_what_to_recompute() -> None:
    with pytest.raises(StrategyError, match="repeats no block"):
        _resolve(["checkpoint"], ALONE, nn.Linear(2, 2))


def test_without_counterpart_is_said() -> None:
    notes = _resolve([("fsdp", {"limit_all_gathers": False, "use_orig_params": False, "device_id": 0})]).notes
    assert sum(note.kind == "left out" for note in notes) == 3
