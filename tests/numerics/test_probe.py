"""The numerics probe passes what trains like one process, and nothing else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.cluster import Cluster
from atorch_ns.job import Inputs, Job
from atorch_ns.method import Method, MethodConfig, Phase, Registry, load_registry
from atorch_ns.numerics.probe import ProbeResult, probe
from atorch_ns.numerics.reference import part_of_ranks
from atorch_ns.numerics.verdict import REDUCED_TOLERANCE, TOLERANCE
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing.conformance import nothing_changes
from atorch_ns.testing.models import SyntheticDataset, get_case
from atorch_ns.testing.workers import run_ranks


@final
class LosesGradient(Method[MethodConfig]):
    """Zeroes the gradient of one parameter."""

    name = "loses_gradient"
    phase = Phase.CAST

    def apply(self, job: Job, config: MethodConfig) -> None:
        """Does it."""
        _first_weight(job).register_hook(torch.zeros_like)


@final
class DoublesGradient(Method[MethodConfig]):
    """Doubles the gradient of one parameter."""

    name = "doubles_gradient"
    phase = Phase.CAST

    def apply(self, job: Job, config: MethodConfig) -> None:
        """Does it."""
        _first_weight(job).register_hook(lambda gradient: 2 * gradient)


@final
class ReducesNothing(Method[MethodConfig]):
    """Says that it averages gradients, and does not."""

    name = "reduces_nothing"
    phase = Phase.SHARD_DATA
    provides = ("gradient_sync",)

    def plan(self, plan: Plan, config: MethodConfig) -> Plan:
        """A lie."""
        return replace(plan, gradient_sync="all_reduce")

    def apply(self, job: Job, config: MethodConfig) -> None:
        """Leaves every rank alone."""
        job.place()


@final
class DriftsApart(Method[MethodConfig]):
    """Moves a weight of every rank but the first at each step."""

    name = "drifts_apart"
    phase = Phase.CAST

    def apply(self, job: Job, config: MethodConfig) -> None:
        """Does it."""
        weight = list(job.module.parameters())[-1]

        @torch.no_grad()
        def drift(*_: Any) -> None:
            if job.cluster.rank > 0:
                weight.add_(1e-6)

        job.module.register_forward_pre_hook(drift)


@final
class Overflows(Method[MethodConfig]):
    """Makes a gradient infinite."""

    name = "overflows"
    phase = Phase.CAST

    def apply(self, job: Job, config: MethodConfig) -> None:
        """Does it."""
        _first_weight(job).register_hook(lambda gradient: gradient * float("inf"))


@final
class Raises(Method[MethodConfig]):
    """Cannot be applied."""

    name = "raises"
    phase = Phase.CAST

    def apply(self, job: Job, config: MethodConfig) -> None:
        """Does not."""
        raise RuntimeError("no such kernel")


def _first_weight(job: Job) -> nn.Parameter:
    return next(parameter for parameter in job.module.parameters() if parameter.dim() > 1)


def _registry() -> Registry:
    registry = load_registry()
    for kind in (LosesGradient, DoublesGradient, ReducesNothing, DriftsApart, Overflows, Raises):
        registry.add(kind)
    return registry


def _inputs(case_name: str = "mlp", **changes: Any) -> Inputs:
    case = get_case(case_name)
    given = Inputs(
        model=case.build(),
        optim_func=torch.optim.AdamW,
        optim_args={"lr": 1e-3},
        dataset=SyntheticDataset(case, 64),
        dataloader_args={"batch_size": 8},
        loss_func=case.loss_func,
        model_input_format=case.model_input_format,
    )
    return replace(given, **changes)


def _probe_all(inputs: Inputs, strategies: Sequence[Any]) -> list[ProbeResult]:
    cluster, registry = Cluster.detect(), _registry()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [probe(inputs, cluster, Strategy.load(strategy), registry) for strategy in strategies]


def _on_ranks(inputs: Inputs, strategies: Sequence[Any], num_ranks: int = 2) -> list[ProbeResult]:
    ranks = run_ranks(_probe_all, num_ranks, args=(inputs, strategies), timeout_s=100)
    for others in ranks[1:]:
        assert [replace(a, seconds=0.0) for a in others] == [replace(a, seconds=0.0) for a in ranks[0]]
    return ranks[0]


RIGHT: list[list[Any]] = [
    [],
    ["ddp"],
    ["zero1"],
    ["zero2"],
    ["fsdp"],
    ["checkpoint"],
    ["module_replace"],
    [("compile", "aot_eager")],
    [("gradient_accumulation", 2)],
    [("amp_native", "bf16")],
    [("amp_native", "fp16")],
    [("half", "bf16")],
    [("half", "fp16")],
    ["fsdp", ("amp_native", "bf16"), "checkpoint"],
    ["zero1", ("half", "fp16"), "checkpoint"],
    ["zero2", ("amp_native", "fp16"), ("gradient_accumulation", 2)],
]

DIVIDED: list[list[Any]] = [
    [("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"],
    [("parallel_mode", ([("sequence", 2)], None)), "sequence_parallel"],
    [("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"num_micro_batches": 2})],
]


@pytest.mark.parametrize(
    ("case_name", "strategies"),
    [("mlp", RIGHT), ("tied_llama", RIGHT[2:6] + RIGHT[8:]), ("tied_llama", DIVIDED)],
)
def test_right_strategies_pass_on_two_ranks(case_name: str, strategies: list[Any]) -> None:
    failed = [
        f"{strategy}: {found}"
        for strategy, found in zip(strategies, _on_ranks(_inputs(case_name), strategies), strict=True)
        if not (found.passed and found.ran and found.num_judged == found.num_parameters > 0) or found.caution
    ]
    assert not failed, "\n".join(failed)


def test_full_precision_is_far_below_the_tolerance() -> None:
    (found,) = _on_ranks(_inputs("tied_llama"), [["fsdp", "checkpoint"]])
    assert found.tolerance == TOLERANCE
    assert found.worst_error < TOLERANCE / 10
    assert found.loss_error < 1e-6


def test_hybrid_sharding_passes_on_four_ranks() -> None:
    axes = ("parallel_mode", ([("zero", 2), ("data", 2)], None))
    found = _on_ranks(_inputs(), [[axes, "fsdp"], [axes, "zero1", ("amp_native", "bf16")]], num_ranks=4)
    assert [one.passed for one in found] == [True, True], found


def test_a_loss_that_is_no_mean_over_samples_is_told() -> None:
    """Ranks average their gradients: half of what one process gives, which no comparison with averaged parts shows."""
    inputs = _inputs()
    whole = replace(inputs, loss_func=lambda batch, output: 0.01 * output.square().sum())
    parted, alone = _on_ranks(whole, [["ddp"]])[0], _probe_all(whole, [[]])[0]
    assert parted.passed
    assert "the loss is not a mean over samples" in parted.text
    assert alone.passed
    assert not alone.caution
    with pytest.warns(UserWarning, match="the loss is not a mean over samples"):
        probe(whole, Cluster.detect(), Strategy([("gradient_accumulation", 2)]), _registry())


def test_a_whole_batch_that_cannot_be_run_is_told() -> None:
    def loss(batch: Any, output: torch.Tensor) -> torch.Tensor:
        if len(output) > 2:
            raise ValueError("more than two samples")
        return output.square().mean()

    (found,) = _on_ranks(replace(_inputs(), loss_func=loss), [["ddp"]])
    assert found.passed
    assert not found.caution
    assert "in one pass is not compared: it cannot be run (ValueError: more than two samples)" in found.text


def test_a_loss_that_is_not_a_number_is_told() -> None:
    (found,) = _probe_all(replace(_inputs(), loss_func=lambda batch, output: output.sum() * math.nan), [[]])
    assert not found.ran
    assert "the model's loss is not a number (NaN)" in found.text


WRONG = ["loses_gradient", "doubles_gradient"]
PRECISIONS: list[list[Any]] = [[], [("amp_native", "bf16")], [("half", "bf16")], [("half", "fp16")]]


def test_a_wrong_gradient_fails_in_every_precision() -> None:
    strategies = [[wrong, "ddp", *precision] for wrong in WRONG for precision in PRECISIONS]
    for strategy, found in zip(strategies, _on_ranks(_inputs(), strategies), strict=True):
        assert found.ran
        assert not found.passed, (strategy, found)
        assert "differ from one process" in found.reason
        assert found.worst_error > 0.5 > found.tolerance


def test_gradients_that_are_not_averaged_fail() -> None:
    strategies = [["reduces_nothing"], ["reduces_nothing", ("amp_native", "bf16")]]
    for found in _on_ranks(_inputs("tied_llama"), strategies):
        assert found.ran
        assert not found.passed
        assert "ranks hold different values" in found.reason
        assert "differ from one process" in found.reason


def test_ranks_that_drift_apart_by_little_fail() -> None:
    (found,) = _on_ranks(_inputs(), [["drifts_apart", "ddp"]])
    assert found.ran
    assert not found.passed
    assert "ranks hold different values of 1 parameter(s)" in found.reason


def test_gradients_that_are_not_finite_fail() -> None:
    plain, scaled = _on_ranks(_inputs(), [["overflows", "ddp"], ["overflows", ("amp_native", "fp16")]])
    assert plain.ran
    assert not plain.passed
    assert scaled.ran
    assert not scaled.passed
    assert "steps in a row were skipped" in scaled.reason


def test_a_strategy_that_raises_is_not_compared_and_says_why() -> None:
    (found,) = _on_ranks(_inputs(), [["raises"]])
    assert not found.ran
    assert not found.passed
    assert "no such kernel" in found.text


def test_nothing_of_the_caller_changes() -> None:
    inputs = _inputs("tied_llama")
    inputs.model.train()
    before = {name: tensor.clone() for name, tensor in inputs.model.state_dict().items()}
    with nothing_changes():
        found = _probe_all(inputs, [["checkpoint", ("half", "bf16")]])
    assert found[0].passed
    assert inputs.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in inputs.model.state_dict().items())
    assert all(parameter.grad is None for parameter in inputs.model.parameters())


def test_a_model_on_meta_is_given_values() -> None:
    inputs = _inputs("hf_llama")
    (found,) = _probe_all(replace(inputs, model=inputs.model.to("meta")), [[("amp_native", "bf16")]])
    assert found.passed, found


def test_two_blocks_stand_for_all() -> None:
    (shallow,) = _probe_all(_inputs(), [[]])
    whole = probe(_inputs(), Cluster.detect(), Strategy.load([]), _registry(), shallow=False)
    assert shallow.num_parameters < whole.num_parameters
    assert shallow.passed
    assert whole.passed


class NeedsItsBlocks(nn.Module):
    """Runs only with four blocks, uses dropout, and begins with zeros behind which gradients vanish."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(rate)
        self.last = nn.Linear(8, 1)
        nn.init.zeros_(self.last.weight)

    def forward(self, features: Tensor) -> Tensor:
        for position in range(4):
            features = features + self.dropout(torch.tanh(self.blocks[position](features)))
        output: Tensor = self.last(features)
        return output


def _square(batch: Any, output: Any) -> Tensor:
    loss: Tensor = (output - batch.sum(1, keepdim=True)).square().mean()
    return loss


def _own(model: nn.Module) -> Inputs:
    return Inputs(
        model=model,
        optim_func=torch.optim.AdamW,
        dataset=torch.randn(32, 8, generator=torch.Generator().manual_seed(3)),
        dataloader_args={"batch_size": 4},
        loss_func=_square,
    )


def test_a_model_that_needs_all_its_blocks_keeps_them_and_loses_its_dropout() -> None:
    right, wrong = _on_ranks(_own(NeedsItsBlocks()), [["ddp"], ["ddp", "loses_gradient"]])
    assert right.passed, right
    assert right.num_parameters == 10
    assert wrong.ran  # behind the layer of zeros nothing would have been seen
    assert not wrong.passed


def test_a_model_of_chance_cannot_be_compared() -> None:
    class Noisy(NeedsItsBlocks):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features + torch.randn_like(features))

    (found,) = _probe_all(_own(Noisy()), [[]])
    assert not found.ran
    assert not found.passed
    assert "with all blocks: InputError: the model's loss changes from one evaluation" in found.text


def test_a_batch_that_only_one_rank_can_hold_stops_all() -> None:
    def lambdas(samples: list[Tensor]) -> Any:
        return {"features": torch.stack(samples), "name": lambda: None}

    inputs = _own(NeedsItsBlocks())
    inputs = replace(
        inputs,
        dataloader_args={"collate_fn": lambdas},
        prepare_input=lambda batch, device: batch["features"].to(device),
    )
    (found,) = _on_ranks(inputs, [["ddp"]])
    assert not found.ran
    assert "pickle" in found.reason


def test_a_model_too_large_to_compare_says_so() -> None:
    cluster = replace(Cluster.detect(), device_memory_bytes=100_000)
    found = probe(_inputs(), cluster, Strategy.load([]), _registry())
    assert not found.ran
    assert "KiB for it" in found.reason


def test_groups_lose_their_options_and_frozen_parameters_stay() -> None:
    model = get_case("mlp").build()
    next(model.parameters()).requires_grad_(False)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        return [{"params": decayed, "weight_decay": 0.5, "lr": 1e-9}, {"params": others, "betas": (0.1, 0.2)}]

    inputs = _inputs(model=model, optim_param_func=groups, max_grad_norm=0.1)
    for found in _on_ranks(inputs, [["fsdp"], ["zero1", ("amp_native", "bf16")]]):
        assert found.passed, found
        assert found.tolerance in (TOLERANCE, pytest.approx(REDUCED_TOLERANCE, abs=0.4))


def test_many_ranks_share_eight_parts_and_no_node_has_the_average() -> None:
    assert part_of_ranks(4) == (0, 1, 2, 3)
    parts = part_of_ranks(1024)
    whole = [parts.count(part) / len(parts) for part in range(8)]
    assert max(parts) == 7
    assert min(whole) > 0.1
    for size in (8, 16, 32):
        nodes = [parts[begin : begin + size] for begin in range(0, 1024, size)]
        assert all(
            max(abs(node.count(part) / size - whole[part]) for part in range(8)) > 0.03 for node in nodes
        )
