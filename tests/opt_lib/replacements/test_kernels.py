"""Kernels of liger-kernel and apex, with the packages pretended: what is called, and that it computes the same."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.testing import assert_parity, compare, get_case, reference_run, run_ranks
from atorch_ns.testing.parity import accelerated_run
from opt_lib._replacements import base
from opt_lib._replacements import kernels as kernels_module
from opt_lib._replacements.registry import known_replacements
from opt_lib.module_replace import ModuleReplace
from tests.opt_lib.replacements.kernels import called
from tests.opt_lib.replacements.modules import GPU, apply_to, job_of
from tests.opt_lib.replacements.transformers_models import PADDED, gpt2, llama, transformers

__all__ = ["called"]  # a fixture

B, T = 2, 64
LIGER = ("liger_rope", "liger_swiglu", "liger_rms_norm")


def _results(model: nn.Module) -> list[torch.Tensor]:
    output = model(**PADDED).logits.float()
    gradients = torch.autograd.grad(output.square().mean(), list(model.parameters()), allow_unused=True)
    return [output.detach(), *(g.float() for g in gradients if g is not None)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_liger_in_llama(called: Counter[str], dtype: torch.dtype, tolerance: float) -> None:
    original = llama(mlp_bias=True).to(dtype)
    model = copy.deepcopy(original)
    tensors = model.state_dict(keep_vars=True)
    _, explained, _ = apply_to(job_of(model, GPU), LIGER)
    assert explained == [
        "liger_rope: 2 × LlamaAttention → LigerRopeLlamaAttention",
        "liger_swiglu: 2 × LlamaMLP → LigerLlamaMLP",
        "liger_rms_norm: 5 × LlamaRMSNorm → LigerLlamaRMSNorm",
    ]
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    for ours, theirs in zip(_results(model), _results(original), strict=True):
        assert (ours - theirs).abs().max() <= tolerance * (1 + theirs.abs().max())
    assert called == {"liger_rope": 2, "liger_swiglu": 2, "liger_rms_norm": 5}


def test_no_class_or_function_of_transformers_is_altered(called: Counter[str]) -> None:
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    forwards = {
        name: value.forward
        for name, value in before.items()
        if isinstance(value, type) and hasattr(value, "forward")
    }
    apply_to(job_of(llama(), GPU), LIGER)
    assert dict(vars(modeling_llama)) == before
    assert all(getattr(modeling_llama, name).forward is value for name, value in forwards.items())
    llama()(**PADDED)
    assert not called


def test_replaced_modules_compile(called: Counter[str]) -> None:
    original = llama()
    model = copy.deepcopy(original)
    apply_to(job_of(model, GPU), LIGER)
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    model.model.norm = copy.deepcopy(original.model.norm)  # it is not compiled
    for ours, theirs in zip(_results(model), _results(original), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not called  # what is compiled is torch's, for the compiler to fuse
    torch.compiler.reset()


def test_copies_and_pickles_work(called: Counter[str]) -> None:
    model = llama()
    apply_to(job_of(model, GPU), LIGER)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.model.layers[0].mlp) is type(model.model.layers[0].mlp)
        torch.testing.assert_close(other(**PADDED).logits, model(**PADDED).logits)


def test_what_is_no_plain_cuda_tensor_goes_through_torch() -> None:
    assert not kernels_module.runs_kernels(torch.zeros(2))
    gate, up = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(kernels_module.silu_mul("liger", gate, up), F.silu(gate) * up)
    x, weight, bias = torch.randn(2, 3), torch.randn(3), torch.randn(3)
    torch.testing.assert_close(
        kernels_module.layer_norm(x, (3,), weight, bias, 1e-5), F.layer_norm(x, (3,), weight, bias, 1e-5)
    )
    torch.testing.assert_close(
        kernels_module.rms_norm("liger", x, weight, 1e-5, 0.0), F.rms_norm(x, (3,), weight, 1e-5)
    )


class _Gated(nn.Module):
    """As in Mixtral: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, activation: Callable[..., torch.Tensor] = F.silu, extra: bool = False) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.activation = activation
        self.extra = nn.Linear(8, 8) if extra else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(self.activation(self.w1(hidden)) * self.w3(hidden))
        return out if self.extra is None else out + self.extra(hidden)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (_Gated, None),
        (lambda: _Gated(F.gelu), "something else than down(silu(gate(x)) * up(x))"),
        (lambda: _Gated(lambda x: F.dropout(F.silu(x), 0.5)), "something else"),
        (lambda: _Gated(lambda x: x.view(1, -1)), "could not be tried"),
        (lambda: _Gated(extra=True), "other parameters"),
        (lambda: llama(hidden_act="gelu").model.layers[0].mlp, "something else"),
    ],
)
def test_a_gated_mlp_is_tried_before_it_is_replaced(
    made: Callable[[], nn.Module], reason: str | None
) -> None:
    model = nn.Sequential(made())
    outcome = known_replacements()["liger_swiglu"].replace(model)
    if reason is None:
        assert outcome.replaced == {"_Gated → Liger_Gated": 1}
        x = torch.randn(2, 8)
        torch.testing.assert_close(model[0](hidden=x), _Gated.forward(model[0], x))
    else:
        assert not outcome.replaced
        assert reason in next(iter(outcome.kept))


class _Noting(_Gated):
    """Keeps what it was called with, and counts."""

    num_calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.last = hidden
        return super().forward(hidden)


def test_trying_leaves_nothing_on_the_users_module() -> None:
    module = _Noting()
    weights = dict(module.named_parameters())
    outcome = known_replacements()["liger_swiglu"].replace(nn.Sequential(module))
    assert outcome.replaced
    assert (module.num_calls, hasattr(module, "last")) == (0, False)
    assert all(module.get_parameter(name) is weight for name, weight in weights.items())


def test_a_model_on_meta_is_replaced(called: Counter[str]) -> None:
    with torch.device("meta"):
        model = llama()
    _, explained, _ = apply_to(job_of(model, GPU), LIGER)
    assert len(explained) == 3
    assert all("→ Liger" in text for text in explained)


def test_another_rotation_stays() -> None:
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CohereConfig(vocab_size=16, **settings)
    model = transformers.CohereForCausalLM(config)  # turns neighbouring features against each other
    outcome = known_replacements()["liger_rope"].replace(model)
    assert not outcome.replaced
    assert "computes something else than Liger's" in next(iter(outcome.kept))


def test_hooks_are_respected() -> None:
    model = llama()
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: None)
    outcome = known_replacements()["liger_swiglu"].replace(model)
    assert outcome.replaced.total() == 1
    assert outcome.kept == {"LlamaMLP: it has hooks, which a new module would not have": 1}


def test_apex_norms(called: Counter[str]) -> None:
    original = nn.Sequential(nn.LayerNorm(8), llama().model.norm, nn.LayerNorm(32, bias=False))
    model = nn.Sequential(copy.deepcopy(original[0]), copy.deepcopy(original[1]), copy.deepcopy(original[2]))
    _, explained, _ = apply_to(job_of(model, GPU), ("apex_layer_norm", "apex_rms_norm"))
    assert explained == [
        "apex_rms_norm: 1 × LlamaRMSNorm → ApexLlamaRMSNorm",
        "apex_layer_norm: 2 × LayerNorm → ApexLayerNorm",
    ]
    for size, ours, theirs in zip((8, 32, 32), model, original, strict=True):
        x = torch.randn(3, size)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    assert called == {"fused_layer_norm_affine": 1, "fused_rms_norm_affine": 1}


def test_an_offset_reaches_liger(called: Counter[str]) -> None:
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GemmaConfig(vocab_size=16, head_dim=8, num_key_value_heads=2, **settings)
    original = transformers.GemmaForCausalLM(config)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = copy.deepcopy(original)
    apply_to(job_of(model, GPU), ("liger_rms_norm",))
    for ours, theirs in zip(_results(model), _results(original), strict=True):
        assert (ours - theirs).abs().max() <= 2e-6 * (1 + theirs.abs().max())
    assert called["liger_rms_norm"] == 3


def test_pypis_apex_is_told_from_nvidias() -> None:
    base._import_error.cache_clear()
    there = Cluster(device_type="cuda", capability=(9, 0), packages={"apex": "0.9.10"})
    reason = known_replacements()["apex_layer_norm"].requirements.unmet(there, "bfloat16")
    base._import_error.cache_clear()
    assert reason is not None
    assert "apex.normalization.fused_layer_norm cannot be imported" in reason
    assert "package of that name on PyPI is another" in reason


def test_gpt2_has_nothing_for_liger(called: Counter[str]) -> None:
    _, _, (warning,) = apply_to(job_of(gpt2(), GPU), LIGER)
    assert "replaced nothing" in warning


STRATEGIES: list[list[Any]] = [
    ["fsdp", "checkpoint"],
    [("parallel_mode", ([("tensor", 2)], None))],
    [("parallel_mode", ([("pipeline", 2)], None))],
]


def test_training_on_two_ranks_matches_one_process(
    called: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What calls the kernels composes; the kernels themselves are pretended."""
    from opt_lib import module_replace

    monkeypatch.setattr(
        module_replace, "_unmet_requirements", lambda job, chosen: {each.name: None for each in chosen}
    )
    case = get_case("hf_llama")
    reference = reference_run(case)
    replaced = ("module_replace", {"include": list(LIGER)})

    def train() -> list[Any]:
        return [accelerated_run(case, [replaced, *steps]) for steps in STRATEGIES]

    for run in run_ranks(train, 2, timeout_s=110)[0]:
        assert_parity(compare(reference, run))


def test_compiled_training_matches(called: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from opt_lib import module_replace

    monkeypatch.setattr(
        module_replace, "_unmet_requirements", lambda job, chosen: {each.name: None for each in chosen}
    )
    case = get_case("hf_llama")
    strategy = [("module_replace", {"include": list(LIGER)}), ("compile", {"backend": "aot_eager"})]
    assert_parity(compare(reference_run(case), accelerated_run(case, strategy)))


def _traced(cluster: Cluster) -> dict[str, Any]:
    """By precision, the cost of a block of a Llama as a plan with modules replaced has it."""
    model = llama()
    replaced = ModuleReplace().rewritten(model, Profile.of(model), cluster)
    assert replaced is not None
    return _block(replaced)


def _block(model: nn.Module) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(**batch).logits.flatten(0, 1), batch["input_ids"].flatten())

    trace = profile_model(model, {"input_ids": torch.zeros(B, T, dtype=torch.long)}, loss, find_dims).trace
    assert trace is not None
    block = next(segment for segment in trace.segments if segment.name == "model.layers.0")
    return dict(block.costs)


def test_a_trace_has_one_operator_for_each_kernel(called: Counter[str]) -> None:
    config = llama().config
    rows = B * T
    width, inner = config.hidden_size, config.intermediate_size
    heads = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    cost = _traced(GPU)["bfloat16"]
    moved = {each.name: each.moved.at(B, T) for each in cost.operators if each.name.startswith("kernel.")}
    turned = rows * heads * 2  # bytes of q and k, which are read and written
    angles = 2 * rows * config.head_dim * 2
    assert moved == {
        "kernel.rms_norm": pytest.approx(2 * (rows * (2 * width * 2 + 4) + width * 2), rel=0.01),
        "kernel.rms_norm_backward": pytest.approx(2 * (rows * (3 * width * 2 + 4) + 2 * width * 2), rel=0.01),
        "kernel.silu_mul": rows * inner * 2 * 3,
        "kernel.silu_mul_backward": rows * inner * 2 * 5,
        "kernel.rotate": pytest.approx(2 * (2 * turned + angles), rel=0.25),  # angles of one sample for all
    }
    assert not called  # nothing of the package is run on tensors without values


def test_what_kernels_do_not_keep_is_not_in_the_trace(called: Counter[str]) -> None:
    config, rows = llama().config, B * T
    plain = _traced(Cluster(device_type="cuda", packages={}))["bfloat16"]  # torch's normalisations alone
    fused = _traced(GPU)["bfloat16"]
    silu = rows * config.intermediate_size * 2
    assert plain.saved.at(B, T) - fused.saved.at(B, T) >= silu  # silu(gate) is computed again
    names = {each.name for each in plain.operators if each.name.startswith("kernel.")}
    assert names == {"kernel.rms_norm", "kernel.rms_norm_backward"}
