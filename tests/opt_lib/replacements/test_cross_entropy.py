"""Last layer and loss in one: the same loss and gradients without all logits at once."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.testing import assert_parity, compare, get_case, reference_run, run_ranks
from atorch_ns.testing.models import Case
from atorch_ns.testing.parity import accelerate_case, accelerated_run
from opt_lib._replacements import cross_entropy as cross_entropy_module
from opt_lib._replacements.cross_entropy import DeferredLogits, chunked_cross_entropy
from opt_lib._replacements.registry import known_replacements
from tests.opt_lib.replacements.kernels import called
from tests.opt_lib.replacements.modules import GPU, apply, apply_to, job_of
from tests.opt_lib.replacements.transformers_models import PADDED, bert, gpt2, llama, transformers

__all__ = ["called"]  # a fixture

CHUNKED = ("chunked_linear_cross_entropy",)
BATCH = {**PADDED, "labels": torch.where(PADDED["attention_mask"].bool(), PADDED["input_ids"], -100)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cross_entropy_module.chunked_cross_entropy
    monkeypatch.setattr(
        cross_entropy_module, "chunked_cross_entropy", lambda *args: whole(*args, chunk_bytes=5 * 4 * 16)
    )


def _results(model: nn.Module, **batch: Any) -> list[torch.Tensor]:
    loss = model(**batch).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [loss.detach(), *gradients]


def _same(model: nn.Module, original: nn.Module, **batch: Any) -> None:
    for ours, theirs in zip(_results(model, **batch), _results(original, **batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_function_is_exact(reduction: str, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(23, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    bias = torch.randn(40, requires_grad=True) if with_bias else None
    target = torch.randint(0, 40, (23,))
    target[3:6] = -1
    given = [x, weight] if bias is None else [x, weight, bias]
    wanted = F.cross_entropy(F.linear(x, weight, bias), target, ignore_index=-1, reduction=reduction)
    for chunk_bytes in (1, 4 * 40 * 7, 10**9):
        loss = chunked_cross_entropy(x, weight, bias, target, -1, reduction, chunk_bytes=chunk_bytes)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        ours, theirs = torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [llama, gpt2, lambda: llama(tie_word_embeddings=True)])
@pytest.mark.parametrize(
    "extra", [{}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": BATCH["labels"].roll(1)}]
)
def test_models_train_alike(build: Any, extra: dict[str, Any]) -> None:
    original = build()
    model = copy.deepcopy(original)
    names, tied = list(model.state_dict()), model.get_input_embeddings().weight is model.lm_head.weight
    job, (row,), _ = apply(model, CHUNKED)
    assert row == f"chunked_linear_cross_entropy: 1 × last layer and loss of {type(original).__name__}"
    assert list(job.module.state_dict()) == names
    assert (job.module.get_input_embeddings().weight is job.module.lm_head.weight) is tied
    assert isinstance(job.module, type(original))
    _same(job.module.train(), original.train(), **BATCH, **extra)
    assert job.module(**BATCH).logits is None


def test_logits_are_there_where_they_are_used() -> None:
    original = llama()
    job, _, _ = apply(copy.deepcopy(original), CHUNKED)
    model: Any = job.module.train()
    wanted = original(**PADDED).logits
    torch.testing.assert_close(model(**PADDED).logits, wanted)  # no labels
    torch.testing.assert_close(model.eval()(**BATCH).logits, wanted)
    with torch.no_grad():
        torch.testing.assert_close(model.train()(**BATCH).logits, wanted)
    _, logits, *_ = model(**BATCH, return_dict=False)
    torch.testing.assert_close(logits, wanted)


def test_logits_that_are_capped_before_the_loss_give_the_models_own_loss() -> None:
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Gemma2Config(
        vocab_size=16, head_dim=8, num_key_value_heads=2, final_logit_softcapping=2.0, **settings
    )
    original = transformers.Gemma2ForCausalLM(config)
    job, _, _ = apply(copy.deepcopy(original), CHUNKED)
    _same(job.module.train(), original.train(), **BATCH)


def test_deferred_logits_act_as_a_tensor() -> None:
    head: Any = nn.Linear(4, 6)
    head._deferring = False
    x = torch.randn(2, 3, 4)
    wanted = head(x)

    def made() -> Any:
        return DeferredLogits(head, x)

    for use in (
        lambda y: y * 2,
        lambda y: 2 * y,
        lambda y: y / 3,
        lambda y: y + 1,
        lambda y: 1 + y,
        lambda y: y - 1,
        lambda y: -y,
        lambda y: y[:, 1:],
        lambda y: y.float(),
        torch.tanh,
        lambda y: torch.add(y, other=y),
    ):
        torch.testing.assert_close(use(made()), use(wanted))
    used = made()
    assert used.shape == wanted.shape
    assert used.operands(6) is None  # it exists: its own loss is cheaper
    assert made().operands(7) is None
    with pytest.raises(AttributeError):
        made().__missing__()


def test_a_model_with_another_loss_or_head_stays() -> None:
    custom = llama()
    custom.loss_function = lambda **kwargs: torch.zeros(())
    hooked = llama()
    hooked.lm_head.register_forward_hook(lambda *args: None)
    for model, reason in (
        (bert(), "its loss is not transformers' loss of causal language models"),
        (custom, "its loss is not"),
        (hooked, "it has hooks"),
        (nn.Linear(2, 2), "no causal language models of transformers"),
    ):
        _, (row, _), _ = apply(model, CHUNKED)
        assert reason in row


def test_only_include_brings_it() -> None:
    _, explained, _ = apply(llama())
    assert not any("cross_entropy" in text for text in explained)
    _, (row, _), _ = apply(llama(), CHUNKED, axes=(("tensor", 2),))
    assert "cannot be used where the model is divided over the axis tensor" in row


def test_liger_takes_over(called: Counter[str]) -> None:
    original = llama()
    job, (row,), _ = apply_to(job_of(copy.deepcopy(original), GPU), ("liger_fused_linear_cross_entropy",))
    assert "last layer and loss of LlamaForCausalLM" in row
    _same(job.module.train(), original.train(), **BATCH)
    assert called == {"liger_fused_linear_cross_entropy": 1}


def test_copies_and_pickles_work() -> None:
    model = llama()
    outcome = known_replacements()[CHUNKED[0]].replace(model)
    for other in (copy.deepcopy(outcome.model), pickle.loads(pickle.dumps(outcome.model))):
        assert other._deferring_head.module is other.lm_head
        _same(other.train(), model.train(), **BATCH)


def _with_labels() -> Case:
    """A Llama that computes its own loss."""
    case = get_case("hf_llama")

    def make_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
        batch = case.make_batch(size, seed)
        return {**batch, "labels": batch["input_ids"]}

    return dataclasses.replace(case, make_batch=make_batch, loss_func=lambda batch, output: output.loss)


STRATEGY = ["fsdp", "checkpoint"]
LAST_LAYER_ALONE: list[list[Any]] = [[(name, {"atorch_wrap_cls": ("Linear",)})] for name in ("fsdp", "zero2")]
"""It is a unit of its own, gathered for itself."""


def test_training_on_two_ranks_matches_one_process() -> None:
    case = _with_labels()
    reference = reference_run(case)
    replaced = ("module_replace", {"include": list(CHUNKED)})

    def train() -> list[Any]:
        assert "1 × last layer and loss" in str(accelerate_case(case, [replaced]).report)
        for steps, expected in ((STRATEGY, 0), *((steps, 1) for steps in LAST_LAYER_ALONE)):
            report = str(accelerate_case(case, [replaced, *steps]).report)
            assert report.count("its own loss instead of chunked_linear_cross_entropy") == expected
        return [accelerated_run(case, [replaced, *steps]) for steps in (STRATEGY, *LAST_LAYER_ALONE)]

    for run in run_ranks(train, 2, timeout_s=100)[0]:
        assert_parity(compare(reference, run))


def test_compiled_training_matches() -> None:
    case = _with_labels()
    strategy = [("module_replace", {"include": list(CHUNKED)}), ("compile", {"backend": "aot_eager"})]
    assert_parity(compare(reference_run(case), accelerated_run(case, strategy)))
