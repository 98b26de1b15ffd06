"""The process that trials are forked from does not start CUDA; where something does, trials load everything anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial import zygote
from atorch_ns.engine.trial.worker import TrialWorker
from tests.engine.inputs import case_inputs
from tests.engine.trials import task

# Whatever starts CUDA in a process goes through these functions of torch.
_SCRIPT = """
import torch

calls = []
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = lambda: calls.append("CUDA was started")
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.current_stream = lambda device=None: calls.append("a stream was asked for")
torch.cuda.is_current_stream_capturing = lambda: calls.append("a stream was asked for") or False

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial import zygote
from atorch_ns.method import load_registry

gpu = dict(device_type="cuda", device_name="NVIDIA H200", device_memory_bytes=2**37, capability=(9, 0))
with zygote._gpu_described(Cluster(**gpu)):
    load_registry()
    zygote._warm_up()
    import torchao.float8, transformers.models.llama.modeling_llama
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
    asked, loaded = source.index("PYTORCH_NVML_BASED_CUDA_CHECK"), source.index("_Loaded.read(job_fd)\n")
    assert asked < loaded


@dataclass(frozen=True)
class _Spoiling:
    """A loss function whose loading leaves a process of which forks are of no use, as one that uses CUDA does."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _spoil, (self.function,)


def _spoil(function: Callable[..., Any]) -> Callable[..., Any]:
    zygote._forks_are_sound = lambda cluster: False
    return function


def test_where_forks_are_of_no_use_trials_load_everything_anew(tmp_path: Path) -> None:
    inputs = case_inputs()
    spoiling = replace(inputs, loss_func=_Spoiling(inputs.loss_func))
    losses = []
    for given in (inputs, spoiling):
        with TrialWorker(given, Cluster(), rendezvous=None, log_dir=tmp_path) as worker:
            reports = [worker.run(task(number), lambda: False) for number in (1, 2)]
        assert [report.status for report in reports] == ["ok", "ok"]
        losses += [report.loss for report in reports]
    assert losses[2:] == losses[:2]
    assert reports[1].setup_seconds < 60
