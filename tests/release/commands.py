"""What works without any extra: a job, and the command lines that plan, explain and train it."""

from __future__ import annotations

from typing import Final

EXTRA_PACKAGES: Final = (
    "accelerate", "bitsandbytes", "deepspeed", "fairscale", "ipykernel", "liger_kernel", "nbclient", "optuna", "peft",
    "psutil", "safetensors", "scipy", "tensorboard", "torchao", "torchvision", "transformers", "triton", "wandb",
)  # fmt: skip
"""Import names of what the extras bring."""

_JOB = "--model job:build --sample job:sample --loss job:loss"
PLANNING: Final = (
    f"plan {_JOB} --cluster 8xH100-80GB --report report.json --save plan.json",
    f"plan {_JOB} --cluster 2xcpu --operators 2",
    f"estimate {_JOB} --cluster 2xH100-80GB --strategy fsdp,amp_native",
    "explain report.json --why fsdp",
    "report report.json --html report.html",
    "diff plan.json plan.json",
    "methods",
    "methods fp8",
    "env",
    "strategy show plan.json",
    "strategy diff plan.json plan.json",
    "strategy convert ds_config.json converted.yaml",
)
"""Verbs that start no process, in an order in which each finds the files of those before it."""
TRAINING: Final = (
    f"verify {_JOB} --strategy fsdp --nproc 2",
    f"search {_JOB} --nproc 2 --time-limit 10 --history history.jsonl --save found.json",
    "history history.jsonl",
    "calibrate --nproc 2 --seconds 5 --output calibration.yaml",
    f"estimate {_JOB} --cluster calibration.yaml --strategy found.json",
    "doctor --nproc 2 --timeout 300",
)
"""Verbs that start ranks, and those that read what they wrote."""

FILES: Final = {
    "job.py": """
import torch
from torch import nn


def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))


def sample():
    return torch.zeros(8, 32)


def loss(batch, output):
    return (output - batch).square().mean()
""",
    "ds_config.json": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
}
"""What the verbs read, by name."""

_TRAIN: Final = """
import torch
from atorch_ns import auto_accelerate
from job import build, loss, sample

def trained(*methods, optimizer=torch.optim.AdamW):
    _, result, _ = auto_accelerate(
        build(), optimizer, torch.randn(64, 32), loss, load_strategy=list(methods), dataloader_args={"batch_size": 8}
    )
    for batch in result.dataloader:
        result.train_step(batch)
    return result
"""
_OF_A_BACKEND: Final = f"""
import subprocess, sys
strategy = '[["{{method}}", {{config}}]]'
subprocess.run(["atorch-ns", "verify", *"{_JOB} --nproc 2".split(), "--strategy", strategy], check=True)
"""
EXTRAS: Final = {
    "hf": """
from atorch_ns import auto_accelerate
from atorch_ns.checkpoint import export_safetensors
from atorch_ns.testing.models import get_case
from transformers import LlamaForCausalLM

_, result, _ = auto_accelerate(get_case("hf_llama").build(), load_strategy=["checkpoint"])
LlamaForCausalLM.from_pretrained(export_safetensors(result, "exported"))
""",
    "merak": """
import torch
from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.testing.models import make_llama

init(dp=1, tp=1, pp=1)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
arguments = MerakArguments("out", max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True)
MerakTrainer(make_llama(), arguments, train_dataset=data).train()
""",
    "optuna": _TRAIN
    + """
for sampler in ("tpe", "gp"):
    auto_accelerate(
        build(), torch.optim.AdamW, torch.randn(64, 32), loss, time_limit=5, search={"sampler": sampler},
        dataloader_args={"batch_size": 8},
    )
""",
    "tensorboard": """
from atorch_ns.tracking import TensorBoardTracker

tracker = TensorBoardTracker("events")
tracker.log({"loss": 1.0}, 1)
tracker.close()
""",
    "wandb": """
from atorch_ns.tracking import WandbTracker

tracker = WandbTracker(project="smoke", folder=".")
tracker.log({"loss": 1.0}, 1)
tracker.close()
""",
    "notebook": """
import nbformat
from nbclient import NotebookClient

code = "import operator\\nfrom atorch_ns.notebook import run\\nassert run(operator.add, (1, 2), nproc=2) == 3"
NotebookClient(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])).execute()
""",
    "fp8": _TRAIN + 'trained(("fp8", {"backend": "torchao", "emulate": True}))\n',
    "optim8bit": _TRAIN
    + """
from bitsandbytes.optim import AdamW8bit
from torchao.optim import AdamW8bit as OfTorchao

trained(optimizer=OfTorchao)
trained(optimizer=AdamW8bit)
""",
    "liger": "import liger_kernel.transformers.functional\n",
    "bench": "import accelerate\n\naccelerate.Accelerator(cpu=True)\n",
    "fairscale": _OF_A_BACKEND.format(method="zero1", config='{"backend": "fairscale"}'),
    "deepspeed": _OF_A_BACKEND.format(method="zero1", config='{"use_ds_zero": true}'),
    "ray": "import ray.train.torch\n",
}
"""For each extra that can be had without a GPU, a script that uses what it brings."""
NO_ISOLATION: Final = ("fairscale", "deepspeed")
"""Extras whose packages import torch while they build."""
