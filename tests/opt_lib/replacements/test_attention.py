"""The attention of transformers models: eager becomes sdpa, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.testing import assert_parity, assert_ranks_agree, compare, get_case, reference_run, run_ranks
from atorch_ns.testing.parity import accelerate_case, accelerated_run
from opt_lib._replacements.attention import AttentionSwitch
from tests.opt_lib.replacements.modules import apply
from tests.opt_lib.replacements.transformers_models import (
    IMAGES,
    PADDED,
    SMALL,
    TOKENS,
    bert,
    clip_vision,
    gpt2,
    llama,
    seeded,
    transformers,
)


def _gradients(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    output = model(**batch)[0]
    if "attention_mask" in batch:
        output = output[batch["attention_mask"].bool()]
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(output.square().mean(), parameters, allow_unused=True)
    return [output.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize(
    ("build", "batch"),
    [(llama, TOKENS), (llama, PADDED), (gpt2, TOKENS), (gpt2, PADDED), (bert, PADDED), (clip_vision, IMAGES)],
    ids=["llama", "llama padded", "gpt2", "gpt2 padded", "bert padded", "clip"],
)
def test_sdpa_matches_eager(build: Callable[[], nn.Module], batch: dict[str, Any]) -> None:
    model, original = build(), build()
    tensors = model.state_dict(keep_vars=True)
    _, explained, _ = apply(model, ("sdpa_attention",))
    (row,) = explained
    assert f"1 × eager attention of {type(model).__name__} → sdpa" in row
    assert model.config._attn_implementation == "sdpa"
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    for ours, theirs in zip(_gradients(model, batch), _gradients(original, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_sdpa_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    model = llama()
    model(**TOKENS)
    assert not calls
    apply(model)
    model(**TOKENS)
    assert len(calls) == 2


def test_sdpa_already_is_reported() -> None:
    _, (row, _), _ = apply(llama("sdpa"), ("sdpa_attention",))
    assert row == "sdpa_attention: 1 × LlamaForCausalLM: runs sdpa attention already"


def test_two_models_of_one_config_stay_independent() -> None:
    config = llama().config
    one, other = (seeded(lambda: transformers.LlamaForCausalLM(config)) for _ in range(2))
    before = copy.deepcopy(config)
    apply(one)
    assert one.config._attn_implementation == "sdpa"
    assert all(layer.self_attn.config is one.config for layer in one.model.layers)
    assert other.config is config
    assert config.to_dict() == before.to_dict()
    assert config._attn_implementation == "eager"
    torch.testing.assert_close(one(**TOKENS).logits, other(**TOKENS).logits, rtol=1e-5, atol=1e-6)


def test_a_model_that_must_return_attention_weights_stays_eager() -> None:
    model = llama(output_attentions=True)
    _, (row, _), (warning,) = apply(model, ("sdpa_attention",))
    assert "1 × LlamaForCausalLM: stays eager, since its config asks for output_attentions" in row
    assert "output_attentions" in warning
    assert model.config._attn_implementation == "eager"
    assert model(**TOKENS).attentions[0].shape == (2, 4, 12, 12)


def test_a_model_without_sdpa_stays_eager_with_its_reason() -> None:
    settings = {**SMALL, "head_dim": 8, "num_key_value_heads": 2, "vocab_size": 16}
    config = transformers.Gemma2Config(attn_implementation="eager", **settings)
    model = seeded(lambda: transformers.Gemma2ForCausalLM(config))
    _, (row, _), _ = apply(model, ("sdpa_attention",))
    assert "Gemma2ForCausalLM: stays eager, " in row
    assert "scaled_dot_product_attention" in row
    assert model.config is config
    assert all(layer.self_attn.config is config for layer in model.model.layers)


def test_an_implementation_nobody_knows_changes_nothing() -> None:
    model = llama()
    config = model.config
    outcome = AttentionSwitch(name="x", implementation="no_such").replace(model)
    assert not outcome.replaced
    (reason,) = outcome.kept
    assert "no_such" in reason
    assert model.config is config
    assert model.config._attn_implementation == "eager"


def test_models_inside_other_modules_are_found() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = llama()
            self.right = nn.ModuleList([gpt2()])

    model = Pair()
    _, explained, _ = apply(model, ("sdpa_attention",))
    assert "eager attention of LlamaForCausalLM → sdpa" in explained[0]
    assert "eager attention of GPT2LMHeadModel → sdpa" in explained[0]


def test_a_model_of_several_models_is_switched_whole() -> None:
    tower = {**SMALL, "projection_dim": 16}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 16, "bos_token_id": 0, "eos_token_id": 1},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        projection_dim=16,
        attn_implementation="eager",
    )
    model = seeded(lambda: transformers.CLIPModel(config))
    original = copy.deepcopy(model)
    apply(model, ("sdpa_attention",))
    used = {
        m.config._attn_implementation for m in model.modules() if isinstance(m, transformers.PreTrainedModel)
    }
    assert used == {"sdpa"}
    assert config.text_config._attn_implementation == "eager"
    batch = {**PADDED, **IMAGES}
    torch.testing.assert_close(
        model(**batch).logits_per_image, original(**batch).logits_per_image, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("case_name", ["hf_llama", "hf_gpt2"])
def test_training_on_two_ranks_matches_eager_in_one_process(case_name: str) -> None:
    case = get_case(case_name)

    def eager() -> nn.Module:
        model = case.build()
        model.set_attn_implementation("eager")
        return model

    reference = reference_run(case, prepare=lambda model: model.set_attn_implementation("eager"))

    def train() -> Any:
        result = accelerate_case(case, ["module_replace", "fsdp"], model=eager())
        assert "→ sdpa" in str(result.report)
        return accelerated_run(case, ["module_replace", "fsdp"], model=eager())

    runs = run_ranks(train, 2)
    assert_parity(compare(reference, runs[0]))
    assert_ranks_agree(runs)
