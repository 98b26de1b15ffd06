"""Biases of attention under sequence_parallel: T5's, handed from block to block, and one that the model makes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.sequence_cases import check, strategy

NUM_HEADS, WIDTH, VOCAB, NUM_TOKENS = 4, 32, 64, 16


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=NUM_HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return T5ForConditionalGeneration(config).train()


def _pairs(size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(1, VOCAB, (size, n), generator=generator) for n in (NUM_TOKENS, 12))
    return {"input_ids": source, "labels": target}


def _padded_pairs(size: int, seed: int) -> dict[str, Tensor]:
    batch = _pairs(size, seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, 11:] = 0
    return {**batch, "attention_mask": mask, "labels": batch["input_ids"]}


def _own_loss(batch: Any, output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


T5 = dataclasses.replace(
    get_case("hf_llama"), name="t5", build=_t5, make_batch=_pairs, loss_func=_own_loss, block="T5Block"
)
PADDED = dataclasses.replace(T5, name="t5 padded", make_batch=_padded_pairs)


class Block(nn.Module):
    """Attention with a bias for every head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Biased(nn.Module):
    """As ALiBi: slopes times distances, [1, H, T, T], made by the model; the slopes may be trained."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.slopes = nn.Parameter(0.5 ** torch.arange(1.0, NUM_HEADS + 1), requires_grad=trained)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.size(1))
        distance = place[:, None] - place[None, :]
        bias = (-distance * self.slopes[:, None, None]).masked_fill(distance < 0, float("-inf"))[None]
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h, bias)
        out: Tensor = self.head(h)
        return out


def _biased(*, trained: bool) -> Case:
    return dataclasses.replace(
        get_case("tied_llama"),
        name=f"biased, {trained=}",
        build=lambda: Biased(trained=trained),
        block="Block",
    )


FIXED, TRAINED = _biased(trained=False), _biased(trained=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_biases_train_as_in_one_process(num_ranks: int) -> None:
    kinds = ("ulysses", "ring") if num_ranks == 2 else ("ring",)
    runs = [(case, strategy(kind, sequence=num_ranks)) for case in (FIXED, TRAINED) for kind in kinds]
    check(num_ranks, runs)


def test_t5_trains_as_in_one_process() -> None:
    check(2, [(T5, strategy("ulysses", "checkpoint")), (PADDED, strategy("ring"))])


def _report() -> str:
    return str(accelerate_case(T5, strategy("auto")).applied)


def test_t5_stays_divided_from_block_to_block() -> None:
    assert "stay divided after 2 block(s)" in run_ranks(_report, 2)[0]
