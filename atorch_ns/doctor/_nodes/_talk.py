"""Starts what measures on this rank, and ends it in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from atorch_ns.doctor._who import Who

__all__ = ["talk"]

_POLL_S: Final = 0.25
_GRACE_S: Final = 3.0
"""Seconds that a rank has left once another one has failed, to find that out by itself."""
_SHOWN_CHARS: Final = 300


def talk(who: Who, *, timeout_s: float, hopeless: Callable[[], bool]) -> dict[str, Any]:
    """Measures in a process of its own, as this rank.

    Args:
        who: this rank.
        timeout_s: seconds until it is ended.
        hopeless: whether another rank has failed, so that this one need not go on.

    Returns:
        ``figures``, or a ``problem`` that says why there are none; ``steps`` that were done; ``late`` if it was ended.
    """
    with tempfile.TemporaryDirectory(prefix="atorch_ns_doctor_") as name:
        folder = Path(name)
        with (folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "atorch_ns.doctor._nodes._talk_rank", name, str(timeout_s)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"OMP_NUM_THREADS": "1", **os.environ, **who.variables()},
            )
            began = time.monotonic()
            try:
                late = _ends_late(process, timeout_s, hopeless)
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        steps = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
        answer: dict[str, Any] = {"steps": steps, "late": late, "seconds": time.monotonic() - began}
        figures = folder / "figures"
        if figures.exists() and process.returncode == 0:
            return {**answer, "figures": json.loads(figures.read_text())}
    reason = _last_error(said) or f"exit code {process.returncode}"
    seconds = answer["seconds"]
    return {**answer, "problem": f"no end within {seconds:.0f} s" if late else reason}


def _ends_late(process: subprocess.Popen[bytes], timeout_s: float, hopeless: Callable[[], bool]) -> bool:
    limit = time.monotonic() + timeout_s
    given_up = False
    while time.monotonic() < limit:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if not given_up and hopeless():
                given_up, limit = True, min(limit, time.monotonic() + _GRACE_S)
        else:
            return False
    return True


def _last_error(said: str) -> str:
    """The line that says what was raised; Python's, rather than what threads print afterwards."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    raised = [line for line in lines if "Error" in line.partition(":")[0] and ":" in line]
    last = (raised or lines or [""])[-1]
    return last if len(last) <= _SHOWN_CHARS else last[: _SHOWN_CHARS - 3] + "..."
