"""Import time: what importing the package adds to importing torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks._ranks import keeping_bytecode
from benchmarks._results import Column, Findings, Spread
from benchmarks._yardstick import WORDS, in_yardsticks

__all__ = ["run"]

TARGET = 5.0
"""The most yardsticks that importing the package may take."""

_TEXT = """
Time to import in a fresh interpreter, from the first line of the program to the last; compiled files are in place.
*cpu* is processor time; {yardstick}; at most {target:.0f} are asked of the first program. The programs run in turns. *loads torch*: whether torch is imported at the end.

The first optimizer that a program makes has torch import much (its compiler, sharded tensors), which this package
imports too: what is added to a program that trains is what comes after that.
"""

_COLUMNS = (
    Column(title="program", key="program"),
    Column(title="runs", key="runs"),
    Column(title="cpu s (p25..p75)", key="cpu_s"),
    Column(title="yardsticks", key="yardsticks", digits=1),
    Column(title="wall s (p25..p75)", key="wall_s"),
    Column(title="loads torch", key="loads_torch"),
)

_ADAMW = "torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])"
_OURS = "from atorch_ns import auto_accelerate"

_PROGRAMS: Mapping[str, tuple[str, str]] = {
    "`import atorch_ns`": ("", "import atorch_ns"),
    "`import torch`": ("", "import torch"),
    "the first optimizer, after `import torch`": ("import torch", _ADAMW),
    f"`{_OURS}`, after `import torch`": ("import torch", _OURS),
    f"`{_OURS}`, after the first optimizer": (f"import torch; {_ADAMW}", _OURS),
    "the built-in methods, after all that": (
        f"import torch; {_ADAMW}; {_OURS}",
        "from atorch_ns.method import load_registry; load_registry()",
    ),
}
"""What is timed, by its heading: what runs before the clock starts, and what runs after."""

_CLOCKED = """
import sys, time
{before}
wall, cpu = time.perf_counter(), time.process_time()
{program}
print(time.process_time() - cpu, time.perf_counter() - wall, "torch" in sys.modules)
"""


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every program.

    Args:
        quick: one run.
        report: told what is being done.
    """
    rounds = 1 if quick else 10
    report(f"imports: {len(_PROGRAMS)} programs, {rounds} times each")
    runs: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in _PROGRAMS}
    for name in _PROGRAMS:
        _once(name)  # compiles, and brings files into memory
    for _ in range(rounds):
        for name in _PROGRAMS:
            runs[name].append(_once(name))
    return Findings(
        name="imports",
        title="Import time",
        text=_TEXT.format(target=TARGET, yardstick=WORDS),
        columns=_COLUMNS,
        rows=[_row(name, found) for name, found in runs.items()],
    )


def _once(name: str) -> tuple[float, float, bool]:
    before, program = _PROGRAMS[name]
    code = _CLOCKED.format(before=before, program=program)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=keeping_bytecode(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    cpu, wall, torch = done.stdout.split()
    return float(cpu), float(wall), torch == "True"


def _row(name: str, found: list[tuple[float, float, bool]]) -> dict[str, Any]:
    return {
        "program": name,
        "runs": len(found),
        "cpu_s": Spread.of(cpu for cpu, _, _ in found),
        "yardsticks": in_yardsticks(statistics.median(cpu for cpu, _, _ in found)),
        "wall_s": Spread.of(wall for _, wall, _ in found),
        "loads_torch": "yes" if any(torch for *_, torch in found) else "no",
    }
