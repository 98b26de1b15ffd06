"""What every tracker is, and the names and units of what it is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from atorch_ns.errors import MissingPackageError

__all__ = ["METRICS", "Metric", "Tracker", "require_package"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One name under which trackers are given a number.

    Attributes:
        name: as trackers show it.
        unit: of the number.
        meaning: what is measured, and when there is none.
    """

    name: str
    unit: str
    meaning: str


METRICS: Final = (
    Metric(
        name="train/loss",
        unit="of the loss function",
        meaning="mean over the global batch of the step that is logged",
    ),
    Metric(
        name="train/grad_norm",
        unit="of the gradients",
        meaning="norm of all gradients before they were clipped; with max_grad_norm only",
    ),
    Metric(
        name="train/lr",
        unit="1",
        meaning="learning rate of the first parameter group; of the others as train/lr/1, train/lr/2, …",
    ),
    Metric(
        name="train/step_seconds",
        unit="s",
        meaning="wall time of a step, data loading included; mean of the steps since the last logged one; "
        "not at the first step",
    ),
    Metric(
        name="train/samples_per_second",
        unit="1/s",
        meaning="samples of all ranks in that time; where the size of the global batch is known",
    ),
    Metric(
        name="train/skipped_steps",
        unit="steps",
        meaning="steps skipped for infinite or NaN gradients since the run began",
    ),
    Metric(
        name="train/loss_scale",
        unit="1",
        meaning="factor on the loss in the backward pass; under fp16 only",
    ),
    Metric(
        name="memory/peak_gib",
        unit="GiB",
        meaning="most memory that rank 0 has held since its process began: of its GPU, as the allocator counts, "
        "or the resident set of its process",
    ),
)
"""What :meth:`Result.track <atorch_ns.job.Result.track>` gives to trackers."""


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of steps. It exists on every rank and is called on rank 0 only.

    So its constructor opens nothing: files and connections are opened by the first :meth:`log`.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes the numbers of one step.

        Args:
            metrics: by name; those of :data:`METRICS`, or a caller's own. :class:`Tracking` gives floats only; the
                trackers of this package take whatever holds one number, and leave out the rest with a warning.
            step: training steps so far, from 1; never smaller than before, except after a checkpoint was loaded.
        """
        ...

    def close(self) -> None:
        """Writes what is not written yet, and ends; may be called twice, and without any :meth:`log`."""
        ...


def require_package(package: str, *, needed_by: str, install: str) -> None:
    """Checks that a package is there, without the seconds that its import would take on every rank.

    Raises:
        MissingPackageError: if it is not.
    """
    try:
        found = importlib.util.find_spec(package) is not None
    except Exception:  # a parent that fails to import raises anything
        found = False
    if not found:
        raise MissingPackageError(package, needed_by=needed_by, install=install)
