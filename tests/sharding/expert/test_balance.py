"""The balance of a router over all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from atorch_ns.sharding.expert.balance import GlobalBalance
from atorch_ns.testing.workers import run_ranks

pytest.importorskip("transformers")
B, T, E, K = 2, 3, 4, 2


class _Router(nn.Module):
    router_aux_loss_coef = 0.5
    num_experts_per_tok = K

    def forward(self, x: torch.Tensor, attention_mask: Any = None) -> MoeCausalLMOutputWithPast:
        shares = x.softmax(-1)
        choices = torch.zeros(E).scatter_add(0, shares.topk(K).indices.flatten(), torch.ones(B * T * K))
        aux = E * (choices * shares.sum(0)).sum() / len(x) ** 2
        return MoeCausalLMOutputWithPast(loss=0.5 * aux, aux_loss=aux, router_logits=(x,))  # type: ignore[arg-type]


def _warnings_of_masks(masks: list[Any]) -> list[str]:
    assert dist.group.WORLD is not None
    model = _Router()
    GlobalBalance(model, dist.group.WORLD, demanded=False).attach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(B * T, E), attention_mask=masks[dist.get_rank()])
    return [str(warning.message) for warning in caught]


def test_all_ranks_exchange_whatever_the_mask_of_each() -> None:
    assert run_ranks(_warnings_of_masks, 2, args=([None, torch.ones(B, T)],)) == [[], []]
    for texts in run_ranks(_warnings_of_masks, 2, args=([None, torch.ones(B, 1, T, T)],), timeout_s=40):
        assert "each rank balances its own tokens" in texts[0]
