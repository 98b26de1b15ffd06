"""The forms of a strategy, its equality and its bytes."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from atorch_ns.errors import StrategyError, StrategyFileError
from atorch_ns.strategy import Requires, Step, Strategy, diff


def test_every_form_gives_the_same_strategy() -> None:
    expected = Strategy(["fsdp", ("amp_native", {"dtype": "bfloat16"})])
    forms: list[Any] = [
        expected,
        ["fsdp", ("amp_native", {"dtype": torch.bfloat16})],
        ("fsdp", ["amp_native", {"dtype": torch.bfloat16}]),
        [Step("fsdp"), Step("amp_native", {"dtype": torch.bfloat16})],
        [("fsdp",), ("amp_native", {"dtype": "bfloat16"}, False)],
        [{"name": "fsdp"}, {"name": "amp_native", "config": {"dtype": "bfloat16"}}],
        expected.to_bytes(),
        '["fsdp", ["amp_native", {"dtype": "bfloat16"}]]',
        {"schema": 1, "steps": [{"name": "fsdp"}, {"name": "amp_native", "config": {"dtype": "bfloat16"}}]},
    ]
    assert [Strategy.load(form) for form in forms] == [expected] * len(forms)
    assert len({Strategy.load(form) for form in forms}) == 1


def test_the_specifications_set_literal_is_a_mapping() -> None:
    assert Strategy([("zero1", {"use_ds_zero", True})])["zero1"] == {"use_ds_zero": True}


def test_classes_dtypes_and_torch_objects_become_names() -> None:
    strategy = Strategy(
        [
            ("checkpoint", (nn.Linear, "Block")),
            (
                "fsdp",
                {
                    "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
                    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
                    "cpu_offload": CPUOffload(offload_params=True),
                    "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
                    "auto_wrap_policy": functools.partial(
                        transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}
                    ),
                },
            ),
            ("zero2", {"auto_wrap_policy": ModuleWrapPolicy({nn.LayerNorm})}),
        ]
    )
    assert strategy["checkpoint"] == ["torch.nn.modules.linear.Linear", "Block"]
    fsdp = strategy["fsdp"]
    assert isinstance(fsdp, dict)
    assert fsdp["sharding_strategy"] == "SHARD_GRAD_OP"
    assert fsdp["cpu_offload"] == {"offload_params": True}
    assert isinstance(fsdp["mixed_precision"], dict)
    assert fsdp["mixed_precision"]["param_dtype"] == "bfloat16"
    json.loads(strategy.to_bytes())


def test_a_strategy_cannot_be_changed() -> None:
    config = {"wrap_class": ["A"]}
    strategy = Strategy([("checkpoint", config)])
    config["wrap_class"].append("B")
    read = strategy["checkpoint"]
    assert isinstance(read, dict)
    read["wrap_class"] = []
    assert strategy["checkpoint"] == {"wrap_class": ["A"]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.steps = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.steps[0].name = "other"  # type: ignore[misc]


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.load(["fsdp", 3, ("a", 1, 2, 3), "fsdp", ("b", lambda: 0), ("c", {"x": float("nan")}), ()])
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for word in ("entry 1", "4 items", "named twice", "lambda", "nan", "entry 6"):
        assert word in text


@pytest.mark.parametrize("source", [3, object(), nn.Linear(1, 1)])
def test_other_objects_are_refused(source: Any) -> None:
    with pytest.raises(StrategyError, match="not a strategy"):
        Strategy.load(source)


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_names = st.text("abcdefgh_", min_size=1, max_size=6)


@given(
    steps=st.lists(st.tuples(_names, _values), unique_by=lambda step: step[0], max_size=4),
    world=st.none() | st.integers(1, 4096),
    provenance=st.dictionaries(st.text(), _values, max_size=2),
    suffix=st.sampled_from([".json", ".yaml"]),
)
def test_round_trip_and_same_bytes(steps: Any, world: Any, provenance: Any, suffix: str) -> None:
    strategy = Strategy(steps, requires=Requires(world_size=world), provenance=provenance)
    again = Strategy(list(strategy), requires=strategy.requires, provenance=strategy.provenance)
    assert again.to_bytes(suffix=suffix) == strategy.to_bytes(suffix=suffix)
    loaded = Strategy.load(strategy.to_bytes(suffix=suffix))
    assert loaded == strategy
    assert loaded.requires == strategy.requires
    assert loaded.provenance == strategy.provenance


def test_equal_content_in_another_order_of_keys_is_equal() -> None:
    one = Strategy([("fsdp", {"a": 1, "b": 2})])
    other = Strategy([("fsdp", {"b": 2, "a": 1})])
    assert one == other
    assert hash(one) == hash(other)
    assert one.to_bytes() == other.to_bytes()


def test_strategies_that_do_the_same_are_equal_wherever_they_came_from() -> None:
    plain = Strategy(["fsdp", ("amp_native", "bf16")])
    found = Strategy(plain, requires=Requires(world_size=8), provenance={"made_by": "a search"})
    assert plain == found
    assert {plain: 1}[found] == 1
    assert plain != Strategy(["fsdp"])
    assert Strategy.load(found.to_bytes()).provenance == found.provenance


def test_a_pickle_does_not_depend_on_the_names_of_files() -> None:
    strategy = Strategy([("fsdp", {"a": 1})], requires=Requires(world_size=2), provenance={"x": 1})
    data = pickle.dumps(strategy, protocol=2)
    assert b"atorch_ns.strategy\n" in data
    assert b"atorch_ns.strategy." not in data
    assert pickle.loads(data).to_bytes() == strategy.to_bytes()


def test_diff() -> None:
    before = Strategy(["parallel_mode", ("amp_native", {"dtype": "float16"}), "zero1"])
    after = Strategy([("amp_native", {"dtype": "bfloat16"}), "parallel_mode", "fsdp"])
    result = diff(before, after)
    assert [step.name for step in result.added] == ["fsdp"]
    assert [step.name for step in result.removed] == ["zero1"]
    assert result.changed == (("amp_native", "dtype", "float16", "bfloat16"),)
    assert result.reordered
    assert not result.same
    assert "amp_native.dtype" in str(result)
    assert diff(before, before).same
    assert str(diff(before, before)) == "no difference"


def test_file_error_is_a_strategy_error() -> None:
    assert issubclass(StrategyFileError, StrategyError)
    assert issubclass(StrategyError, ValueError)
