"""flash-attn in the place of eager and scaled-dot-product attention, with the package pretended."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.cluster import Cluster
from opt_lib._replacements import base
from opt_lib._replacements.attention import AttentionSwitch
from opt_lib._replacements.registry import known_replacements
from tests.opt_lib.replacements.kernels import pretend
from tests.opt_lib.replacements.modules import GPU, apply_to, job_of
from tests.opt_lib.replacements.transformers_models import (
    IMAGES,
    PADDED,
    TOKENS,
    bert,
    clip_vision,
    gpt2,
    llama,
    transformers,
)

ONLY_FLASH = ("flash_attention", "sdpa_attention")


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool
) -> torch.Tensor:
    """q [B, T, H, D], k and v [B, T, G, D], as flash-attn has them."""
    q, k, v = (each.transpose(1, 2).float() for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal, enable_gqa=True).transpose(
        1, 2
    )


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """flash-attn is installed, and runs on the CPU; counts its calls."""
    from transformers import modeling_flash_attention_utils as edge

    calls: Counter[str] = Counter()

    def flash_attn_func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        assert q.dtype in (torch.bfloat16, torch.float16)
        calls["whole"] += 1
        return _attention(q, k, v, softmax_scale, causal).to(q.dtype)

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        assert q.dtype in (torch.bfloat16, torch.float16)
        calls["packed"] += 1
        ends = cu_seqlens_q.tolist()
        parts = [
            _attention(q[None, a:b], k[None, a:b], v[None, a:b], softmax_scale, causal)[0]
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(parts).to(q.dtype)

    pretend(
        monkeypatch,
        "flash_attn",
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=None,
    )
    pretend(monkeypatch, "flash_attn.bert_padding", pad_input=edge._pad_input, unpad_input=edge._unpad_input)
    checks = {**edge.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check": lambda: True}
    checks["supported_devices"] = ((lambda: True, "cuda"),)
    monkeypatch.setitem(edge.FLASH_ATTENTION_COMPATIBILITY_MATRIX, 2, checks)
    monkeypatch.setattr(edge, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(edge, "_loaded_implementation", None)
    yield calls
    monkeypatch.undo()
    base._import_error.cache_clear()


def _grads(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    output = model(**batch)[0].float()
    if "attention_mask" in batch:
        output = output[batch["attention_mask"].bool()]
    gradients = torch.autograd.grad(output.square().mean(), list(model.parameters()), allow_unused=True)
    return [output.detach(), *(g.float() for g in gradients if g is not None)]


@pytest.mark.parametrize("before", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("build", "batch", "kind"),
    [
        (llama, TOKENS, "whole"),
        (llama, PADDED, "packed"),
        (gpt2, TOKENS, "whole"),
        (bert, PADDED, "packed"),
        (clip_vision, IMAGES, "whole"),
    ],
    ids=["llama", "llama padded", "gpt2", "bert padded", "clip"],
)
def test_flash_runs_and_agrees(
    flash: Counter[str], build: Callable[..., nn.Module], batch: dict[str, Any], kind: str, before: str
) -> None:
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    original, model = build().bfloat16(), build(before).bfloat16()
    names = list(model.state_dict())
    tensors = model.state_dict(keep_vars=True)
    wanted = _grads(original.float(), batch)
    _, explained, warned = apply_to(job_of(model, GPU), ONLY_FLASH)
    assert (
        f"flash_attention: 1 × {before} attention of {type(model).__name__} → flash_attention_2"
        in explained[0]
    )
    assert "sdpa_attention: 1 × " in explained[1]
    assert len(warned) == 1  # sdpa_attention, which include names, has nothing left to do
    assert list(model.state_dict()) == names
    assert all(model.state_dict(keep_vars=True)[name] is tensor for name, tensor in tensors.items())
    actual = _grads(model, half)
    assert flash[kind] == 2
    for ours, theirs in zip(actual, wanted, strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm() + 1e-3


@pytest.mark.parametrize(
    ("cluster", "plan", "reason"),
    [
        (GPU, {}, "it supports bfloat16, float16, and this job computes in float32"),
        (Cluster(device_type="cuda", device_name="T4", capability=(7, 5)), {}, "T4 has (7, 5)"),
        (
            Cluster(device_type="cuda", capability=(9, 0)),
            {},
            "pip install --no-build-isolation 'atorch-ns[flash]'",
        ),
        (
            GPU,
            {"precision": {"compute_dtype": "bfloat16"}, "axes": (("tensor", 2),)},
            "divided over the axis tensor",
        ),
    ],
)
def test_without_flash_attn_sdpa_takes_over(
    flash: Counter[str], cluster: Cluster, plan: dict[str, Any], reason: str
) -> None:
    model = llama()
    _, explained, _ = apply_to(job_of(model, cluster, **plan), ONLY_FLASH)
    assert explained[0].startswith("flash_attention is not used: ")
    assert reason in explained[0]
    assert "eager attention of LlamaForCausalLM → sdpa" in explained[1]


def test_a_broken_wheel_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    base._import_error.cache_clear()
    _, explained, _ = apply_to(job_of(llama().bfloat16(), GPU), ONLY_FLASH)  # there is no flash_attn here
    base._import_error.cache_clear()
    assert "flash_attn cannot be imported (ModuleNotFoundError: No module named 'flash_attn')" in explained[0]
    assert "→ sdpa" in explained[1]


def test_a_model_without_flash_stays_what_it_was(flash: Counter[str]) -> None:
    config = transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, attn_implementation="eager"
    )
    model = transformers.T5ForConditionalGeneration(config)
    switch = known_replacements()["flash_attention"]
    outcome = switch.replace(model)
    assert not outcome.replaced
    assert "does not support flash_attention_2" in next(iter(outcome.kept))
    assert model.config is config


def test_transformers_own_choice_of_another_kernel_is_undone(
    flash: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    config = model.config

    def another(self: Any, name: str) -> None:
        self.config._attn_implementation_internal = "kernels-community/flash-attn2"

    monkeypatch.setattr(type(model), "set_attn_implementation", another)
    switch = AttentionSwitch(name="x", implementation="flash_attention_2")
    (reason,) = switch.replace(model).kept
    assert "would run another implementation" in reason
    assert model.config is config


def test_the_report_names_what_is_left_out_once() -> None:
    _, explained, _ = apply_to(job_of(llama()))
    rows = [text for text in explained if "runs on cuda" in text]
    assert rows == [
        "flash_attention_3, flash_attention, liger_rope, liger_swiglu, liger_rms_norm, apex_rms_norm are not "
        "used: it runs on cuda, and this job runs on cpu"
    ]
