"""The whole search on a GPU: trials in processes of their own, which give the device back."""

from __future__ import annotations

import subprocess

import pytest

from tests.warm import COLD_PYTHON

pytestmark = pytest.mark.gpu

# In a program of its own, no fork of another: here CUDA may have been used already.
_SCRIPT = """
import torch
from atorch_ns import auto_accelerate
from atorch_ns.testing.models import SyntheticDataset, get_case

if __name__ == "__main__":
    case = get_case("tied_llama")
    status, result, strategy = auto_accelerate(
        case.build(),
        torch.optim.AdamW,
        SyntheticDataset(case, 256, seed=0),
        case.loss_func,
        model_input_format=case.model_input_format,
        dataloader_args={"batch_size": 16},
        time_limit=60,
    )
    free_before, total = torch.cuda.mem_get_info()
    losses = [float(result.train_step(batch)) for batch in result.dataloader]
    search = result.report.search
    tried = [row for row in search.rows if row.trial is not None]
    assert status and result.job.device.type == "cuda"
    assert any(row.trial.succeeded for row in tried), [row.trial.reason for row in tried]
    assert all(row.trial.peak_bytes for row in tried if row.trial.succeeded)
    assert losses[-1] < losses[0]
    assert total - free_before < 4 * 2**30, "a trial has kept the device's memory"
    print("chosen:", strategy)
"""


def test_a_search_tries_on_the_gpu_and_gives_it_back() -> None:
    done = subprocess.run(
        [COLD_PYTHON, "-c", _SCRIPT], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "chosen:" in done.stdout
