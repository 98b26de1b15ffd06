"""Loss scaling of fp16 by half and amp_native: the fields of a scale, and ranks that skip steps and scale alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.errors import InputError, StepError
from atorch_ns.job import LossScaling, Result
from atorch_ns.testing.models import CASES
from atorch_ns.testing.parity import accelerate_case, whole_parameters
from atorch_ns.testing.workers import run_ranks
from opt_lib.amp_native import AmpNativeConfig
from opt_lib.half import HalfConfig

CASE = CASES["tied_llama"]
SCALING = {"dtype": "fp16", "init_scale": 64.0, "growth_interval": 2, "hysteresis": 2, "min_scale": 32.0}
OVERFLOWS = (1, 4, 5, 6)
SCALES = [64.0, 64.0, 64.0, 128.0, 128.0, 64.0, 32.0, 32.0]
STATIC = {"dtype": "fp16", "static_scale": 16.0}
MESHES = {
    "ddp": [("parallel_mode", [("data", 2)]), "ddp"],
    "pipeline": [("parallel_mode", [("pipeline", 2)])],
    "tensor": [("parallel_mode", [("tensor", 2)])],
}


@pytest.mark.parametrize("config", [AmpNativeConfig, HalfConfig])
def test_the_fields_of_a_scale(config: type[AmpNativeConfig | HalfConfig]) -> None:
    assert config(**SCALING).loss_scaling == LossScaling(64.0, 2, 2, 32.0)
    assert config().loss_scaling == LossScaling()
    assert config(**STATIC).loss_scaling.static_scale == 16.0
    with pytest.raises(ValueError, match="less than min_scale"):
        config(init_scale=2.0, min_scale=4.0)
    for wrong in ({"hysteresis": 0}, {"static_scale": 0.0}, {"min_scale": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            config(**wrong)


class _Overflowing:
    """The loss, infinite on the second rank alone in some of the steps."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, batch: Any, output: Any) -> torch.Tensor:
        loss: torch.Tensor = CASE.loss_func(batch, output)
        return loss * math.inf if self.step in OVERFLOWS and dist.get_rank() == 1 else loss


def _train(strategy: list[Any], model: nn.Module | None = None) -> list[tuple[bool, float, bool]]:
    loss = _Overflowing()
    result = accelerate_case(CASE, strategy, steps=len(SCALES), loss_func=loss, model=model)
    found = []
    for loss.step, batch in enumerate(result.dataloader or ()):
        before = whole_parameters(result)
        result.train_step(batch)
        after = whole_parameters(result)
        changed = any(not torch.equal(value, before[name]) for name, value in after.items())
        found.append((result.train_step.skipped, _scale(result), changed))
    return found


def _scale(result: Result) -> float:
    return float(result.optim.scaler.scaler.get_scale())  # type: ignore[union-attr]


def _train_all(strategies: list[list[Any]]) -> list[list[tuple[bool, float, bool]]]:
    return [_train(strategy) for strategy in strategies]


@pytest.mark.parametrize("mesh", MESHES)
def test_all_ranks_skip_the_steps_that_one_overflows_and_have_one_scale(mesh: str) -> None:
    methods = [("half", SCALING), ("amp_native", STATIC)]
    ranks = run_ranks(_train_all, 2, args=([[*MESHES[mesh], one] for one in methods],), timeout_s=100)
    assert ranks[0] == ranks[1]
    for (_, config), steps in zip(methods, ranks[0], strict=True):
        scales = SCALES if config is SCALING else [16.0] * len(SCALES)
        bad = [number in OVERFLOWS for number in range(len(SCALES))]
        assert steps == [(one, scale, not one) for one, scale in zip(bad, scales, strict=True)]


def _train_last_stage_alone() -> list[tuple[bool, float, bool]]:
    model = CASE.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "norm.weight")
    return _train([*MESHES["pipeline"], ("amp_native", SCALING)], model)


def test_a_rank_without_gradients_scales_alike() -> None:
    ranks = run_ranks(_train_last_stage_alone, 2, timeout_s=60)
    assert ranks[0] == ranks[1]
    assert [scale for _, scale, _ in ranks[0]] == SCALES


def _interrupted(folder: Path) -> list[float]:
    """The scales of a job that is saved after the first of two overflows."""
    strategy = [*MESHES["pipeline"], ("amp_native", SCALING)]
    found = []
    for steps in (range(5), range(5, len(SCALES))):
        loss = _Overflowing()
        result = accelerate_case(CASE, strategy, steps=len(SCALES), loss_func=loss)
        if steps.start:
            checkpoint.load(folder, result)
        for loss.step, batch in zip(steps, result.dataloader or (), strict=False):
            result.train_step(batch)
            found.append(_scale(result))
        checkpoint.save(folder, result)
    return found


def test_a_checkpoint_keeps_the_count_of_overflows(tmp_path: Path) -> None:
    assert run_ranks(_interrupted, 2, args=(tmp_path / "saved",), timeout_s=60) == [SCALES] * 2


def test_weights_in_fp16_are_refused_where_their_gradients_would_be_scaled() -> None:
    model = nn.Linear(4, 4).half()
    arguments: dict[str, Any] = {
        "loss_func": lambda _, out: out.mean(),
        "load_strategy": [("amp_native", "fp16")],
    }
    with pytest.raises(InputError, match=r"trainable weights in fp16.*model\.float\(\).*half"):
        auto_accelerate(model, torch.optim.SGD, **arguments)
    auto_accelerate(model.requires_grad_(False), **arguments)


def test_complex_gradients_are_not_scaled() -> None:
    with pytest.raises(InputError, match="which torch cannot check for overflow"):
        auto_accelerate(
            nn.Linear(4, 4, dtype=torch.complex64),
            torch.optim.SGD,
            loss_func=lambda _, out: out.abs().mean(),
            load_strategy=[("amp_native", "fp16")],
        )


BATCHES = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(3))
PENALTIES = ("sum", "in place", "product", "stacked", "backward", "second pass", "prepared")
"""What a loop does with further losses and gradients that takes no thought of a scale."""
CHANGES = ("pass of its own", "pass before", "clipped", "written")
"""What would mix gradients that have the scale and gradients that have not."""


def _loop(kind: str, model: nn.Module, optimizer: Any, loss_func: Any, part: slice) -> None:
    for batch in (batches[part] for batches in BATCHES):
        optimizer.zero_grad()
        loss = loss_func(batch, model(batch))
        penalty = 0.3 * sum(p.float().square().sum() for p in model.parameters())
        if kind == "in place":
            loss += penalty
        elif kind == "product":
            loss = loss * (1 + penalty)
        elif kind == "stacked":
            loss = torch.stack([loss, penalty]).mean()
        elif kind == "pass before":
            penalty.backward()
        elif kind in PENALTIES and kind != "prepared":
            loss = loss + penalty
        if kind == "second pass":
            (loss / 2).backward(retain_graph=True)
            loss = loss / 2 + loss_func(batch, model(batch))
        torch.autograd.backward([loss]) if kind == "backward" else loss.backward()
        if kind == "pass of its own":
            penalty.backward()
        elif kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif kind == "prepared" and hasattr(optimizer, "prepare_gradients"):
            optimizer.prepare_gradients()
        if kind in ("written", "prepared"):
            with torch.no_grad():
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    parameter.grad.add_(parameter, alpha=0.3)
        optimizer.step()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def _loss(batch: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return (output.float() - batch).square().mean()


def _train_by_loops(strategy: str, method: str) -> dict[str, Any]:
    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    found: dict[str, Any] = {}
    for kind in PENALTIES + CHANGES[: None if method == "amp_native" else -1]:
        methods = [strategy, (method, {"dtype": "fp16", "init_scale": 1024.0})]
        _, result, _ = auto_accelerate(
            _model(), torch.optim.SGD, loss_func=_loss, optim_args={"lr": 0.1}, load_strategy=methods
        )
        assert result is not None
        try:
            _loop(kind, result.model, result.optim, result.loss_func, rows)
        except StepError as error:
            found[kind] = str(error)
        else:
            found[kind] = checkpoint.export_state_dict(result)
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("method", ["amp_native", "half"])
def test_loops_add_losses_and_what_they_do_to_scaled_gradients_is_refused(method: str, strategy: str) -> None:
    for kind, found in run_ranks(_train_by_loops, 2, args=(strategy, method), timeout_s=90)[0].items():
        if kind in CHANGES:
            assert "prepare_gradients" in found, kind
            continue
        model = _model()
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        _loop(kind, model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, slice(None))
        for name, expected in model.named_parameters():
            change = float((expected - start[name]).abs().max())
            assert float((found[name] - expected).abs().max()) < 0.05 * change, (kind, name)


def test_hooks_of_gradients_are_warned_of() -> None:
    model = _model()
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.warns(UserWarning, match="gradient times the loss scale"):
        auto_accelerate(model, torch.optim.SGD, loss_func=_loss, load_strategy=[("amp_native", "fp16")])
