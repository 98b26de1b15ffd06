"""What parallel modules cannot do is refused where a user asks for it, on all ranks, and with what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import ComputeConfig, build_optimizer, parallelize
from atorch_ns.errors import InputError, RankError, StepError
from atorch_ns.testing.workers import catch_ranks, run_ranks


class Net(nn.Module):
    """Two layers; a negative scale is an error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if scale < 0:
            raise ValueError(f"a scale of {scale}")
        found: torch.Tensor = self.down(torch.relu(self.up(x))) * scale
        return found


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def made(folder: str, policy: str = "dp", plan: int = 1, *, ranks: int = 2, **fields: Any) -> Any:
    return parallelize(
        Net(), {"x": X}, policy, ComputeConfig(plan, ranks, **fields), gen_savedir=folder, reuse="override"
    )


def hooked(folder: str) -> list[str]:
    """What hooks of inner modules and of gradients that come after ``parallelize`` say, and what is called."""
    divided, replicated = made(folder, "tp", 2), made(folder)
    calls: list[str] = []
    found = []
    for model in (divided, replicated):
        model(X)
        model.register_forward_hook(lambda *_: calls.append("whole"))
        model.up.register_forward_hook(lambda *_: calls.append("inner"))
        try:
            model(X)
            found.append("called")
        except Exception as error:
            found.append(str(error))
    assert calls == ["inner", "whole"]
    sharded = made(folder, use_zero=True)
    optimizer = build_optimizer(sharded, torch.optim.SGD, lr=0.1)
    sharded(X).sum().backward()
    optimizer.step()
    next(sharded.parameters()).register_hook(lambda gradient: gradient * 0)
    with pytest.raises(InputError) as refused:
        sharded(X)
    return [*found, str(refused.value)]


def test_hooks_that_would_not_be_called(tmp_path: Path) -> None:
    for divided, replicated, sharded in run_ranks(hooked, 2, args=(str(tmp_path),)):
        assert "up has a forward hook" in divided
        assert replicated == "called"
        assert "up.weight has a hook on its gradient" in sharded
        assert "sync_shard_grad" in sharded


def different(folder: str) -> None:
    module = Net()
    if dist.get_rank():
        module.down.bias.requires_grad_(False)
    parallelize(module, {"x": X}, "dp", ComputeConfig(1, 2), gen_savedir=folder, reuse="override")


def test_ranks_with_other_modules(tmp_path: Path) -> None:
    for outcome in catch_ranks(different, 2, args=(str(tmp_path),)):
        assert isinstance(outcome.error, RankError)
        assert "different arguments" in str(outcome.error)
        assert "ranks [1] have Net" in str(outcome.error)


def frozen(folder: str) -> float:
    module = Net().requires_grad_(False)
    made = parallelize(module, {"x": X}, "dp", ComputeConfig(1, 2), gen_savedir=folder, reuse="override")
    return float(made(X).sum())


def test_a_module_with_nothing_to_train_is_divided(tmp_path: Path) -> None:
    """It may be thawed later, or be a part of what is trained."""
    assert run_ranks(frozen, 2, args=(str(tmp_path),)) == pytest.approx([float(Net()(X).sum())] * 2)


def test_gradient_hooks_from_before(tmp_path: Path) -> None:
    model = Net()
    model.down.bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(InputError, match=r"down\.bias has a hook on its gradient"):
        parallelize(model, {"x": X}, "dp", ComputeConfig(1, 1), gen_savedir=str(tmp_path))


@pytest.mark.parametrize(
    "move",
    [
        nn.Module.half,
        nn.Module.share_memory,
        lambda model: model.to("meta"),
        lambda model: nn.Sequential(model).double(),
    ],
)
def test_moves_are_refused(tmp_path: Path, move: Callable[[nn.Module], object]) -> None:
    model = made(str(tmp_path), ranks=1)
    assert model.to("cpu").float() is model
    with pytest.raises(StepError, match="module_dtype"):
        move(model)
    assert model(X).dtype == torch.float32


def failing(folder: str) -> None:
    """A step whose forward pass fails on one rank."""
    model = made(folder)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
    for factor in (0, 1):
        model(X, -1.0 * factor * dist.get_rank()).sum().backward()
        optimizer.step()


def test_a_forward_pass_that_fails_on_one_rank(tmp_path: Path) -> None:
    start = time.monotonic()
    other, own = catch_ranks(failing, 2, args=(str(tmp_path),))
    assert own.message == "a scale of -1.0"
    assert "rank 1: ValueError: a scale of -1.0" in other.message, other.traceback
    assert time.monotonic() - start < 40


@pytest.mark.parametrize("norm", [-1.0, 0.0, float("nan")])
def test_norms_that_clip_nothing(tmp_path: Path, norm: float) -> None:
    model = made(str(tmp_path), ranks=1)
    optimizer: Any = build_optimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match="positive norm"):
        optimizer.clip_gnorm(norm)
