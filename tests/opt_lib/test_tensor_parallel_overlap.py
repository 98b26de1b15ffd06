"""Overlap inside tensor-parallel layers: parity with one process, and the order of products and reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from atorch_ns.sharding import Layout, TensorGroup, divide
from atorch_ns.sharding.tensor.plan import LayerStyle, RegionSpec
from atorch_ns.testing.models import CASES, Case
from atorch_ns.testing.parity import Trajectory, accelerated_run, assert_ranks_agree, compare, reference_run
from atorch_ns.testing.workers import run_ranks
from opt_lib.tensor_parallel import TensorParallelConfig
from tests.opt_lib.tensor_cases import TENSOR, check

OVERLAP = ("tensor_parallel", {"overlap": True})


def _double(case: Case) -> Case:
    return replace(case, build=lambda: case.build().double())


def _runs(name: str) -> dict[str, Trajectory]:
    case = _double(CASES[name])
    return {
        "halves": accelerated_run(case, [TENSOR, OVERLAP, "checkpoint"], steps=3, max_grad_norm=0.5),
        "odd": accelerated_run(case, [TENSOR, OVERLAP], steps=3, global_batch=3),
        "one sample": accelerated_run(
            case, [TENSOR, OVERLAP], steps=3, global_batch=2, gradient_accumulation_steps=2
        ),
    }


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_training_is_that_of_one_process(name: str) -> None:
    case = _double(CASES[name])
    references = {
        "halves": reference_run(case, steps=3, max_norm=0.5),
        "odd": reference_run(case, steps=3, global_batch=3),
        "one sample": reference_run(case, steps=3, global_batch=2),
    }
    ranks = run_ranks(_runs, 2, args=(name,), timeout_s=100)
    for what, reference in references.items():
        report = compare(ranks[0][what], reference)
        assert max(report.max_param_error, report.max_loss_error) < 2e-6, f"{what}: {report.describe()}"
        assert_ranks_agree([rank[what] for rank in ranks])


@pytest.mark.slow
def test_beside_other_methods() -> None:
    zero_bubble = ("pipeline_parallel", {"schedule": "ZBVZeroBubble"})
    beside = {
        "fsdp": ({"zero": 2}, ["fsdp", "checkpoint"]),
        "zero bubble": ({"pipeline": 2}, [zero_bubble]),
        "compile": ({"data": 2}, [("compile", {"backend": "aot_eager"})]),
    }
    strategies = {
        name: [("parallel_mode", [("tensor", 2), *axes.items()]), OVERLAP, *methods]
        for name, (axes, methods) in beside.items()
    }
    check(CASES["tied_llama"], 4, strategies)


def _autocast() -> tuple[list[float], list[float]]:
    case, methods = CASES["hf_llama"], [TENSOR, ("amp_native", "bf16")]
    return tuple(accelerated_run(case, [*methods, *more], steps=3).losses for more in ([], [OVERLAP]))  # type: ignore[return-value]


def test_products_are_those_of_autocast() -> None:
    for plain, overlapped in run_ranks(_autocast, 2, timeout_s=60):
        assert overlapped == pytest.approx(plain, rel=1e-3)


class _Net(nn.Module):
    """Two columns of one input and a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6, bias=False), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.gate(x) * self.up(x))
        return out


LAYOUT = Layout({"gate": LayerStyle("colwise"), "up": LayerStyle("colwise"), "down": LayerStyle("rowwise")})


class _Products(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._log.append("product")
        return func(*args, **(kwargs or {}))


@dataclass
class _Work:
    work: Any
    log: list[str]

    def wait(self) -> None:
        self.log.append("wait")
        self.work.wait()


def _logged(reduce: Callable[..., Any], log: list[str]) -> Callable[..., Any]:
    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        log.append(f"begin {len(tensor)}" if async_op else "reduce")
        return _Work(reduce(tensor, *args, async_op=async_op, **options), log)

    return all_reduce


def _order(batch: int) -> tuple[list[str], list[str], list[torch.Tensor], list[torch.Tensor]]:
    """The log forward and backward; output, and the gradients of the input, divided and whole."""
    whole, model = _Net(), _Net()
    group = TensorGroup(init_device_mesh("cpu", (2,)), overlap=True)
    divide(model, LAYOUT, group, [RegionSpec(("gate", "up"), ("down",))])
    x = torch.randn(batch, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch, _Products(log):
        patch.setattr(dist, "all_reduce", _logged(dist.all_reduce, log))
        out = model(x)
        forward = log.copy()
        log.clear()
        out.square().sum().backward()
    theirs = x.detach().clone().requires_grad_()
    expected = whole(theirs)
    expected.square().sum().backward()
    return forward, log, [out.detach(), x.grad], [expected.detach(), theirs.grad]


def _without_gradients() -> list[str]:
    model = _Net()
    divide(model, LAYOUT, TensorGroup(init_device_mesh("cpu", (2,)), overlap=True))
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch, _Products(log), torch.no_grad():
        patch.setattr(dist, "all_reduce", _logged(dist.all_reduce, log))
        model(torch.ones(4, 4))
    return log


def test_the_second_half_is_computed_while_the_first_is_reduced() -> None:
    forward = ["product", "product", "product", "begin 2", "product", "begin 1", "wait", "wait"]
    # The row's two gradients, then those of the second column; the first column reduces the sum of both.
    backward = [*["product"] * 4, "product", "begin 2", "product", "begin 1", "product", "wait", "wait"]
    for first, second, found, expected in run_ranks(_order, 2, args=(3,), timeout_s=60):
        assert (first, second) == (forward, backward)
        torch.testing.assert_close(found, expected)


def test_one_sample_is_one_half() -> None:
    for first, second, found, expected in run_ranks(_order, 2, args=(1,), timeout_s=60):
        assert first == ["product"] * 3 + ["begin 1", "wait"]
        assert second == ["product"] * 5 + ["begin 1", "product", "wait"]
        torch.testing.assert_close(found, expected)


def test_rows_overlap_without_gradients_too() -> None:
    expected = ["product", "product", "product", "begin 2", "product", "begin 2", "wait", "wait"]
    assert run_ranks(_without_gradients, 2, timeout_s=60) == [expected] * 2


def test_overlap_is_refused_with_a_divided_sequence() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        TensorParallelConfig(overlap=True, sequence=True)
