"""The model that is measured: a Llama of transformers, of chosen size, with data and loss.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LARGE", "SMALL", "TINY", "Llama", "next_token_loss", "random_batch"]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A size.

    Attributes:
        vocab_size: V.
        width: of the residual stream.
        hidden: of the feed-forward layers.
        num_layers: blocks.
        num_heads: of attention.
    """

    vocab_size: int
    width: int
    hidden: int
    num_layers: int
    num_heads: int = 4

    def build(self, device: str = "cpu") -> nn.Module:
        """The model in training mode; equal on every call, the caller's random state left alone."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            use_cache=False,
        )
        gpus = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(devices=gpus), torch.device(device):
            torch.manual_seed(0)
            model: nn.Module = LlamaForCausalLM(config).train()
        return model

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(parameter.numel() for parameter in self.build("meta").parameters())

    def describe(self) -> str:
        """The size in words."""
        sizes = ", ".join(f"{key.removeprefix('num_')} {value}" for key, value in asdict(self).items())
        return f"transformers' Llama, {self.num_parameters / 1e6:.1f} M parameters ({sizes})"


TINY = Llama(vocab_size=512, width=64, hidden=172, num_layers=4)
SMALL = Llama(vocab_size=4096, width=256, hidden=688, num_layers=8)
LARGE = Llama(vocab_size=24000, width=1024, hidden=2752, num_layers=20, num_heads=8)


def random_batch(model: Llama, batch_size: int, num_tokens: int, *, seed: int) -> dict[str, Tensor]:
    """Tokens [B, T], as keyword arguments of the model."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(model.vocab_size, (batch_size, num_tokens), generator=generator)}


def next_token_loss(batch: Any, output: Any) -> Tensor:
    """Mean cross entropy of logits [B, T, V] against the tokens that follow."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())
