"""Hand-written normalisations by torch's fused kernel: equal in values, gradients, dtypes and weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.testing import get_case, run_ranks
from atorch_ns.testing.parity import accelerate_case
from tests.opt_lib.replacements.modules import apply, output_and_gradients


def _class(path: str) -> Callable[[int], nn.Module]:
    """A class of transformers by model and name."""
    model, name = path.split(".")
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    kind: Callable[[int], nn.Module] = getattr(module, name)
    return kind


def _randomised(kind: Callable[[int], nn.Module], size: int) -> nn.Module:
    module = kind(size)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        module.get_parameter("weight").copy_(torch.rand(size, generator=generator) + 0.5)
    return module


SIBLINGS = [
    "llama.LlamaRMSNorm",
    "mistral.MistralRMSNorm",
    "qwen2.Qwen2RMSNorm",
    "qwen3.Qwen3RMSNorm",
    "phi3.Phi3RMSNorm",
    "gemma.GemmaRMSNorm",
    "gemma3.Gemma3RMSNorm",
    "olmo2.Olmo2RMSNorm",
    "gpt_oss.GptOssRMSNorm",
    "llama4.Llama4TextRMSNorm",
    "deepseek_v3.DeepseekV3RMSNorm",
    "t5.T5LayerNorm",
    "mamba.MambaRMSNorm",
    "pixtral.PixtralRMSNorm",
]


@pytest.mark.parametrize("path", SIBLINGS)
def test_siblings_of_llama_are_replaced_and_compute_the_same(path: str) -> None:
    original = _randomised(_class(path), 64)
    model = nn.Sequential(copy.deepcopy(original))
    weight = model[0].weight
    _, (row,), _ = apply(model)
    name = type(original).__name__
    assert row == f"fused_rms_norm: 1 × {name} → Fused{name}"
    assert isinstance(model[0], type(original))
    assert model[0].weight is weight
    assert list(model.state_dict()) == ["0.weight"]
    x = torch.randn(2, 5, 64) * 2
    expected = output_and_gradients(original, x)
    for ours, theirs in zip(output_and_gradients(model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for x_dtype in (torch.float32, torch.bfloat16):
        for weight_dtype in (torch.float32, torch.bfloat16):
            both = copy.deepcopy(original).to(weight_dtype), copy.deepcopy(model).to(weight_dtype)
            theirs, ours = (output_and_gradients(module, x.to(x_dtype)) for module in both)
            assert [t.dtype for t in ours] == [t.dtype for t in theirs]
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one.float(), other.float(), rtol=0.03, atol=0.03)


def test_the_result_is_no_less_exact_in_bf16_than_the_original() -> None:
    original = _randomised(_class("llama.LlamaRMSNorm"), 256)
    model = nn.Sequential(copy.deepcopy(original)).to(torch.bfloat16)
    apply(model)
    x = torch.randn(64, 256).to(torch.bfloat16)
    weight = model[0].weight.double()
    exact = F.rms_norm(x.double(), (256,), weight, original.variance_epsilon)
    ours = (model(x).double() - exact).abs().max()
    theirs = (original.to(torch.bfloat16)(x).double() - exact).abs().max()
    assert ours <= theirs


def test_a_small_weight_beside_one_is_not_lost_in_bf16() -> None:
    kind = _class("gemma.GemmaRMSNorm")
    original = kind(64)
    with torch.no_grad():
        original.weight.fill_(1e-3)  # 1 + 1e-3 is 1 in bf16
    model = nn.Sequential(copy.deepcopy(original)).to(torch.bfloat16)
    apply(model)
    x = torch.full((4, 64), 1.0, dtype=torch.bfloat16)
    x[:, ::2] = 3.0
    assert torch.equal(model(x), original.to(torch.bfloat16)(x))


class OwnNorm(nn.Module):
    """Written by somebody who never saw another one."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ChannelsFirst(OwnNorm):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * torch.rsqrt(tokens.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class OtherEpsilon(OwnNorm):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + 2 * self.eps) * self.weight


class Centred(OwnNorm):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens - tokens.mean(-1, keepdim=True))


class DetachedScale(OwnNorm):
    """Equal in its values; its gradients are others."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        size = torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + self.eps).detach()
        return tokens * size * self.weight


class Fails(OwnNorm):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.view(-1, 7) * self.weight


class Gated(OwnNorm):
    def forward(self, tokens: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(tokens) if gate is None else super().forward(tokens * gate)


@pytest.mark.parametrize("size", [3, 64, 1024])
def test_a_norm_of_any_name_is_judged_by_what_it_computes(size: int) -> None:
    model = nn.Sequential(OwnNorm(size))
    apply(model)
    assert type(model[0]).__name__ == "FusedOwnNorm"
    x = torch.randn(2, size)
    torch.testing.assert_close(model[0](tokens=x), OwnNorm(size)(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [3, 64])
@pytest.mark.parametrize("kind", [ChannelsFirst, OtherEpsilon, Centred, DetachedScale])
def test_what_computes_something_else_is_kept(kind: type[OwnNorm], size: int) -> None:
    model = nn.Sequential(kind(size), OwnNorm(size))
    _, (row,), _ = apply(model)
    assert type(model[0]) is kind
    assert f"1 × {kind.__name__}: it computes something else" in row
    assert "1 × OwnNorm → FusedOwnNorm" in row


class FourDimensional(OwnNorm):
    """Normalises the channels of images."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.dim() != 4:
            return super().forward(tokens)
        return tokens * torch.rsqrt(tokens.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class ManyTokens(OwnNorm):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + (1 if tokens.dim() == 3 and tokens.shape[1] > 8 else 0)


class Rows(OwnNorm):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (2 if tokens.dim() == 2 else 1)


class HalvedInTraining(OwnNorm):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (0.5 if self.training else 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [FourDimensional, ManyTokens, Rows, HalvedInTraining])
def test_other_shapes_and_the_other_mode_are_tried_too(kind: type[OwnNorm], training: bool) -> None:
    model = nn.Sequential(kind(16)).train(training)
    _, (row, *_), _ = apply(model)
    assert type(model[0]) is kind
    assert "it computes something else" in row
    assert model[0].training is training


class Counting(OwnNorm):
    """Keeps its last input, and counts in a buffer, an attribute and its class."""

    calls = 0

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("count", torch.zeros(()))
        self.num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        self.num_calls += 1
        self.count += 1
        self.last = tokens
        return super().forward(tokens)


class Caching(OwnNorm):
    """Nothing tells before a call that it keeps its input."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.last = tokens.detach()
        return super().forward(tokens)


def test_judging_leaves_nothing_on_the_users_module() -> None:
    model = nn.Sequential(Counting(8), Caching(8))
    _, (row, *_), _ = apply(model)
    assert (Counting.calls, model[0].num_calls, float(model[0].count)) == (0, 0, 0)
    assert not hasattr(model[1], "last")
    assert [type(part) for part in model] == [Counting, Caching]
    assert "1 × Counting: it has buffers (count)" in row
    assert "1 × Caching: its forward pass changes last" in row


class Switched(OwnNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.enabled = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) if self.enabled else tokens


class SwitchedByClass(OwnNorm):
    enabled = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) if self.enabled else tokens


class Annealed(OwnNorm):
    """Its epsilon is made anew at each access."""

    @property
    def annealed(self) -> float:
        return float(getattr(self, "current", 1e-6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + self.annealed) * self.weight


class Scaled(OwnNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale[0]


@pytest.mark.parametrize(
    ("kind", "named"),
    [(Switched, "enabled"), (SwitchedByClass, "enabled"), (Annealed, "annealed"), (Scaled, "scale")],
)
def test_what_may_be_set_to_something_else_later_is_kept(kind: type[OwnNorm], named: str) -> None:
    model = nn.Sequential(kind(8), OwnNorm(8))
    _, (row, *_), _ = apply(model)
    assert [type(part).__name__ for part in model] == [kind.__name__, "FusedOwnNorm"]
    assert f"1 × {kind.__name__}: it" in row
    assert named in row
    assert "which a fused pass would not follow" in row or "and a fused pass would not follow" in row


def test_attributes_that_tell_the_size_are_no_reason() -> None:
    class Sized(OwnNorm):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.dim, self.normalized_shape, self.bias = size, (size,), None

    model = nn.Sequential(Sized(8))
    apply(model)
    assert type(model[0]).__name__ == "FusedSized"


def test_an_epsilon_that_is_set_later_is_followed() -> None:
    model, original = nn.Sequential(OwnNorm(8)), OwnNorm(8)
    apply(model)
    model[0].eps = original.eps = 10.0
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), original(x))


def test_what_cannot_be_judged_is_kept() -> None:
    model = nn.Sequential(Fails(4), Gated(4))
    _, explained, _ = apply(model)
    assert [type(part) for part in model] == [Fails, Gated]
    assert "1 × Fails: it could not be tried on a small input (RuntimeError)" in explained[0]


def test_the_same_class_with_other_settings_is_judged_anew() -> None:
    model = nn.Sequential(OwnNorm(8, eps=1e-6), OwnNorm(8, eps=1e-3), OwnNorm(16))
    x = torch.randn(2, 8) * 1e-2
    expected = model[1](x)
    apply(model)
    torch.testing.assert_close(model[1](x), expected, rtol=1e-6, atol=1e-6)
    assert len({type(part) for part in model}) == 1, "one class, so that compiled code is shared"


def test_torchs_own_norms_are_reported() -> None:
    model = nn.Sequential(nn.RMSNorm(4), nn.LayerNorm(4), nn.LayerNorm(4))
    _, explained, _ = apply(model)
    assert explained[:2] == [
        "fused_rms_norm: 1 × RMSNorm: torch's fused kernel already",
        "fused_layer_norm: 2 × LayerNorm: torch's fused kernel already",
    ]


def test_applying_twice_changes_nothing_more() -> None:
    model = nn.Sequential(OwnNorm(8))
    apply(model)
    first = model[0]
    apply(model)
    assert model[0] is first


def test_random_state_is_left_alone() -> None:
    class Noisy(OwnNorm):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + torch.rand(())

    before = torch.get_rng_state()
    model = nn.Sequential(Noisy(8), OwnNorm(8))
    apply(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(model[0]) is Noisy


def test_a_model_on_meta_is_replaced_sharded_and_initialised() -> None:
    case = get_case("hf_llama")

    def train() -> tuple[list[str], float]:
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            model = LlamaForCausalLM(case.build().config)
        result = accelerate_case(case, ["module_replace", "fsdp"], model=model)
        kinds = sorted(
            {type(part).__mro__[1].__name__ for part in model.modules() if "RMSNorm" in repr(type(part))}
        )
        loss = float("nan")
        for batch in result.dataloader or ():
            loss = float(result.train_step(batch))
        return kinds, loss

    kinds, loss = run_ranks(train, 2)[0]
    assert kinds == ["Derived"]
    assert 0 < loss < 6


def test_copies_and_pickles_of_a_replaced_model_work() -> None:
    model = get_case("hf_llama").build()
    job, _, _ = apply(model)
    batch = get_case("hf_llama").make_batch(2, 0)
    expected = job.module(**batch).logits
    for other in (copy.deepcopy(job.module), pickle.loads(pickle.dumps(job.module))):
        assert torch.equal(other(**batch).logits, expected)
        assert type(other.model.norm) is type(model.model.norm)
