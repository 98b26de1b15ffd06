"""The same training of a Llama on one device, by this package and by hand.

Legend: B samples, T tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks._llama import Llama, next_token_loss, random_batch

__all__ = ["ADAMW", "Setting", "Step", "bf16_by_hand", "bf16_with_liger", "fp8_by_hand", "ours"]

ADAMW: dict[str, Any] = {"lr": 1e-4}
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and on what.

    Attributes:
        model: its size.
        batch_size: B.
        num_tokens: T.
        device: ``"cuda"``, or ``"cpu"`` to see that everything works.
        backend: of ``torch.compile``.
    """

    model: Llama
    batch_size: int
    num_tokens: int
    device: str = "cuda"
    backend: str = "inductor"

    def batch(self) -> dict[str, Tensor]:
        """Random tokens on the device."""
        batch = random_batch(self.model, self.batch_size, self.num_tokens, seed=0)
        return {key: value.to(self.device) for key, value in batch.items()}

    @property
    def compile(self) -> tuple[str, Any]:
        """The method, with the backend."""
        return ("compile", self.backend)


def ours(setting: Setting, strategy: Sequence[Any]) -> Step:
    """A step under a strategy."""
    from atorch_ns import auto_accelerate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result, _ = auto_accelerate(
            setting.model.build(setting.device),
            torch.optim.AdamW,
            loss_func=next_token_loss,
            model_input_format="unpack_dict",
            optim_args=ADAMW,
            load_strategy=list(strategy),
        )
    assert result is not None
    step, batch = result.train_step, setting.batch()
    return lambda: step(batch)


def bf16_by_hand(setting: Setting) -> Step:
    """bf16 gathered by fully_shard, blocks compiled, fused AdamW."""
    return _trained(setting, _sharded(setting, setting.model.build(setting.device)))


def bf16_with_liger(setting: Setting) -> Step:
    """The same with Liger's normalisations and MLPs inside of compiled blocks; what it patches for all Llamas is put back."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    model = setting.model.build(setting.device)
    with mock.patch.dict(vars(modeling_llama)):
        apply_liger_kernel_to_llama(rope=False, fused_linear_cross_entropy=False, model=model)
    return _trained(setting, _sharded(setting, model))


def fp8_by_hand(setting: Setting) -> Step:
    """The same with torchao's float8 linear layers, tensor by tensor, all but the last."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = setting.model.build(setting.device)
    config = Float8LinearConfig(emulate=setting.device == "cpu")
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name,
    )
    return _trained(setting, _sharded(setting, model))


def _sharded(setting: Setting, model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(setting.device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = model.get_submodule("model.layers")
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        block.compile(backend=setting.backend)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _trained(setting: Setting, model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    batch = setting.batch()

    def step() -> None:
        optimizer.zero_grad()
        next_token_loss(batch, model(**batch)).backward()
        optimizer.step()

    return step
