"""profile_model: what it finds, what it leaves alone, and what it says when it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from atorch_ns.capture.nests import tensors_of
from atorch_ns.errors import InputError
from atorch_ns.estimate import MemoryParts, PlanTable, Workload
from atorch_ns.estimate.memory.peak import price_memory
from atorch_ns.profile import Trace, fused, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan, Recomputation
from tests.profile.subjects import Stack, case_inputs, square


def _trace(model: nn.Module, batch: Any, forward_loss: Any = square, **options: Any) -> Trace:
    options.setdefault("precisions", ["float32"])
    trace = profile_model(model, batch, forward_loss, find_dims, **options).trace
    assert trace is not None
    return trace


def _total_flops(trace: Trace, num_samples: int) -> float:
    return sum(
        segment.count * sum(p.flops.at(num_samples, trace.num_tokens) for p in (cost.forward, cost.backward))
        for segment in trace.segments
        for cost in [segment.costs["float32"]]
    )


class Reads(Stack):
    """Looks at its own values, as no fake tensor lets it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.sum().item() > 0 else y


def test_nothing_of_the_callers_changes() -> None:
    model = Stack()
    model.drop = nn.Dropout(0.5)
    model.register_buffer("count", torch.zeros(3))
    batch = torch.randn(4, 8)

    def forward_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        random.random()
        np.random.rand()
        torch.rand(1)
        model.count.add_(1)
        return model.drop(model(batch)).sum()

    reads = Reads()  # takes a real step
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state())
    assert _trace(model, batch, forward_loss).how == "fake"
    assert _trace(reads, batch, lambda model, batch: model(batch).sum() * random.random()).how == "real"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert not model._forward_hooks


def test_meta_model_costs_what_a_real_one_does() -> None:
    _, batch, forward_loss = case_inputs("hf_llama")
    real, _, _ = case_inputs("hf_llama")
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        meta = LlamaForCausalLM(real.config)
    assert _trace(meta, batch, forward_loss).segments == _trace(real, batch, forward_loss).segments


@pytest.mark.parametrize("name", ["mlp", "tied_llama"])
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    model, batch, forward_loss = case_inputs(name, 4)
    trace = _trace(model, batch, forward_loss)
    with FlopCounterMode(display=False) as counter:
        forward_loss(model, batch).backward()
    # torch has no formula for attention on the CPU: [B, H, T, E], two products forward, five backward; of T × T pairs
    # a causal mask leaves T (T + 1) / 2.
    attention = 4 * 7 * 2 * (4 * 16 * 17 // 2 * 32) if name == "tied_llama" else 0
    assert _total_flops(trace, 4) == counter.get_total_flops() + attention


def test_linear_block_by_hand() -> None:
    trace = _trace(Stack(depth=5, width=8), torch.randn(4, 8))
    (block,) = [segment for segment in trace.segments if segment.count == 3]
    cost = block.costs["float32"]
    assert cost.forward.flops.at(6) == 2 * 6 * 8 * 8
    assert cost.backward.flops.at(6) == 4 * 6 * 8 * 8
    # The linear's result, which relu reads, and relu's, which it keeps; relu runs between the blocks.
    assert cost.saved.at(6) == 6 * 8 * 4
    assert cost.output.at(6) == 6 * 8 * 4
    assert {operator.name for operator in cost.operators} >= {"aten.addmm", "aten.mm", "aten.relu"}
    assert block.parameters[0].shape == (8, 8)
    assert trace.batch_bytes.at(6) == 6 * 8 * 4


class Chain(nn.Module):
    """Two element-wise operators between two products."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu() * 2.0).sum()


def test_a_fused_kernel_reads_what_it_does_not_make_and_writes_what_others_read() -> None:
    trace = profile_model(
        Chain(), torch.randn(4, 8), lambda model, batch: model(batch), find_dims, precisions=["float32"]
    ).trace
    assert trace is not None
    forward, tensor = trace.segments[0].costs["float32"].forward, 4 * 8 * 4
    # relu and the product with 2 read and write one each, the sum reads one; fused, the second reads nothing. relu's
    # result stays: the backward pass reads it.
    assert forward.moved.at(4) == 5 * tensor + 4
    assert forward.fused.at(4) == 4 * tensor + 4
    assert forward.operands.at(4) == 2 * (2 * tensor + 8 * 8 * 4)


class Dropped(nn.Module):
    """Dropout alone, and in fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dropout = nn.Parameter(torch.ones(16)), nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.dropout(inputs * self.scale).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True).sum()


def test_dropout_of_gpus_keeps_bytes_and_none_in_attention() -> None:
    found = {}
    for device in ("cpu", "cuda"):
        trace = profile_model(
            Dropped(),
            torch.randn(4, 64, 16),
            lambda model, batch: model(batch),
            find_dims,
            precisions=["float32"],
            device=device,
        ).trace
        assert trace is not None
        found[device] = {each.name: each for each in trace.segments[0].costs["float32"].operators}
    assert found["cuda"]["aten.native_dropout"].moved.at(4) == 4 * 64 * 16 * (4 + 4 + 1)
    assert "aten.native_dropout" not in found["cpu"]
    fused = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert fused in found["cuda"]
    assert fused not in found["cpu"], "the CPU's kernel has no dropout"


class Latent(nn.Module):
    """Attention whose values have a quarter of the width of its queries."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(16, 36), attend

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.project(inputs).unflatten(-1, (2, 18)).transpose(1, 2).split([8, 8, 2], -1)
        return self.attend(*heads, is_causal=True).square().sum()


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    assert is_causal
    mask = torch.full((query.shape[-2],) * 2, -torch.inf, device=query.device).triu(1)
    return (query @ key.mT + mask).softmax(-1) @ value


def _by_name(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    empty = torch.zeros(0, requires_grad=True)  # also trained, and without elements
    kernel = fused(lambda query, key, value, **_: _written_out(query, key, value, is_causal=True))
    return kernel(value=value, key=key, query=query, empty=empty, is_causal=is_causal)


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, fused(_written_out), _by_name])
def test_gpus_attend_by_one_operator_where_the_cpu_has_none(attend: Callable[..., torch.Tensor]) -> None:
    model, batch, key = Latent(attend), torch.randn(4, 64, 16), "float32/bfloat16"
    (here,), (there,) = (
        _trace(model, batch, lambda model, x: model(x), precisions=[key], device=device).segments
        for device in ("cpu", "cuda")
    )
    assert (there.num_attentions, there.heads, there.head_width) == (1, (2, 2), 8)
    assert here.costs[key].forward.attention.at(4) == 0
    assert there.costs[key].forward.attention.at(4) == 2 * 4 * 2 * (64 * 65 // 2) * (8 + 2)
    values = {"inputs": 16, "projected": 36, "attention": 4, "log-sum-exp": 2 * 2}  # 16 bits each
    assert there.costs[key].saved.per_sample == 64 * 2 * sum(values.values())
    assert here.costs[key].saved.per_sample > 2 * 64 * 64 * 2


def test_what_is_fused_is_called_as_it_is() -> None:
    inputs = [torch.randn(2, 4, 8, width, requires_grad=True) for width in (6, 6, 3)]
    kernel = fused(_written_out, like="attention")
    compiled = torch.compile(kernel, backend="aot_eager", fullgraph=True)
    outs = [call(*inputs, is_causal=True) for call in (_written_out, kernel, compiled)]
    gradients = [torch.autograd.grad(out.sum(), inputs) for out in outs]
    for out, found in zip(outs, gradients, strict=True):
        assert torch.equal(out, outs[0])
        assert all(map(torch.equal, found, gradients[0]))
    with torch.device("meta"):  # a mode of the user's reaches the function's own calls
        assert fused(lambda: torch.ones(3))().is_meta
    with pytest.raises(InputError, match=r"fused\(like='mlp'\): only the cost of attention is known"):
        fused(_written_out, like="mlp")


def test_what_only_local_variables_hold_is_told_apart() -> None:
    class Holds(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = x * 2  # which nothing saves, and this name keeps until the blocks have run
            hidden = whole + 1
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    batch = torch.zeros(4, 8)
    segments = _trace(Holds(), batch).segments
    held = [segment.count * segment.costs["float32"].held.at(4, 1) for segment in segments]
    assert held[0] == batch.numel() * 4
    assert sum(held) == 0.0  # what the first stretch holds a later one lets go
    assert not any(one.costs["float32"].held.at(4, 1) for one in _trace(Stack(), batch).segments)


def test_autocast_copies_are_counted_apart() -> None:
    trace = _trace(Stack(), torch.randn(4, 8), precisions=["float32", "float32/bfloat16", "bfloat16"])
    block = trace.segments[-2]
    assert block.costs["float32"].cast_parameters == 0
    assert block.costs["float32/bfloat16"].cast_parameters == 2 * (8 * 8 + 8)
    assert block.costs["bfloat16"].cast_parameters == 0
    assert block.costs["bfloat16"].saved.at(4) == 4 * 8 * 2


def test_tied_and_unused_parameters_are_counted_once() -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 8)
            self.head = nn.Linear(8, 32, bias=False)
            self.head.weight = self.embed.weight
            self.unused = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(super().forward(self.embed(x)))

    profile = profile_model(
        Tied(), torch.zeros(2, 6, dtype=torch.int64), square, find_dims, precisions=["float32"]
    )
    assert profile.trace is not None
    specs = [(spec, segment) for segment in profile.trace.segments for spec in segment.parameters]
    tied = [(spec.name, spec.tied_to) for spec, _ in specs if spec.tied_to]
    assert tied == [("head.weight", "embed.weight")]
    counted = sum(spec.num_elements * segment.count for spec, segment in specs if not spec.tied_to)
    assert counted == profile.num_parameters
    assert (profile.trace.num_tokens, profile.trace.vocabulary_size) == (6, 32)


def test_block_called_again_shares_its_parameters() -> None:
    class Twice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    profile = profile_model(Twice(depth=3), torch.randn(2, 8), square, find_dims, precisions=["float32"])
    assert profile.trace is not None
    assert sum(segment.count for segment in profile.trace.segments if segment.is_block) == 6
    counted = sum(
        spec.num_elements * segment.count
        for segment in profile.trace.segments
        for spec in segment.parameters
        if not spec.tied_to
    )
    assert counted == profile.num_parameters


def test_recomputed_blocks_save_their_inputs_only() -> None:
    class Deep(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.recompute = recompute
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(5)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            return x

    costs = []
    for recompute in (False, True):
        trace = _trace(Deep(recompute), torch.randn(4, 8))
        costs.append(trace.segments[-3].costs["float32"])
    assert costs[1].saved.at(4) == 4 * 8 * 4
    assert costs[0].saved.at(4) == 4 * (8 + 64 + 64) * 4
    # The second linear is not run again: nothing needs its result.
    first_linear = 2 * 4 * 8 * 64
    assert costs[1].backward.flops.at(4) == costs[0].backward.flops.at(4) + first_linear


def test_sequence_gives_costs_of_other_lengths() -> None:
    model, batch, forward_loss = case_inputs("tied_llama")
    grown = _trace(model, batch, forward_loss, sequence=True)
    assert grown.notes == ()
    for num_tokens in (8, 12):
        shorter = _trace(model, batch[:, :num_tokens], forward_loss)
        for one, other in zip(grown.segments, shorter.segments, strict=True):
            for read in (lambda c: c.forward.flops, lambda c: c.backward.flops):
                values = [read(s.costs["float32"]).at(8, num_tokens) for s in (one, other)]
                assert values[0] == pytest.approx(values[1], rel=1e-9)
            saved = [s.costs["float32"].saved.at(8, num_tokens) for s in (one, other)]
            assert saved[0] == pytest.approx(saved[1], rel=0.02)


def test_a_short_sequence_is_traced_at_no_more_tokens() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(16, 8), nn.Parameter(torch.randn(6, 8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids) + self.positions[: ids.shape[1]]

    trace = _trace(Positions(), torch.zeros(2, 6, dtype=torch.int64), sequence=True)
    assert trace.notes == ()
    assert trace.segments[0].costs["float32"].forward.moved.per_token > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_router_does_not_count_as_attention(attention: str) -> None:
    model, batch, forward_loss = case_inputs("hf_mixtral")
    model.set_attn_implementation(attention)
    trace = _trace(model, batch, forward_loss)
    assert {(s.num_attentions, s.num_routed) for s in trace.segments if s.is_block} == {(1, 1)}


def test_every_sample_against_every_other() -> None:
    def contrast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch) @ model(batch).T, torch.arange(len(batch)))

    trace = _trace(nn.Linear(8, 8), torch.randn(16, 8), contrast)
    cost = trace.segments[0].costs["float32"]
    # Two linears and a product of [16, 8] with [8, 16].
    assert cost.forward.flops.at(16) == 2 * (2 * 16 * 8 * 8) + 2 * 16 * 16 * 8


def test_model_that_reads_its_values_takes_one_real_step() -> None:
    trace = _trace(Reads(), torch.randn(4, 8))
    assert trace.how == "real"
    assert "DataDependentOutputException" in trace.notes[0]
    plain = _trace(Stack(), torch.randn(4, 8))
    flops = [
        [s.costs["float32"].forward.flops.at(4) for s in t.segments if s.is_block] for t in (trace, plain)
    ]
    assert sum(flops[0][:1]) == sum(flops[1][:1])


def test_batch_of_one_size_only() -> None:
    class Fixed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).view(4, 2, 4)

    trace = _trace(Fixed(), torch.randn(4, 8))
    assert trace.how == "fake"
    assert "batches of 4 only" in trace.notes[0]


def test_own_fault_is_named() -> None:
    def wrong(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise KeyError("labels")

    with pytest.raises(InputError, match=r"KeyError: 'labels' \(.*test_tracing.py, line \d+, in wrong\)"):
        _trace(Stack(), torch.randn(4, 8), wrong)
    with pytest.raises(InputError, match="one number"):
        _trace(Stack(), torch.randn(4, 8), lambda model, batch: model(batch))
    with torch.device("meta"):
        model = Reads()
    with pytest.raises(InputError, match=r"meta device.*Build it on a device"):
        _trace(model, torch.randn(4, 8))


def test_precision_that_does_not_run_is_a_note() -> None:
    class Picky(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.layers[0].weight.dtype != torch.float32:
                raise TypeError("fp32 weights, please")
            return super().forward(x)

    trace = _trace(Picky(), torch.randn(4, 8), precisions=["float32", "bfloat16"])
    assert trace.precisions == ("float32",)
    assert "does not run in bfloat16: TypeError: fp32 weights, please" in trace.notes[0]


def test_heads_and_vocabulary() -> None:
    model, batch, forward_loss = case_inputs("hf_llama")
    trace = _trace(model, batch, forward_loss)
    assert (trace.num_heads, trace.num_key_value_heads, trace.vocabulary_size) == (4, 2, 64)
    plain = _trace(Stack(), torch.randn(4, 8))
    assert (plain.num_heads, plain.num_key_value_heads, plain.vocabulary_size) == (0, 0, 0)


def test_gpu_that_is_not_in_use_is_not_started() -> None:
    trace = _trace(Stack(), torch.randn(4, 8), device="cuda", make_optimizer=torch.optim.AdamW)
    assert trace.how == "fake"
    assert "The CPU's kernels stand for those of cuda" in trace.notes[0]
    assert trace.optimizer is not None
    assert trace.optimizer.temporary_copies == 1
    assert not torch.cuda.is_initialized()


def test_kernels_of_this_cpu_say_nothing_of_the_workspaces_on_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a GPU that is in use is traced with its own kernels")
    model, batch = nn.Conv2d(8, 8, 3), torch.randn(4, 8, 16, 16)
    cpu, cuda = (_trace(model, batch, device=device) for device in ("cpu", "cuda"))
    assert cpu.segments != cuda.segments
    monkeypatch.setattr("atorch_ns.profile.record.recorder.workspace_bytes", lambda *_: ())
    assert _trace(model, batch).segments == cuda.segments


class _Squares(TorchDispatchMode):
    """Collects operators whose results are of every pair of ``num_tokens`` tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.square = (num_tokens, num_tokens)
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(tensor.shape[-2:] == self.square for tensor in tensors_of(result)):
            self.found.add(str(func))
        return result


@pytest.mark.parametrize(
    ("num_tokens", "padding", "has_mask"),
    [(4096, None, False), (32768, None, False), (32768, 0, False), (4096, 1, True)],
)
def test_masks_of_all_pairs_are_those_that_training_builds(
    num_tokens: int, padding: int | None, has_mask: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=num_tokens,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(1, num_tokens, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    if padding is not None:
        mask = torch.ones(1, num_tokens, dtype=torch.long)
        mask[:, num_tokens - padding :] = 0
        batch["attention_mask"] = mask
    with _Squares(num_tokens) as squares:
        trace = _trace(model, batch, lambda model, batch: model(**batch).loss)
    assert bool(squares.found) is has_mask
    peak = trace.segments[0].costs["float32"].forward.peak.at(1, num_tokens)
    assert (peak >= num_tokens**2) is has_mask


def test_results_that_only_the_output_is_made_of_are_not_read_again() -> None:
    model, batch, forward_loss = case_inputs("hf_llama", 2)
    trace = _trace(model, batch, forward_loss)
    (block,) = {segment.block_class: segment for segment in trace.segments if segment.is_block}.values()
    products = [one for one in block.costs["float32"].results if one.name == "aten.mm"]
    *others, down = ((one.size.at(2), one.read_again.at(2)) for one in products)
    assert down[0] > down[1] == 0
    assert all(size == again > 0 for size, again in others)


def test_compiled_blocks_keep_what_the_backward_pass_reads() -> None:
    model, batch, forward_loss = case_inputs("hf_llama", 2)
    trace = _trace(model, batch, forward_loss)
    again = Recomputation(kind="selective", saved_operators=("aten.mm",))
    plans = [Plan(recomputation=again), Plan(recomputation=again, compiled=True, compiler="aot_eager")]
    memory, *_ = price_memory(
        PlanTable.of(plans), trace, Workload(global_batch=2, num_tokens=trace.num_tokens)
    )
    blocks = [segment for segment in trace.segments if segment.is_block]
    dropped = blocks[0].costs["float32"].results[-1].size.at(2)
    activations = memory[:, MemoryParts._fields.index("activations")]
    assert activations[0] - activations[1] >= dropped
