"""Recomputation writes no buffer a second time, and reads those that the forward pass has read."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atorch_ns import auto_accelerate
from atorch_ns.capture.operators import label
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


class Attending(nn.Module):
    """Products q, k, v, attention written out, products out and up, and a function after them."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.attention = attention
        self.projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, 8]."""
        query, key, value, out, up = self.projections
        if self.attention == "fused":
            mixed = nn.functional.scaled_dot_product_attention(
                query(x)[:, None], key(x)[:, None], value(x)[:, None]
            )[:, 0]
        else:
            mixed = (query(x) @ key(x).transpose(1, 2)).softmax(-1) @ value(x)
        return torch.tanh(up(torch.tanh(out(mixed))))


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[label(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("attention", "rule", "products", "attentions"),
    [
        ("written out", "every_second_product", 2, 2),  # k and out of q, k, v, out, up
        ("fused", "every_second_product", 2, 0),
        ("written out", "all_but_attention", 0, 2),
        ("fused", "all_but_attention", 0, 1),
        ("written out", ["aten.addmm"], 0, 2),
        ("written out", ["aten.bmm.default"], 5, 0),
    ],
)
def test_what_is_recomputed(attention: str, rule: Any, products: int, attentions: int) -> None:
    counts = []
    for strategy in ([], [("checkpoint", {"save_operators": rule, "wrap_class": ["Attending"]})]):
        torch.manual_seed(0)
        model = nn.Sequential(Attending(attention), Attending(attention))
        _, result, _ = auto_accelerate(model, torch.optim.SGD, load_strategy=strategy)
        assert result is not None
        with Calls() as calls:
            result.model(torch.randn(2, 16, 8)).sum().backward()
        counts.append(calls.names)
    more = counts[1] - counts[0]
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu" if attention == "fused" else "aten.bmm"
    assert (more["aten.addmm"], more[kernel]) == (2 * products, 2 * attentions)
