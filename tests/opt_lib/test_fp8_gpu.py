"""fp8 on a GPU that has it: the same training in bf16 and in fp8."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.testing.networks import TiedLlama
from opt_lib._fp8.backend import MIN_CAPABILITY, why_unavailable
from opt_lib._fp8.config import Fp8Config


def _missing(config: dict[str, Any]) -> str | None:
    from atorch_ns.cluster import Cluster

    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return f"needs compute capability {MIN_CAPABILITY}"
    return why_unavailable(None, Fp8Config.model_validate(config), Cluster.detect())


CONFIGS = (
    {"backend": "torchao"},
    {"backend": "torchao", "recipe": "rowwise"},
    {"backend": "torchao", "recipe": "rowwise_with_gw_hp"},
    {"backend": "te", "amax_history_len": 16},
)


def _losses(model: nn.Module, *strategy: Any) -> list[float]:
    torch.manual_seed(1)
    tokens = torch.randint(256, (8, 128)).repeat(60, 1)  # the same eight samples: it must learn them by heart

    def loss_func(batch: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result, _ = auto_accelerate(
            model,
            torch.optim.AdamW,
            tokens,
            loss_func,
            optim_args={"lr": 1e-3},
            dataloader_args={"batch_size": 8},
            load_strategy=list(strategy),
        )
    assert result is not None
    assert result.dataloader is not None
    return [float(result.train_step(batch)) for batch in result.dataloader]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return TiedLlama(vocab_size=256, width=512, num_heads=8, num_layers=2, hidden=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("rest", [(), ("checkpoint",)], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_learns_as_bf16_does(config: dict[str, Any], rest: tuple[str, ...]) -> None:
    if (reason := _missing(config)) is not None:
        pytest.skip(reason)
    bf16 = _losses(_model(), ("amp_native", "bf16"), *rest)
    fp8 = _losses(_model(), ("fp8", config), ("amp_native", "bf16"), *rest)
    assert fp8 != bf16
    assert bf16[-1] < 0.5 * bf16[0]
    assert fp8[-1] < 0.5 * fp8[0]
    assert sum(fp8[:20]) == pytest.approx(sum(bf16[:20]), rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_compiled_blocks_compute_in_fp8(config: dict[str, Any]) -> None:
    if (reason := _missing(config)) is not None:
        pytest.skip(reason)
    eager = _losses(_model(), ("fp8", config), ("amp_native", "bf16"))
    compiled = _losses(_model(), ("fp8", config), ("amp_native", "bf16"), "compile")
    assert sum(compiled[:20]) == pytest.approx(sum(eager[:20]), rel=0.02)
