"""Which linears compute in fp8, and the reasons of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from atorch_ns import auto_accelerate
from atorch_ns.profile import Profile
from opt_lib._fp8.select import find_linears, fold_names, lora_layers, unmatched_parts
from opt_lib._replacements.registry import known_replacements


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)


class Odd(nn.Linear):
    """A linear of somebody's own."""


class Net(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.own = Odd(32, 32)
        self.narrow = nn.Linear(32, 24)
        self.watched = nn.Linear(32, 32)
        self.watched.register_forward_hook(lambda *_: None)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.logits = nn.Linear(32, 64, bias=False)
        if tied:
            self.logits.weight = self.embed.weight


BLOCKS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


def test_every_linear_is_replaced_or_has_a_reason() -> None:
    found = find_linears(Net(), None, ())
    assert found.replaced == BLOCKS
    reasons = {name: reason for reason, names in found.kept.items() for name in names}
    assert "subclass" in reasons["own"]
    assert "multiples of 16" in reasons["narrow"]
    assert "hooks" in reasons["watched"]
    assert "subclass" in reasons["normed"]
    assert "logits" in reasons["logits"]
    assert found.heads == ("logits",)
    assert len(reasons) + len(found.replaced) == sum(isinstance(m, nn.Linear) for m in Net().modules())


def test_an_untied_head_is_found_by_its_name() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(32, 64), "other": nn.Linear(32, 64)})
    assert find_linears(model, None, ()).heads == ("lm_head",)
    assert find_linears(model, ("lm_head",), ()).replaced == ("lm_head",)


@pytest.mark.parametrize(
    ("include", "exclude", "replaced"),
    [
        (("layers",), (), BLOCKS),
        (("up",), (), ("layers.0.up", "layers.1.up")),
        (("up", "1.down"), (), ("layers.0.up", "layers.1.up", "layers.1.down")),
        (None, ("down",), ("layers.0.up", "layers.1.up")),
        (("layers",), ("0",), ("layers.1.up", "layers.1.down")),
        (("logits",), (), ("logits",)),
        (("logits",), ("log",), ()),
        (("narrow", "watched"), (), ()),
    ],
)
def test_include_and_exclude_are_parts_of_names(
    include: Any, exclude: tuple[str, ...], replaced: tuple[str, ...]
) -> None:
    found = find_linears(Net(), include, exclude)
    assert found.replaced == tuple(name for name in (*BLOCKS, "logits") if name in replaced)


def test_an_excluded_head_is_not_spoken_of() -> None:
    assert find_linears(Net(), None, ("logits",)).heads == ()


def test_parts_of_a_divided_layer_keep_the_rule() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 64), "b": nn.Linear(32, 16)})
    assert find_linears(model, None, (), degree=2).replaced == ("a",)
    (reason,) = find_linears(model, None, (), degree=2).kept
    assert "each of 2 tensor ranks" in reason
    assert find_linears(model, None, (), degree=4).replaced == ()


def test_a_weight_with_two_names_is_kept_where_it_is_gathered_in_fp8() -> None:
    model = Net()
    assert find_linears(model, ("logits",), (), keep_tied=True).replaced == ()
    assert find_linears(model, ("layers",), (), keep_tied=True).replaced == BLOCKS


def test_names_are_folded() -> None:
    assert fold_names(["layers.0.up", "layers.1.up", "stem"]) == "layers.*.up (2), stem"
    assert fold_names(["0.1.w", "0.2.w", "h10.w"]) == "*.*.w (2), h10.w"
    assert fold_names(find_linears(Net(), None, ()).replaced) == "layers.*.up (2), layers.*.down (2)"


def test_a_model_that_is_one_linear() -> None:
    assert find_linears(nn.Linear(16, 16), None, ()).replaced == ("",)


def test_lora_layers_are_found_by_what_they_hold() -> None:
    peft = pytest.importorskip("peft", exc_type=Exception)
    model = nn.ModuleDict({"q": nn.Linear(32, 32), "v": nn.Linear(32, 32)})
    model.forward = lambda x: x  # type: ignore[method-assign]
    config = peft.LoraConfig(target_modules=["q"], r=4)
    classes = Profile.of(peft.get_peft_model(model, config)).module_classes
    (path,) = lora_layers(classes, None, ())
    assert path.endswith(".q")
    assert lora_layers(classes, ("v",), ()) == []
    assert lora_layers(classes, None, ("q",)) == []


def test_meta_models_are_read_too() -> None:
    with torch.device("meta"):
        model = Net()
    assert find_linears(model, None, ()).replaced == BLOCKS


@pytest.mark.parametrize(
    "name", ["head", "output", "classifier", "proj_out", "unembed", "decoder", "fc_out", "score"]
)
def test_a_likely_name_counts_beside_the_model_s_other_children(name: str) -> None:
    inner = nn.ModuleDict({name: nn.Linear(32, 32)})
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "block": inner, name: nn.Linear(32, 48)})
    assert find_linears(model, None, ()).heads == (name,)
    assert find_linears(model, (name,), ()).replaced == (f"block.{name}", name)


def test_a_likely_name_counts_deeper_where_it_has_an_output_for_each_row_of_the_embedding() -> None:
    parts = {"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64)}
    assert find_linears(nn.ModuleDict({"model": nn.ModuleDict(parts)}), None, ()).heads == ("model.head",)


class Answering(nn.Module):
    """Says which of its layers makes the logits, as models of transformers do."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(32, 32)
        self.last = nn.Linear(32, 64)
        self.fails = fails

    def get_output_embeddings(self) -> nn.Module:
        if self.fails:
            raise NotImplementedError
        return self.last


def test_a_model_that_says_what_makes_its_logits_is_asked() -> None:
    assert find_linears(Answering(), None, ()).heads == ("last",)
    assert find_linears(nn.ModuleDict({"model": Answering()}), None, ()).heads == ("model.last",)
    assert find_linears(Answering(fails=True), None, ()).heads == ()


def test_a_head_that_cannot_be_replaced_is_told_by_its_size() -> None:
    assert find_linears(nn.ModuleDict({"lm_head": nn.Linear(32, 10)}), None, ()).heads == ()


def _attribute(linear: nn.Linear) -> None:
    linear.mult = 3.0  # type: ignore[assignment]


def _state_dict_hook(linear: nn.Linear) -> None:
    linear.register_state_dict_pre_hook(lambda *_: None)


def _load_hook(linear: nn.Linear) -> None:
    linear.register_load_state_dict_post_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (_attribute, "mult"),
        (lambda linear: linear.register_buffer("mask", torch.zeros(32, 32)), "mask"),
        (lambda linear: linear.register_parameter("gain", nn.Parameter(torch.ones(32))), "gain"),
        (lambda linear: linear.add_module("lora", nn.Linear(32, 32)), "lora"),
        (_state_dict_hook, "hooks"),
        (_load_hook, "hooks"),
    ],
)
def test_a_linear_that_holds_more_stays_with_the_reason(edit: Any, part: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    edit(model["a"])
    found = find_linears(model, None, ("lora",))
    assert found.replaced == ("b",)
    (reason,) = (reason for reason, names in found.kept.items() if "a" in names)
    assert part in reason


def test_marks_of_transformers_are_nothing_more() -> None:
    linear = nn.Linear(32, 32)
    linear._is_hf_initialized = True  # type: ignore[assignment]
    assert find_linears(nn.Sequential(linear), None, ()).replaced == ("0",)


def test_layers_that_are_no_linears_have_a_reason() -> None:
    transformers = pytest.importorskip("transformers", exc_type=Exception)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    )
    found = find_linears(model, None, ())
    assert found.replaced == ()
    assert found.heads == ("lm_head",)
    assert "transformer.h.*.attn.c_attn (2)" in found.why_nothing()
    assert "a Conv1D of transformers" in found.why_nothing()


def test_parts_of_names_that_nothing_contains_are_found() -> None:
    model = Net()
    assert unmatched_parts(model, ("layers.0", "up", "own")) == {}
    assert unmatched_parts(model, ("layres.1", "xyz")) == {"layres.1": ["layers.1"], "xyz": []}


def test_the_model_itself_has_a_name_in_texts() -> None:
    assert fold_names(find_linears(nn.Linear(16, 16), None, ()).replaced) == "the model itself"
    assert find_linears(nn.Linear(3, 3), None, ()).describe_kept().startswith("the model itself: dims")


def test_a_layer_that_module_replace_changed_says_so() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    replacement = known_replacements()["chunked_linear_cross_entropy"]
    model = replacement.replace(LlamaForCausalLM(config), set()).model
    include = ("lm_head", "mlp")
    found = find_linears(model, include, ())
    assert len(found.replaced) == 3
    assert "module_replace" in found.refused(include)["lm_head"]
    assert list(found.refused(include)) == ["lm_head"]


def test_a_name_in_include_whose_layers_all_stay_is_a_warning() -> None:
    with pytest.warns(
        UserWarning, match="'narrow' in include stays as it is: dims that are not multiples of 16"
    ):
        auto_accelerate(
            Net(),
            torch.optim.AdamW,
            load_strategy=[("fp8", {"backend": "torchao", "emulate": True, "include": ("layers", "narrow")})],
        )
