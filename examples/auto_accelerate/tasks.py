"""What ``train.py`` can train: a model with synthetic data and a loss.

Legend: B batch, T tokens, V vocabulary, F features.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

__all__ = ["MODEL_TYPES", "Task", "make_task"]

VOCABULARY_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and what it is trained on.

    Attributes:
        model: the plain model.
        block: the class of the module it repeats, for methods that wrap blocks.
        dataset: synthetic samples, the same on every process.
        loss_func: ``(batch, output)`` to the mean loss.
        model_input_format: how ``auto_accelerate`` and the loops hand a batch to the model.
    """

    model: nn.Module
    block: str
    dataset: Dataset[Any]
    loss_func: Callable[[Any, Any], Tensor]
    model_input_format: str


class ToyBlock(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] to [B, F]."""
        return x + torch.tanh(self.linear(self.norm(x)))


class Toy(nn.Module):
    """Residual layers and a linear head. The targets [B, F], part of each batch, are not used."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ToyBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, width)

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        """[B, F] to predictions [B, F]."""
        for layer in self.layers:
            features = layer(features)
        predictions: Tensor = self.head(features)
        return predictions


class Progressions(Dataset[dict[str, Tensor]]):
    """Arithmetic progressions modulo V, each ``{"input_ids": [T]}``: two tokens tell all that follow."""

    def __init__(self, num_samples: int, length: int, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCABULARY_SIZE, (num_samples, 1), generator=generator)
        stride = torch.randint(1, 8, (num_samples, 1), generator=generator)
        self._tokens = (start + stride * torch.arange(length)) % VOCABULARY_SIZE

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index]}


def next_token_loss(batch: dict[str, Tensor], output: Any) -> Tensor:
    """Mean cross entropy of each token given those before it."""
    logits = output.logits[:, :-1].flatten(0, 1).float()  # [B * (T - 1), V]
    return F.cross_entropy(logits, batch["input_ids"][:, 1:].flatten())


def squared_error(batch: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
    """Mean squared error of predictions [B, F]."""
    return F.mse_loss(output.float(), batch[1])


def make_toy(options: argparse.Namespace) -> Task:
    """A residual network that learns a fixed map."""
    generator = torch.Generator().manual_seed(options.seed)
    features = torch.randn(options.datasize, options.hidden_size, generator=generator)
    return Task(
        model=Toy(options.hidden_size, options.layer_num),
        block="ToyBlock",
        dataset=TensorDataset(features, features.roll(1, dims=1).sin()),
        loss_func=squared_error,
        model_input_format="unpack_sequence",
    )


def make_gpt2(options: argparse.Namespace) -> Task:
    """transformers' GPT-2 from a config, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_embd=options.hidden_size,
        n_layer=options.layer_num,
        n_head=options.head_num,
        n_positions=options.seq_length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language_task(GPT2LMHeadModel(config), "GPT2Block", options)


def make_llama(options: argparse.Namespace) -> Task:
    """transformers' Llama from a config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.layer_num,
        num_attention_heads=options.head_num,
        max_position_embeddings=options.seq_length,
    )
    return _language_task(LlamaForCausalLM(config), "LlamaDecoderLayer", options)


def _language_task(model: nn.Module, block: str, options: argparse.Namespace) -> Task:
    return Task(
        model=model,
        block=block,
        dataset=Progressions(options.datasize, options.seq_length, seed=options.seed),
        loss_func=next_token_loss,
        model_input_format="unpack_dict",
    )


MODEL_TYPES: dict[str, Callable[[argparse.Namespace], Task]] = {
    "toy": make_toy,
    "gpt2": make_gpt2,
    "llama": make_llama,
}


def make_task(options: argparse.Namespace) -> Task:
    """The task that ``--model_type`` names, in the sizes that the other options give."""
    return MODEL_TYPES[options.model_type](options)
