"""auto_accelerate as a whole: what it returns, what it leaves alone, how it fails."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
import subprocess
import textwrap
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import atorch_ns
from atorch_ns import Result, Strategy, auto_accelerate
from atorch_ns.data import split_batch
from atorch_ns.errors import AtorchError, InputError, RankError, StepError, StrategyError, StrategyFileError
from atorch_ns.testing.models import SyntheticDataset, get_case
from atorch_ns.testing.parity import (
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.opt_lib.scenarios import plain_loop_step
from tests.warm import COLD_PYTHON

pytestmark = pytest.mark.filterwarnings("ignore:.*left out.*")


def test_the_result_is_a_named_tuple_of_seven() -> None:
    result = accelerate_case(get_case("mlp"), ["amp_native"])
    assert result._fields == (
        "model", "optim", "dataloader", "loss_func", "prepare_input", "lr_scheduler", "args",
    )  # fmt: skip
    model, optim, loader, loss_func, prepare_input, scheduler, args = result
    assert model is result.model
    assert optim is result.optim
    assert scheduler is None
    assert loader is not None
    assert callable(loss_func)
    assert callable(prepare_input)
    assert args == {"use_optim_backward": False, "requires_set_gradient_accumulation_boundary": False}
    assert "amp_native" in str(result.report)


def test_everything_but_the_model_is_optional() -> None:
    status, result, strategy = auto_accelerate(nn.Linear(2, 2), load_strategy=[])
    assert status
    assert result is not None
    assert result.optim is None
    assert result.dataloader is None
    assert strategy == Strategy()
    with pytest.raises(StepError, match="optim_func"):
        result.train_step(None)


def test_nothing_of_the_callers_is_changed() -> None:
    case = get_case("mlp")
    given: dict[str, Any] = {
        "optim_args": {"lr": 0.1},
        "dataloader_args": {"batch_size": 8, "shuffle": True},
        "lr_scheduler_args": {"step_size": 3},
        "load_strategy": [
            "parallel_mode",
            ("amp_native", {"dtype": torch.bfloat16}),
            ("checkpoint", {"every_n": 2}),
        ],
    }
    before = copy.deepcopy(given)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    auto_accelerate(
        case.build(),
        torch.optim.SGD,
        SyntheticDataset(case, 16),
        case.loss_func,
        lr_scheduler_cls=torch.optim.lr_scheduler.StepLR,
        **given,
    )
    # Building the model draws nothing either: it is seeded apart.
    assert given == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_one_warning_says_what_was_left_out() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerate_case(get_case("mlp"), ["parallel_mode", "fsdp", "checkpoint"])
    texts = [str(item.message) for item in caught if "left out" in str(item.message)]
    assert len(texts) == 1
    assert "parallel_mode" in texts[0]
    assert "fsdp" in texts[0]


def test_saved_strategy_is_what_was_applied_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    case = get_case("mlp")
    _, result, best = auto_accelerate(
        case.build(), load_strategy=["fsdp", ("amp_native", "bf16")], save_strategy_to_file=path
    )
    assert result is not None
    assert Strategy.load(path) == best
    assert best.names == ("fsdp", "amp_native"), "what one process leaves out is kept for more of them"
    assert best.provenance["num_parameters"] == sum(p.numel() for p in case.build().parameters())
    found = Strategy(best, requires=best.requires, provenance={**best.provenance, "objective": "memory"})
    found.save(path)
    _, _, again = auto_accelerate(case.build(), load_strategy=path)
    assert again == best
    assert again.provenance == found.provenance, "what a search knew of it goes along"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 3}, "model must be a torch.nn.Module"),
        ({"model": nn.Linear}, "make an instance"),
        ({"optim_func": 3}, "optim_func must be callable"),
        ({"loss_func": "mse"}, "loss_func must be callable"),
        ({"optim_args": [1]}, "optim_args must be a dictionary"),
        ({"optim_args": {"lr": 1}, "optim_func": None}, "without optim_func"),
        ({"lr_scheduler_args": {}}, "without lr_scheduler_cls"),
        ({"dataset": 3}, "dataset must have"),
        ({"dataset": None, "dataloader_args": {"batch_size": 1}}, "need dataset"),
        ({"model_input_format": "dict"}, "model_input_format"),
        ({"gradient_accumulation_steps": 0}, "positive integer"),
        ({"max_grad_norm": -1}, "positive number"),
        ({"distributed_sampler_cls": 3}, "must be a class"),
        ({"excluded": ["fsdpp"]}, "Did you mean 'fsdp'"),
        ({"included": "fsdp"}, r"write \['fsdp'\]"),
        ({"load_strategy": None, "loss_func": None}, "fully automatic"),
        ({"load_strategy": None, "finetune_strategy": True}, "finetune_strategy"),
        ({"optim_func": lambda groups, **_: groups}, "not a torch.optim.Optimizer"),
        ({"optim_param_func": lambda model: [{"lr": 1}]}, "without 'params'"),
        ({"optim_param_func": lambda model: [torch.zeros(1)]}, "not a parameter of the model"),
        ({"ignore_dryrun_on_load_strategy": False, "dataset": None}, "dry run needs"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    case = get_case("mlp")
    good: dict[str, Any] = {
        "model": case.build(),
        "optim_func": torch.optim.SGD,
        "optim_args": {"lr": 0.1},
        "dataset": SyntheticDataset(case, 8),
        "loss_func": case.loss_func,
        "load_strategy": [],
    }
    if arguments.get("optim_func", 1) is None:
        good.pop("optim_args")
    with pytest.raises(InputError, match=words):
        auto_accelerate(**{**good, **arguments})


def test_misspelt_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="load_stratgy"):
        auto_accelerate(nn.Linear(1, 1), load_stratgy=[])  # type: ignore[call-arg]


def test_quiet_failure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="atorch_ns"):
        answer = auto_accelerate(nn.Linear(1, 1), load_strategy=["fsdpp"], raise_errors=False)
    assert answer == (False, None, None)
    assert "Did you mean 'fsdp'" in caplog.text


def test_quiet_failure_of_the_users_own_function(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("of the user's own")

    case = get_case("mlp")
    answer = auto_accelerate(
        case.build(), torch.optim.SGD, optim_param_func=broken, load_strategy=[], raise_errors=False
    )
    assert answer == (False, None, None)
    assert "of the user's own" in caplog.text


@pytest.mark.parametrize("strategy", [["amp_native"], [("half", "bf16")]], ids=str)
def test_an_accelerated_model_can_be_copied_and_pickled(strategy: Any) -> None:
    import pickle

    case = get_case("mlp")
    model = accelerate_case(case, strategy).model
    batch = case.make_batch(4, 0)
    expected = case.call(model, batch)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(case.call(again, batch), expected)


def test_lbfgs_is_refused_where_it_cannot_work() -> None:
    case = get_case("mlp")
    result = accelerate_case(case, [], optim_func=torch.optim.LBFGS, optim_args={"lr": 0.1})
    with pytest.raises(StepError, match="closure"):
        result.train_step(next(iter(result.dataloader or ())))


class _Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = get_case("mlp").build()
        self.scripted = torch.jit.script(nn.Linear(1, 1))

    def forward(self, *batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.scripted(self.inner(*batch)[..., :1])
        return out


def test_a_scripted_submodule_is_no_obstacle() -> None:
    from atorch_ns.capture.blocks import repeated_blocks
    from atorch_ns.profile import Profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _Scripted()
    assert repeated_blocks(model)
    assert Profile.of(model).num_parameters


def test_save_folder_must_exist_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(StrategyFileError, match="does not exist"):
        auto_accelerate(nn.Linear(1, 1), load_strategy=[], save_strategy_to_file=tmp_path / "a" / "b.json")


def test_dry_run_leaves_everything_as_it_was() -> None:
    case = get_case("mlp")
    reference = reference_run(case)
    run = accelerated_run(case, ["amp_native"], ignore_dryrun_on_load_strategy=False)
    plain = accelerated_run(case, ["amp_native"])
    assert run.losses == plain.losses
    assert len(run.losses) == len(reference.losses)


def test_dry_run_refuses_a_loss_that_is_not_finite() -> None:
    case = get_case("mlp")
    with pytest.raises(InputError, match="loss is nan"):
        accelerate_case(
            case,
            [],
            loss_func=lambda batch, output: output.sum() * float("nan"),
            ignore_dryrun_on_load_strategy=False,
        )


# ---------------------------------------------------------------- several ranks

BAD_STRATEGIES: list[Any] = [
    ["fsdpp"],
    [("checkpoint", {"evry_n": 1})],
    [("checkpoint", ("NoSuchBlock",))],
    [("amp_native", {"dtype": 3})],
    ["fsdp", "fsdp"],
    ["fsdp", "zero1"],
    [("parallel_mode", ([("tensor", 3)], None))],
    "missing_file.json",
    b"{",
    b"\x80\x04.",
]


def _call_badly(strategies: list[Any]) -> list[str]:
    return [type(_error_of(strategy)).__name__ for strategy in strategies]


def _error_of(strategy: Any) -> AtorchError | None:
    try:
        accelerate_case(get_case("mlp"), strategy)
    except AtorchError as error:
        return error
    return None


def test_every_rank_raises_the_same_error() -> None:
    started = time.monotonic()
    ranks = run_ranks(_call_badly, 2, args=(BAD_STRATEGIES,))
    assert ranks[0] == ranks[1]
    assert "NoneType" not in ranks[0]
    assert time.monotonic() - started < 20


def _bad_on_rank_one() -> None:
    import torch.distributed as dist

    strategy = ["fsdp"] if dist.get_rank() == 0 else "only_rank_one_lacks_this.json"
    accelerate_case(get_case("mlp"), strategy)


def test_a_failure_on_one_rank_stops_the_other_with_its_reason() -> None:
    outcomes = catch_ranks(_bad_on_rank_one, 2, timeout_s=30)
    assert outcomes[1].error_type.endswith("StrategyFileError")
    assert isinstance(outcomes[0].error, RankError)
    assert "rank 1" in outcomes[0].message
    assert "only_rank_one_lacks_this.json" in outcomes[0].message


def _different_strategies() -> None:
    import torch.distributed as dist

    accelerate_case(get_case("mlp"), ["fsdp"] if dist.get_rank() == 0 else ["zero1"])


def test_different_strategies_are_refused_on_all_ranks() -> None:
    outcomes = catch_ranks(_different_strategies, 2, timeout_s=30)
    assert all(isinstance(outcome.error, RankError) for outcome in outcomes)
    assert "ranks [0]" in outcomes[0].message
    assert "zero1" in outcomes[0].message


DIFFERENT: list[dict[str, Any]] = [
    {"optim_args": {"lr": 0.1}},
    {"optim_func": torch.optim.SGD, "optim_args": {"lr": 1e-2}},
    {"global_batch": 16},
    {"gradient_accumulation_steps": 2},
    {"max_grad_norm": 1.0},
    {"sampler_seed": 3},
    {"steps": 4},
    {"model": nn.Linear(3, 3)},
]


def _different_on_rank_one(cases: list[dict[str, Any]]) -> list[str]:
    import torch.distributed as dist

    return [str(_rank_error(case if dist.get_rank() == 1 else {})) for case in cases]


def _rank_error(arguments: dict[str, Any]) -> RankError | None:
    try:
        accelerate_case(get_case("mlp"), ["ddp"], **{"optim_args": {"lr": 1e-2}, **arguments})
    except RankError as error:
        return error
    return None


def test_arguments_that_differ_between_ranks_are_named_on_all() -> None:
    words = [
        "optim_args",
        "optim_func",
        "dataset",
        "accumulation",
        "max_grad_norm",
        "sampler_seed",
        "dataset",
        "model",
    ]
    ranks = run_ranks(_different_on_rank_one, 2, args=(DIFFERENT,))
    assert ranks[0] == ranks[1]
    for word, text in zip(words, ranks[0], strict=True):
        assert word in text


def _bad_optimizer_on_rank_one() -> None:
    import torch.distributed as dist

    def optim_func(groups: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1 if dist.get_rank() == 0 else -1.0)

    accelerate_case(get_case("mlp"), ["ddp"], optim_func=optim_func)


def test_a_failing_optimizer_on_one_rank_stops_all() -> None:
    outcomes = catch_ranks(_bad_optimizer_on_rank_one, 2, timeout_s=30)
    assert "Invalid learning rate" in outcomes[1].message
    assert isinstance(outcomes[0].error, RankError)


def _plain_loop(name: str, strategy: Any) -> Any:
    return accelerated_run(get_case(name), strategy, step=plain_loop_step)


@pytest.mark.parametrize("strategy", [["ddp"], ["zero1"], ["zero2"], ["fsdp", "checkpoint"]], ids=str)
def test_the_specifications_plain_loop(strategy: Any) -> None:
    for name in ("mlp", "hf_gpt2"):
        reference = reference_run(get_case(name))
        runs = run_ranks(_plain_loop, 2, args=(name, strategy))
        assert_parity(compare(reference, runs[0]))
        assert_ranks_agree(runs)


def _train(strategy: Any, arguments: dict[str, Any]) -> Any:
    return accelerated_run(get_case("tied_llama"), strategy, **arguments)


@pytest.mark.parametrize("strategy", [["ddp"], ["zero1"], ["zero2"], ["fsdp"]], ids=str)
def test_accumulation_and_clipping(strategy: Any) -> None:
    reference = reference_run(get_case("tied_llama"), max_norm=0.05)
    free = reference_run(get_case("tied_llama"))
    assert compare(free, reference).max_param_error > 0.1, "the norm must be small enough to matter"
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}
    runs = run_ranks(_train, 2, args=(strategy, arguments))
    assert_parity(compare(reference, runs[0]))
    assert_ranks_agree(runs)


def _accumulate_by_hand(result: Result, batch: Any) -> torch.Tensor:
    """Two micro-batches of a plain loop, the first without synchronisation."""
    assert result.optim is not None
    assert result.loss_func is not None
    result.optim.zero_grad()
    total = torch.zeros((), device=result.device)
    parts = split_batch(result.prepare_input(batch, result.device), 2)
    for position, part in enumerate(parts):
        with result.no_sync() if position == 0 else nullcontext():
            loss = result.loss_func(part, result.model(part)) / 2
            loss.backward()
        total += loss.detach()
    result.optim.step()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@pytest.mark.parametrize("strategy", [["ddp"], ["fsdp"]], ids=str)
def test_accumulation_by_hand(strategy: Any) -> None:
    reference = reference_run(get_case("tied_llama"))
    runs = run_ranks(lambda: accelerated_run(get_case("tied_llama"), strategy, step=_accumulate_by_hand), 2)
    assert_parity(compare(reference, runs[0]))
    assert_ranks_agree(runs)


@pytest.mark.parametrize(
    "strategy",
    [
        [("parallel_mode", ([("data", 2), ("zero", 2)], None)), "fsdp", "checkpoint"],
        pytest.param([("parallel_mode", ([("zero", 2), ("data", 2)], None)), "fsdp"], marks=pytest.mark.slow),
        pytest.param(
            [("parallel_mode", ([("zero", 2), ("data", 2)], [0, 2, 1, 3])), "zero2"], marks=pytest.mark.slow
        ),
        [("parallel_mode", ([("zero", 2), ("data", 2)], None)), "zero1"],
        [("parallel_mode", ([("zero", 4)], None))],
        pytest.param([("parallel_mode", ([("zero", 4)], None)), "fsdp"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_four_ranks_on_two_axes(strategy: Any) -> None:
    reference = reference_run(get_case("tied_llama"), max_norm=0.05)
    runs = run_ranks(_train, 4, args=(strategy, {"max_grad_norm": 0.05}))
    assert_parity(compare(reference, runs[0]))
    assert_ranks_agree(runs)


FSDP_CONFIGS: list[dict[str, Any]] = [
    {"atorch_wrap_cls": ["Block", "Attention"], "forward_prefetch": True},
    {"atorch_wrap_cls": "layers.*"},
    {"atorch_size_based_min_num_params": 2000},
    {"atorch_ignored_cls": ["embed_tokens", "norm"]},
    {"reshard_after_forward": False},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"cpu_offload": True},
    {"sync_module_states": False},
    {"mixed_precision": None},
]


def _train_configs(configs: list[dict[str, Any]]) -> Any:
    from atorch_ns.testing.models import get_case

    case = get_case("tied_llama")
    return [accelerated_run(case, [("fsdp", config)], gradient_accumulation_steps=2) for config in configs]


def test_every_way_to_wrap_and_shard() -> None:
    reference = reference_run(get_case("tied_llama"))
    block = get_case("tied_llama").block
    configs = [
        {**config, "atorch_wrap_cls": [block]}
        if config.get("atorch_wrap_cls") == ["Block", "Attention"]
        else config
        for config in FSDP_CONFIGS
    ]
    ranks = run_ranks(_train_configs, 2, args=(configs,), timeout_s=100)
    for position, config in enumerate(configs):
        runs = [rank[position] for rank in ranks]
        try:
            assert_parity(compare(reference, runs[0]))
            assert_ranks_agree(runs)
        except AssertionError as error:
            raise AssertionError(f"{config}: {error}") from error


class _Temperature(nn.Module):
    """Single numbers among the parameters, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = get_case("mlp").build()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, *batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner(*batch) * self.temperature
        return out


def _train_temperature(strategy: Any) -> Any:
    return accelerated_run(get_case("mlp"), strategy, model=_Temperature(), gradient_accumulation_steps=2)


@pytest.mark.parametrize("strategy", [["fsdp"], ["zero2", "checkpoint"]], ids=str)
def test_single_numbers_are_replicated(strategy: Any) -> None:
    reference = reference_run(dataclasses.replace(get_case("mlp"), build=_Temperature))
    runs = run_ranks(_train_temperature, 2, args=(strategy,))
    assert_parity(compare(reference, runs[0]))
    assert_ranks_agree(runs)


class _Lora(nn.Module):
    """A frozen linear layer with a small trainable product beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return out


def _lora_model() -> nn.Module:
    model = get_case("mlp").build()
    torch.manual_seed(3)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, _Lora(child))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".down." in name or ".up." in name)
    return model


def _train_lora(config: dict[str, Any]) -> Any:
    return accelerated_run(get_case("mlp"), [("fsdp", config)], model=_lora_model())


@pytest.mark.parametrize("key", ["wrap_trainable_outmost", "fsdp_wrap_params_outmost"])
def test_trainable_parameters_in_a_unit_of_their_own(key: str) -> None:
    case = dataclasses.replace(get_case("mlp"), build=_lora_model)
    reference = reference_run(case, optim_param_func=lambda m: [p for p in m.parameters() if p.requires_grad])
    runs = run_ranks(_train_lora, 2, args=({key: True},))
    moved = compare(reference, runs[0])
    assert_parity(moved)
    assert_ranks_agree(runs)


def _overflow_on_rank_one(strategy: Any) -> Any:
    """An overflow on one rank only: all must skip that step, and only that one."""
    import torch.distributed as dist

    calls = []

    def loss_func(batch: Any, output: Any) -> torch.Tensor:
        loss = get_case("mlp").loss_func(batch, output)
        calls.append(None)
        bad = len(calls) == 2 and dist.get_rank() == 1
        return loss * float("inf") if bad else loss

    result = accelerate_case(get_case("mlp"), strategy, loss_func=loss_func)
    skipped = []
    for batch in result.dataloader or ():
        result.train_step(batch)
        skipped.append(result.train_step.skipped)
    finite = all(torch.isfinite(p).all() for p in result.model.parameters() if p.numel())
    scale = getattr(getattr(result.optim, "scaler", None), "scaler", None)
    return skipped, finite, None if scale is None else scale.get_scale()


@pytest.mark.parametrize(
    ("strategy", "scale"),
    [
        (["amp_native"], 32768.0),
        (["amp_native", "fsdp"], 32768.0),
        (["amp_native", "zero1"], 32768.0),
        (["half", "fsdp"], 32768.0),
        (["half", "zero2"], 32768.0),
        ([("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True})], None),
        ([("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True}), "fsdp"], None),
    ],
    ids=str,
)
def test_ranks_skip_a_bad_step_together(strategy: Any, scale: float | None) -> None:
    for skipped, finite, now in run_ranks(_overflow_on_rank_one, 2, args=(strategy,)):
        assert skipped == [False, True, False, False, False]
        assert finite
        assert now == scale


def test_fp16_without_the_scaled_loss_is_an_error_and_not_a_wrong_step() -> None:
    result = accelerate_case(get_case("mlp"), ["amp_native"])
    batch = next(iter(result.dataloader or ()))
    case = get_case("mlp")
    case.loss_func(batch, case.call(result.model, batch)).backward()
    with pytest.raises(StepError, match=r"result\.loss_func"):
        result.optim.step()  # type: ignore[union-attr]


def test_two_models_have_independent_scalers() -> None:
    case = get_case("mlp")
    one = accelerate_case(case, ["amp_native"])
    other = accelerate_case(case, [("amp_native", {"init_scale": 8.0})])
    for batch in one.dataloader or ():
        one.train_step(batch)
    assert one.optim.scaler.scaler.get_scale() == 2.0**16  # type: ignore[union-attr]
    for batch in other.dataloader or ():
        other.train_step(batch)
    assert other.optim.scaler.scaler.get_scale() == 8.0  # type: ignore[union-attr]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.3, "lr": 3e-3}, {"params": rest, "weight_decay": 0.0}]


def _train_one_cycle(strategy: Any) -> Any:
    from atorch_ns.testing.parity import Trajectory, snapshot

    result = accelerate_case(
        get_case("mlp"),
        strategy,
        lr_scheduler_cls=torch.optim.lr_scheduler.OneCycleLR,
        lr_scheduler_args={"max_lr": 1e-2, "total_steps": 5},
    )
    initial, losses = snapshot(result.model), []
    for batch in result.dataloader or ():
        losses.append(float(result.train_step(batch)))
        result.lr_scheduler.step()
    return Trajectory(losses=losses, initial=initial, final=snapshot(result.model))


@pytest.mark.parametrize(
    "strategy",
    [["zero1"], ["zero2"], [("zero1", {"backend": "fairscale"})], [("zero2", {"not_use_fsdp": True})]],
    ids=str,
)
def test_a_scheduler_that_moves_momentum_reaches_the_inner_optimizer(strategy: Any) -> None:
    alone = _train_one_cycle([])
    runs = run_ranks(_train_one_cycle, 2, args=(strategy,))
    assert_parity(compare(alone, runs[0]))


def _train_groups(strategy: Any) -> Any:
    result = accelerate_case(
        get_case("hf_llama"),
        strategy,
        optim_param_func=_groups,
        lr_scheduler_cls=torch.optim.lr_scheduler.StepLR,
        lr_scheduler_args={"step_size": 2, "gamma": 0.5},
    )
    from atorch_ns.testing.parity import Trajectory, snapshot

    initial, losses, rates = snapshot(result.model), [], []
    for batch in result.dataloader or ():
        rates.append([group["lr"] for group in result.optim.param_groups])  # type: ignore[union-attr]
        losses.append(float(result.train_step(batch)))
        result.lr_scheduler.step()
    return Trajectory(losses=losses, initial=initial, final=snapshot(result.model)), rates


@pytest.mark.parametrize("strategy", [["ddp"], ["zero1"], ["zero2"], ["fsdp", "checkpoint"]], ids=str)
def test_parameter_groups_and_scheduler_survive(strategy: Any) -> None:
    alone, rates = _train_groups([])
    runs = run_ranks(_train_groups, 2, args=(strategy,))
    assert_parity(compare(alone, runs[0][0]))
    assert runs[0][1] == rates == [[3e-3, 1e-2]] * 2 + [[1.5e-3, 5e-3]] * 2 + [[7.5e-4, 2.5e-3]]


# ---------------------------------------------------------------- the package


def _python(code: str) -> str:
    done = subprocess.run(
        [COLD_PYTHON, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_importing_the_package_imports_little_and_patches_nothing() -> None:
    loaded = _python(
        "import sys, atorch_ns; print([m for m in ('torch', 'transformers', 'grpc') if m in sys.modules])"
    )
    assert loaded == "[]"
    code = """
        import sys
        from torch.distributed.fsdp import fully_shard
        import torch.distributed.fsdp as fsdp, torch.optim, torch.nn as nn
        before = fsdp.fully_shard, nn.Module.__call__, nn.Module.forward, torch.optim.AdamW.step, fsdp.FSDPModule.__dict__.copy()
        from atorch_ns import auto_accelerate, Strategy
        from atorch_ns.method import load_registry
        load_registry()
        after = fsdp.fully_shard, nn.Module.__call__, nn.Module.forward, torch.optim.AdamW.step, fsdp.FSDPModule.__dict__.copy()
        assert before == after
        print([m for m in ("transformers", "grpc", "deepspeed", "fairscale") if m in sys.modules])
    """
    assert _python(code) == "[]"


def test_public_names() -> None:
    own = {"Result", "Strategy", "__version__", "attach_optimizer", "auto_accelerate"}
    of_parallel = [name for name in atorch_ns.__all__ if name not in own]
    assert own < set(atorch_ns.__all__)
    assert all(getattr(atorch_ns, name) is getattr(atorch_ns.parallel, name) for name in of_parallel)
    assert all(getattr(atorch_ns, name) for name in atorch_ns.__all__)
    from atorch_ns.checkpoint import load, save
    from atorch_ns.cluster import layout
    from opt_lib.module_replace import register_replace_pair

    assert all(map(callable, (load, save, layout, register_replace_pair)))
    with pytest.raises(AttributeError):
        atorch_ns.nothing  # noqa: B018


def test_a_saved_strategy_holds_what_a_file_held() -> None:
    from atorch_ns.job.result import _with_settings
    from atorch_ns.strategy import Step

    made = _with_settings(Step("m", {"plan": "plan.json", "kept": 1}), {"plan": {"a": 1}, "kept": 2})
    assert made.config == {"plan": {"a": 1}, "kept": 1}


def test_strategy_error_reaches_the_user_whole() -> None:
    with pytest.raises(StrategyError) as caught:
        auto_accelerate(nn.Linear(1, 1), load_strategy=[("half", "fp8"), ("checkpoint", {"every": 1})])
    assert len(caught.value.problems) == 2
