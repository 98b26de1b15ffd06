"""What the examples share: reading a strategy from the command line, and speaking from one process only."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["is_first_process", "parse_strategy", "say", "use_same_seed"]

# transformers imports torchao, which warns of kernels for other devices and of torch's next version.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def is_first_process() -> bool:
    """Whether this process is the one that prints; torchrun tells each process its rank."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str = "") -> None:
    """Prints ``text`` once, however many processes there are."""
    if is_first_process():
        print(text, flush=True)


def parse_strategy(text: str) -> Any:
    """A strategy from the command line.

    Args:
        text: the path of a strategy file, or method names with commas between them. A name may carry the
            shorthand of its config behind a colon: ``fsdp,amp_native:bf16,checkpoint``.

    Returns:
        What ``load_strategy`` takes: the path, or a list of names and ``(name, config)`` pairs.
    """
    if Path(text).suffix in (".json", ".yaml", ".yml") or Path(text).is_file():
        return text
    entries = (entry.strip().partition(":") for entry in text.split(",") if entry.strip())
    return [(name, config) if config else name for name, _, config in entries]


def use_same_seed(seed: int) -> None:
    """Seeds torch on every process alike, so that all of them build the same model."""
    torch.manual_seed(seed)
