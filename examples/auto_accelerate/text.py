"""English text that every Python ships, as bytes: the chapters that ``help('assert')`` and the like show.

Legend: T bytes of a window.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["VOCABULARY_SIZE", "ByteWindows", "encode", "english_text"]

VOCABULARY_SIZE = 256


def english_text() -> str:
    """Python's help topics, one after another: about 465 thousand characters."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(text: str) -> Tensor:
    """One token for every byte of ``text``: [number of bytes], int64."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


class ByteWindows(Dataset[dict[str, Tensor]]):
    """A text cut into windows of T bytes, each ``{"input_ids": [T]}``; a rest shorter than T is left out."""

    def __init__(self, text: str, length: int) -> None:
        self._tokens = encode(text)
        self._length = length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = index * self._length
        return {"input_ids": self._tokens[begin : begin + self._length]}
