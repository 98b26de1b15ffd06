"""``python -m tests.faults [NAME ...]``: plants faults in a copy of the tree, which tests must find.

A NAME is a fault's, or a part of it; without one, all are planted. The exit code is 1 if a fault was not
found or tests could not be run, and 2 if a name is unknown.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from atorch_ns.system import kill_group
from tests.faults.faults import FAULTS, Fault

ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 120.0
"""Seconds for the tests of a fault."""
UNCHANGED_LIMIT_S: Final = 1800.0
"""Seconds for the tests of all faults, before any is planted."""

_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", re.MULTILINE)
_TESTS_FAILED: Final = 1
"""pytest's exit code. Larger ones: interrupted, an internal error, wrong usage, nothing collected."""
_PACKAGES: Final = ("atorch_ns", "opt_lib", "tests")


class Run(NamedTuple):
    """What became of a run of tests.

    Attributes:
        code: pytest's exit code; ``None`` if it was ended at the limit.
        output: its output.
        seconds: how long it took.
    """

    code: int | None
    output: str
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The tests that failed, by their ids."""
        return _FAILED.findall(self.output)


class Copy:
    """A copy of the checkout, in which faults are planted.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times = count(1)
        for name in _checkout_files():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place, follow_symlinks=False)

    def check_imports(self) -> None:
        """Ends the program unless the packages that tests import are those of the copy."""
        program = "\n".join(f"import {one}; print({one}.__file__)" for one in _PACKAGES)
        # From another folder, as ranks and commands of tests may be started.
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd="/", env=self._environment(), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        wrong = [line for line in done.stdout.splitlines() if not Path(line).is_relative_to(self._folder)]
        if wrong:
            sys.exit(f"tests would not import the copy in {self._folder}, but {', '.join(wrong)}")

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault stands in its file inside the block."""
        path = self._folder / fault.file
        text = path.read_text(encoding="utf-8")
        self._write(path, fault.planted_in(text))
        try:
            yield
        finally:
            self._write(path, text)

    def run(self, tests: Sequence[str], *options: str, limit_s: float) -> Run:
        """Runs tests by pytest, whose processes are all ended at the limit."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *options,
            *tests,
        ]
        began = time.monotonic()
        # A file, and not a pipe, which a process that outlives pytest would keep open.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            code = None
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                kill_group(process.pid)
                process.wait()
            seconds = time.monotonic() - began
            output.seek(0)
            return Run(code, output.read(), seconds)

    def _write(self, path: Path, text: str) -> None:
        """Writes a file with a time of its own, by which Python tells whether what it has compiled is old."""
        path.write_text(text, encoding="utf-8")
        changed = path.stat().st_mtime + 10 * next(self._times)
        os.utime(path, (changed, changed))

    def _environment(self) -> Mapping[str, str]:
        paths = [str(self._folder), os.environ.get("PYTHONPATH")]
        # pytest's own options would come before ours.
        others = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        return {**others, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def _checkout_files() -> list[str]:
    """The files of the checkout, tracked or not, but those that git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted({name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)})


def chosen_faults(names: Sequence[str]) -> list[Fault]:
    """The faults that have one of the names or parts of names, in their order; all without names."""
    unknown = [name for name in names if not any(name in fault.name for fault in FAULTS)]
    if unknown:
        say(f"no fault is named {', '.join(map(repr, unknown))}. Faults are:")
        say("\n".join(f"  {fault.name}" for fault in FAULTS))
        sys.exit(2)
    return [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]


def check_unchanged(copy: Copy, faults: Sequence[Fault]) -> None:
    """Ends the program unless all tests of the faults pass before one is planted."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    run = copy.run(tests, limit_s=UNCHANGED_LIMIT_S)
    if run.code:
        which = "\n".join(f"  {test}" for test in run.failed)
        sys.exit(f"{run.output}\npytest ended with code {run.code} on the unchanged copy:\n{which}")
    if run.code is None:
        sys.exit(f"{run.output}\nthe tests of the unchanged copy took more than {UNCHANGED_LIMIT_S:.0f} s")
    say(f"the tests of {len(faults)} faults pass without them, in {run.seconds:.1f} s")


def verdict(fault: Fault, run: Run) -> tuple[bool, str]:
    """Whether tests have found a fault, and a text that says which, or why not."""
    if run.code is None:
        return (
            True,
            f"in {run.seconds:.1f} s: {fault.name}: the tests hung until the limit of {LIMIT_S:.0f} s",
        )
    if run.code == _TESTS_FAILED:
        return True, f"in {run.seconds:.1f} s: {fault.name}: {', '.join(run.failed[:1]) or 'a test'}"
    if run.code == 0:
        return False, f"NOT FOUND: {fault.name}: all of {', '.join(fault.tests)} pass with it"
    return False, f"ERROR: {fault.name}: pytest ended with code {run.code}\n{run.output}"


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)  # noqa: T201


def main(names: Sequence[str]) -> int:
    """Plants the faults; the exit code."""
    faults = chosen_faults(names)
    began, found = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder).resolve())
        copy.check_imports()
        check_unchanged(copy, faults)
        for fault in faults:
            with copy.planted(fault):
                run = copy.run(fault.tests, "-x", limit_s=LIMIT_S)
            is_found, text = verdict(fault, run)
            found += is_found
            say(f"{found}/{len(faults)} found {text}" if is_found else text)
    say(f"{found} of {len(faults)} planted faults were found, in {time.monotonic() - began:.0f} s")
    return 0 if found == len(faults) else 1


if __name__ == "__main__":
    # So that the tests end with this program: they are in a session of their own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
