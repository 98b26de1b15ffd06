"""Models that nobody prepared: unused, frozen, too few parameters, convolutions, no repeated block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch_ns import auto_accelerate
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import (
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import catch_ranks, run_ranks

STRATEGIES: tuple[list[Any], ...] = (["ddp"], ["zero1"], ["zero2"], ["fsdp"])


class Unused(nn.Module):
    """Half of it never takes part, and what is between two equal sizes is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.unused = nn.Linear(4, 4)
        self.probe = nn.Linear(4, 1)  # of which one row cannot be divided, nor its bias at all
        self.rest = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x) + nn.functional.linear(x, self.rest).sum()
        return out


class ManyUnused(Unused):
    """More than torch names at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(130))


class Containers(nn.Module):
    """Layers that are dictionaries of modules, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
            for _ in range(3)
        )
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = x + layer["down"](torch.relu(layer["up"](layer["norm"](x))))
        out: Tensor = self.last(x)
        return out


class ReadApart(nn.Module):
    """Weights that the model's own code reads: of layers that nobody calls, and of parts of a block that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.stem = Parts()
        self.queries, self.scale = nn.Embedding(4, 4), nn.Parameter(torch.tensor(0.1))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem.second(torch.relu(self.stem.first(x)))
        for layer in self.layers:
            x = x + torch.tanh(nn.functional.linear(x, layer.weight))
        for block in self.blocks:
            x = block(x) + 0.1 * x @ block[0].weight.T  # type: ignore[index]
        x = x + self.scale * x @ self.queries.weight
        out: Tensor = self.last(x)
        return out


class Parts(nn.Module):
    """Its parts are called by others, and it never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("never called")


class TwoTowers(nn.Module):
    """Two towers that are computed in turns, one of which the loss does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.unseen = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        other = x
        for seen, unseen in zip(self.seen, self.unseen, strict=True):
            x, other = seen(x), unseen(other)
        return self.last(x), other


class Sometimes(nn.Module):
    """A layer and a factor for rare samples: some steps use them on one rank alone, and some do not use them at all."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Linear(4, 2)
        self.rare = nn.Linear(4, 2)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.usual(x)
        chosen = x[:, 0] > 0.8  # (0, 2), (0, 0), (0, 1), (1, 1), (0, 0) samples of two ranks in five steps
        if chosen.any():
            out = out.index_add(0, chosen.nonzero()[:, 0], self.factor * self.rare(x[chosen]))
        return out.sum(1, keepdim=True)


class _Recomputed(torch.autograd.Function):
    """Keeps no activations: its backward pass calls the layers again, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:  # type: ignore[override]
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            start = ctx.saved_tensors[0].detach().requires_grad_()
            y = start
            for layer in ctx.layers:
                y = layer[1](layer[0](y))
            y.backward(gradient)
        return start.grad, None


class Reversible(nn.Module):
    """Its layers are called by an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(_Recomputed.apply(self.first(x), self.layers))  # type: ignore[no-untyped-call]
        return out


class OneParameter(nn.Module):
    """Fewer parameters than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.only(x)
        return out


class Frozen(nn.Module):
    """The first layer does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


class Convolutions(nn.Module):
    """Not a transformer, and no two layers alike but for their class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv1d(3, 2, 3), nn.Flatten(), nn.Linear(4, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x[:, None])
        return out


class Twice(nn.Module):
    """One layer called twice, and shared under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.again(torch.tanh(self.layer(x))))
        return out


class KeepsLists(nn.Module):
    """Calls its children by a list of its own, as decoders of segmentation do."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, nn.Module]] = []
        for place in range(4):
            step = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.add_module(f"step_{place}", step)
            self.steps.append((f"step {place}", step))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _, step in self.steps:
            x = x + step(x)
        out: Tensor = self.last(x)
        return out


class ChangesViews(nn.Module):
    """Changes views that its blocks return, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))) for _ in range(3))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            parts = block(x)
            parts += 0.5
            x = parts.tanh().flatten(1)
        out: Tensor = self.last(x)
        return out


class Skips(nn.Module):
    """Blocks that a rank calls only for some of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        wanted = (x > 0.8).float()
        for place, block in enumerate(self.blocks):
            if wanted[:, place].any():
                x = x + wanted[:, place, None] * block(x)
        out: Tensor = self.last(x)
        return out


class _Gated(nn.Module):
    """Is always called, and uses one of its parameters only for some samples, as fused experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 1)
        self.expert = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        x = x * self.gate(x).sigmoid()
        return x + wanted[:, None] * (x @ self.expert) if wanted.any() else x


class UsesSome(nn.Module):
    """Blocks that some ranks use in part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Gated() for _ in range(4))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        wanted = (x > 0.8).float()
        for place, block in enumerate(self.blocks):
            x = block(x, wanted[:, place])
        out: Tensor = self.last(x)
        return out


class SharedInside(nn.Module):
    """Blocks that hold one layer together."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def _batch(size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, 1, generator=generator)}


def _loss(batch: dict[str, Tensor], output: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return nn.functional.mse_loss(output, batch["y"])


class _Picked(nn.Module):
    """Takes the input out of the batch, so that the batch can be a dictionary with more in it."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = kind()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(batch["x"])
        return out


class _Named(_Picked):
    """Takes one item of the batch by its name; the loss takes the other."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def _case(kind: Callable[[], nn.Module], *, named: bool = False) -> Case:
    return dataclasses.replace(
        get_case("mlp"),
        name=kind.__name__,
        build=lambda: (_Named if named else _Picked)(kind),
        make_batch=_batch,
        loss_func=_loss,
        model_input_format="unpack_dict" if named else None,
    )


def _train(kind: Callable[[], nn.Module], strategy: list[Any]) -> None:
    accelerated_run(_case(kind), strategy)


def _train_all(kind: Callable[[], nn.Module]) -> list[Any]:
    return [accelerated_run(_case(kind), strategy) for strategy in _strategies(kind)]


def _strategies(kind: Callable[[], nn.Module]) -> tuple[list[Any], ...]:
    if kind in (Containers, ReadApart, TwoTowers):
        return (*STRATEGIES, ["fsdp", "checkpoint"], [("parallel_mode", ([("pipeline", 2)], None))])
    if kind is KeepsLists:
        return (*STRATEGIES, [("parallel_mode", ([("pipeline", 2)], None))])
    if kind in (Skips, UsesSome):
        return (*STRATEGIES, ["fsdp", "checkpoint"])
    return STRATEGIES[:2] if kind is Reversible else STRATEGIES


@pytest.mark.parametrize(
    "kind",
    [
        Containers,
        ReadApart,
        TwoTowers,
        Unused,
        ManyUnused,
        Sometimes,
        Reversible,
        OneParameter,
        Frozen,
        Convolutions,
        Twice,
        SharedInside,
        KeepsLists,
        ChangesViews,
        Skips,
        UsesSome,
    ],
    ids=lambda k: k.__name__,
)
def test_odd_models(kind: Callable[[], nn.Module]) -> None:
    trainable = lambda model: [p for p in model.parameters() if p.requires_grad]  # noqa: E731
    reference = reference_run(_case(kind), optim_param_func=trainable)
    ranks = run_ranks(_train_all, 2, args=(kind,))
    for position, strategy in enumerate(_strategies(kind)):
        try:
            runs = [rank[position] for rank in ranks]
            assert_parity(compare(reference, runs[0]))
            assert_ranks_agree(runs)
        except AssertionError as error:
            raise AssertionError(f"{strategy}: {error}") from error


def _train_in_stages(kind: Callable[[], nn.Module]) -> Any:
    return accelerated_run(_case(kind), [("parallel_mode", ([("pipeline", 2), ("data", 2)], None)), "ddp"])


def test_scalars_are_averaged_beside_an_axis_that_divides_the_model() -> None:
    runs = run_ranks(_train_in_stages, 4, args=(ReadApart,))
    assert_parity(compare(reference_run(_case(ReadApart)), runs[0]))
    assert_ranks_agree(runs)


def _goes_on_after_a_failed_pass() -> list[bool]:
    _, result, _ = auto_accelerate(Unused(), load_strategy=["ddp"])
    assert result is not None

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("in the pass")

    out = result.model(torch.ones(1, 4))
    out.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    for _ in range(2):
        result.model(torch.ones(1, 4)).sum().backward()
    return [parameter.grad is None for parameter in result.model.parameters()]


def test_unused_parameters_are_found_after_a_pass_that_failed() -> None:
    assert run_ranks(_goes_on_after_a_failed_pass, 2) == [[False, False, False, True, True, True, True]] * 2


def _train_named() -> list[Any]:
    return [accelerated_run(_case(Convolutions, named=True), strategy) for strategy in (["ddp"], ["fsdp"])]


def test_a_batch_with_more_than_forward_takes() -> None:
    reference = reference_run(_case(Convolutions))
    for rank in zip(*run_ranks(_train_named, 2), strict=True):
        assert_parity(compare(reference, rank[0]))
        assert_ranks_agree(rank)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (["fsdp"], "StepError: Linear is called in the backward pass"),
        ([("parallel_mode", ([("pipeline", 2)], None))], "divided over pipeline, the model trains otherwise"),
    ],
)
def test_gradients_by_the_models_own_function_are_not_divided(strategy: list[Any], text: str) -> None:
    for outcome in catch_ranks(_train, 2, args=(Reversible, strategy)):
        assert text in outcome.describe()
