"""Data: loaders that give every rank its part of a global batch, and what is done with a batch."""

from atorch_ns.data.batch import (
    call_arguments,
    call_model,
    check_model_input_format,
    default_prepare_input,
    forward_signature,
    split_batch,
    user_module,
)
from atorch_ns.data.build import build_dataloader
from atorch_ns.data.loader import TrainLoader
from atorch_ns.data.step_work import BatchRunner, LossScale, Passed, Reduction, StepOutput, StepWork, weigh

__all__ = [
    "BatchRunner", "LossScale", "Passed", "Reduction", "StepOutput", "StepWork", "TrainLoader",
    "build_dataloader", "call_arguments", "call_model", "check_model_input_format",
    "default_prepare_input", "forward_signature", "split_batch", "user_module", "weigh",
]  # fmt: skip
