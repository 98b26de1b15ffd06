"""Trackers: JSON lines, TensorBoard, Weights & Biases, and progress on the terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, TextIO, final

from atorch_ns.errors import MissingPackageError
from atorch_ns.tracking.tracking import Numbers

log = logging.getLogger("atorch_ns")


@final
class JsonlTracker:
    """Appends ``{"step": 10, "time": 1767225600.0, "train/loss": 2.25, …}``, a line for each logged step.

    Every line is in the file when ``log`` returns, or, on a full disk, nothing of it. JSON has no infinite
    numbers: these are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float`` reads. A step
    can have several lines: a caller's own numbers have their own, and a run that went back to a checkpoint
    writes its steps again. The last value of each metric of a step counts.

    Args:
        path: the file; its folder is made.
        clock: seconds since 1970, for ``time``.
    """

    def __init__(self, path: str | PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._numbers = Numbers()
        self._file: FileIO | None = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Appends one line."""
        if self._file is None:
            self._file = self._open_file()
        row: dict[str, float | str] = {"step": step, "time": round(self._clock(), 3)}
        row |= {name: _json_value(value) for name, value in self._numbers.of(metrics).items()}
        try:
            _append_bytes(self._file, (json.dumps(row, allow_nan=False) + "\n").encode())
        except OSError:
            self.close()  # opened again by the next step, which looks for a torn line
            raise

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open_file(self) -> FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        has_torn_line = _ends_within_a_line(self.path)
        # Unbuffered: a buffer would keep bytes that a full disk refuses, and write the rest of them later.
        file = FileIO(self.path, "a")
        if has_torn_line:  # by a process that was killed: the next row shall be a line of its own
            try:
                _append_bytes(file, b"\n")
            except OSError:
                file.close()
                raise
        return file


def _append_bytes(file: FileIO, data: bytes) -> None:
    start = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]  # without a buffer, a write may take a part
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), start)  # so that no torn line is left
        raise


def _json_value(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


@final
class TensorBoardTracker:
    """Writes scalars that ``tensorboard --logdir FOLDER`` draws; they are in the file when ``log`` returns.

    Steps that were logged before a checkpoint was loaded are hidden by TensorBoard when they come again.

    Args:
        folder: folder of the event files, one run.

    Raises:
        MissingPackageError: if the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        _require_package(
            "tensorboard", needed_by="TensorBoardTracker", install="pip install 'atorch-ns[tensorboard]'"
        )
        self.folder = Path(folder)
        self._numbers = Numbers()
        self._writer: Any = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Writes a scalar for each metric."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Steps that come again replace those that an earlier run wrote there.
            self._writer = SummaryWriter(str(self.folder), purge_step=step)
        for name, value in self._numbers.of(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


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
        folder: folder of the run's files; ``None`` for ``./wandb``.
        config: settings of the run, for wandb's table of runs.

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
        _require_package("wandb", needed_by="WandbTracker", install="pip install 'atorch-ns[wandb]'")
        self.project, self.name = project, name
        self._mode: Literal["online", "offline"] = mode
        self._folder, self._config = folder, dict(config or {})
        self._numbers = Numbers()
        self._run: Any = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs the metrics of one step."""
        if self._run is None:
            self._run = self._start_run()
        self._run.log({"step": step, **self._numbers.of(metrics)})

    def close(self) -> None:
        """Ends the run; in the mode ``"online"`` this waits until everything is sent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _start_run(self) -> Any:
        import wandb

        run = wandb.init(
            project=self.project,
            name=self.name,
            mode=self._mode,
            dir=None if self._folder is None else str(self._folder),
            config=self._config,
            settings=wandb.Settings(silent=True),
        )
        target = Path(self._folder or os.environ.get("WANDB_DIR") or ".").resolve()
        folder = Path(run.dir).resolve()
        if not folder.is_relative_to(target):
            log.warning("wandb cannot write to %s, so it writes this run to %s.", target, folder.parent)
        run.define_metric("step", hidden=True)  # the axis of all others, and no chart of its own
        run.define_metric("*", step_metric="step")
        return run


_SHOWN: Final = (  # metrics of a line, in this order, as far as they are given
    ("train/loss", "loss {:.4g}"),
    ("train/grad_norm", "norm {:.3g}"),
    ("train/lr", "lr {:.3g}"),
    ("train/samples_per_second", "{:,.1f} samples/s"),
    ("memory/peak_gib", "{:.2f} GiB"),
)


@final
class ProgressTracker:
    """Shows how far training is: a bar of rich on a terminal, else one line every ``every_s`` seconds.

    The first and the last logged step always have a line.

    Args:
        num_steps: steps of the whole run; ``None`` if unknown.
        stream: the stream to write to; ``None`` for standard error.
        every_s: seconds between lines where the stream is not a terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        stream: TextIO | None = None,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._stream = sys.stderr if stream is None else stream
        self._every_s, self._clock = every_s, clock
        self._numbers = Numbers()
        self._bar: tuple[Any, Any] | None = None  # rich's progress and its task
        self._written_s: float | None = None
        self._waiting: str | None = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Shows the metrics of one step, or keeps them for later."""
        numbers = self._numbers.of(metrics)
        line = "  ".join(text.format(numbers[name]) for name, text in _SHOWN if name in numbers)
        if self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            if self._bar is None:
                self._bar = self._start_progress()
            progress, task = self._bar
            progress.update(task, completed=step, shown=line)
            return
        of = "" if self._num_steps is None else f"/{self._num_steps}"
        self._waiting = f"step {step}{of}  {line}\n"
        now = self._clock()
        if self._written_s is None or now - self._written_s >= self._every_s or step == self._num_steps:
            self._written_s = now
            self._write_waiting()

    def close(self) -> None:
        """Ends the bar, or writes the line of the last logged step."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar[0].stop()
        self._write_waiting()

    def _write_waiting(self) -> None:
        line, self._waiting = self._waiting, None
        if line is not None:
            self._stream.write(line)
            self._stream.flush()

    def _start_progress(self) -> tuple[Any, Any]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[shown]}", markup=False),
            TimeRemainingColumn(),
            console=Console(file=self._stream, highlight=False),
            redirect_stdout=False,  # the user's own output goes where it always went
            redirect_stderr=False,
        )
        task = progress.add_task("", total=self._num_steps, shown="")
        progress.start()
        return progress, task


def _require_package(package: str, *, needed_by: str, install: str) -> None:
    try:  # without importing it, which takes seconds on every rank
        available = importlib.util.find_spec(package) is not None
    except Exception:  # a parent that fails to import raises anything
        available = False
    if not available:
        raise MissingPackageError(package, needed_by=needed_by, install=install)
