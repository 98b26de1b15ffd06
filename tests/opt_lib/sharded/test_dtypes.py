"""Models with weights of several dtypes, which torch shards apart: norms in fp32 beside bf16, a complex filter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from atorch_ns import auto_accelerate
from atorch_ns.errors import InputError
from atorch_ns.testing import run_ranks
from opt_lib._sharded.units import units_of_other_dtypes

_WIDTH = 8


class Block(nn.Module):
    """[B, F] to [B, F]; a norm in fp32 before a layer in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.layer = nn.Linear(_WIDTH, _WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x).to(self.layer.weight.dtype)).float()


class Mixed(nn.Module):
    """[B, F] to [B]; its own parameter is in another dtype than most of its blocks' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(_WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.filter = Filter()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return self.filter(x).square().mean(-1)


class Filter(nn.Module):
    """[B, F] to [B, F], in the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=_WIDTH)


def _losses(strategies: list[list[Any]]) -> list[tuple[list[float], str]]:
    found = []
    for strategy in strategies:
        torch.manual_seed(0)
        status, result, _ = auto_accelerate(
            Mixed(),
            torch.optim.AdamW,
            TensorDataset(torch.randn(64, _WIDTH), torch.randn(64)),
            lambda batch, output: nn.functional.mse_loss(output, batch[1]),
            model_input_format="unpack_sequence",
            optim_args={"lr": 1e-2},
            dataloader_args={"batch_size": 16},
            load_strategy=strategy,
            max_grad_norm=1.0,
        )
        assert status
        assert result is not None
        dtypes = {parameter.dtype for parameter in result.model.parameters()}
        assert dtypes == {torch.float32, torch.bfloat16, torch.complex64}
        losses = [float(result.train_step(batch)) for batch in result.dataloader or ()]
        found.append((losses, str(result.applied)))
    return found


_SHARDED: tuple[list[Any], ...] = (
    ["zero1"],
    ["zero2"],
    ["fsdp"],
    [("fsdp", {"atorch_wrap_cls": ()})],
    ["fsdp", "checkpoint"],
    ["zero2", ("gradient_accumulation", 2)],
)


def test_they_train_as_they_do_when_replicated() -> None:
    (replicated, _), *others = run_ranks(_losses, 2, args=([["ddp"], *_SHARDED],), timeout_s=120)[0]
    for strategy, (losses, applied) in zip(_SHARDED, others, strict=True):
        assert losses == pytest.approx(replicated, rel=2e-3), strategy
        assert strategy == ["zero1"] or "of another dtype are units of their own" in applied


def _llama_losses(strategies: list[list[Any]]) -> list[list[float]]:
    """Of a Llama in bf16 whose norms are in fp32."""
    found = []
    for strategy in strategies:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2,
            )
        ).bfloat16()  # fmt: skip
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.float().register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
        status, result, _ = auto_accelerate(
            model,
            torch.optim.SGD,
            [{"input_ids": torch.randint(32, (8,))} for _ in range(8)] * 3,
            lambda batch, output: nn.functional.cross_entropy(
                output.logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten()
            ),
            model_input_format="unpack_dict",
            optim_args={"lr": 1.0},
            dataloader_args={"batch_size": 8},
            load_strategy=strategy,
        )
        assert status
        assert result is not None
        found.append([float(result.train_step(batch)) for batch in result.dataloader or ()])
    return found


def test_they_train_where_the_model_is_divided() -> None:
    """What is divided is compared with one process, by the precision of most of its weights."""
    axes = {"tensor": "tensor_parallel", "sequence": "sequence_parallel", "pipeline": "pipeline_parallel"}
    strategies = [[("parallel_mode", ([(axis, 2)], None)), method] for axis, method in axes.items()]
    replicated, *others = run_ranks(_llama_losses, 2, args=([["ddp"], *strategies],), timeout_s=180)[0]
    assert replicated[-1] < replicated[0] - 0.05
    for axis, losses in zip(axes, others, strict=True):
        assert losses == pytest.approx(replicated, abs=5e-3), axis


def test_a_unit_has_the_dtype_of_its_own_parameters() -> None:
    model = Mixed()
    blocks = list(model.blocks)
    assert set(units_of_other_dtypes([model, *blocks], ())) == {
        *(block.norm for block in model.blocks),
        model.filter,
    }, "most of a block is in bf16"
    assert set(units_of_other_dtypes([model], ())) == {*(block.layer for block in model.blocks), model.filter}
    for block in model.blocks:
        block.norm.requires_grad_(False)
    assert set(units_of_other_dtypes([model, *blocks], ())) == {model.filter}, "frozen ones go with any"


def test_units_of_another_dtype_have_such_units_in_them() -> None:
    model = nn.Sequential(Block(), nn.Linear(_WIDTH, 64, dtype=torch.bfloat16))
    inner = model[0]
    inner.scale = nn.Parameter(torch.ones(1, dtype=torch.float16))
    assert set(units_of_other_dtypes([model], ())) == {inner, inner.norm, inner.layer}
    assert set(units_of_other_dtypes([model], {inner.scale})) == {inner.norm}


def test_a_module_of_several_dtypes_is_refused() -> None:
    layer = nn.Linear(_WIDTH, _WIDTH)
    layer.bias = nn.Parameter(torch.zeros(_WIDTH, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=r"weight torch.float32, bias torch.bfloat16.*atorch_ignored_cls"):
        units_of_other_dtypes([layer], ())
    assert units_of_other_dtypes([layer], {layer.bias}) == []


def test_tied_modules_of_another_dtype_are_refused() -> None:
    model = Mixed()
    model.blocks[0].layer.weight = model.blocks[1].layer.weight
    with pytest.raises(
        InputError, match=r"Linear shares a parameter in torch.bfloat16 .* in Mixed is in torch.float32"
    ):
        units_of_other_dtypes([model], ())
    del model.position
    assert set(units_of_other_dtypes([model], ())) == {*(block.norm for block in model.blocks), model.filter}
