"""Differences of two strategies."""

from __future__ import annotations

from atorch_ns.strategy import Strategy, diff


def test_equal_strategies_have_none() -> None:
    found = diff(Strategy([("fsdp", {"cpu_offload": True})]), Strategy([("fsdp", {"cpu_offload": True})]))
    assert found.same
    assert str(found) == "no difference"


def test_methods_and_keys_that_differ_are_named() -> None:
    before = Strategy(["ddp", ("amp_native", {"dtype": "fp16", "init_scale": 2.0}), "compile"])
    after = Strategy([("amp_native", {"dtype": "bf16", "skip_if_nonfinite": None}), "fsdp", "compile"])
    lines = str(diff(before, after)).splitlines()
    assert lines == [
        "- ddp",
        "+ fsdp",
        "~ amp_native.dtype: 'fp16' → 'bf16'",
        "~ amp_native.init_scale: 2.0 → None",
        "~ amp_native.skip_if_nonfinite: None → None",
    ]


def test_a_shorthand_is_compared_as_a_whole() -> None:
    found = diff(Strategy([("amp_native", "bf16")]), Strategy([("amp_native", {"dtype": "bf16"})]))
    assert [(item.key, item.before) for item in found.changed] == [("config", "bf16")]


def test_only_the_order_of_common_methods_counts() -> None:
    assert diff(Strategy(["ddp", "half"]), Strategy(["compile", "half", "ddp"])).reordered
    assert not diff(Strategy(["ddp", "half"]), Strategy(["ddp", "compile", "half"])).reordered
