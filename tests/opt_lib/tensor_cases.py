"""What tests of tensor parallelism share: strategies, hand-written cases, and the check of a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atorch_ns.testing.models import CASES, Case
from atorch_ns.testing.parity import Trajectory, accelerated_run, assert_ranks_agree, compare, reference_run
from atorch_ns.testing.workers import run_ranks
from tests.sharding.tensor_models import VOCAB, make

TENSOR = ("parallel_mode", [("tensor", 2)])
SEQUENCE = ("tensor_parallel", {"sequence": True})
NAMES = ("mlp", "tied_llama", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit", "hf_mixtral", "encoder_decoder")


def by_hand(attention: Any, **settings: Any) -> Case:
    """A case of a model whose heads are reshaped by hand."""
    return of_model(lambda: make(attention, **settings), attention.__name__)


def of_model(build: Callable[[], nn.Module], name: str = "by hand") -> Case:
    """A case of a model of token ids [B, 8], equal on every call."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return build()

    return Case(
        name=name,
        build=made,
        make_batch=lambda size, seed: torch.randint(
            VOCAB, (size, 8), generator=torch.Generator().manual_seed(seed)
        ),
        loss_func=CASES["tied_llama"].loss_func,
        model_input_format=None,
        block="Block",
    )


def trajectories(case: Case, strategies: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Trajectory]:
    return {what: accelerated_run(case, strategy, **arguments) for what, strategy in strategies.items()}


def check(case: Case, ranks: int, strategies: dict[str, Any], **arguments: Any) -> None:
    """Parity of each strategy with one process, and of the ranks with each other."""
    reference = reference_run(case, **({"max_norm": n} if (n := arguments.get("max_grad_norm")) else {}))
    runs = run_ranks(trajectories, ranks, args=(case, strategies, arguments), timeout_s=220)
    for what in strategies:
        report = compare(runs[0][what], reference)
        assert report.max_param_error < 2e-4, f"{case.name}, {what}: {report.describe()}"
        assert report.max_loss_error < 1e-5, f"{case.name}, {what}: {report.describe()}"
        assert_ranks_agree([run[what] for run in runs])
