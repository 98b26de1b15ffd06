"""The real kernels of flash-attn, liger-kernel and torch on a GPU: the same numbers, and they are what runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from opt_lib._replacements.registry import known_replacements
from tests.opt_lib.replacements.modules import apply_to, job_of
from tests.opt_lib.replacements.transformers_models import llama

pytestmark = pytest.mark.gpu

NAMES = [
    "flash_attention",
    "sdpa_attention",
    "liger_rope",
    "liger_swiglu",
    "liger_rms_norm",
    "fused_rms_norm",
    "liger_fused_linear_cross_entropy",
    "chunked_linear_cross_entropy",
]


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


def _results(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [loss.detach().float(), *(each.float() for each in gradients)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_loss_and_gradients(name: str, dtype: torch.dtype, tolerance: float) -> None:
    cluster = Cluster.detect()
    reason = known_replacements()[name].requirements.unmet(cluster, str(dtype).removeprefix("torch."))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    wide = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_key_value_heads": 4}
    original = llama(**wide).to("cuda", dtype)
    job = job_of(copy.deepcopy(original), cluster)
    _, (row,), _ = apply_to(job, (name,))
    assert "→" in row or "last layer and loss" in row
    tokens = torch.randint(0, 1024, (2, 64), device="cuda")
    for ours, theirs in zip(_results(job.module, tokens), _results(original, tokens), strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm() + 1e-6


def test_torchs_rms_norm_is_one_kernel() -> None:
    """It saves the mean square only; what is written by hand keeps the normalised input too."""
    original = llama(hidden_size=1024, intermediate_size=64).model.norm.to("cuda", torch.bfloat16)
    model = nn.Sequential(copy.deepcopy(original))
    known_replacements()["fused_rms_norm"].replace(model)
    x = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kept = []
    for module in (model, original):
        before = torch.cuda.memory_allocated()
        output = module(x)
        kept.append(torch.cuda.memory_allocated() - before)
        del output
    assert kept[0] < kept[1]
