"""The models and strategies whose step times are predicted and measured.

Legend: B batch, T tokens, F features, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.testing import Case

__all__ = ["GLOBAL_BATCH", "STRATEGIES", "label_of", "make_cases"]

GLOBAL_BATCH = 8
_VOCABULARY = 256


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, F] to [B, T, F]."""
        out: Tensor = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return out


class _Mlp(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 16)

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        """[B, T, F] to [B, T, 16]."""
        hidden = self.entry(features)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


def make_cases(*, quick: bool) -> dict[str, Case]:
    """Llama of 5 M parameters as in the demo, a wide MLP, a GPT-2; tiny ones where ``quick``."""
    width, layers, tokens = (64, 2, 16) if quick else (320, 4, 64)
    return {
        "llama": _language_case(
            "llama", functools.partial(_llama, width, layers), tokens, "LlamaDecoderLayer"
        ),
        "mlp": Case(
            name="mlp",
            build=functools.partial(_seeded, functools.partial(_Mlp, width, layers)),
            make_batch=functools.partial(_features, width, tokens),
            loss_func=_squared_error,
            model_input_format="unpack_sequence",
            block="_Block",
        ),
        "gpt2": _language_case("gpt2", functools.partial(_gpt2, width, layers), tokens, "GPT2Block"),
    }


def _language_case(name: str, build: Any, num_tokens: int, block: str) -> Case:
    return Case(
        name=name,
        build=functools.partial(_seeded, build),
        make_batch=functools.partial(_tokens, num_tokens),
        loss_func=_next_token_loss,
        model_input_format="unpack_dict",
        block=block,
    )


def _seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = make()
        return model.train()


def _llama(width: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, width // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=width, intermediate_size=int(2.7 * width),
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=1024, tie_word_embeddings=True, use_cache=False,
        )
    )  # fmt: skip


def _gpt2(width: int, layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=4 * _VOCABULARY, n_embd=width, n_layer=layers, n_head=max(1, width // 64),
            n_positions=256, use_cache=False, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def _features(width: int, rows: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch_size, rows, width, generator=generator)
    return features, torch.randn(batch_size, rows, 16, generator=generator)


def _tokens(num_tokens: int, batch_size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(_VOCABULARY, (batch_size, num_tokens), generator=generator)}


def _squared_error(batch: Any, output: Any) -> Tensor:
    return F.mse_loss(output.float(), batch[1])


def _next_token_loss(batch: Any, output: Any) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, batch["input_ids"][:, 1:].flatten())


_FP32 = (
    ("ddp",), ("zero1",), ("zero2",), ("fsdp",), (("fsdp", {"atorch_wrap_cls": ()}),),
)  # fmt: skip
_AMP = ("amp_native", {"dtype": "bfloat16"})
_HALF = ("half", {"dtype": "bfloat16", "master_weights": True})


def _passes(count: int) -> tuple[str, dict[str, int]]:
    return ("gradient_accumulation", {"num_micro_batches": count})


STRATEGIES: Sequence[Sequence[Any]] = (
    *_FP32,
    *((*base, "checkpoint") for base in _FP32),
    *((*base, _AMP) for base in _FP32),
    *((*base, _AMP, "checkpoint") for base in _FP32[::3]),
    *((*base, _HALF) for base in _FP32[::3]),
    *((*base, _passes(2)) for base in _FP32),
    *((*base, _passes(4)) for base in _FP32[::3]),
    *((*base, _AMP, _passes(4)) for base in _FP32[::3]),
    (("checkpoint", {"every_n": 2}), "ddp"),
    (("checkpoint", {"every_n": 2}), "fsdp"),
    (("compile", "aot_eager"), "ddp"),
)
"""What a search on CPU would try, one after the other."""


def label_of(strategy: Sequence[Any]) -> str:
    """``fsdp + checkpoint``, configs in brackets."""
    return " + ".join(_step_label(step) for step in strategy)


def _step_label(step: Any) -> str:
    if isinstance(step, str):
        return step
    name, config = step
    values = config.values() if isinstance(config, dict) else (config,)
    shown = ", ".join("whole" if value == () else str(value) for value in values)
    return f"{name} ({shown})"
