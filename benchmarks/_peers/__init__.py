"""Other ways to train the same model, one file each; ``benchmarks/peers.py`` holds ours against them."""

from __future__ import annotations

from benchmarks._peers.by_accelerate import ACCELERATE
from benchmarks._peers.by_atorch import ATORCH
from benchmarks._peers.by_deepspeed import DEEPSPEED
from benchmarks._peers.torch_by_hand import TORCH

__all__ = ["PEERS"]

PEERS = (TORCH, ACCELERATE, DEEPSPEED, ATORCH)
"""From the nearest to the farthest."""
