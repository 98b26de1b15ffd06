"""The demo, in two acts: a small Llama on the machine as it is, and with less memory than the plain strategy needs.

::

    python examples/auto_accelerate/demo.py

Every job is ``small_llama.py``, and its command line is printed: each can be run alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

JOB = os.path.relpath(Path(__file__).with_name("small_llama.py"))
MIB = 2**20
LIMIT = 0.9  # of what the plain strategy was measured to hold
EQUAL = 1e-5  # losses of strategies that differ in the order of sums alone


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

    def say(self, text: str, style: str = "") -> None:
        """A line with the seconds since the beginning."""
        self._console.print(f"\n[{time.monotonic() - self._begin:3.0f} s] {text}", style=style)

    def run(self, what: str, place: str, *flags: str) -> Path:
        """Runs a job; returns its folder, ``place``."""
        folder = self.folder / place
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch = [sys.executable, "-m", "atorch_ns.cli", "launch", "--nproc", str(self._nproc)]
        command = [*launch, JOB, what, "--save", str(folder), *flags, *self._flags]
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(f"the job ended with {code}: {' '.join(command)}")
        return folder

    def training(self, folder: Path) -> list[dict[str, Any]]:
        """Each rank's losses, seconds of a step, and how it ended."""
        return [read(folder / f"training-{rank}.json") for rank in range(self._nproc)]


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def first_act(demo: Demo) -> dict[str, Any]:
    """The machine as it is: a search, and training with what it found."""
    demo.say("Act 1: the machine as it is. Which strategy is the fastest, in full precision?", "bold")
    found = demo.run("find", "act-1/search")
    demo.say("Training with it:")
    trained = demo.run("train", "act-1/training", "--strategy", str(found / "strategy.json"))
    figures = read(found / "figures.json")
    best, plain = (figures[name]["measured_seconds"] for name in ("found", "plain"))
    verdict = "trains; nothing that was tried is faster than the plain strategy, beyond the noise"
    if figures["found"]["label"] != figures["plain"]["label"]:
        verdict = f"trains; {plain / best:.2f} times as fast as the plain strategy"
    return {**figures["found"], **demo.training(trained)[0], "limit": "none", "verdict": verdict}


def second_act(demo: Demo, limit: int, losses: list[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``limit`` MiB for each rank: the plain strategy runs out of memory, one that is searched for trains."""
    limited = ("--memory-limit", str(limit))
    demo.say(f"Act 2: {limit} MiB for each rank, enforced. The plain strategy tries:", "bold")
    plain = read(demo.folder / "act-1/search/figures.json")["plain"]
    strategy = str(demo.folder / "act-1/search/plain.json")
    ranks = demo.training(demo.run("train", "act-2/plain", "--strategy", strategy, *limited))
    failed = [number for number, rank in enumerate(ranks) if "out of memory" in rank["ended"]]
    if not failed:
        sys.exit(f"the plain strategy was to run out of {limit} MiB and did not.")
    step = len(ranks[failed[0]]["losses"]) + 1
    verdict = f"out of memory in step {step}"

    demo.say("Is there a strategy that fits?")
    found = demo.run("find", "act-2/search", *limited)
    demo.say("Training with it, under the same limit:")
    trained = demo.run("train", "act-2/training", "--strategy", str(found / "strategy.json"), *limited)
    outcome = demo.training(trained)[0]
    if outcome["ended"]:
        sys.exit(f"the strategy that was found cannot train: {outcome['ended']}")
    apart = max(abs(one - other) for one, other in zip(losses, outcome["losses"], strict=True))
    if apart > EQUAL:
        sys.exit(f"the losses of both acts differ by {apart:.1e}, more than {EQUAL:.0e}.")
    text = (
        f"trains; losses as in act 1 (within {apart:.0e})" if apart else "trains; losses equal those of act 1"
    )
    return (
        {**plain, **ranks[0], "limit": f"{limit} MiB", "verdict": verdict},
        {**read(found / "figures.json")["found"], **outcome, "limit": f"{limit} MiB", "verdict": text},
    )


def summary(columns: dict[str, dict[str, Any]]) -> Table:
    """Both acts side by side."""
    table = Table(title="Both acts", title_justify="left", title_style="bold")
    table.add_column("")
    for heading in columns:
        table.add_column(heading, overflow="fold")
    rows = {
        "strategy": "label",
        "memory limit of a rank": "limit",
        "peak memory, predicted": "predicted_bytes",
        "peak memory, measured in its trial": "measured_bytes",
        "step, predicted": "predicted_seconds",
        "step, measured in its trial": "measured_seconds",
        "step, measured in training": "step_seconds",
    }
    for name, key in rows.items():
        table.add_row(name, *(shown(key, column[key]) for column in columns.values()))
    table.add_row("losses of the first steps", *(losses_text(one["losses"][:3]) for one in columns.values()))
    table.add_row(
        "losses of the last steps", *(losses_text(one["losses"][3:][-3:]) for one in columns.values())
    )
    table.add_row("verdict", *(one["verdict"] for one in columns.values()), style="bold")
    return table


def shown(key: str, value: Any) -> str:
    """A figure with its unit; a dash for one that there is not."""
    if value is None:
        return "–"
    if key.endswith("_bytes"):
        return f"{value / MIB:.0f} MiB"
    return f"{value * 1e3:.0f} ms" if key.endswith("_seconds") else str(value)


def losses_text(losses: list[float]) -> str:
    """Losses in nats."""
    return " ".join(f"{loss:.5f}" for loss in losses) or "–"


def main() -> None:
    """Both acts, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes of every job")
    parser.add_argument("--save", type=Path, default=Path("runs/demo"), help="folder for what is kept")
    options, flags = parser.parse_known_args()  # the rest is for the jobs
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    demo = Demo(console, options.save, options.nproc, flags)

    first = first_act(demo)
    held = read(demo.folder / "act-1/search/figures.json")["plain"]
    limit = round(LIMIT * (held["measured_bytes"] or held["predicted_bytes"]) / MIB)
    plain, found = second_act(demo, limit, first["losses"])

    demo.say("Done.")
    console.print(summary({"act 1": first, "act 2, plain": plain, "act 2, found": found}))
    console.print(
        "Under an enforced limit a step takes longer than in a trial: the system takes back what is freed at once."
    )
    for act in ("act-1", "act-2"):
        place = options.save / act / "search"
        pictures = " ".join(sorted(path.name for path in (place / "pictures").iterdir()))
        console.print(
            f"{act}: strategy.json and report.html in {place}, pictures: {pictures}", soft_wrap=True
        )


if __name__ == "__main__":
    main()
