"""A plan for a Llama of 70 B on 1,024 GPUs, held against what its experts do."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.estimate import Workload
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Profile, profile_model
from atorch_ns.search import Candidate, SearchSettings, explore
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan

LARGE = cluster_from_spec("8xH100-80GB, 128 nodes, ib400")
NUM_TOKENS = 4096


@functools.cache
def profile() -> Profile:
    """Of Llama-3 70B on the meta device."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()

    def forward_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        logits = model(**batch).logits[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, batch["input_ids"][:, 1:].flatten())

    batch = {"input_ids": torch.zeros(4, NUM_TOKENS, dtype=torch.long)}
    return profile_model(model, batch, forward_loss, find_dims, make_optimizer=torch.optim.AdamW)


def _plan(one: Candidate) -> Plan:
    return resolve(one.strategy, LARGE, load_registry(), profile=profile()).plan


@pytest.mark.timeout(120)
def test_seventy_billion_parameters_on_a_thousand_gpus() -> None:
    """Recomputation, states sharded over data ranks, and a model that is divided: tensor within a node with its
    residual stream divided too, or interleaved stages across nodes."""
    work = Workload(global_batch=4096, num_tokens=NUM_TOKENS)
    found = explore(profile(), LARGE, work, load_registry(), settings=SearchSettings())
    fitting = [one for one in found.candidates if one.pruned is None]
    assert found.num_priced > 20_000
    assert fitting
    plans = [_plan(one) for one in fitting[:20]]
    for plan in plans:
        assert plan.size("tensor") * plan.size("sequence") <= 8
        assert plan.sharding.gradients_over or plan.sharding.optimizer_over
        assert plan.size("tensor") * plan.size("pipeline") > 1 or plan.sharding.parameters_over
        assert plan.size("tensor") == 1 or plan.tensor.sequence
    assert any(plan.size("tensor") > 1 for plan in plans)
    cut = [plan for plan in map(_plan, fitting) if plan.size("pipeline") > 1]
    assert any(plan.pipeline.schedule == "Interleaved1F1B" for plan in cut)
    # As many micro-batches as samples of a rank keep the stages of a plain schedule busy.
    assert any(
        plan.num_micro_batches == work.global_batch // plan.size("data") // plan.size("zero") for plan in cut
    )
    # 6 floating point operations for each parameter and token, and 2 of 8 more with recomputation.
    best = fitting[0].estimate
    assert best is not None
    tokens = work.global_batch * NUM_TOKENS / LARGE.world_size
    utilisation = 6 * profile().num_parameters * tokens / best.step_seconds / 989e12
    assert 0.25 < utilisation < (1.0 if plans[0].precision.narrow is not None else 0.65)
