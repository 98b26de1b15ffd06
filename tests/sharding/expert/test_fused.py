"""Experts divided over ranks compute what they compute together, and what cannot be divided is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from atorch_ns.sharding import divide_experts, find_experts, why_not_dividable
from atorch_ns.sharding.expert.fused import _RowSums
from atorch_ns.testing.models import get_case
from atorch_ns.testing.workers import run_ranks

NUM_EXPERTS, WIDTH, INNER = 4, 6, 10


class Experts(nn.Module):
    """Written by hand, with a bias, a norm that all experts share and a name of its own for their number."""

    def __init__(self) -> None:
        super().__init__()
        self.n_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, INNER))
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, INNER))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, INNER, WIDTH))
        self.norm = nn.LayerNorm(INNER)

    def forward(self, x: Tensor, expert_indices: Tensor, scores: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.n_experts):
            token, choice = torch.where(expert_indices == expert)
            inner = self.norm(torch.tanh(x[token] @ self.up[expert] + self.bias[expert]))
            out = out.index_add(0, token, inner @ self.down[expert] * scores[token, choice, None])
        return out


class Normalised(Experts):
    """Not a sum over choices: the weights of all of a token's choices are made to add up to 1."""

    def forward(self, x: Tensor, expert_indices: Tensor, scores: Tensor) -> Tensor:
        return super().forward(x, expert_indices, scores / scores.sum(1, keepdim=True))


class Counted(Experts):
    """Knows the number of experts from elsewhere."""

    def forward(self, x: Tensor, expert_indices: Tensor, scores: Tensor) -> Tensor:
        hit = nn.functional.one_hot(expert_indices, NUM_EXPERTS).float() * scores[..., None]
        each = torch.einsum("nd,edi->nei", x, self.up)
        return torch.einsum("nei,eid,ne->nd", each.tanh(), self.down, hit.sum(1))


class Listed(nn.Module):
    """Experts as modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def test_finds_experts_of_transformers_and_by_hand() -> None:
    found, unfit = find_experts(get_case("hf_mixtral").build())
    assert not unfit
    assert [one.name for one in found] == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert found[0].divided == ("gate_up_proj", "down_proj")
    assert found[0].num_experts == 4
    (mine,), _ = find_experts(nn.Sequential(Experts()))
    assert mine.divided == ("up", "bias", "down")
    assert mine.whole == ("norm.weight", "norm.bias")
    assert mine.counts == ("n_experts",)
    assert mine.arguments == ("x", "expert_indices", "scores")


def test_dense_models_have_none() -> None:
    assert find_experts(get_case("hf_llama").build()) == ([], [])


def test_says_what_cannot_be_divided() -> None:
    found, (unfit,) = find_experts(Listed())
    assert not found
    assert unfit.name == "experts"
    assert "Stack their parameters" in unfit.reason
    _, (unfit,) = find_experts(nn.Sequential(nn.Linear(2, 2)), ["Linear"])
    assert "top_k_index" in unfit.reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Experts, None),
        (Normalised, "add up to something else"),
        (Counted, "with 1/2 of the experts it fails"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_shares_are_tried(make: type[Experts], reason: str | None) -> None:
    module = seeded(make)
    before = [parameter.clone() for parameter in module.parameters()]
    (found,), _ = find_experts(nn.Sequential(module))
    why = why_not_dividable(found, 2)
    assert why is None if reason is None else reason in str(why)
    assert module.n_experts == NUM_EXPERTS
    assert module.training
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


def _inputs(rank: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices and weights of one rank; ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 0 if kind == "a rank without tokens" and rank == 1 else 5 + rank
    x = torch.randn(num_tokens, WIDTH, generator=generator)
    index = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :2]
    if kind == "one expert":
        index = torch.zeros_like(index)
    if kind == "some choose none":
        index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.5, NUM_EXPERTS)
    return x, index, torch.rand(num_tokens, 2, generator=generator)


KINDS = ("all", "one expert", "a rank without tokens", "some choose none")


def _run(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and gradients of tokens and weights."""
    x, index, weights = inputs
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = module(x, index, weights)
    out.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


def _whole(parameter: Tensor) -> Tensor:
    """The gradient over all ranks: of an expert from the ranks that hold it, of the rest summed."""
    grad = parameter.grad
    assert grad is not None, "an expert without tokens has a gradient of zeros"
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    dist.all_reduce(grad)
    return grad


def _divided(kind: str) -> tuple[Any, dict[str, Tensor], dict[str, int]]:
    torch.manual_seed(dist.get_rank())  # ranks that disagree take the first one's values
    module = Experts() if dist.get_rank() else seeded(Experts)
    (found,), _ = find_experts(nn.Sequential(module))
    divide_experts(found, init_device_mesh("cpu", (dist.get_world_size(),)), equal=False)
    mine = _run(module, _inputs(dist.get_rank(), kind))
    stored = {
        name: p.to_local().untyped_storage().nbytes() for name, p in module.named_parameters() if p.dim() > 1
    }
    return mine, {name: _whole(parameter) for name, parameter in module.named_parameters()}, stored


def test_sums_of_results_keep_no_results() -> None:
    rows, index = torch.randn(5, WIDTH, requires_grad=True), torch.tensor([0, 2, 2, 1, 0])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        sums = _RowSums.apply(rows, index, 4)
    assert [tensor.dtype for tensor in kept] == [torch.int64]
    whole = rows.new_zeros(4, WIDTH).index_add(0, index, rows)
    torch.testing.assert_close(sums, whole)
    weights = torch.randn_like(sums)
    (mine,), (theirs,) = (torch.autograd.grad((each * weights).sum(), [rows]) for each in (sums, whole))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_the_whole_module(num_ranks: int) -> None:
    results = run_ranks(lambda: [_divided(kind) for kind in KINDS], num_ranks)
    for position, kind in enumerate(KINDS):
        reference = seeded(Experts)
        for rank in range(num_ranks):
            inputs = _inputs(rank, kind)
            if kind == "some choose none":
                inputs = (inputs[0], inputs[1], inputs[2].masked_fill(inputs[1] == NUM_EXPERTS, 0.0))
            expected = _run(reference, inputs)
            mine, _, stored = results[rank][position]
            for ours, theirs in zip(mine[:2], expected[:2], strict=True):
                torch.testing.assert_close(ours, theirs)
            kept = inputs[1] < NUM_EXPERTS
            torch.testing.assert_close(mine[2][kept], expected[2][kept])
            for name, parameter in reference.named_parameters():
                if parameter.dim() > 1:
                    assert stored[name] == parameter.numel() * 4 // num_ranks, (name, kind)
        for rank in range(num_ranks):
            for name, parameter in reference.named_parameters():
                # The mean over ranks of what the ranks' tokens give.
                torch.testing.assert_close(results[rank][position][1][name], parameter.grad / num_ranks)
