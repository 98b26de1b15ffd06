"""Memory inside convolutions, as it is assumed and as torch's allocator tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atorch_ns.capture.operators import is_free
from atorch_ns.costs.workspaces import workspace_bytes
from atorch_ns.torch_compat import CpuMemoryRecord

FORWARD = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default


def _beside_results(call: Callable[[], Any]) -> int:
    """The most bytes alive during a call, without its results."""
    call()
    record = CpuMemoryRecord()
    record.count(True)
    try:
        record.start()
        torch.empty(1)
        results = call()
        counts = record.stop()
    finally:
        record.count(False)
    tensors = results if isinstance(results, tuple) else (results,)
    kept = sum(one.numel() * one.itemsize for one in tensors if one is not None)
    return max(counts) - counts[0] - kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "groups", "last"),
    [
        ((8, 32, 16, 16), (32, 32, 3, 3), 1, 1, False),
        ((8, 16, 16, 16), (48, 16, 3, 3), 1, 1, False),
        ((8, 32, 16, 16), (64, 32, 3, 3), 2, 1, False),
        ((8, 32, 16, 16), (32, 1, 3, 3), 1, 32, False),
        ((8, 32, 16, 16), (32, 32, 1, 1), 1, 1, False),
        ((8, 20, 16, 16), (36, 20, 3, 3), 1, 1, False),
        ((4, 32, 14, 14), (32, 1, 7, 7), 1, 32, True),
        ((4, 64, 14, 14), (64, 1, 3, 3), 1, 64, True),
        ((8, 32, 16, 16), (32, 8, 3, 3), 1, 4, False),
    ],
)
def test_what_a_convolution_takes(
    dtype: torch.dtype, shape: tuple[int, ...], kernel: tuple[int, ...], stride: int, groups: int, last: bool
) -> None:
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(kernel, dtype=dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    options = ([stride] * 2, [kernel[2] // 2] * 2, [1, 1], False, [0, 0], groups)
    args = (x, weight, None, *options)
    out = FORWARD(*args)
    assert sum(workspace_bytes(FORWARD, args, out)) == pytest.approx(
        _beside_results(lambda: FORWARD(*args)), rel=0.1, abs=40_000
    )
    back = (torch.randn_like(out), x, weight, None, *options, [True, True, False])
    if dtype is torch.bfloat16 and (last or 1 < groups < len(weight)):
        return  # other copies than in fp32, and not always as many
    found = sum(workspace_bytes(BACKWARD, back, None))
    measured = _beside_results(lambda: BACKWARD(*back))
    assert found == pytest.approx(measured, rel=0.2, abs=16_000)


def test_other_operators_and_devices_are_assumed_to_take_nothing() -> None:
    x = torch.randn(2, 4, 8, 8, device="meta")
    args = (x, torch.randn(4, 4, 3, 3, device="meta"), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert workspace_bytes(FORWARD, args, x) == ()
    assert workspace_bytes(torch.ops.aten.mm.default, (x, x), x) == ()


def test_views_start_no_kernel_whatever_their_schema_says() -> None:
    aten = torch.ops.aten
    views = (aten._unsafe_view.default, aten.view.default, aten.squeeze_.dim, aten.detach_.default)
    assert all(map(is_free, views))
    assert not any(map(is_free, (aten.clone.default, aten.add_.Tensor, aten.slice_backward.default)))
