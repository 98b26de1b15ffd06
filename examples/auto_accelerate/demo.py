"""The demo, in two acts: a Llama on the machine as it is, and with less memory than the plain strategy needs.

::

    python examples/auto_accelerate/demo.py

Every job is ``small_llama.py``, and its command line is printed: each can be run alone. Each process is bound to its share of
the cores, and stands for a device. All figures are measured in the run that shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

JOB = os.path.relpath(Path(__file__).with_name("small_llama.py"))
MIB = 2**20
LIMIT = 0.85  # of what tensors alone take under the plain strategy: it cannot fit
EQUAL = (
    1e-3  # of what training changes: rounding, which sums in another order differ by, grows from step to step
)

SCRIPT = """\
status, result, strategy = auto_accelerate(model, optim_func, dataset, loss_func, ...)
for batch in result.dataloader:
    loss = result.train_step(batch)"""


class Demo:
    """Jobs on ``nproc`` processes, and where they leave what they found.

    Args:
        console: shows what happens.
        folder: for everything that is kept.
        nproc: processes of each job.
        flags: options that every job gets.
    """

    def __init__(self, console: Console, folder: Path, nproc: int, flags: list[str]) -> None:
        self.folder = folder
        self._console, self._nproc, self._flags = console, nproc, flags
        self._begin = time.monotonic()

    def say(self, text: str, style: str = "bold") -> None:
        """A line with the seconds since the beginning."""
        self._console.print(f"\n[{time.monotonic() - self._begin:3.0f} s] {text}", style=style)

    def run(self, what: str, name: str, *flags: str) -> Path:
        """Runs a job; returns its folder, ``name``."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch = [sys.executable, "-m", "atorch_ns.cli", "launch", "--nproc", str(self._nproc)]
        command = [*launch, JOB, what, "--save", str(folder), *flags, *self._flags]
        with subprocess.Popen(command) as job:
            try:
                code = job.wait()
            except BaseException:
                job.terminate()  # it ends its ranks
                raise
        if code:
            sys.exit(f"the job ended with {code}: {' '.join(command)}")
        return folder

    def training(self, folder: Path) -> list[dict[str, Any]]:
        """Each rank's losses, seconds of a step, and how it ended."""
        return [read(folder / f"training-{rank}.json") for rank in range(self._nproc)]


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def first_act(demo: Demo) -> tuple[dict[str, Any], dict[str, Any]]:
    """The machine as it is: the plain strategy and one that is searched for, in full precision; before and after."""
    demo.say(
        "Act 1: the machine as it is. A search for the fastest strategy in full precision, and training with it:"
    )
    after = demo.run("find", "act-1/after", "--then-train")
    figures = read(after / "figures.json")
    demo.say("What a script without it does, plain data parallelism:")
    before = demo.run("train", "act-1/before", "--strategy", str(after / "plain.json"))
    columns = {"before": figures["plain"], "after": figures["found"]}
    for name, folder in (("before", before), ("after", after)):
        columns[name] |= demo.training(folder)[0] | {"limit": "none"}
    seconds = [column["step_seconds"] for column in columns.values()]
    columns["before"]["verdict"] = "what you have"
    if columns["after"]["label"] == columns["before"]["label"]:
        columns["after"]["verdict"] = "nothing is faster here beyond the noise"
    else:
        gain = f"{seconds[0] / seconds[1]:.2f} times as fast in training"
        columns["after"]["verdict"] = f"{gain}; {same_training(before, after)}"
    return columns["before"], columns["after"]


def second_act(demo: Demo, limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``limit`` MiB for each rank: the plain strategy runs out of memory, one that is searched for trains."""
    limited = ("--memory-limit", str(limit))
    demo.say(f"Act 2: {limit} MiB for each rank, enforced by the system. The plain strategy tries:")
    plain = read(demo.folder / "act-1/after/figures.json")["plain"]
    strategy = str(demo.folder / "act-1/after/plain.json")
    ranks = demo.training(demo.run("train", "act-2/before", "--strategy", strategy, *limited))
    if not any("out of memory" in rank["ended"] for rank in ranks):
        sys.exit(f"the plain strategy was to run out of {limit} MiB and did not.")

    demo.say("Is there a strategy that fits?")
    found = demo.run("find", "act-2/search", *limited, "--max-trials", "4")
    demo.say("Training with it, under the same limit:")
    after = demo.run("train", "act-2/after", "--strategy", str(found / "strategy.json"), *limited)
    outcome = demo.training(after)[0]
    if outcome["ended"]:
        sys.exit(f"the strategy that was found cannot train: {outcome['ended']}")
    verdict = f"fits; {same_training(demo.folder / 'act-1/before', after)}"
    return (
        {**plain, **ranks[0], "limit": f"{limit} MiB", "verdict": "out of memory"},
        {**read(found / "figures.json")["found"], **outcome, "limit": f"{limit} MiB", "verdict": verdict},
    )


def same_training(before: Path, after: Path) -> str:
    """How far two runs are apart in all weights and losses, which must be by rounding alone."""
    first, second = (torch.load(folder / "weights.pt", weights_only=True) for folder in (before, after))
    apart = sum(float((first[name] - second[name]).square().sum()) for name in first) ** 0.5
    size = sum(float(value.square().sum()) for value in first.values()) ** 0.5
    losses = [read(folder / "training-0.json")["losses"] for folder in (before, after)]
    loss = max(abs(mine - other) for mine, other in zip(*losses, strict=True))
    if max(apart / size, loss) > EQUAL:
        sys.exit(f"the weights of both runs differ by {apart / size:.1e} and their losses by {loss:.1e}.")
    return f"the same training (weights within {apart / size:.0e}, losses within {loss:.0e})"


def summary(columns: dict[str, dict[str, Any]]) -> Table:
    """Both acts side by side."""
    table = Table(title="Before and after", title_justify="left", title_style="bold")
    table.add_column("")
    for heading in columns:
        table.add_column(heading, overflow="fold")
    rows = {
        "strategy": "label",
        "memory limit of a rank": "limit",
        "peak of tensors, predicted": "predicted_bytes",
        "peak of tensors, in its trial": "measured_bytes",
        "memory of the process, in its trial": "process_bytes",
        "step, predicted": "predicted_seconds",
        "step, in its trial": "measured_seconds",
        "step, in training": "step_seconds",
    }
    for name, key in rows.items():
        table.add_row(name, *(shown(key, column[key]) for column in columns.values()))
    table.add_row("losses, first", *(losses_text(column["losses"][:3]) for column in columns.values()))
    table.add_row("losses, last", *(losses_text(column["losses"][3:][-3:]) for column in columns.values()))
    table.add_row("verdict", *(column["verdict"] for column in columns.values()), style="bold")
    return table


def shown(key: str, value: Any) -> str:
    """A figure with its unit; a dash for a missing figure."""
    if value is None:
        return "–"
    if key.endswith("_bytes"):
        return f"{value / MIB:.0f} MiB"
    return f"{value * 1e3:.0f} ms" if key.endswith("_seconds") else str(value)


def losses_text(losses: list[float]) -> str:
    """Losses in nats."""
    return " ".join(f"{loss:.4f}" for loss in losses) or "–"


def main() -> None:
    """Both acts, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes of every job")
    parser.add_argument("--save", type=Path, default=Path("runs/demo"), help="folder for what is kept")
    options, flags = parser.parse_known_args()  # the rest is for the jobs
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the job ends as well
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    demo = Demo(console, options.save, options.nproc, flags)

    before, after = first_act(demo)
    limit = round(LIMIT * (before["measured_bytes"] or before["predicted_bytes"]) / MIB)
    plain, found = second_act(demo, limit)

    demo.say("Done.")
    console.print(
        summary({"before": before, "after": after, "before, limited": plain, "after, limited": found})
    )
    console.print(
        "Why: with few samples a step, plain data parallelism spends its time on what every rank repeats, the exchange of\n"
        "all gradients and the update of all weights; memory goes to weights, gradients and moments that every rank holds.\n"
        "What was found divides them. Under a limit a step takes longer: the system takes back what is freed at once.\n"
        "Each process is bound to its share of the cores and stands for a device. A search says too what one such device takes:\n"
        "on this machine that may be as fast, since processes wait for each other and share its memory.\n"
        "Figures of trials and training are measured, with whatever else this machine does meanwhile.\n"
    )
    console.print("The lines of a script that do it:", style="bold")
    console.print(SCRIPT)
    for folder in ("act-1/after", "act-2/search"):
        console.print(f"strategy.json, report.html and pictures: {options.save / folder}", soft_wrap=True)


if __name__ == "__main__":
    main()
