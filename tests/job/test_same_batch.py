"""Ranks that divide one model and are given different samples end with an error; those with data of their own train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from atorch_ns import ComputeConfig, auto_accelerate, parallelize
from atorch_ns.cluster import Mesh
from atorch_ns.errors import InputError
from atorch_ns.job import SameBatch
from atorch_ns.testing.workers import run_ranks


class Net(nn.Module):
    """Two layers; takes the targets too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def _refusal(step: Callable[[], Any]) -> str:
    try:
        step()
    except InputError as error:
        return str(error)
    return ""


def _trained(axes: list[tuple[str, int]], seed: int, targets_seed: int) -> tuple[str, str]:
    """What a step by ``train_step`` refuses, and one of a loop of one's own, with this rank's samples."""
    torch.manual_seed(0)
    model = Net()
    data = [torch.randn(16, 8, generator=torch.Generator().manual_seed(one)) for one in (seed, targets_seed)]
    status, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        TensorDataset(*data),
        lambda batch, output: nn.functional.mse_loss(output, batch[1]),
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8},
        model_input_format="unpack_sequence",
        load_strategy=[("parallel_mode", (axes, None))],
    )
    assert status
    batch = next(iter(result.dataloader))
    loop = "" if axes[0][0] == "pipeline" else _refusal(lambda: result.model(batch[0]))
    with torch.no_grad():  # validation first, on data that are equal
        result.train_step.evaluate([torch.zeros(8, 8), torch.zeros(8, 8)])
    return _refusal(lambda: result.train_step(batch)), loop


def _cases(folder: Path) -> dict[str, tuple[str, str]]:
    rank = dist.get_rank()
    found = {
        "equal": _trained([("tensor", 2)], 1, 2),
        "data": _trained([("data", 2)], rank, rank),
        "pipeline": _trained([("pipeline", 2)], rank, 2),
        "tensor": _trained([("tensor", 2)], rank, 2),
        "targets": _trained([("tensor", 2)], 1, rank),
    }
    made = _parallelized(rank, folder)
    return {**found, "a module": (made, "")}


def _parallelized(seed: int, folder: Path) -> str:
    torch.manual_seed(0)
    sample = {"x": torch.randn(4, 8)}
    module = parallelize(
        Net(), sample, "autodist", ComputeConfig(plan_ngpus=2, runtime_ngpus=2), gen_savedir=folder
    )
    torch.manual_seed(seed)
    return _refusal(lambda: module(x=torch.randn(4, 8)))


def test_different_samples_of_ranks_that_divide_a_model_end_on_each_of_them(tmp_path: Path) -> None:
    first, second = run_ranks(_cases, 2, args=(tmp_path,))
    assert first == second
    assert first["equal"] == first["data"] == ("", "")
    assert "batch[0] differ" in first["tensor"][1]
    assert first["targets"][1] == ""
    assert "batch[1] differ" in first["targets"][0]
    for name in ("pipeline", "tensor", "a module"):
        assert "ranks 0 and 1 divide one model" in first[name][0]
        assert "torch.manual_seed" in first[name][0]
    assert "batch['x']" in first["a module"][0]


def _compared() -> dict[str, str]:
    rank = dist.get_rank()
    mesh = Mesh([("tensor", 2)], device_type="cpu")
    tokens = torch.arange(100_000)
    given = {
        "rounding": [torch.ones(10) * (1.0 + 1e-3 * rank), torch.tensor(float("nan"))],
        "one token": {"ids": torch.tensor([1, 2, 3 + rank])},
        "order": {"ids": tokens if rank == 0 else tokens.flip(0)},
        "shape": [torch.zeros(2 + rank)],
        "flag": {"causal": rank == 0},
        "kinds": [
            torch.zeros(2, dtype=torch.complex64),
            torch.zeros(0),
            torch.zeros(3, dtype=torch.bool),
            torch.zeros(3, dtype=torch.uint16),
            torch.zeros(3, dtype=torch.float8_e4m3fn),
            object(),
        ],
        "nothing": [],
        "names": {"file": f"rank-{rank}"},
    }
    found = {name: _refusal(lambda nest=nest: SameBatch(mesh).check(nest)) for name, nest in given.items()}
    later = SameBatch(mesh)
    for _ in range(1000):
        later.check([torch.zeros(1)])
    found["later"] = _refusal(lambda: later.check([torch.full((1,), float(rank))]))
    return found


def test_what_differs_is_named() -> None:
    first, second = run_ranks(_compared, 2)
    assert first == second
    assert not any(first[name] for name in ("rounding", "kinds", "nothing", "names"))
    assert "batch['ids'] differ, such as 3 and 4" in first["one token"]
    assert "batch['ids'] differ" in first["order"]
    assert "batch[0] float32[2] and batch[0] float32[3]" in first["shape"]
    assert "True and batch['causal'] False" in first["flag"]
    assert "such as 0 and 1" in first["later"]


def _four() -> tuple[str, str]:
    rank = dist.get_rank()
    mesh = Mesh([("tensor", 2), ("data", 2)], device_type="cpu")
    by_data = _refusal(lambda: SameBatch(mesh).check([torch.full((1,), rank // 2)]))
    one_wrong = _refusal(lambda: SameBatch(mesh).check([torch.full((1,), int(rank == 3))]))
    return by_data, one_wrong


def test_data_ranks_have_samples_of_their_own() -> None:
    found = run_ranks(_four, 4)
    assert [by_data for by_data, _ in found] == [""] * 4
    assert [bool(wrong) for _, wrong in found] == [False, False, True, True]
    assert "ranks 2 and 3" in found[2][1]
