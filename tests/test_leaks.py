"""The checks of ``conftest.py``, on tests that leak on purpose."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = """
import multiprocessing, os, subprocess, threading, time
import pytest, torch
import torch.distributed as dist

def test_environment(): os.environ["LEFT"] = "here"
def test_after_environment(): assert "LEFT" not in os.environ
def test_removed(): del os.environ["HOME"]
def test_after_removed(): assert "HOME" in os.environ
def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
def test_after_group(): assert not dist.is_initialized()
def test_dtype(): torch.set_default_dtype(torch.float64)
def test_after_dtype(): assert torch.get_default_dtype() == torch.float32
def test_thread():
    threading.Thread(target=lambda: time.sleep(5), name="left-thread").start()
def test_process(): subprocess.Popen(["sleep", "100"])
def test_after_process(): assert not [c for c in __import__("psutil").Process().children()]
def test_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("MINE", "1")
    brief = threading.Thread(target=lambda: time.sleep(0.2))
    brief.start()
    subprocess.run(["true"], check=True)
def test_no_gpu(): assert not torch.cuda.is_available() and torch.get_num_threads() == 1
"""


@pytest.mark.slow
def test_each_leak_fails_the_test_that_leaks_and_no_other(tmp_path: Path) -> None:
    here = Path(__file__).parent
    shutil.copy(here / "conftest.py", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "processes.py", "sample.py", "costs.json"):
        shutil.copy(here / name, tmp_path / "tests")
    shutil.copytree(here / "warm", tmp_path / "tests" / "warm")
    (tmp_path / "test_leaking.py").write_text(LEAKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    text = done.stdout
    errors = sorted(line.split("::")[1].split()[0] for line in text.splitlines() if line.startswith("ERROR "))
    assert errors == [
        "test_dtype",
        "test_environment",
        "test_group",
        "test_process",
        "test_removed",
        "test_thread",
    ]
    counts = text.splitlines()[-1]
    assert "13 passed" in counts
    assert "6 errors" in counts
    assert "environment variable LEFT: None became 'here'" in text
    assert "environment variable HOME:" in text
    assert "a live process group" in text
    assert "default dtype torch.float32 became torch.float64" in text
    assert "a thread: <Thread(left-thread" in text
    assert "name='sleep'" in text
