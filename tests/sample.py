"""Sample of ``make test``: every cheap test, and as many dear ones of each room as its budget pays for.

What a test costs is read from ``costs.json``, in seconds of the processor of all its processes. Which dear tests are run
is drawn anew for every commit, so that all of them have their turn; ``make test-all`` leaves none out. Each run writes what
its tests cost into ``build/costs``, and ``python -m tests.sample`` takes that over into the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

ROOT: Final = Path(__file__).parents[1]
COSTS: Final = Path(__file__).with_name("costs.json")
RECORDS: Final = ROOT / "build" / "costs"
CHEAP: Final = 0.5
"""Seconds of the processor up to which a test is always run: four fifths of them cost a tenth of all."""
MOST: Final = 1140
"""Seconds of the processor that ``make test`` may take, for whoever waits for it on two cores."""
START: Final = 90
"""Seconds of these that two workers take to import, to collect, and to start what commands are forked from."""
BUDGETS: Final[Mapping[str, int]] = {
    "opt_lib": 123,
    "loops": 229,
    "release": 18,
    "parity": 55,
    "cli": 50,
    "merak": 40,
    "parallel": 40,
    "tests": 32,
    "job": 33,
    "operators": 35,
    "sharding": 34,
    "checkpoint": 31,
    "estimate": 30,
    "examples": 24,
    "trainer": 28,
    "testing": 28,
    "docs": 30,
    "engine": 19,
    "numerics": 21,
    "pipeline": 23,
    "benchmarks": 20,
    "search": 16,
    "cluster": 8,
    "profile": 8,
    "data": 8,
    "tracking": 7,
    "strategy": 3,
    "report": 5,
    "apply": 1,
    "planning": 11,
    "capture": 12,
    "costs": 12,
    "processes": 2,
    "method": 2,
    "doctor": 3,
    "faults": 5,
    "gpu": 1,
    "surface": 2,
    "torch_compat": 1,
}
"""Seconds by room, cheap tests among them. Whoever needs more for a room lowers another."""


def commit_number() -> int:
    """A number that moves with the commit, for tests that draw: in time many cases have had their turn. ``SEED`` gives another."""
    text = os.environ.get("SEED", "")
    if not text:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        text = found.stdout.strip() or "0"
    return int.from_bytes(text.encode(), "little") % 2**63


def room_of(test: str) -> str:
    """The folder under ``tests`` that a test is in; ``"tests"`` for those beside the folders."""
    parts = test.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"


def function_of(test: str) -> str:
    """A test without its parameters."""
    return test.partition("[")[0]


def read_costs() -> dict[str, Any]:
    """``dear``: seconds by test; ``cheap``: seconds of all others by room."""
    found: dict[str, Any] = json.loads(COSTS.read_text())
    return found


def room_for_dear(room: str, costs: Mapping[str, Any], budgets: Mapping[str, int]) -> float:
    """Seconds that the cheap tests of a room leave of its budget; a test that takes more is for ``make test-all`` alone."""
    return float(budgets[room] - costs["cheap"].get(room, 0.0))


def draw_tests(
    tests: Iterable[str], seed: str, costs: Mapping[str, Any], budgets: Mapping[str, int]
) -> set[str]:
    """The tests to run. Pure; the same for the same arguments.

    Of each room dear tests are drawn while its budget lasts, one case of every function before a second one of any.

    Args:
        tests: node ids, as pytest has them.
        seed: text that decides which dear tests are drawn.
        costs: as :func:`read_costs` gives them. A test that is not in them is new, and is run.
        budgets: seconds by room.
    """
    chosen, dear = set(), defaultdict(list)
    for test in tests:
        if test in costs["dear"]:
            dear[room_of(test)].append(test)
        else:
            chosen.add(test)
    for room, found in dear.items():
        left = room_for_dear(room, costs, budgets)
        for test in _in_turn(found, seed):
            if costs["dear"][test] <= left:
                left -= costs["dear"][test]
                chosen.add(test)
    return chosen


def _in_turn(tests: Iterable[str], seed: str) -> list[str]:
    """Tests in the order in which they are drawn: the first case of each function, then the second of each, and so on."""
    number: dict[str, int] = defaultdict(int)
    keys = {}
    for test in sorted(tests, key=lambda test: _draw(seed, test)):
        keys[test] = (number[function_of(test)], _draw(seed, function_of(test)))
        number[function_of(test)] += 1
    return sorted(keys, key=keys.__getitem__)


def _draw(seed: str, text: str) -> str:
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()


class CostRecord:
    """Writes what each test costs: seconds of the processor of this process and of all that it started.

    Args:
        folder: for a file of JSON lines, one for each process that runs tests.
    """

    def __init__(self, folder: Path = RECORDS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}.jsonl"
        self._process = psutil.Process()
        self._before = 0.0

    def start(self, *, starts_processes: bool) -> None:
        """A test begins."""
        self._before = self._spent(starts_processes)

    def stop(self, test: str, *, starts_processes: bool) -> None:
        """It has ended."""
        spent = self._spent(starts_processes) - self._before
        with self._path.open("a") as file:
            file.write(json.dumps([test, round(max(0.0, spent), 3)]) + "\n")

    def _spent(self, starts_processes: bool) -> float:
        # Looking at all processes takes milliseconds: most tests start none.
        others = self._process.children(recursive=True) if starts_processes else []
        total = 0.0
        for process in (self._process, *others):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total


def write_costs() -> None:
    """Takes over what recorded runs cost: tests that were not run keep what is known of them."""
    seen: dict[str, float] = {}
    for path in sorted(RECORDS.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            test, seconds = json.loads(line)
            seen[test] = seconds
    known = read_costs()
    dear = {test: seconds for test, seconds in known["dear"].items() if test not in seen and _exists(test)}
    dear |= {test: round(seconds, 1) for test, seconds in seen.items() if seconds > CHEAP}
    cheap: dict[str, float] = defaultdict(float)
    for test, seconds in seen.items():
        if seconds <= CHEAP:
            cheap[room_of(test)] += seconds
    # A run of one folder says nothing about the others; every run of a folder has all its cheap tests.
    rooms = known["cheap"] | {room: round(seconds, 1) for room, seconds in cheap.items()}
    COSTS.write_text(json.dumps({"cheap": rooms, "dear": dear}, indent=1, sort_keys=True) + "\n")


def _exists(test: str) -> bool:
    """Whether the function of a test is still there, as far as its file tells."""
    path, _, name = function_of(test).partition("::")
    file = ROOT / path
    return (
        file.exists()
        and re.search(rf"\b{re.escape(name.rpartition('::')[2])}\b", file.read_text()) is not None
    )


if __name__ == "__main__":
    write_costs()
