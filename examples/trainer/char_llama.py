"""A small Llama that learns English text character by character, for the Trainer: the model and its data.

The text is what ``help('assert')`` and the like show, which every Python ships.

Legend: B samples, T characters of a sample, V vocabulary (256 byte values).
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY_SIZE = 256
SHARE_FOR_TRAINING = 0.9


class CharLlama(nn.Module):
    """A Llama of transformers whose ``forward`` takes a batch and returns the loss first, as the Trainer asks."""

    def __init__(self, hidden: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
        self.llama = LlamaForCausalLM(config)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of predicting each next character of ``batch["ids"]``, [B, T]."""
        ids = batch["ids"]
        found: Tensor = self.llama(input_ids=ids, labels=ids).loss
        return found


class Text:
    """Pieces of the text: ``{"ids": [T]}`` each; the last tenth of the text is for validation.

    Args:
        split: ``train`` or ``val``.
        length: T.
    """

    def __init__(self, split: str, length: int = 64) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        border = int(SHARE_FOR_TRAINING * len(text))
        own = text[:border] if split == "train" else text[border:]
        self._ids = torch.tensor(list(own))
        self._length = length

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"ids": self._ids[place * self._length : (place + 1) * self._length]}

    def __len__(self) -> int:
        return len(self._ids) // self._length
