"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, final

from atorch_ns.tracking._base import require_package

__all__ = ["WandbTracker"]


@final
class WandbTracker:
    """Logs to a run that begins with the first logged step.

    The step is logged as the metric ``step``, which all others are drawn over: so a run that goes back to a
    checkpoint may log steps again, which wandb's own counter refuses.

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
        self._run: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of one step."""
        if self._run is None:
            self._run = self._begin()
        self._run.log({"step": step, **metrics})

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
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run
