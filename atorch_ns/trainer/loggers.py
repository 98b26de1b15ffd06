"""Loggers of a Trainer: TensorBoard, Weights & Biases, or one's own; the first rank logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from atorch_ns.tracking import TensorBoardTracker, WandbTracker


class LoggerBase:
    """Base of loggers."""

    def setup(self, config: Mapping[str, Any]) -> None:
        """Called before training, with the trainer's arguments as plain data."""

    def log_metrics(self, metrics: Mapping[str, float], step: int, *, tag: str | None = None) -> None:
        """Logs the metrics of a step; ``tag`` is ``train`` or ``val``."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Called when training is over."""


class TensorBoardLogger(LoggerBase):
    """Event files in ``root_dir/name/tag``, a folder for each tag.

    Args:
        name: the run.
        root_dir: the folder of runs.
    """

    def __init__(self, name: str, root_dir: str | PathLike[str] = "./runs") -> None:
        self._folder = Path(root_dir) / name
        self._trackers: dict[str, TensorBoardTracker] = {}
        TensorBoardTracker(self._folder)  # which needs a package

    def log_metrics(self, metrics: Mapping[str, float], step: int, *, tag: str | None = None) -> None:
        """Writes a scalar for each metric."""
        folder = self._folder / (tag or "")
        tracker = self._trackers.setdefault(tag or "", TensorBoardTracker(folder))  # opens no file yet
        tracker.log(metrics, step)

    def finalize(self) -> None:
        """Closes the files."""
        for tracker in self._trackers.values():
            tracker.close()


class WandbLogger(LoggerBase):
    """A run of Weights & Biases, with metrics called ``tag/metric``.

    Args:
        name, project: the run, and its project.
        mode: ``offline`` writes to ``dir`` for a later ``wandb sync``.
        dir: the folder of the run's files.
    """

    def __init__(
        self,
        name: str | None = None,
        project: str = "atorch_ns",
        *,
        mode: Literal["online", "offline"] = "offline",
        dir: str | PathLike[str] | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {"name": name, "project": project, "mode": mode, "folder": dir}
        self._tracker = WandbTracker(**self._settings)  # fails without the package

    def setup(self, config: Mapping[str, Any]) -> None:
        """Gives the run its table of settings."""
        self._tracker = WandbTracker(**self._settings, config=config)

    def log_metrics(self, metrics: Mapping[str, float], step: int, *, tag: str | None = None) -> None:
        """Logs the metrics of one step."""
        start = f"{tag}/" if tag else ""
        self._tracker.log({start + name: value for name, value in metrics.items()}, step)

    def finalize(self) -> None:
        """Ends the run."""
        self._tracker.close()


BUILT_IN = {logger.__name__: logger for logger in (TensorBoardLogger, WandbLogger)}
"""Loggers that need no module before their names."""


def set_default_logger_level(level: str | int) -> None:
    """Shows the log of this package from a level on, such as ``INFO``, on standard error."""
    logger = logging.getLogger("atorch_ns")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter(
                "%(asctime)s | %(levelname)s | %(name)s | %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
            )
        )
        logger.addHandler(handler)
    logger.setLevel(level)
