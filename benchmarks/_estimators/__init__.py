"""Other ways to ask how much memory training needs, one file each; see ``benchmarks/estimate_peers.py``."""

from __future__ import annotations

from benchmarks._estimators.by_accelerate import ACCELERATE
from benchmarks._estimators.by_deepspeed import DEEPSPEED
from benchmarks._estimators.by_torch import TORCH
from benchmarks._estimators.ours import OURS

__all__ = ["ESTIMATORS", "OURS"]

ESTIMATORS = (OURS, TORCH, ACCELERATE, DEEPSPEED)
"""Ours, then the others."""
