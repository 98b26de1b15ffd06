"""The same training of a Llama on one device, by this package and by hand.

Legend: B samples, T tokens.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks._llama import Llama, next_token_loss, random_batch

__all__ = ["ADAMW", "Setting", "Step", "bf16_by_hand", "fp8_by_hand", "ours"]

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
    """bf16 gathered by fully_shard, blocks compiled, Liger's modules where they are installed, fused AdamW."""
    return _trained(setting, _sharded(setting, _with_liger(setting)))


def fp8_by_hand(setting: Setting) -> Step:
    """The same with torchao's float8 linear layers, tensor by tensor, all but the last."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = _with_liger(setting)
    config = Float8LinearConfig(emulate=setting.device == "cpu")
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name,
    )
    return _trained(setting, _sharded(setting, model))


def _uses_liger(setting: Setting) -> bool:
    return setting.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def _with_liger(setting: Setting) -> nn.Module:
    """The model, with Liger's normalisations and MLPs; what Liger patches for all Llamas is put back."""
    model = setting.model.build(setting.device)
    if _uses_liger(setting):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        with mock.patch.dict(vars(_llamas())):
            _apply_liger_kernel_to_instance(
                model=model, fused_linear_cross_entropy=False, cross_entropy=False
            )
    return model


@contextmanager
def _turned_by_liger(setting: Setting) -> Iterator[None]:
    """Rotary embeddings are Liger's inside: a function of the module, not of a model."""
    if not _uses_liger(setting):
        yield
        return
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    with mock.patch.object(_llamas(), "apply_rotary_pos_emb", liger_rotary_pos_emb):
        yield


def _llamas() -> ModuleType:
    from transformers.models.llama import modeling_llama

    return modeling_llama


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
        with _turned_by_liger(setting):
            next_token_loss(batch, model(**batch)).backward()
        optimizer.step()

    return step
