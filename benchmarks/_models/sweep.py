"""Sweep: every model in a process forked from this warm one, its rows one after the other, each row written when it is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atorch_ns.system import parent_tie
from benchmarks._models.entry import Entry, Unfit, has_experts, num_batch_norms
from benchmarks._models.row import STRATEGIES, References, Strategy, run_row

__all__ = ["Rows", "sweep"]


class Rows:
    """Rows in a file, one JSON object a line, appended whole; of two with one key the later counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Rows by model and strategy. A last line that a killed sweep left unfinished is passed over."""
        rows = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                rows[row["model"], row["strategy"]] = row
        return rows

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row with one write, from any process."""
        line = ("\n" if self._torn() else "") + json.dumps(row, ensure_ascii=False) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def _torn(self) -> bool:
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"


def sweep(
    entries: Sequence[Entry],
    rows: Rows,
    *,
    again: bool,
    chosen: Callable[[str, str], bool],
    report: Callable[[str], object],
    workers: int,
    timeout_s: float,
) -> None:
    """Runs the rows that are not there, or are to run again.

    Args:
        entries: the models.
        rows: where rows are written.
        again: whether rows that are there are run once more.
        chosen: whether a model and a strategy are asked for.
        report: told about every model.
        workers: how many models are trained at once.
        timeout_s: the time limit of a row, in seconds.
    """
    there = rows.read()
    running: dict[int, str] = {}
    began = time.monotonic()

    def missing(entry: Entry) -> list[Strategy]:
        return [
            strategy
            for strategy in STRATEGIES
            if entry.place % strategy.every == 0
            and chosen(entry.key, strategy.name)
            and (again or not {(entry.key, strategy.name), (entry.key, "")} & there.keys())
        ]

    before = signal.signal(signal.SIGTERM, _leave)  # for workers too, which then end their ranks
    try:
        for position, entry in enumerate(sorted(entries, key=lambda entry: entry.place)):
            strategies = missing(entry)
            if not strategies:
                continue
            while len(running) >= workers:
                _reap(running, rows, report)
            report(
                f"models: {time.monotonic() - began:.0f} s: {entry.key} ({position + 1} of {len(entries)})"
            )
            running[_fork(entry, strategies, rows, timeout_s)] = entry.key
        while running:
            _reap(running, rows, report)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in running:
            os.waitpid(pid, 0)
        signal.signal(signal.SIGTERM, before)


def _busy() -> float:
    """How many times longer work may take here now than on a quiet machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _reap(running: dict[int, str], rows: Rows, report: Callable[[str], object]) -> None:
    """Waits for a model's process to end."""
    pid, status = os.wait()
    key = running.pop(pid, None)  # none of another child
    if key is not None and status:
        reason = f"its process ended with {os.waitstatus_to_exitcode(status)}"
        rows.add({"model": key, "strategy": "", "is": "unfit", "reason": reason})
        report(f"models: {key}: {reason}")


def _fork(entry: Entry, strategies: Sequence[Strategy], rows: Rows, timeout_s: float) -> int:
    tie = parent_tie()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        tie()
        _of_model(entry, strategies, rows, timeout_s)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _leave(*_: object) -> None:
    raise SystemExit(1)


def _of_model(entry: Entry, strategies: Iterable[Strategy], rows: Rows, timeout_s: float) -> None:
    """All rows of a model, in its process."""
    facts: dict[str, Any] = {"model": entry.key, "kind": entry.kind}
    try:
        case = entry.case()
    except Exception as error:
        reason = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
        rows.add({**facts, "strategy": "", "is": "unfit", "reason": reason[:1000]})
        return
    model = case.build()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    facts |= {"class": type(model).__name__, "parameters": num_parameters}
    if batch_norms := num_batch_norms(model):
        facts["batch norms"] = batch_norms
    with tempfile.TemporaryDirectory(prefix="models_") as folder:
        references = References(case, Path(folder), 10 * timeout_s)
        for strategy in strategies:
            if strategy.mixtures_only and not has_experts(model):
                rows.add({**facts, "strategy": strategy.name, "is": "no mixture"})
                continue
            try:
                row = run_row(case, strategy, references, timeout_s * _busy())
            except Unfit as error:
                whole = strategy.autocast_dtype is None  # then no row of this model can be compared
                rows.add(
                    {**facts, "strategy": "" if whole else strategy.name, "is": "unfit", "reason": str(error)}
                )
                if whole:
                    return
                continue
            rows.add({**facts, "strategy": strategy.name, **row})
