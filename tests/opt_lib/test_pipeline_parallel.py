"""Training in a pipeline: equal to one process, within its memory, and never silent when something is wrong."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.errors import AtorchError, BatchSizeError, InputError, RankError, StrategyError
from atorch_ns.job import Materialiser, Result
from atorch_ns.pipeline.run import executor
from atorch_ns.pipeline.run.weight_gradients import WeightGradients, awaits_gradient
from atorch_ns.testing.conformance import MethodConformance
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import (
    ADAMW,
    BF16_GLOBAL_BATCH,
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
    whole_parameters,
)
from atorch_ns.testing.workers import catch_ranks, run_ranks
from atorch_ns.torch_compat import plain_name
from opt_lib.pipeline_parallel import PipelineParallel
from tests.pipeline.odd_models import LooksAtValues, build, mean_loss

Strategy = list[Any]


class TestConformance(MethodConformance):
    method = PipelineParallel
    partners = (("parallel_mode", [("pipeline", 2)]),)
    configs = (None, {"schedule": "gpipe", "split_points": ["blocks.2"], "num_micro_batches": 2})
    bad_configs = (
        ({"schedule": "1f2b"}, "schedule"),
        ({"num_micro_batches": 0}, "num_micro_batches"),
        ({"split_point": ["blocks.1"]}, "split_point"),
    )
    cases = ("mlp",)


TWO = ("parallel_mode", [("pipeline", 2)])
TWO_BY_TWO = ("parallel_mode", [("pipeline", 2), ("data", 2)])
RESHARDED = ("fsdp", {"reshard_after_forward": True})


def _runs(jobs: Sequence[tuple[str, Strategy, dict[str, Any]]]) -> list[Trajectory]:
    return [accelerated_run(get_case(name), strategy, **options) for name, strategy, options in jobs]


def _assert_parity(jobs: Sequence[tuple[str, Strategy, dict[str, Any]]], num_ranks: int) -> None:
    references = {name: reference_run(get_case(name)) for name, _, _ in jobs}
    by_rank = run_ranks(_runs, num_ranks, args=(jobs,), timeout_s=150)
    for place, (name, strategy, _) in enumerate(jobs):
        try:
            assert_parity(compare(references[name], by_rank[0][place]))
            assert_ranks_agree([trajectories[place] for trajectories in by_rank])
        except AssertionError as error:
            raise AssertionError(f"{name} with {strategy}: {error}") from None


def _with(schedule: str, *others: Any, mesh: Any = TWO, **config: Any) -> Strategy:
    return [mesh, ("pipeline_parallel", {"schedule": schedule, **config}), *others]


def test_two_stages_train_as_one_process() -> None:
    jobs: list[Any] = [
        ("mlp", [TWO], {}),  # the method is added for the axis
        ("tied_llama", _with("DualPipeV"), {}),
        ("mlp", _with("auto"), {}),
        ("hf_gpt2", _with("GPipe", "checkpoint"), {}),
        ("hf_gpt2", _with("pre_recompute_1f1b", "checkpoint", num_micro_batches=4), {}),
        ("encoder_decoder", _with("shifted_critical_path", "checkpoint", num_micro_batches=4), {}),
        ("mlp", _with("last_no_recompute_1f1b", num_micro_batches=4), {}),  # nothing is recomputed
        ("mlp", _with("1F1B", num_micro_batches=1), {}),  # fewer than stages
        ("mlp", _with("tests.pipeline.schedule.own_schedules:PAIRS", num_micro_batches=4), {}),
        ("encoder_decoder", _with("InterleavedZeroBubble"), {}),
        ("hf_bert", _with("1F1B", split_points=["bert.encoder.layer.1"]), {}),
        ("hf_vit", _with("LoopedBFS", num_micro_batches=2, split_method="parameters"), {}),
    ]
    _assert_parity(jobs, 2)


@pytest.mark.slow
def test_four_stages_and_two_by_two_train_as_one_process() -> None:
    four = ("parallel_mode", [("pipeline", 4)])
    jobs: list[Any] = [
        ("encoder_decoder", _with("1F1B", mesh=four), {}),
        ("tied_llama", _with("last_no_recompute_1f1b", "checkpoint", mesh=four, num_micro_batches=8), {}),
        ("tied_llama", _with("shifted_critical_path", "checkpoint", mesh=four, num_micro_batches=8), {}),
        ("tied_llama", _with("pre_recompute_1f1b", "fsdp", "checkpoint", mesh=TWO_BY_TWO), {}),
        ("tied_llama", _with("ZBVZeroBubble", "fsdp", "checkpoint", mesh=TWO_BY_TWO), {}),
        ("tied_llama", _with("ZBVZeroBubble", RESHARDED, mesh=TWO_BY_TWO, num_micro_batches=4), {}),
        ("encoder_decoder", _with("Interleaved1F1B", mesh=TWO_BY_TWO), {}),
    ]
    _assert_parity(jobs, 4)


@pytest.mark.slow
def test_stages_of_one_rank_divide_the_sequence_each_for_itself() -> None:
    mesh = ("parallel_mode", [("tensor", 2), ("pipeline", 2)])
    steps = _with("Interleaved1F1B", ("tensor_parallel", {"sequence": True}), "checkpoint", mesh=mesh)
    _assert_parity([("tied_llama", steps, {})], 4)


def _weights_left(name: str, strategy: Strategy) -> tuple[Trajectory, int, int]:
    """A run, the weight gradients that it left for later, and the layers that a rank has."""
    left, layers = 0, 0

    class Counting(WeightGradients):
        def __init__(self, found: Sequence[nn.Module]) -> None:
            nonlocal layers
            layers = max(layers, len(found))
            super().__init__(found)

        def takes(self, *product: Any) -> bool:
            nonlocal left
            left += super().takes(*product)
            return self._defers

    with mock.patch.object(executor, "WeightGradients", Counting):
        return accelerated_run(get_case(name), strategy), left, layers


BOTH = ("parallel_mode", [("tensor", 2), ("pipeline", 2)])
SELECTIVE = ("checkpoint", {"save_operators": "every_second_product"})


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("tied_llama", [SELECTIVE]),
        pytest.param("hf_gpt2", ["checkpoint"], marks=pytest.mark.slow),
        ("hf_llama", ["tensor_parallel"]),
        pytest.param(
            "hf_llama", [("tensor_parallel", {"sequence": True}), "checkpoint"], marks=pytest.mark.slow
        ),
        pytest.param("hf_gpt2", ["tensor_parallel"], marks=pytest.mark.slow),
    ],
)
def test_weight_gradients_are_computed_later(name: str, others: list[Any]) -> None:
    divided = any("tensor_parallel" in str(one) for one in others)
    strategy = _with("InterleavedZeroBubble", *others, mesh=BOTH if divided else TWO, num_micro_batches=4)
    reference = reference_run(get_case(name))
    num_steps = len(reference.losses)
    for run, left, layers in run_ranks(
        _weights_left, 4 if divided else 2, args=(name, strategy), timeout_s=120
    ):
        assert_parity(compare(reference, run))
        assert layers
        assert left >= layers * 4 * num_steps


def _waiting(name: str, strategy: Strategy) -> tuple[str, bool]:
    """The report after two steps, and whether a weight still waits for its gradient."""
    result = accelerate_case(get_case(name), strategy)
    for batch in itertools.islice(result.dataloader, 2):
        result.train_step(batch)
    return str(result.applied), any(map(awaits_gradient, result.model.parameters()))


@pytest.mark.parametrize(("name", "method"), [("hf_llama", "zero2"), ("hf_gpt2", "fsdp")])
def test_weights_that_wait_or_are_tied_are_not_taken_for_unused_ones(name: str, method: str) -> None:
    strategy = _with("InterleavedZeroBubble", method, num_micro_batches=4)
    for report, waits in run_ranks(_waiting, 2, args=(name, strategy)):
        assert "each sharded over" in report
        assert "has not used" not in report
        assert not waits


def test_bf16_is_that_of_one_process() -> None:
    case, batch = get_case("tied_llama"), {"global_batch": BF16_GLOBAL_BATCH, "steps": 2}
    reference = reference_run(case, autocast_dtype=torch.bfloat16, **batch)
    jobs = [
        ("tied_llama", _with("1F1B", ("amp_native", {"dtype": "bf16"}), num_micro_batches=4), batch),
        ("tied_llama", _with("ZBVZeroBubble", "half", "checkpoint", num_micro_batches=4), batch),
        *(
            (
                "tied_llama",
                _with(schedule, sharded, ("amp_native", {"dtype": "bf16"}), num_micro_batches=2),
                batch,
            )
            for schedule, sharded in (("InterleavedZeroBubble", "zero2"), ("ZBVZeroBubble", RESHARDED))
        ),
    ]
    amp, half, *sharded = run_ranks(_runs, 2, args=(jobs,), timeout_s=120)[0]
    assert compare(reference, half).max_loss_error < 3e-3
    for run in (amp, *sharded):
        assert compare(reference, run).max_loss_error < 1e-3


def _clipped() -> tuple[float, float, dict[str, torch.Tensor]]:
    result = accelerate_case(get_case("tied_llama"), [TWO], max_grad_norm=0.05)
    losses = [float(result.train_step(batch)) for batch in result.dataloader]
    assert result.train_step.grad_norm is not None
    return losses[-1], float(result.train_step.grad_norm), whole_parameters(result)


def test_clipping_counts_a_tied_weight_once() -> None:
    reference = reference_run(get_case("tied_llama"), max_norm=0.05)
    for loss, _, final in run_ranks(_clipped, 2, timeout_s=60):
        assert loss == pytest.approx(reference.losses[-1], abs=1e-5)
        actual = Trajectory(losses=reference.losses, initial=reference.initial, final=final)
        assert_parity(compare(reference, actual))


def _evaluated(schedule: str) -> tuple[float, float, bool]:
    result = accelerate_case(get_case("tied_llama"), _with(schedule))
    batch = next(iter(result.dataloader))
    before = float(result.train_step.evaluate(batch))
    return before, float(result.train_step(batch)), result.model.training


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_evaluation_gives_the_loss_of_the_step(schedule: str) -> None:
    for evaluated, trained, training in run_ranks(_evaluated, 2, args=(schedule,), timeout_s=60):
        assert evaluated == pytest.approx(trained, abs=1e-6)
        assert training


def _from_meta() -> tuple[int, dict[str, torch.Tensor], int]:
    with torch.device("meta"):
        model = get_case("hf_gpt2").build()
    result = accelerate_case(get_case("hf_gpt2"), [TWO_BY_TWO, "fsdp"], model=model)
    own = sum(parameter.numel() for parameter in result.model.parameters())
    return result.job.seed, whole_parameters(result), own


def test_a_model_on_meta_gets_the_values_of_the_whole_model() -> None:
    outcomes = run_ranks(_from_meta, 4, timeout_s=60)
    with torch.device("meta"):
        model = get_case("hf_gpt2").build()
    Materialiser(model, torch.device("cpu"), seed=outcomes[0][0]).materialise([model])
    for name, parameter in model.named_parameters():
        assert torch.equal(outcomes[0][1][name], parameter), name


def _lengths(schedule: str) -> list[float]:
    case = get_case("tied_llama")
    result = accelerate_case(case, _with(schedule, num_micro_batches=4))
    batches = [case.make_batch(8, 1)[:rows, :length] for rows, length in ((8, 16), (8, 9), (4, 16), (8, 9))]
    return [float(result.train_step(batch)) for batch in batches]


def test_batches_may_differ_in_rows_and_length() -> None:
    case = get_case("tied_llama")
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    expected = []
    for rows, length in ((8, 16), (8, 9), (4, 16), (8, 9)):
        batch = case.make_batch(8, 1)[:rows, :length]
        optimizer.zero_grad()
        loss = case.loss_func(batch, model(batch))
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses in run_ranks(_lengths, 2, args=("ZBVZeroBubble",), timeout_s=60):
        assert losses == pytest.approx(expected, abs=1e-5)


class _LiveActivations:
    """The most activations inside of this rank's blocks that are alive at one time, in micro-batches."""

    def __init__(self, result: Result) -> None:
        self.most = 0
        self._blocks = [found.module for found in repeated_blocks(result.job.module)]
        self._kept: list[StorageWeakRef] = []
        for block in self._blocks:
            block.mlp.gate_proj.register_forward_hook(self._note)  # which silu keeps for its backward pass

    def _note(self, _: Any, __: Any, output: torch.Tensor) -> None:
        self._kept.append(StorageWeakRef(output.untyped_storage()))
        self._kept = [kept for kept in self._kept if not kept.expired()]
        self.most = max(self.most, -(-len(self._kept) // len(self._blocks)))


def _live(schedules: Sequence[str], num_micro_batches: int) -> list[int]:
    found = []
    for schedule in schedules:
        strategy = [
            ("parallel_mode", [("pipeline", dist.get_world_size())]),
            ("pipeline_parallel", {"schedule": schedule, "num_micro_batches": num_micro_batches}),
        ]
        result = accelerate_case(get_case("tied_llama"), strategy, global_batch=num_micro_batches)
        live = _LiveActivations(result)
        for batch in result.dataloader:
            result.train_step(batch)
        found.append(live.most)
    return found


def test_1f1b_holds_as_many_micro_batches_as_its_stage_is_deep() -> None:
    by_rank = run_ranks(_live, 3, args=(["1F1B", "GPipe"], 8), timeout_s=90)
    assert by_rank == [[3, 8], [2, 8], [1, 8]]


def _noted() -> tuple[list[str], str]:
    result = accelerate_case(get_case("tied_llama"), _with("chimera_direct", num_micro_batches=4))
    return result.job.explained("pipeline_parallel"), result.job.plan.pipeline.schedule


def test_a_schedule_by_its_name_elsewhere_has_a_note_in_the_report() -> None:
    for said, schedule in run_ranks(_noted, 2, timeout_s=60):
        assert schedule == "DualPipeV"
        assert "'chimera_direct' is run as DualPipeV: Chimera keeps two copies" in said[-1]


class _Slow(nn.Module):
    """Waits in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(0.3))
        return x * 1.0


def _timeline(schedule: str) -> tuple[list[Any], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), _Slow(), nn.Linear(4, 1))
    passes: list[int] = [0]
    model[0].register_forward_pre_hook(lambda *_: passes.append(1))
    result = accelerate_case(
        get_case("mlp"),
        _with(schedule, ("checkpoint", ("Linear",)), num_micro_batches=4, split_points=["2"]),
        model=model,
        dataset=[(torch.rand(4), torch.rand(1)) for _ in range(4)],
        loss_func=lambda batch, out: (out - batch[1]).square().mean(),
        model_input_format="first",
        global_batch=4,
    )
    passes.clear()
    for batch in result.dataloader:
        result.train_step(batch)
    return [tuple(one) for one in result.train_step._runner.timeline], passes


def test_a_recomputation_begins_before_the_gradient_has_come() -> None:
    (timeline, passes), _ = run_ranks(_timeline, 2, args=("pre_recompute_1f1b",), timeout_s=60)
    assert len(passes) == 2 * 4  # each is computed twice, the last one by a pass of its own
    rows = {(action[0], action[2]): times for action, *times in timeline}
    _, again, _ = rows["R", 3]
    due, arrived, _ = rows["B", 3]
    assert again < due < arrived - 0.1


def _sent_outputs() -> list[list[bool]]:
    """Before each forward pass of the first stage: which outputs of earlier ones have their memory still."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    kept: list[StorageWeakRef] = []
    seen: list[list[bool]] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append([not one.expired() for one in kept]))
    model[1].register_forward_hook(lambda *given: kept.append(StorageWeakRef(given[2].untyped_storage())))
    result = accelerate_case(
        get_case("mlp"),
        _with("1F1B", num_micro_batches=6, split_points=["2"]),
        model=model,
        dataset=[(torch.rand(4), torch.rand(1)) for _ in range(6)],
        loss_func=lambda batch, out: (out - batch[1]).square().mean(),
        model_input_format="first",
        global_batch=6,
    )
    kept.clear()
    seen.clear()
    for batch in result.dataloader:
        result.train_step(batch)
    return seen


def test_an_output_that_was_sent_is_let_go() -> None:
    """A linear layer's output is not needed for its gradient. Two are alive while the next stage works on the first."""
    seen, _ = run_ranks(_sent_outputs, 2, timeout_s=60)
    assert len(seen) == 6
    for number, alive in enumerate(seen):
        assert not any(alive[: max(0, number - 1)]), seen


SHARES: list[tuple[dict[str, Any], list[str]]] = [
    ({"share": [0.5, 0.0]}, ["layers.0"]),
    ({"share": 1.0, "by_stage": "merak"}, ["layers.0", "layers.1"]),
    ({"share": 0.5, "by_stage": "level"}, ["layers.0"]),
    ({"share": "auto"}, []),
]


def _shares() -> list[tuple[list[str], list[float]]]:
    found = []
    for config, _ in SHARES:
        result = accelerate_case(
            get_case("tied_llama"),
            _with("1F1B", ("checkpoint", config), num_micro_batches=4, split_points=["layers.2"]),
        )
        losses = [float(result.train_step(batch)) for batch in result.dataloader]
        wrapped = [
            name for name, m in result.job.module.named_modules() if type(m).__name__ == "CheckpointWrapper"
        ]
        found.append(([plain_name(name) for name in wrapped], losses))
    return found


def test_stages_recompute_the_share_that_they_are_given() -> None:
    first, second = run_ranks(_shares, 2, timeout_s=60)
    for (_, expected), (blocks, losses), (others, _) in zip(SHARES, first, second, strict=True):
        assert blocks + others == expected
        assert losses == first[0][1]


def _refused(attempts: Sequence[tuple[str, Strategy, dict[str, Any]]]) -> list[str]:
    texts = []
    for name, strategy, options in attempts:
        try:
            result = accelerate_case(get_case(name), strategy, **options)
            result.train_step(next(iter(result.dataloader)))
        except AtorchError as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("nothing was refused")
    return texts


def test_bad_input_is_named_on_every_rank() -> None:
    model_that_looks = {"model": build(LooksAtValues), "loss_func": mean_loss}
    data = {"dataset": [torch.arange(6) % 5 for _ in range(16)]}
    attempts: list[Any] = [
        (
            "hf_vit",
            [
                ("parallel_mode", [("pipeline", 2)]),
                (
                    "pipeline_parallel",
                    {
                        "schedule": "1F1B",
                        "stages_per_rank": 1,
                        "split_method": "custom",
                        "custom_partition": [0, 9, 5],
                    },
                ),
            ],
            {},
        ),
        ("hf_bert", _with("Interleaved1F1B", stages_per_rank=4, num_micro_batches=2), {}),
        ("mlp", _with("early_recompute_1f1b", num_micro_batches=1), {}),
        ("mlp", _with("GPipe", num_micro_batches=3), {}),
        ("mlp", _with("DualPipeV"), {"global_batch": 2}),
        ("mlp", _with("1F1B", split_points=["blocks.9"]), {}),
        ("mlp", _with("1F1B", split_points=["blocks.1", "blocks.2"]), {}),
        ("tied_llama", _with("1F1B", split_points=["blocks.2"]), {**model_that_looks, **data}),
        ("mlp", _with("1F1B", "checkpoint"), {"dataset": None, "dataloader_args": None}),
    ]
    wanted = [
        "cut 9 is outside of the model, whose 5 blocks",
        "makes 8 stages, but the model has 4 units",
        "PreRecompute1F1B needs at least as many micro-batches as stages",
        "8 rows per rank cannot be split into 3",
        "a batch of 2 rows",
        "no module 'blocks.9'",
        "2 stages need 1",
        "goes on according to it",
        "Pass dataset, or sample_batch",
    ]
    for texts in run_ranks(_refused, 2, args=(attempts,), timeout_s=90):
        for text, part in zip(texts, wanted, strict=True):
            assert part in text


def test_an_unknown_schedule_is_refused_with_the_choices() -> None:
    (text,) = _refused([("mlp", _with("1F2B"), {})])
    assert "1F2B" in text
    assert "Interleaved1F1B" in text


def _dies(*, in_training: bool) -> float:
    case = get_case("mlp")
    calls = []
    trains = False

    def loss(batch: Any, output: Any) -> torch.Tensor:
        calls.append(trains)
        if dist.is_initialized() and dist.get_rank() == 2 and calls.count(in_training) > 3:
            os._exit(7)
        return case.loss_func(batch, output)

    result = accelerate_case(
        case,
        [("parallel_mode", [("pipeline", 3)]), ("pipeline_parallel", {"num_micro_batches": 4})],
        loss_func=loss,
    )
    trains = True
    return [float(result.train_step(batch)) for batch in result.dataloader][-1]


@pytest.mark.parametrize(
    ("in_training", "text"),
    [
        (True, "rank(s) 2 of the pipeline (ranks 0, 1, 2) no longer answer"),
        (False, "one of the ranks 0, 1, 2 no longer answers"),
    ],
)
def test_a_rank_that_dies_ends_the_job_on_all(in_training: bool, text: str) -> None:
    outcomes = catch_ranks(partial(_dies, in_training=in_training), 3, timeout_s=60)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised", "died"]
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, RankError)
        assert text in str(outcome.error)
    assert max(outcome.seconds for outcome in outcomes) < 45


def _other_cuts() -> str:
    points = ["blocks.1"] if dist.get_rank() == 0 else ["blocks.2"]
    try:
        accelerate_case(get_case("mlp"), _with("1F1B", split_points=points))
    except (RankError, StrategyError, InputError, BatchSizeError) as error:
        return str(error)
    return ""


def test_ranks_that_would_cut_differently_stop() -> None:
    for text in run_ranks(_other_cuts, 2, timeout_s=60):
        assert "blocks.1" in text
        assert "blocks.2" in text
