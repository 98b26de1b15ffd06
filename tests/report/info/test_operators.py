"""Shares of operators in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atorch_ns.estimate import Workload
from atorch_ns.profile.trace import Growth, OperatorCost
from atorch_ns.report import operators_info
from atorch_ns.strategy import Plan


def _segment(name: str, count: int, *operators: OperatorCost) -> Any:
    return SimpleNamespace(name=name, count=count, costs={"float32": SimpleNamespace(operators=operators)})


def _trace() -> Any:
    """Two layers of 4 products, and a head of 1 product and 1 copy; each product has 10 FLOP a sample."""
    work, moved = Growth(0.0, 10.0, 0.0, 0.0), Growth(8.0, 0.0, 0.0, 0.0)
    product = OperatorCost(name="aten.mm", count=4, flops=work, moved=moved)
    copied = Growth(4.0, 0.0, 0.0, 0.0)
    copy = OperatorCost(name="aten.copy", count=1, flops=Growth(0.0, 0.0, 0.0, 0.0), moved=copied)
    segments = (_segment("layers", 2, product), _segment("head", 1, product, copy))
    return SimpleNamespace(segments=segments, precisions=("float32",))


def test_shares_of_work_and_traffic() -> None:
    info = operators_info(_trace(), Plan(), Workload(global_batch=6), world_size=2)
    assert (info.precision, info.num_samples) == ("float32", 3.0)
    assert info.flops == pytest.approx(3 * 10 * 3)
    assert info.num_bytes == pytest.approx(3 * 8 + 4)
    product, copy = info.lines
    assert (product.name, product.calls, product.flops_share) == ("aten.mm", 12, 1.0)
    assert product.mostly_in == "layers"
    assert (copy.flops_share, copy.mostly_in) == (0.0, "head")
    assert product.bytes_share + copy.bytes_share == pytest.approx(1.0)


def test_the_largest_alone() -> None:
    (line,) = operators_info(_trace(), Plan(), Workload(global_batch=6), world_size=2, top=1).lines
    assert line.name == "aten.mm"
