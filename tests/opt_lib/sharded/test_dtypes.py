"""Models with weights of several dtypes, and with casts of their own: norms in fp32 beside bf16, a complex filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from atorch_ns.errors import InputError
from atorch_ns.testing import Case, run_ranks
from atorch_ns.testing.parity import accelerate_case, accelerated_run, reference_run
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


class Filter(nn.Module):
    """[B, F] to [B, F], in the frequencies; its gain is not part of any unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_WIDTH // 2 + 1, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones((), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight * self.gain, n=_WIDTH)


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


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def _numbers(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, _WIDTH, generator=generator), torch.randn(batch_size, generator=generator)


MIXED = Case(
    name="mixed",
    build=lambda: _seeded(Mixed),
    make_batch=_numbers,
    loss_func=lambda batch, output: F.mse_loss(output, batch[1]),
    model_input_format="unpack_sequence",
    block="Block",
)


def _norms_in_fp32() -> nn.Module:
    """Llama in bf16, with norms in fp32 that give what they are given."""
    model = _llama().bfloat16()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.float().register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
    return model


class Norm(nn.Module):
    """A norm in fp32 that gives bf16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight).bfloat16()


def _norms_that_cast() -> nn.Module:
    model = _llama().bfloat16()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = Norm(16), Norm(16)
    return model


class Casting(nn.Linear):
    """Weights in fp32, computed in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)


def _layers_that_cast() -> nn.Module:
    model = _llama()
    for layer in model.model.layers:
        for name, one in list(layer.mlp.named_children()):
            if isinstance(one, nn.Linear):
                made = Casting(one.in_features, one.out_features, bias=False)
                made.load_state_dict(one.state_dict())
                setattr(layer.mlp, name, made)
    return model


def _llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


def _tokens(batch_size: int, seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(32, (batch_size, 8), generator=torch.Generator().manual_seed(seed))}


def _next_token_loss(batch: Any, output: Any) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, batch["input_ids"][:, 1:].flatten())


LLAMAS = {
    make.__name__: Case(
        name=make.__name__,
        build=lambda make=make: _seeded(make),  # type: ignore[misc]
        make_batch=_tokens,
        loss_func=_next_token_loss,
        model_input_format="unpack_dict",
        block="LlamaDecoderLayer",
    )
    for make in (_norms_in_fp32, _norms_that_cast, _layers_that_cast)
}


_SHARDED: tuple[list[Any], ...] = (
    ["zero1"],
    ["zero2"],
    ["fsdp"],
    [("fsdp", {"atorch_wrap_cls": ()})],
    [("fsdp", {"atorch_wrap_cls": ("Block", "Filter")}), ("checkpoint", ("Block", "Filter"))],
    ["zero2", ("gradient_accumulation", 2)],
)
_DIVIDED: tuple[list[Any], ...] = (
    [("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"],
    [("parallel_mode", ([("tensor", 2)], None)), ("tensor_parallel", {"sequence": True})],
    [("parallel_mode", ([("sequence", 2)], None)), "sequence_parallel"],
    [("parallel_mode", ([("pipeline", 2)], None)), "pipeline_parallel"],
)


def _losses(case: Case, strategies: Sequence[Any]) -> list[list[float]]:
    return [accelerated_run(case, one, max_grad_norm=1.0).losses for one in strategies]


def test_they_train_as_in_one_process_where_they_are_sharded() -> None:
    expected = reference_run(MIXED, max_norm=1.0).losses
    for strategy, losses in zip(
        _SHARDED, run_ranks(_losses, 2, args=(MIXED, _SHARDED), timeout_s=120)[0], strict=True
    ):
        assert losses == pytest.approx(expected, rel=2e-3), strategy


def _report() -> tuple[set[torch.dtype], str]:
    result = accelerate_case(MIXED, ["fsdp"])
    return {parameter.dtype for parameter in result.model.parameters()}, str(result.applied)


def test_the_report_counts_units_of_another_dtype() -> None:
    dtypes, applied = run_ranks(_report, 2, timeout_s=60)[0]
    assert dtypes == {torch.float32, torch.bfloat16, torch.complex64}
    assert "; 4 module(s) of another dtype are units of their own" in applied


@pytest.mark.parametrize("name", LLAMAS)
def test_they_train_as_in_one_process_where_they_are_divided(name: str) -> None:
    """Blocks are tested in fp32, the model with the tolerance of what it rounds to."""
    case = LLAMAS[name]
    expected = reference_run(case, max_norm=1.0).losses
    for strategy, losses in zip(
        _DIVIDED, run_ranks(_losses, 2, args=(case, _DIVIDED), timeout_s=180)[0], strict=True
    ):
        assert losses == pytest.approx(expected, abs=5e-3), strategy


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
        InputError, match=r"Linear shares a parameter in torch.bfloat16 .* of Mixed is in torch.float32"
    ):
        units_of_other_dtypes([model], ())
    del model.position
    assert set(units_of_other_dtypes([model], ())) == {*(block.norm for block in model.blocks), model.filter}
