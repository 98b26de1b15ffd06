"""Models built on the meta device get the same values however they are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from atorch_ns import auto_accelerate
from atorch_ns.errors import InputError
from atorch_ns.job import Materialiser, is_on_meta, local_part
from atorch_ns.job.materialise import divided_like
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerated_run, snapshot
from atorch_ns.testing.workers import run_ranks


def _on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return get_case(name).build()


def _initial(name: str, strategy: Any, seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed if not dist.is_initialized() or dist.get_rank() == 0 else 99)
    _, result, _ = auto_accelerate(_on_meta(name), load_strategy=strategy)
    assert result is not None
    assert not is_on_meta(result.model)
    return snapshot(result.model)


@pytest.mark.parametrize("name", ["mlp", "hf_llama", "hf_gpt2"])
@pytest.mark.parametrize(
    "strategy", [["fsdp"], ["ddp"], ["zero2", "checkpoint"], ["fsdp", ("half", "bf16")]], ids=str
)
def test_values_do_not_depend_on_the_strategy(name: str, strategy: Any) -> None:
    alone = _initial(name, [step for step in strategy if step not in ("fsdp", "ddp", "zero2")])
    for rank in run_ranks(_initial, 2, args=(name, strategy)):
        assert rank.keys() == alone.keys()
        for parameter, value in alone.items():
            assert torch.equal(rank[parameter], value), parameter
    other = _initial(name, [], seed=6)
    assert any(not torch.equal(other[key], alone[key].to(other[key].dtype)) for key in alone)


def _train(name: str, strategy: Any) -> Any:
    torch.manual_seed(5)
    return accelerated_run(get_case(name), strategy, model=_on_meta(name))


def test_a_meta_model_trains() -> None:
    alone = _train("hf_llama", [])
    for run in run_ranks(_train, 2, args=("hf_llama", ["fsdp", "checkpoint"])):
        assert run.losses == pytest.approx(alone.losses, abs=1e-5)


class _NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class _ForgetsBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize(
    ("kind", "words"), [(_NoReset, "has no reset_parameters"), (_ForgetsBuffer, "leaves table unset")]
)
def test_values_that_nobody_sets_are_an_error(kind: type[nn.Module], words: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), kind())
    with pytest.raises(InputError, match=words):
        auto_accelerate(model, load_strategy=[])


def ones(module: nn.Module) -> None:
    """Sets every parameter of a module to 1."""
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def _with_init_function() -> bool:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), _NoReset())
    _, result, _ = auto_accelerate(model, load_strategy=[("fsdp", {"param_init_fn": ones})])
    assert result is not None
    return all(bool((value == 1).all()) for value in snapshot(result.model).values())


def test_param_init_fn() -> None:
    assert run_ranks(_with_init_function, 2) == [True, True]


def test_tied_parameters_stay_tied() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        model[1].weight = model[0].weight
    Materialiser(model, torch.device("cpu"), seed=0).materialise([model])
    assert model[0].weight is model[1].weight
    assert not model[0].weight.is_meta


def _parts(shape: tuple[int, int]) -> list[tuple[str, bool, bool]]:
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    divided: dict[str, DTensor] = {
        "rows": distribute_tensor(whole, mesh["tensor"], [Shard(0)]),
        "columns of replicas": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
    }
    for dim in (0, 1):
        layer = nn.Linear(shape[1], shape[0], bias=False)
        layer.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(dim)]))
        fully_shard(layer, mesh=mesh["data"])
        divided[f"tensor along {dim}, then fully_shard"] = layer.weight
    return [
        (
            name,
            torch.equal(local_part(whole, tensor), tensor.to_local()),
            torch.equal(divided_like(whole, tensor).full_tensor(), whole),
        )
        for name, tensor in divided.items()
    ]


@pytest.mark.parametrize("shape", [(8, 4), (6, 6), (6, 5), (2, 3)], ids=str)
def test_local_part(shape: tuple[int, int]) -> None:
    for rank in run_ranks(_parts, 4, args=(shape,)):
        assert [name for name, part, _ in rank if not part] == []
        assert [name for name, _, whole in rank if not whole] == []


class _Scaled(nn.Module):
    """A tensor that is neither parameter nor buffer, or one that only tells a shape."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scales = {"all": torch.arange(8.0, device=device)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x).view_as(x)
        return out


def _refusal(strategy: Any) -> str:
    with torch.device("meta"):
        model = nn.Sequential(_Scaled(), _Scaled())
    with pytest.raises(InputError) as caught:
        auto_accelerate(model, load_strategy=strategy)
    return str(caught.value)


def test_a_tensor_in_a_plain_attribute_is_named_on_all_ranks() -> None:
    found = [
        _refusal([]),
        *run_ranks(_refusal, 2, args=(["fsdp"],)),
        *run_ranks(_refusal, 2, args=(["ddp"],)),
    ]
    for text in found:
        assert "(_Scaled) has a meta tensor in its plain attribute scales" in text
        assert "register_buffer('scales', ..., persistent=False)" in text


class _Alias(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(8)
        self.original_mean = self.running_mean


def test_an_attribute_that_is_a_buffer_stays_that_buffer() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_Alias())
    Materialiser(model, torch.device("cpu"), seed=0).materialise([model])
    assert model[0].original_mean is model[0].running_mean
    assert not is_on_meta(model)


def test_a_model_that_is_not_on_meta_may_hold_a_tensor_that_is() -> None:
    for strategy in ([], ["fsdp"]):
        assert run_ranks(_keeps_it, 2 if strategy else 1, args=(strategy,))[0]


def _keeps_it(strategy: Any) -> bool:
    model = _Scaled("meta")
    auto_accelerate(model, load_strategy=strategy)
    return bool(model.scales["all"].is_meta)
