"""Merak 2.2.2, in an environment of its own, from its source: on GitHub, or in the folder ``merak-source`` of the peers.

transformers 4.46, the newest that it works with, and this project's torch.
"""

from __future__ import annotations

from benchmarks._peers._beside import environment, source
from benchmarks._peers.by_nnscaler import OURS, RPC, TORCH

__all__ = ["prepare"]


def prepare() -> str:
    """Makes the environment and fetches the source, if they are not there; the reason if that fails."""
    own = ("transformers==4.46.3", "accelerate", "tensorboard", "sentencepiece")
    return environment("merak", (TORCH, (*OURS, *RPC), own)) or source(
        "merak", "https://github.com/HPDL-Group/Merak", "1593043"
    )
