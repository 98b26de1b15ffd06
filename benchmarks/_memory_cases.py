"""The models, sizes and strategies that predictions of memory are held against.

Legend: B batch, T tokens, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.testing.models import Case, make_gpt2, make_llama
from atorch_ns.testing.networks import ResidualMlp

__all__ = ["SIZED_CASES", "SizedCase", "gpt2", "language_case", "llama", "seeded", "sized_case"]

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


def sized_case(name: str) -> SizedCase:
    """The case of that name."""
    return next(case for case in SIZED_CASES if case.name == name)
