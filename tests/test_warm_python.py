"""The warm Python of the tests does what a fresh one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import COLD_PYTHON, warm_python

IS_WARM = "import sys; print('torch' in sys.modules)"


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """The program, once its server listens."""
    before = sys.executable
    if before != COLD_PYTHON:
        _wait_for(Path(before).with_name("server"))
        yield before
        return
    with warm_python():
        _wait_for(Path(sys.executable).with_name("server"))
        yield sys.executable


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < limit
        time.sleep(0.1)


def _run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


CODES = [
    "import sys; print(sys.argv, __name__, sys.path[0], sys.stdin.read())",
    "import os; print(os.getcwd(), os.environ['MINE'])",
    "raise SystemExit(3)",
    "raise SystemExit('no such thing')",
    "def f():\n    1 / 0\nf()",
    "import os; os.kill(os.getpid(), 9)",
    "import os; os.abort()",
    "raise KeyboardInterrupt",
    "import atexit; atexit.register(print, 'last'); print('first')",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
]


@pytest.mark.parametrize("code", CODES)
def test_code_does_as_in_a_fresh_python(python: str, code: str, tmp_path: Path) -> None:
    options = {"cwd": tmp_path, "input": "given", "env": {**os.environ, "MINE": "1"}}
    warm, cold = (_run(each, "-c", code, "a", "-b", **options) for each in (python, COLD_PYTHON))
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_scripts_and_modules(python: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import sys\nif __name__ == '__main__': print(sys.argv[1:], __file__)\nX = 1"
    )
    (tmp_path / "script.py").write_text("import beside, sys; print(__file__, sys.argv, beside.X)")
    for command in (["script.py", "1"], [str(tmp_path / "script.py")]):
        assert (
            _run(python, *command, cwd=tmp_path).stdout
            == _run(COLD_PYTHON, *command, cwd=tmp_path).stdout
            != ""
        )
    told = _run(python, "-m", "atorch_ns.cli", "methods", cwd=tmp_path)
    assert "zero2" in told.stdout
    assert told.stderr == ""


def test_it_is_warm_and_so_is_what_it_starts(python: str) -> None:
    assert _run(python, "-c", IS_WARM).stdout == "True\n"
    nested = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {IS_WARM!r}]))"
    assert "True" in _run(python, "-c", nested).stdout


@pytest.mark.parametrize(
    ("options", "variables"),
    [(["-I"], {}), (["-X", "dev"], {}), ([], {"ATEN_CPU_CAPABILITY": "avx2"}), ([], {"PYTHONHASHSEED": "1"})],
)
def test_what_a_fork_cannot_do_is_fresh(python: str, options: list[str], variables: dict[str, str]) -> None:
    done = _run(python, *options, "-c", IS_WARM, env={**os.environ, **variables})
    assert done.stdout == "False\n"


def test_a_module_in_the_way_is_fresh(python: str, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("MINE = True")
    done = _run(
        python, "-c", "import rich; print(rich.MINE)", env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout == "True\n"


# Short sleeps: Python sees a signal that comes just before a system call when the call ends.
WAITS = "import os, time\nprint(os.getpid(), flush=True)\nfor _ in range(600): time.sleep(0.1)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_reach_the_fork(python: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [python, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
    limit = time.monotonic() + 30
    while Path(f"/proc/{fork}").exists():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_forks_draw_their_own_numbers(python: str) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    assert len({_run(python, "-c", code).stdout for _ in range(3)}) == 3


def test_open_files_keep_their_numbers(python: str) -> None:
    reading, writing = os.pipe()
    try:
        subprocess.run(
            [python, "-c", f"import os; os.write({writing}, b'here')"], pass_fds=(writing,), check=True
        )
        assert os.read(reading, 10) == b"here"
    finally:
        os.close(reading)
        os.close(writing)
