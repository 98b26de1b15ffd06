"""The process that trials are forked from does not start CUDA, and nothing that it imports does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atorch_ns.engine.trial import zygote
from atorch_ns.errors import BackendError

# Whatever starts CUDA in a process goes through this function of torch.
_SCRIPT = """
import torch

calls = []
torch.cuda._lazy_init = lambda: calls.append("CUDA was started")

from atorch_ns.engine.trial import zygote
from atorch_ns.method import load_registry

load_registry()
zygote._warm_up()
zygote._check_forks_have_cuda()
print("started:", calls, torch.cuda.is_initialized())
"""


def test_nothing_starts_cuda_before_a_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "started: [] False" in done.stdout


def test_the_question_for_gpus_is_asked_of_the_driver() -> None:
    source = Path(zygote.__file__).read_text()
    asked, loaded = source.index("PYTORCH_NVML_BASED_CUDA_CHECK"), source.index("_read_job(job_fd)\n")
    assert asked < loaded


def test_cuda_that_was_started_is_an_error_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(BackendError, match="Move what touches a GPU on import into a function"):
        zygote._check_forks_have_cuda()
