"""Metrics of a training run, written to files, to TensorBoard, to Weights & Biases or to the terminal.

::

    result.track(JsonlTracker("metrics.jsonl"), every=10)   # on every rank; rank 0 writes

:data:`METRICS` lists what is written, with units.
"""

from atorch_ns.tracking.trackers import JsonlTracker, ProgressTracker, TensorBoardTracker, WandbTracker
from atorch_ns.tracking.tracking import METRICS, Metric, StepMeter, Tracker, Tracking

__all__ = [
    "METRICS", "JsonlTracker", "Metric", "ProgressTracker", "StepMeter", "TensorBoardTracker", "Tracker",
    "Tracking", "WandbTracker",
]  # fmt: skip
