"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, final

from atorch_ns.tracking._base import require_package
from atorch_ns.tracking._numbers import Numbers

__all__ = ["WandbTracker"]

log = logging.getLogger("atorch_ns")


@final
class WandbTracker:
    """Logs to a run that begins with the first logged step.

    The step is logged as the metric ``step``, which all others are drawn over: so a run that goes back to a
    checkpoint may log steps again, which wandb's own counter refuses.

    Where ``folder`` cannot be written, wandb takes another one: then a warning says at the start which.

    Args:
        project: the run's project.
        name: the run's name; ``None`` for one that wandb makes up.
        mode: ``"online"``; ``"offline"`` to write to ``folder`` for a later ``wandb sync``.
        folder: where the run's files go; ``None`` for ``./wandb``.
        config: what the run was started with, for wandb's table of runs.

    Raises:
        MissingPackageError: if the package ``wandb`` is not installed.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str | None = None,
        mode: Literal["online", "offline"] = "offline",
        folder: str | PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        require_package("wandb", needed_by="WandbTracker", install="pip install 'atorch-ns[wandb]'")
        self.project, self.name = project, name
        self._mode: Literal["online", "offline"] = mode
        self._folder, self._config = folder, dict(config or {})
        self._numbers = Numbers()
        self._run: Any = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs the metrics of one step."""
        if self._run is None:
            self._run = self._begin()
        self._run.log({"step": step, **self._numbers.of(metrics)})

    def close(self) -> None:
        """Ends the run; in the mode ``"online"`` this waits until everything is sent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _begin(self) -> Any:
        import wandb

        run = wandb.init(
            project=self.project,
            name=self.name,
            mode=self._mode,
            dir=None if self._folder is None else str(self._folder),
            config=self._config,
            settings=wandb.Settings(silent=True),
        )
        asked = Path(self._folder or os.environ.get("WANDB_DIR") or ".").resolve()
        place = Path(run.dir).resolve()
        if not place.is_relative_to(asked):
            log.warning("wandb cannot write to %s, and writes this run to %s.", asked, place.parent)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run
