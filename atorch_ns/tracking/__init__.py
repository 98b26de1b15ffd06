"""Metrics of a training run, written to files, to TensorBoard, to Weights & Biases or to the terminal.

::

    result.track(JsonlTracker("metrics.jsonl"), every=10)   # on every rank; rank 0 writes

:data:`METRICS` lists what is written, with units.
"""

from __future__ import annotations

from atorch_ns.tracking._base import METRICS, Metric, Tracker
from atorch_ns.tracking._jsonl import JsonlTracker
from atorch_ns.tracking._progress import ProgressTracker
from atorch_ns.tracking._tensorboard import TensorBoardTracker
from atorch_ns.tracking._tracking import StepMeter, Tracking
from atorch_ns.tracking._wandb import WandbTracker

__all__ = [
    "METRICS",
    "JsonlTracker",
    "Metric",
    "ProgressTracker",
    "StepMeter",
    "TensorBoardTracker",
    "Tracker",
    "Tracking",
    "WandbTracker",
]
