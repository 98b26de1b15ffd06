"""Split backward passes in one process: the weights' share, and the operators that deferring their gradients adds.

By both the planner prices schedules that split: ``_WEIGHT_SHARE`` (:mod:`atorch_ns.pipeline.plan.choose`) and
``_DEFERRED_OPERATORS`` (:mod:`atorch_ns.estimate.time.pipeline`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from atorch_ns.pipeline.run.weight_gradients import WeightGradients, linear_layers
from benchmarks._results import Spread
from benchmarks._stage_passes import host_start_seconds

__all__ = ["split_rows"]


@dataclass(frozen=True, kw_only=True)
class _Size:
    blocks: int
    width: int
    tokens: int
    rounds: int

    def text(self) -> str:
        return f"{self.blocks} blocks, width {self.width}, {self.tokens} tokens"


_COMPUTE, _HOST = (
    _Size(blocks=2, width=512, tokens=512, rounds=16),
    _Size(blocks=8, width=32, tokens=8, rounds=60),
)
"""Where products take the time, for the share, and where starting operators does, for their number."""


def split_rows(*, quick: bool, report: Callable[[str], object]) -> list[dict[str, Any]]:
    """A row for each kind of block."""
    found = []
    for name, blocks in {"GPT-2": _gpt2, "Llama": _llama, "BERT": _bert}.items():
        report(f"schedules: split backward pass of {name}")
        share, both = _products(blocks(_COMPUTE), _COMPUTE, 2 if quick else _COMPUTE.rounds)
        operators = _operators(blocks(_HOST), _HOST, 2 if quick else _HOST.rounds)
        found.append(
            {
                "part": "split backward",
                "plan": f"{name} blocks",
                "step": f"{_COMPUTE.text()}; operators: {_HOST.text()}",
                "pairs": both.n,
                "wall_ratio": both,
                "weight_share": share,
                "operators": operators,
            }
        )
    return found


class _Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module], **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._options = options

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            found = block(value, **self._options)
            value = found[0] if isinstance(found, tuple) else found
        return value


def _gpt2(size: _Size) -> _Stage:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=size.width, n_head=size.width // 16, attn_implementation="sdpa")
    return _Stage([GPT2Block(config, layer_idx=number) for number in range(size.blocks)])


def _llama(size: _Size) -> _Stage:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(**_sizes(size))
    places = torch.arange(size.tokens)[None]
    rotations = LlamaRotaryEmbedding(config)(torch.empty(1, 1, size.width), places)
    blocks = [LlamaDecoderLayer(config, number) for number in range(size.blocks)]
    return _Stage(blocks, position_embeddings=rotations)


def _bert(size: _Size) -> _Stage:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(**_sizes(size))
    return _Stage([BertLayer(config) for _ in range(size.blocks)])


def _sizes(size: _Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_attention_heads": size.width // 16,
        "attn_implementation": "sdpa",
    }


def _products(stage: _Stage, size: _Size, rounds: int) -> tuple[Spread, Spread]:
    """Of the whole backward pass: the weights' part, and both parts."""
    passes = _passes(stage, size, rounds)
    return (
        Spread.of(split[2] / whole[1] for whole, split in passes),
        Spread.of((split[1] + split[2]) / whole[1] for whole, split in passes),
    )


def _operators(stage: _Stage, size: _Size, rounds: int) -> Spread:
    """More operators, by the time that starting one takes, for each matrix."""
    start_s, matrices = host_start_seconds(), len(linear_layers(stage))
    return Spread.of(
        (sum(split) - sum(whole)) / matrices / start_s for whole, split in _passes(stage, size, rounds)
    )


_Seconds = tuple[float, float, float]
"""Of processor time: forward, backward (or its inputs' part), the weights' part."""


def _passes(stage: _Stage, size: _Size, rounds: int) -> list[tuple[_Seconds, _Seconds]]:
    """A whole and a split pass beside each other, after two that are not counted."""
    stage.eval()  # dropout would be drawn alike in both, and hide what is compared
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = []
    for number in range(rounds + 2):
        pair = {split: _pass(stage, size, split=split) for split in (bool(number % 2), not number % 2)}
        found.append((pair[False], pair[True]))
    return found[2:]


def _pass(stage: _Stage, size: _Size, *, split: bool) -> _Seconds:
    value = torch.randn(1, size.tokens, size.width, requires_grad=True)
    later = WeightGradients(linear_layers(stage))
    times = [time.process_time()]
    with later if split else contextlib.nullcontext():
        output = stage(value)
    times.append(time.process_time())
    gradient = torch.ones_like(output)
    if split:
        later.backward([get_gradient_edge(output)], [gradient])
        times.append(time.process_time())
        later.add()
    else:
        output.backward(gradient)
        times.append(time.process_time())
    times.append(time.process_time())
    forward, backward, weights = (after - before for before, after in itertools.pairwise(times))
    return forward, backward, weights
