"""What fully sharded training does to the model's floating inputs: under autocast they stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.testing import run_ranks

METHODS: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "zero2": "zero2",
    "few units": ("fsdp", {"atorch_wrap_cls": "LayerNorm"}),
}
SHARDED = tuple(METHODS)[1:]


class Timed(nn.Module):
    """Frequencies of times up to 1000, of which bf16 keeps 8 bits, and modules that refuse mixed dtypes on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 32)
        self.stem = nn.Linear(32, 32)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        )
        self.mixed = nn.Bilinear(32, 32, 8)
        self.bag = nn.EmbeddingBag(4, 8, mode="sum")
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, w: Tensor, ids: Tensor) -> dict[str, Any]:
        """x [B, 32], t, y and w [B], ids [B, 2]."""
        waves = torch.sin(t[:, None] * torch.arange(1, 33))
        hidden = self.stem(waves + self.norm(x))
        hidden = self.mixed(self.body(hidden).to(x.dtype), x)
        hidden = self.last(hidden + self.bag(ids, per_sample_weights=torch.stack([t, y], 1) / 1000))
        loss = ((self.head(hidden).float()[:, 0] - y).square() * w).mean()
        return {"loss": loss, "seen": x.dtype}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, heavy: float = 1.0) -> None:
        self.heavy = heavy

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(32, generator=draws),
            "t": 1000 * torch.rand((), generator=draws),
            "y": torch.randn((), generator=draws),
            "w": torch.tensor(self.heavy),
            "ids": torch.tensor([index % 4, index % 3]),
        }


Run = tuple[dict[str, Tensor], list[float], set[torch.dtype]]


def _run(methods: list[Any], heavy: float = 1.0) -> Run:
    torch.manual_seed(0)
    seen: set[torch.dtype] = set()

    def loss(_: Any, output: dict[str, Any]) -> Tensor:
        seen.add(output["seen"])
        return torch.as_tensor(output["loss"] / heavy)

    _, result, _ = auto_accelerate(
        Timed(),
        torch.optim.AdamW,
        Samples(heavy),
        loss,
        optim_args={"lr": 1e-2, "eps": 5e-3},
        dataloader_args={"batch_size": 16, "shuffle": False},
        model_input_format="unpack_dict",
        load_strategy=methods,
    )
    assert result is not None
    losses = [float(result.train_step(batch)) for batch in result.dataloader or ()]
    return checkpoint.export_state_dict(result), losses, seen


def _runs(amp: Any, heavy: float) -> dict[str, Run]:
    return {name: _run([method, ("amp_native", amp)], heavy) for name, method in METHODS.items()}


@pytest.mark.parametrize(
    ("amp", "heavy"), [("bf16", 1.0), ({"dtype": "fp16", "init_scale": 256.0}, 1e6)], ids=["bf16", "fp16"]
)
def test_under_autocast_they_are_those_of_a_replica(amp: Any, heavy: float) -> None:
    torch.manual_seed(0)
    start = Timed().state_dict()
    runs = run_ranks(_runs, 2, args=(amp, heavy), timeout_s=110)[0]
    want, losses, _ = runs["ddp"]
    update = _distance(want, start)
    for name in SHARDED:
        got, found, seen = runs[name]
        assert seen == {torch.float32}, name
        assert found == pytest.approx(losses, rel=2e-2), name
        off = _distance(want, got) / update
        assert off < 0.05, f"{name}: {off:.2e} of the update"


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] - other[name]).abs().sum()) for name in one)


def _cast_ones() -> list[set[torch.dtype]]:
    given: dict[str, Any] = {"mixed_precision": "bf16"}
    methods: list[list[Any]] = [[("fsdp", given), ("amp_native", "bf16")], ["fsdp", ("half", "bf16")]]
    return [_run(each)[2] for each in methods]


def test_dtypes_of_the_users_own_and_half_cast_them() -> None:
    assert run_ranks(_cast_ones, 2, timeout_s=60)[0] == [{torch.bfloat16}] * 2
