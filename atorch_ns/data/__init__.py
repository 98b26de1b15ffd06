"""Data: loaders that give every rank its part of a global batch, and what is done with a batch."""

from atorch_ns.data.batch import (
    batch_sizes,
    call_model,
    check_model_input_format,
    default_prepare_input,
    forward_signature,
    split_batch,
)
from atorch_ns.data.build import build_dataloader
from atorch_ns.data.loader import TrainLoader

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
