"""Metrics as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, final

from atorch_ns.tracking._base import require_package
from atorch_ns.tracking._numbers import Numbers

__all__ = ["TensorBoardTracker"]


@final
class TensorBoardTracker:
    """Writes scalars that ``tensorboard --logdir FOLDER`` draws; they are in the file when ``log`` returns.

    Steps that were logged before a checkpoint was loaded are hidden by TensorBoard when they come again.

    Args:
        folder: for the event files; one run.

    Raises:
        MissingPackageError: if the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        require_package(
            "tensorboard", needed_by="TensorBoardTracker", install="pip install 'atorch-ns[tensorboard]'"
        )
        self.folder = Path(folder)
        self._numbers = Numbers()
        self._writer: Any = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Writes a scalar for each metric."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What comes again from this step on takes the place of what an earlier run wrote there.
            self._writer = SummaryWriter(str(self.folder), purge_step=step)
        for name, value in self._numbers.of(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
