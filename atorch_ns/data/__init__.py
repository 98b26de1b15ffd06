"""Data: loaders that give every rank its part of a global batch, and what is done with a batch."""

from __future__ import annotations

from atorch_ns.data._batch import (
    batch_sizes,
    call_model,
    check_model_input_format,
    default_prepare_input,
    split_batch,
)
from atorch_ns.data._build import build_dataloader
from atorch_ns.data._forward import forward_signature
from atorch_ns.data._loader import TrainLoader

__all__ = [
    "TrainLoader",
    "batch_sizes",
    "build_dataloader",
    "call_model",
    "check_model_input_format",
    "default_prepare_input",
    "forward_signature",
    "split_batch",
]
