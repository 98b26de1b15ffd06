"""English text by characters, and what the two examples share: arguments, and degrees from the command line.

The text is what ``help('assert')`` and the like show, which every Python ships.

Legend: T characters of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import HfArgumentParser

from atorch_ns.merak import MerakArguments, init

VOCABULARY_SIZE = 257
MASK = 256
"""The id of a character that BERT is to guess; those below are bytes."""


@dataclass
class Layout:
    """How ranks divide the model; without any degree, it is searched for."""

    dp: int | None = field(default=None, metadata={"help": "Ranks that see different data."})
    tp: int | None = field(default=None, metadata={"help": "Ranks that divide layers."})
    pp: int | None = field(default=None, metadata={"help": "Stages of the pipeline."})


def arguments() -> MerakArguments:
    """Lays out the ranks, and reads the arguments of the run from the command line."""
    parser = HfArgumentParser([Layout, MerakArguments])
    layout, args = parser.parse_args_into_dataclasses()
    init(dp=layout.dp, tp=layout.tp, pp=layout.pp)
    return args


class Text(torch.utils.data.Dataset[dict[str, Any]]):
    """Pieces of the text, ``{"input_ids": [T], "labels": [T]}``; the last tenth of the text is for evaluation.

    Args:
        split: ``train`` or ``eval``.
        length: T.
        hide: the share of characters to guess; labels of the others are -100. 0 to predict each next character.
    """

    def __init__(self, split: str, length: int = 64, hide: float = 0.0) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        border = int(0.9 * len(text))
        self._ids = torch.tensor(list(text[:border] if split == "train" else text[border:]))
        self._length, self._hide = length, hide

    def __len__(self) -> int:
        return len(self._ids) // self._length

    def __getitem__(self, place: int) -> dict[str, Any]:
        ids = self._ids[place * self._length : (place + 1) * self._length]
        if not self._hide:
            return {"input_ids": ids, "labels": ids}
        hidden = torch.rand(len(ids), generator=torch.Generator().manual_seed(place)) < self._hide
        return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}
