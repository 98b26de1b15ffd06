"""The models, sizes and strategies that predictions of memory are held against.

Legend: B batch, T tokens, V vocabulary, F features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.testing.models import Case, make_gpt2, make_llama
from atorch_ns.testing.networks import ResidualMlp

__all__ = [
    "LAYOUTS",
    "MIXTURES",
    "SIZED_CASES",
    "SizedCase",
    "axes_of",
    "gpt2",
    "language_case",
    "llama",
    "seeded",
    "sized_case",
]

_INITIALIZER_RANGE = 0.02
"""transformers' default."""


@dataclass(frozen=True, kw_only=True)
class SizedCase:
    """A model of a size with its data.

    Attributes:
        name: the model and its size.
        case: model, data and loss.
        global_batch: samples in a step, over all ranks.
        num_tokens: in a sample; 1 where there is no sequence.
    """

    name: str
    case: Case
    global_batch: int
    num_tokens: int = 1


def seeded(build: Any, *args: Any) -> nn.Module:
    """A model in training mode, equal on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model: nn.Module = build(*args).train()
        return model


def _mlp(width: int, hidden: int, num_blocks: int) -> nn.Module:
    return ResidualMlp(num_features=32, width=width, hidden=hidden, num_blocks=num_blocks, num_outputs=16)


def _features(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch_size, 32, generator=generator)
    return features, torch.randn(batch_size, 16, generator=generator)


def _squared_error(batch: Any, output: Tensor) -> Tensor:
    return F.mse_loss(output.float(), batch[1])


def llama(width: int, hidden: int, num_layers: int, vocab_size: int, num_tokens: int) -> nn.Module:
    """A Llama of transformers."""
    return make_llama(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=num_layers,
        max_position_embeddings=num_tokens,
        initializer_range=_INITIALIZER_RANGE,
    )


def gpt2(width: int, hidden: int, num_layers: int, vocab_size: int, num_tokens: int) -> nn.Module:
    """A GPT-2 of transformers, without dropout."""
    return make_gpt2(
        vocab_size=vocab_size,
        hidden_size=width,
        n_inner=hidden,
        num_hidden_layers=num_layers,
        max_position_embeddings=num_tokens,
        initializer_range=_INITIALIZER_RANGE,
    )


def _next_token_loss(batch: Any, output: Any) -> Tensor:
    logits, tokens = output.logits, batch["input_ids"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def language_case(name: str, build: Any, sizes: tuple[int, ...]) -> Case:
    """The case of a model that ``build(*sizes)`` makes; the last two sizes are V and T."""
    vocab_size, num_tokens = sizes[-2:]

    def make_batch(batch_size: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {"input_ids": torch.randint(vocab_size, (batch_size, num_tokens), generator=generator)}

    return Case(
        name=name,
        build=lambda: seeded(build, *sizes),
        make_batch=make_batch,
        loss_func=_next_token_loss,
        model_input_format="unpack_dict",
        block="",
    )


def _mlp_case(name: str, sizes: tuple[int, ...]) -> Case:
    return Case(
        name=name,
        build=lambda: seeded(_mlp, *sizes),
        make_batch=_features,
        loss_func=_squared_error,
        model_input_format="unpack_sequence",
        block="ResidualBlock",
    )


def _cases() -> Iterator[SizedCase]:
    for size, widths, batch in (("small", (64, 256, 4), 256), ("large", (192, 640, 6), 512)):
        name = f"mlp, {size}"
        yield SizedCase(name=name, case=_mlp_case(name, widths), global_batch=batch)
    for model, build in (("llama", llama), ("gpt2", gpt2)):
        for size, sizes, batch in (
            ("small", (64, 172, 4, 384, 32), 8),
            ("large", (128, 344, 6, 1000, 48), 8),
        ):
            name = f"{model}, {size}"
            case = language_case(name, build, sizes)
            yield SizedCase(name=name, case=case, global_batch=batch, num_tokens=sizes[-1])


SIZED_CASES = tuple(_cases())

_MIXTURE: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
_NUM_EXPERTS = 4  # so that rows of experts are fewer than eight ranks


def _qwen3_moe(**sizes: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": _NUM_EXPERTS, "moe_intermediate_size": 512, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_MIXTURE, **experts, head_dim=32, **sizes))


def _mixtral(**sizes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_MIXTURE, num_local_experts=_NUM_EXPERTS, **sizes))


def _gpt_oss(**sizes: Any) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    settings = {"num_local_experts": _NUM_EXPERTS, "head_dim": 32, "sliding_window": 32}
    return GptOssForCausalLM(GptOssConfig(**_MIXTURE, **settings, **sizes))


def _deepseek_v3(**sizes: Any) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {"n_routed_experts": _NUM_EXPERTS, "moe_intermediate_size": 512, "n_group": 2, "topk_group": 1}
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 32, "first_k_dense_replace": 1}
    heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**_MIXTURE, **experts, **ranks, **heads, **sizes}))


def _mixture(build: Callable[..., nn.Module], vocab_size: int, num_tokens: int) -> nn.Module:
    model = build(vocab_size=vocab_size, max_position_embeddings=num_tokens)
    with torch.no_grad():  # with embeddings of usual size all tokens look alike, and choose the same experts
        model.get_input_embeddings().weight.mul_(1 / _INITIALIZER_RANGE)  # type: ignore[operator]
    return model


def _mixtures() -> Iterator[SizedCase]:
    builders = (_qwen3_moe, _mixtral, _gpt_oss, _deepseek_v3)
    for name, build in zip(("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3"), builders, strict=True):
        case = language_case(name, functools.partial(_mixture, build), (384, 64))
        yield SizedCase(name=name, case=case, global_batch=32, num_tokens=64)


MIXTURES = tuple(_mixtures())


def _mesh(*methods: Any, **axes: int) -> list[Any]:
    return [("parallel_mode", (list(axes.items()), None)), *methods]


_PASSES = ("gradient_accumulation", 2)
LAYOUTS: Mapping[int, Sequence[list[Any]]] = {
    2: (
        _mesh("fsdp", data=2),
        _mesh("zero2", data=2),
        _mesh(expert=2),
        _mesh("fsdp", expert=2),
        _mesh("zero2", expert=2),
        _mesh(tensor=2),
        _mesh(_PASSES, pipeline=2),
    ),
    4: (
        _mesh("fsdp", data=4),
        _mesh("zero2", data=4),
        _mesh(expert=2, data=2),
        _mesh("zero1", expert=2, data=2),
        _mesh("fsdp", expert=2, data=2),
        _mesh("zero2", expert=2, data=2),
        _mesh("fsdp", _PASSES, expert=2, data=2),
        _mesh("fsdp", "checkpoint", expert=2, data=2),
        _mesh("zero2", ("amp_native", "bf16"), expert=2, data=2),
        _mesh("fsdp", expert=2, zero=2),
        _mesh("fsdp", expert=4),
        _mesh("zero2", expert=4),
        _mesh("fsdp", tensor=2, expert=2),
        _mesh("fsdp", tensor=2, data=2),
        _mesh("zero2", _PASSES, expert=2, pipeline=2),
        _mesh("fsdp", _PASSES, data=2, pipeline=2),
    ),
    8: (
        _mesh("fsdp", data=8),
        _mesh("fsdp", expert=2, data=4),
        _mesh("zero2", expert=4, data=2),
        _mesh("fsdp", tensor=2, expert=2, data=2),
        _mesh("zero2", _PASSES, expert=2, data=2, pipeline=2),
    ),
}
"""Strategies for mixtures, by number of ranks."""


def axes_of(strategy: Sequence[Any]) -> dict[str, int]:
    """Sizes of the axes that a strategy names; empty where it names none."""
    name, config = strategy[0] if strategy and not isinstance(strategy[0], str) else ("", None)
    return dict(config[0]) if name == "parallel_mode" and config else {}


def sized_case(name: str) -> SizedCase:
    """The case of that name."""
    return next(case for case in (*SIZED_CASES, *MIXTURES) if case.name == name)
