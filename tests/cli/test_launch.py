"""``atorch-ns launch``, as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atorch_ns.cli._failures import split_debug
from tests.cli.conftest import Run

_SCRIPT = """
import os, sys
with open(f"rank{os.environ['RANK']}.txt", "w") as file:
    file.write(" ".join([os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]))
sys.exit(int(os.environ.get("CODE", 0)))
"""


def _launch(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "-c", "from atorch_ns.cli import main; main()", "launch", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_it_runs_the_line_that_it_prints(tmp_path: Path) -> None:
    done = _launch(tmp_path, "--nproc", "2", "--threads", "1", "script.py", "--debug", "--nproc", "9")
    assert done.returncode == 0, done.stderr
    line = "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -- script.py --debug --nproc 9"
    assert done.stderr.splitlines()[0] == line
    assert done.stdout == ""
    for rank in range(2):
        assert (tmp_path / f"rank{rank}.txt").read_text() == "2 1 --debug --nproc 9"


def test_a_failure_is_the_script_s_own_exit_code(tmp_path: Path) -> None:
    done = _launch(tmp_path, "script.py", CODE="3")
    assert done.returncode == 3
    assert "exitcode  : 3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_without_a_traceback(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGINT, lambda *_: os._exit(0))\n"
        "open('up', 'w').close()\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", "from atorch_ns.cli import main; main()", "launch", "waits.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        while not (tmp_path / "up").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code
    assert "Traceback" not in err


def test_dry_run_prints_the_line_alone(tmp_path: Path, run: Run) -> None:
    (tmp_path / "train.py").write_text("")
    done = run("launch", "--nproc", "2", "--threads", "3", "--dry-run", "train.py", "a b")
    assert done.stdout == "OMP_NUM_THREADS=3 torchrun --standalone --nproc-per-node=2 train.py 'a b'\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("given", "kept", "debug"),
    [
        ("plan --debug --top 3", "plan --top 3", True),
        ("--debug launch --nproc 2 a.py --debug", "launch --nproc 2 a.py --debug", True),
        ("launch --debug --nproc 2 a.py --debug", "launch --nproc 2 a.py --debug", True),
        ("launch --nproc=2 -m a.py --debug", "launch --nproc=2 -m a.py --debug", False),
        ("launch -n2 a.py --debug", "launch -n2 a.py --debug", False),
        ("launch -mn 2 a --debug", "launch -mn 2 a --debug", False),
        ("launch --nproc 2 -- a.py --debug", "launch --nproc 2 -- a.py --debug", False),
        ("strategy show launch --debug", "strategy show launch", True),
    ],
)
def test_the_script_s_own_debug_is_the_script_s(given: str, kept: str, debug: bool) -> None:
    assert split_debug(given.split()) == (kept.split(), debug)
