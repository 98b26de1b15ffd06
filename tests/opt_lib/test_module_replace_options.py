"""When a search considers module_replace, and what it predicts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine.problem import with_replaced_costs
from atorch_ns.estimate import Workload, estimate
from atorch_ns.method import load_registry
from atorch_ns.profile import Profile, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan
from opt_lib.module_replace import ModuleReplace
from tests.opt_lib.replacements.modules import GPU, FastBuilt, FastLinear, Model, Old
from tests.opt_lib.replacements.transformers_models import TOKENS, llama

CPU = Cluster()
BARE_GPU = replace(GPU, packages={})


def _traced(model: nn.Module) -> Profile:
    return profile_model(model, TOKENS, lambda model, batch: model(**batch).logits.square().mean(), find_dims)


def _is_offered(profile: Profile, cluster: Cluster) -> bool:
    return any(True for _ in ModuleReplace().options(profile, cluster))


def test_eager_attention_is_reason_enough_and_fused_attention_is_not() -> None:
    assert _is_offered(_traced(llama("eager")), CPU)
    assert not _is_offered(_traced(llama("sdpa")), CPU)
    assert not _is_offered(Profile.of(llama("eager")), CPU)  # nobody saw it run


def test_rms_norms_are_a_reason_where_kernels_are_fused() -> None:
    structure = Profile.of(llama("sdpa"))
    assert not _is_offered(structure, CPU)
    assert _is_offered(structure, BARE_GPU)
    assert not _is_offered(Profile.of(nn.Sequential(nn.LayerNorm(4))), BARE_GPU)


def test_registered_pairs_are_a_reason(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastBuilt))
    assert _is_offered(Profile.of(Model()), CPU)
    assert not _is_offered(Profile.of(nn.Sequential(nn.Linear(2, 2))), CPU)
    register("fast_linear", supported_dtypes={torch.bfloat16}, pair_cls=(nn.Linear, FastLinear))
    assert _is_offered(Profile.of(nn.Sequential(nn.Linear(2, 2))), CPU)


def test_the_scores_that_eager_attention_saves_are_predicted_to_go() -> None:
    cluster, workload = CPU.with_hardware(), Workload(global_batch=2, num_tokens=12)
    eager, fused = llama("eager"), llama("sdpa")
    profile = with_replaced_costs(_traced(eager), eager, cluster, load_registry(), trace_of=_traced)
    peak = {
        replaced: estimate(Plan(replaced=replaced), profile, cluster, workload).peak_bytes
        for replaced in (False, True)
    }
    # Scores, probabilities and their copies: two layers, B·H·T·T of 4 bytes each, at least twice.
    assert peak[False] - peak[True] >= 2 * 2 * (2 * 4 * 12 * 12) * 4 * 0.5
    assert peak[True] == estimate(Plan(), _traced(fused), cluster, workload).peak_bytes
    assert eager.config._attn_implementation == "eager"  # the user's model is as it was
