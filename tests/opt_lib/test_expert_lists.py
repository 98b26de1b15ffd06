"""expert_parallel divides experts that are modules of their own, called in a loop by the layer that holds them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atorch_ns.errors import InputError
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import (
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import run_ranks

WIDTH, VOCAB, NUM_EXPERTS, NUM_CHOICES = 32, 64, 4, 2


class Expert(nn.Module):
    """Its middle is of a width that two ranks do not divide, and so is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 45)
        self.down = nn.Linear(45, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(rows))) * self.scale
        return out


class Weighted(Expert):
    """Takes the weights of its rows as well."""

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(rows) * weights


class Loop(nn.Module):
    """Skips experts that no token has chosen, and counts tokens in a buffer."""

    def __init__(self, expert: type[nn.Module] = Expert) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(NUM_EXPERTS))
        self.register_buffer("seen", torch.zeros(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        weights, chosen = self.gate(rows).softmax(-1).topk(NUM_CHOICES, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(chosen == number)
            if len(row) == 0:
                continue
            self.seen[number] += len(row)
            out = out.index_add(0, row, self.result(expert, rows[row], weights[row, choice, None]))
        return out.view_as(x)

    def result(self, expert: nn.Module, rows: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = expert(rows) * weights
        return result


class LoopOfWeighted(Loop):
    def __init__(self) -> None:
        super().__init__(Weighted)

    def result(self, expert: nn.Module, rows: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = expert(rows, weights)
        return result


class TokenByToken(Loop):
    """As a sum for each token alone."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(NUM_CHOICES, -1)
        tokens = zip(x.flatten(0, -2), weights.flatten(0, -2), chosen.flatten(0, -2), strict=True)
        sums = [
            torch.stack([w * self.experts[e](token) for w, e in zip(of, by.tolist(), strict=True)]).sum(0)
            for token, of, by in tokens
        ]
        return torch.stack(sums).view_as(x)


class Chained(Loop):
    """Gives one expert what another returns."""

    def result(self, expert: nn.Module, rows: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = self.experts[0](expert(rows)) * weights
        return result


class Reader(Loop):
    """Reads the weights of its experts itself."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + F.linear(
            x, self.experts[0].down.weight @ self.experts[0].up.weight
        )
        return out


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), layer()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(h)
        out: Tensor = self.head(h)
        return out


def _case(layer: type[nn.Module]) -> Case:
    return dataclasses.replace(
        get_case("tied_llama"), name=layer.__name__, build=lambda: Model(layer), block="Sequential"
    )


CASES = {layer.__name__: _case(layer) for layer in (Loop, LoopOfWeighted, TokenByToken)}
EXPERT_2 = ("parallel_mode", ([("expert", 2)], None))
WITH_DATA = ("parallel_mode", ([("expert", 2), ("data", 2)], None))

RUNS: dict[int, list[tuple[str, list[Any], dict[str, Any]]]] = {
    2: [
        ("Loop", [EXPERT_2], {}),
        ("Loop", [EXPERT_2, "checkpoint"], {"max_grad_norm": 0.05}),
        ("LoopOfWeighted", [EXPERT_2, ("compile", "aot_eager")], {}),
        ("TokenByToken", [EXPERT_2], {}),
    ],
    4: [
        ("Loop", [WITH_DATA], {"gradient_accumulation_steps": 2}),
        ("LoopOfWeighted", [("parallel_mode", ([("expert", 4)], None))], {}),
        ("Loop", [("parallel_mode", ([("expert", 2), ("pipeline", 2)], None))], {}),
    ],
}


def _all(num_ranks: int) -> list[Trajectory]:
    return [accelerated_run(CASES[name], steps, **options) for name, steps, options in RUNS[num_ranks]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_trains_as_one_process_does(num_ranks: int) -> None:
    found = run_ranks(_all, num_ranks, args=(num_ranks,), timeout_s=100)
    for place, (name, _, options) in enumerate(RUNS[num_ranks]):
        assert_ranks_agree([trajectories[place] for trajectories in found])
        reference = reference_run(CASES[name], max_norm=options.get("max_grad_norm"))
        assert_parity(compare(reference, found[0][place]))


def _bytes() -> tuple[int, int, float, str]:
    result = accelerate_case(CASES["Loop"], [EXPERT_2])
    parameters = dict(result.job.module.named_parameters())
    inside = [p for name, p in parameters.items() if ".experts." in name]
    kept = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in inside)
    assert result.dataloader is not None
    batch = next(iter(result.dataloader))
    result.train_step(batch)
    seen = sum(float(buffer.sum()) for name, buffer in result.job.module.named_buffers())
    return kept, sum(p.numel() for p in inside), seen / batch.numel(), str(result.applied)


def test_each_rank_keeps_its_part_and_buffers_count_once() -> None:
    (kept, whole, seen, text), _ = run_ranks(_bytes, 2)
    assert kept == (whole + 2 * NUM_EXPERTS * (45 + 1)) // 2  # a bias and a scale do not divide
    assert seen == 2 * NUM_CHOICES
    assert "2 module(s) of 4 experts, 1/2 of them on each rank" in text


def _refusals() -> list[str]:
    messages = []
    for layer in (Chained, Reader):
        with pytest.raises(InputError) as caught:
            accelerate_case(_case(layer), [EXPERT_2])
        messages.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        accelerate_case(CASES["Loop"], [EXPERT_2, "fsdp"])
    messages.append(str(caught.value))
    return messages


def test_what_cannot_be_followed_is_refused() -> None:
    (chained, reader, sharded), _ = run_ranks(_refusals, 2)
    assert "layers.0.1.experts" in chained
    assert "use what experts return" in chained
    assert "their weights outside their calls" in reader
    assert "cannot be sharded further. Use ddp" in sharded
