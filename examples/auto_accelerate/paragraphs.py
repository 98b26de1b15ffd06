"""Paragraphs of Python's help, and the chapter each is from: a small text-classification task.

Legend: T tokens of a paragraph.
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["CHAPTERS", "Paragraphs", "labelled_paragraphs", "split"]

CHAPTERS = ("compound", "debugger", "specialnames", "string-methods")
_NUM_PER_CHAPTER = 90


def labelled_paragraphs() -> list[tuple[str, int]]:
    """Paragraphs of 60 to 600 characters with the index of their chapter, as many of each chapter."""
    chapters = [_paragraphs(topics[name]) for name in CHAPTERS]
    count = min(_NUM_PER_CHAPTER, *(len(paragraphs) for paragraphs in chapters))
    return [(chapters[label][number], label) for number in range(count) for label in range(len(CHAPTERS))]


def split(
    samples: list[tuple[str, int]], every: int = 5
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What to train on, and what is held out: every fifth paragraph of every chapter."""
    rows = [samples[begin : begin + len(CHAPTERS)] for begin in range(0, len(samples), len(CHAPTERS))]
    training = [sample for number, row in enumerate(rows) if number % every for sample in row]
    held_out = [sample for number, row in enumerate(rows) if number % every == 0 for sample in row]
    return training, held_out


def _paragraphs(chapter: str) -> list[str]:
    paragraphs = (" ".join(text.split()) for text in re.split(r"\n\s*\n", chapter))
    return [text for text in paragraphs if 60 <= len(text) <= 600]


class Paragraphs(Dataset[dict[str, Tensor]]):
    """Tokens of paragraphs, padded or cut to T, each ``{"input_ids", "attention_mask": [T], "labels": []}``.

    Args:
        samples: paragraphs and the index of their chapter.
        tokenizer: of the pretrained model.
        length: T.
    """

    def __init__(self, samples: list[tuple[str, int]], tokenizer: Any, length: int) -> None:
        texts = [text for text, _ in samples]
        encoded = tokenizer(
            texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        self._columns = {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": torch.tensor([label for _, label in samples]),
        }

    def __len__(self) -> int:
        return len(self._columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}
