"""Recomputation writes no buffer a second time, and reads those that the forward pass has read."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch_ns import auto_accelerate
from atorch_ns.checkpoint import export_state_dict
from atorch_ns.testing import run_ranks
from opt_lib._recompute import BufferSafeRecompute


class Average(nn.Module):
    """Divides by a running average that it writes, each in its own way."""

    ema: Tensor
    constant: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("ema", torch.ones(8))
        self.register_buffer("constant", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        y = x / self.ema.clone() * self.constant
        new = 0.9 * self.ema + 0.1 * x.detach().abs().mean(0)
        if self.how == "in place":
            self.ema.copy_(new)
        elif self.how == "assigned":
            self.ema = new
        else:
            self.ema.data.copy_(new)
        return y


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = norm
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        out: Tensor = x + self.drop(torch.relu(self.norm(self.layer(x))))
        return out


class Instances(nn.InstanceNorm1d):
    """The 8 features of a sample are its positions."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        return super().forward(x.unsqueeze(1)).squeeze(1)


NORMS: dict[str, Any] = {
    "batch": lambda: nn.BatchNorm1d(8),
    "batch, cumulative": lambda: nn.BatchNorm1d(8, momentum=None),
    "instance": lambda: Instances(1, track_running_stats=True),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    **{how: functools.partial(Average, how) for how in ("in place", "assigned", "data")},
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(NORMS[name]()) for _ in range(3)))


def _trained(name: str, strategy: list[Any], steps: int = 4) -> dict[str, Tensor]:
    inputs = torch.randn(steps * 8, 8, generator=torch.Generator().manual_seed(1)) + 3
    _, result, _ = auto_accelerate(
        _model(name),
        torch.optim.AdamW,
        inputs,
        lambda batch, output: (output - batch).square().mean(),
        dataloader_args={"batch_size": 8},
        optim_args={"lr": 1e-2},
        load_strategy=strategy,
    )
    assert result is not None
    torch.manual_seed(2)
    for batch in result.dataloader or ():
        result.train_step(batch)
    state = export_state_dict(result)
    return {key: value.clone() for key, value in (state or {}).items()}


def _assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    "config", [{}, {"no_reentrant": False}, {"save_operators": ["aten.addmm", "aten.clone"]}]
)
def test_parameters_and_buffers_are_those_without_recomputation(name: str, config: dict[str, Any]) -> None:
    _assert_equal(_trained(name, [("checkpoint", config)]), _trained(name, []))


@pytest.mark.parametrize("name", ["batch", "in place"])
def test_compiled(name: str) -> None:
    torch.compiler.reset()
    compiled = ("compile", {"backend": "aot_eager"})
    _assert_equal(_trained(name, [compiled, "checkpoint"]), _trained(name, [compiled]))


@pytest.mark.parametrize("name", ["batch", "in place"])
def test_compiled_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        torch._dynamo.graph_break()
        out: Tensor = x + torch.relu(y)
        return out

    monkeypatch.setattr(Block, "forward", forward)
    torch.compiler.reset()
    compiled = ("compile", {"backend": "aot_eager"})
    _assert_equal(_trained(name, [compiled, "checkpoint"]), _trained(name, []))


def test_constants_are_not_copied() -> None:
    block = Block(Average("in place"))
    once = BufferSafeRecompute(lambda run, x: run(x))
    once(block, torch.ones(2, 8))
    assert [place.name for place in once._written] == ["ema"]
    assert [place.name for place in once._watched or ()] == ["constant"]
    assert isinstance(block.norm, Average)
    block.norm.register_forward_hook(lambda module, *_: module.constant.add_(1))
    once(block, torch.ones(2, 8))
    assert [place.name for place in once._written] == ["ema", "constant"]


def test_a_copied_model_has_buffers_of_its_own() -> None:
    _, result, _ = auto_accelerate(_model("batch"), torch.optim.SGD, load_strategy=["checkpoint"])
    assert result is not None
    model = result.model
    model(torch.randn(4, 8)).sum().backward()
    other = copy.deepcopy(model)
    other(torch.randn(4, 8)).sum().backward()
    for each, num_batches in ((model, 1), (other, 2)):
        norms = [module for module in each.modules() if isinstance(module, nn.BatchNorm1d)]
        assert [norm.num_batches_tracked for norm in norms] == [num_batches] * 3


def test_buffers_come_back_after_an_error() -> None:
    passes = []

    def keep(run: Any, x: Tensor) -> Any:
        passes.append(run)
        return run(x)

    block = _model("batch").get_submodule("0")
    once = BufferSafeRecompute(keep)
    once(block, torch.randn(4, 8))
    mean = block.get_buffer("norm.running_mean")
    block.get_submodule("norm").register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        passes[0](torch.randn(4, 8))
    assert block.get_buffer("norm.running_mean") is mean
    assert int(block.get_buffer("norm.num_batches_tracked")) == 1


def _with_and_without(strategies: list[list[Any]]) -> list[list[dict[str, Tensor]]]:
    return [[_trained("batch", [*each, *more], 8) for more in ([], ["checkpoint"])] for each in strategies]


class Cache:
    """Keys of the positions seen so far, of all layers."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}

    def update(self, layer: int, keys: Tensor) -> Tensor:
        self.keys.setdefault(layer, []).append(keys)
        return torch.stack(self.keys[layer]).sum(0)


class CachedBlock(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        """x [B, 8]."""
        if isinstance(cache, list):
            cache.append(self.layer(x))
            return x + torch.stack(cache[self.number :]).sum(0)
        return x + cache.update(self.number, self.layer(x))


class MakesCache(nn.Module):
    """Hands a cache of its own to its blocks."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(CachedBlock(number) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        cache = self.kind()
        for block in self.blocks:
            x = block(x, cache)
        return x


@pytest.mark.parametrize("kind", [Cache, list])
@pytest.mark.parametrize("no_reentrant", [True, False])
def test_a_cache_of_the_models_own_is_not_filled_twice(kind: type, no_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = MakesCache(kind)
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    _, result, _ = auto_accelerate(model, load_strategy=[("checkpoint", {"no_reentrant": no_reentrant})])
    assert result is not None
    result.model(x).square().sum().backward()
    for parameter, gradient in zip(result.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_with_several_processes() -> None:
    strategies = [["ddp"], [("ddp", {}), ("amp_native", "bf16")], ["fsdp", ("amp_native", "bf16")]]
    for found in run_ranks(_with_and_without, 2, args=(strategies,), timeout_s=90):
        for plain, recomputed in found:
            _assert_equal(recomputed, plain)
