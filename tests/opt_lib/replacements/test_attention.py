"""The attention of transformers models: eager becomes sdpa, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.testing import assert_parity, assert_ranks_agree, compare, get_case, reference_run, run_ranks
from atorch_ns.testing.runs import accelerate_case, accelerated_run
from opt_lib._replacements.attention import AttentionSwitch
from tests.opt_lib.replacements.modules import apply

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {
    "input_ids": torch.arange(24).reshape(2, 12) % 16,
    "attention_mask": torch.ones(2, 12, dtype=torch.long),
}
PADDED = {**TOKENS, "attention_mask": torch.tensor([[1] * 12, [1] * 9 + [0] * 3])}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def _llama(attention: str = "eager", **settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=16,
        num_key_value_heads=2,
        attn_implementation=attention,
        use_cache=False,
        **SMALL,
        **settings,
    )
    return _seeded(lambda: transformers.LlamaForCausalLM(config))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return _seeded(lambda: transformers.GPT2LMHeadModel(config))


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **SMALL,
    )
    return _seeded(lambda: transformers.BertForMaskedLM(config))


def _clip_vision() -> nn.Module:
    config = transformers.CLIPVisionConfig(image_size=16, patch_size=8, attn_implementation="eager", **SMALL)
    return _seeded(lambda: transformers.CLIPVisionModel(config))


IMAGES = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}


def _gradients(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    output = model(**batch)[0]
    if "attention_mask" in batch:
        output = output[batch["attention_mask"].bool()]
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(output.square().mean(), parameters, allow_unused=True)
    return [output.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (_llama, TOKENS),
        (_llama, PADDED),
        (_gpt2, TOKENS),
        (_gpt2, PADDED),
        (_bert, PADDED),
        (_clip_vision, IMAGES),
    ],
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
    model = _llama()
    model(**TOKENS)
    assert not calls
    apply(model)
    model(**TOKENS)
    assert len(calls) == 2


def test_sdpa_already_is_reported() -> None:
    _, (row, _), _ = apply(_llama("sdpa"), ("sdpa_attention",))
    assert row == "sdpa_attention: 1 × LlamaForCausalLM: runs sdpa attention already"


def test_two_models_of_one_config_stay_independent() -> None:
    config = _llama().config
    one, other = (_seeded(lambda: transformers.LlamaForCausalLM(config)) for _ in range(2))
    before = copy.deepcopy(config)
    apply(one)
    assert one.config._attn_implementation == "sdpa"
    assert all(layer.self_attn.config is one.config for layer in one.model.layers)
    assert other.config is config
    assert config.to_dict() == before.to_dict()
    assert config._attn_implementation == "eager"
    torch.testing.assert_close(one(**TOKENS).logits, other(**TOKENS).logits, rtol=1e-5, atol=1e-6)


def test_a_model_that_must_return_attention_weights_stays_eager() -> None:
    model = _llama(output_attentions=True)
    _, (row, _), (warning,) = apply(model, ("sdpa_attention",))
    assert "1 × LlamaForCausalLM: stays eager, since its config asks for output_attentions" in row
    assert "output_attentions" in warning
    assert model.config._attn_implementation == "eager"
    assert model(**TOKENS).attentions[0].shape == (2, 4, 12, 12)


def test_a_model_without_sdpa_stays_eager_with_its_reason() -> None:
    settings = {**SMALL, "head_dim": 8, "num_key_value_heads": 2, "vocab_size": 16}
    config = transformers.Gemma2Config(attn_implementation="eager", use_cache=False, **settings)
    model = _seeded(lambda: transformers.Gemma2ForCausalLM(config))
    _, (row, _), _ = apply(model, ("sdpa_attention",))
    assert "Gemma2ForCausalLM: stays eager, " in row
    assert "scaled_dot_product_attention" in row
    assert model.config is config
    assert all(layer.self_attn.config is config for layer in model.model.layers)


def test_an_implementation_nobody_knows_changes_nothing() -> None:
    model = _llama()
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
            self.left = _llama()
            self.right = nn.ModuleList([_gpt2()])

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
    model = _seeded(lambda: transformers.CLIPModel(config))
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
