"""MerakArguments: every documented field, what it stands for, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import HfArgumentParser, TrainingArguments

from atorch_ns.errors import InputError
from atorch_ns.merak import MerakArguments, set_tp_layer_lists
from atorch_ns.merak.args import _NO_USE
from atorch_ns.merak.models import check_sizes
from atorch_ns.merak.mpu import Grid
from atorch_ns.merak.strategy import notes_of, strategy_of
from tests.merak.parts import model

DOCUMENTED: dict[str, Any] = {
    "train_schedule": "1f1b",
    "partition_method": "uniform",
    "split_method": "farthest_min_deps",
    "custom_split_points": None,
    "trace_method": "fx",
    "trace_model": "",
    "init_method_std": 0.02,
    "activation_checkpointing": True,
    "checkpoint_num_layers": 1,
    "input_names": None,
    "num_layers": None,
    "seq_length": None,
    "num_heads": None,
    "wall_clock_breakdown": False,
    "shard_count": None,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": False,
    "zero_stage": 1,
    "zero_allgather_bucket_size": 500000000,
    "zero_reduce_bucket_size": 500000000,
    "save": False,
    "finetune": False,
    "no_save_rng": False,
    "no_save_optim": False,
    "no_load_rng": False,
    "no_load_optim": False,
    "split_inputs": False,
    "parallel_vocab": False,
    "sequence_parallel": False,
    "sequence_dim": 1,
    "dealloc_pipeoutput": False,
    "activation_checkpoint_ratio": None,
    "tp_overlapping_level": 0,
    "loss_scale": 0,
    "initial_scale_power": 32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "custom_partition": None,
    "no_tie_modules": False,
    "save_total_limit": -1,
    "eval_iters": None,
    "text_generation": False,
    "out_seq_length": 1024,
    "temperature": 0.9,
    "lora_config": None,
    "adapter_name": "default",
    "strategy_file": None,
}
"""Fields of Merak's documentation, the one that is ours alone last, and their defaults."""

DP, TP, PP = Grid((1, 2, 1, 1), 0), Grid((1, 1, 1, 2), 0), Grid((2, 1, 1, 1), 0)
ALL = Grid((2, 2, 1, 2), 0)

Effect = tuple[Grid, dict[str, Any], str, Any]
"""A grid, the arguments, a step of the strategy, and what its config is then: entries, or ``None`` for no such step."""
EFFECTS: dict[str, list[Effect]] = {
    "train_schedule": [
        (PP, {}, "pipeline_parallel", {"schedule": "1F1B"}),
        (PP, {"train_schedule": "ds_default"}, "pipeline_parallel", {"schedule": "1F1B"}),
        (PP, {"train_schedule": "pre_recompute_1f1b"}, "pipeline_parallel", {"schedule": "PreRecompute1F1B"}),
        (
            PP,
            {"train_schedule": "last_no_recompute_1f1b"},
            "pipeline_parallel",
            {"schedule": "LastNoRecompute1F1B"},
        ),
        (
            PP,
            {"train_schedule": "shifted_critical_path"},
            "pipeline_parallel",
            {"schedule": "ShiftedCriticalPath"},
        ),
        (PP, {"train_schedule": "auto"}, "pipeline_parallel", {"schedule": "auto"}),
    ],
    "partition_method": [
        (PP, {}, "pipeline_parallel", {"split_method": "uniform"}),
        (PP, {"partition_method": "uniform_floor"}, "pipeline_parallel", {"split_method": "uniform_floor"}),
        (PP, {"partition_method": "parameters"}, "pipeline_parallel", {"split_method": "parameters"}),
    ],
    "custom_partition": [
        (
            PP,
            {"partition_method": "custom", "custom_partition": ["0,3,8"]},
            "pipeline_parallel",
            {"split_method": "custom", "custom_partition": [0, 3, 8]},
        )
    ],
    "split_method": [
        (PP, {}, "pipeline_parallel", {"shards": "farthest_min_deps"}),
        (PP, {"split_method": "nearest_min_deps"}, "pipeline_parallel", {"shards": "nearest_min_deps"}),
        (PP, {"split_method": "layer_split"}, "pipeline_parallel", {"shards": None}),
    ],
    "custom_split_points": [
        (
            PP,
            {"split_method": "layer_split", "custom_split_points": ["transformer.h.1"]},
            "pipeline_parallel",
            {"shards": "split_points", "split_points": ["transformer.h.1"]},
        )
    ],
    "shard_count": [(PP, {"shard_count": 3}, "pipeline_parallel", {"shard_count": 3})],
    "activation_checkpointing": [
        (DP, {}, "checkpoint", {}),
        (DP, {"activation_checkpointing": False}, "checkpoint", None),
    ],
    "checkpoint_num_layers": [
        (DP, {"checkpoint_num_layers": 2}, "checkpoint", {"chunk": 2}),
        (DP, {"checkpoint_num_layers": 0}, "checkpoint", None),
    ],
    "activation_checkpoint_ratio": [
        (PP, {"activation_checkpoint_ratio": ["0.5"]}, "checkpoint", {"share": 0.5, "by_stage": "merak"}),
        (PP, {"activation_checkpoint_ratio": ["0.5", "1"]}, "checkpoint", {"share": [0.5, 1.0]}),
        (DP, {"activation_checkpoint_ratio": 0.5}, "checkpoint", {"share": 0.5, "by_stage": None}),
    ],
    "prescale_gradients": [
        (DP, {"zero_stage": 0}, "ddp", {"reducer": None}),
        (DP, {"zero_stage": 0, "prescale_gradients": True}, "ddp", {"reducer": "own", "predivide": 1.0}),
    ],
    "gradient_predivide_factor": [
        (DP, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}, "ddp", {"predivide": 2.0})
    ],
    "zero_stage": [
        (DP, {"zero_stage": 0}, "zero1", None),
        (DP, {}, "zero1", {}),
        (DP, {"zero_stage": 2}, "zero2", {}),
        (DP, {"zero_stage": 3}, "fsdp", {}),
        (ALL, {}, "zero1", {}),
        (PP, {"zero_stage": 3}, "fsdp", None),
    ],
    "zero_reduce_bucket_size": [(DP, {"zero_reduce_bucket_size": 2**18}, "ddp", {"bucket_cap_mb": 1.0})],
    "parallel_vocab": [
        (TP, {}, "tensor_parallel", {"vocabulary": False}),
        (TP, {"parallel_vocab": True}, "tensor_parallel", {"vocabulary": None}),
    ],
    "sequence_parallel": [
        (TP, {}, "tensor_parallel", {"sequence": None}),
        (TP, {"sequence_parallel": True}, "tensor_parallel", {"sequence": True}),
    ],
    "sequence_dim": [
        (TP, {"sequence_parallel": True, "sequence_dim": 0}, "tensor_parallel", {"sequence_dim": 0})
    ],
    "tp_overlapping_level": [
        (TP, {}, "tensor_parallel", {"overlap": None}),
        (TP, {"tp_overlapping_level": 1}, "tensor_parallel", {"overlap": True}),
        (TP, {"tp_overlapping_level": 3}, "tensor_parallel", {"overlap": True}),
        (TP, {"tp_overlapping_level": 1, "sequence_parallel": True}, "tensor_parallel", {"overlap": None}),
    ],
    "loss_scale": [
        (DP, {"fp16": True, "loss_scale": 128.0}, "amp_native", {"dtype": "fp16", "static_scale": 128.0})
    ],
    "initial_scale_power": [
        (DP, {"fp16": True}, "amp_native", {"init_scale": 2.0**32, "static_scale": None}),
        (DP, {"fp16": True, "initial_scale_power": 8}, "amp_native", {"init_scale": 256.0}),
    ],
    "loss_scale_window": [(DP, {"fp16": True, "loss_scale_window": 5}, "amp_native", {"growth_interval": 5})],
    "hysteresis": [(DP, {"fp16": True, "hysteresis": 3}, "amp_native", {"hysteresis": 3})],
    "min_loss_scale": [(DP, {"fp16": True, "min_loss_scale": 4}, "amp_native", {"min_scale": 4.0})],
    "text_generation": [(DP, {"text_generation": True}, "checkpoint", None)],
}

RUN_BY: dict[str, str] = {
    "wall_clock_breakdown": "test_schedules.test_the_wall_clock_of_each_rank_is_logged",
    "zero_allow_untested_optimizer": "test_precision.test_an_optimizer_that_differs_when_sharded_needs_consent",
    "save": "test_checkpoints.test_checkpoints_are_saved_when_asked_for",
    "finetune": "test_checkpoints.test_finetuning_takes_the_weights_alone",
    "no_save_rng": "test_checkpoints.test_parts_are_left_out_of_checkpoints",
    "no_save_optim": "test_checkpoints.test_parts_are_left_out_of_checkpoints",
    "no_load_rng": "test_checkpoints.test_parts_of_checkpoints_are_not_loaded",
    "no_load_optim": "test_checkpoints.test_parts_of_checkpoints_are_not_loaded",
    "strategy_file": "test_auto.test_a_strategy_file_lays_out_the_ranks",
    "save_total_limit": "test_checkpoints.test_the_best_checkpoint_and_the_last_are_kept",
    "no_tie_modules": "test_trainer.test_tied_weights_are_trained_apart_when_asked_for",
    "eval_iters": "test_trainer.test_an_evaluation_ends_after_eval_iters",
    "out_seq_length": "test_generation.test_length_and_temperature_are_those_of_the_arguments",
    "temperature": "test_generation.test_length_and_temperature_are_those_of_the_arguments",
    "lora_config": "test_lora.test_adapters_train_as_in_one_process",
    "adapter_name": "test_lora.test_adapters_train_as_in_one_process",
}
"""Tests of fields that a strategy does not show."""
CHECKED_AGAINST_THE_MODEL = {"num_layers": 4, "num_heads": 4, "seq_length": 32}
"""What the config of the model in this file has."""


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., MerakArguments]:
    def make(**given: Any) -> MerakArguments:
        return MerakArguments(str(tmp_path), use_cpu=True, report_to=[], **given)

    return make


@pytest.fixture(autouse=True)
def _no_lists_left() -> Iterator[None]:
    yield
    set_tp_layer_lists()


def test_fields_and_defaults_are_the_documented_ones() -> None:
    usual = {one.name: one.default for one in fields(MerakArguments)}
    assert {name: usual[name] for name in DOCUMENTED} == DOCUMENTED
    own = usual.keys() - {one.name for one in fields(TrainingArguments)}
    assert own <= DOCUMENTED.keys()  # no field without documentation


def test_each_field_is_tested_in_one_way() -> None:
    ways = (EFFECTS, RUN_BY, CHECKED_AGAINST_THE_MODEL, _NO_USE)
    known = [name for way in ways for name in way]
    others = {"zero_allgather_bucket_size"}  # of which the report says that it changes nothing
    assert sorted([*known, *others]) == sorted(DOCUMENTED)


@pytest.mark.parametrize(("name", "where"), RUN_BY.items())
def test_a_field_is_run_by_a_test_that_names_it(name: str, where: str) -> None:
    module, _, function = where.partition(".")
    source = (Path(__file__).parent / f"{module}.py").read_text()
    assert f"def {function}(" in source
    assert name in source


@pytest.mark.parametrize("name", EFFECTS)
def test_a_field_is_part_of_the_strategy(name: str, made: Callable[..., MerakArguments]) -> None:
    for grid, given, method, wanted in EFFECTS[name]:
        strategy = strategy_of(made(**given), grid, model("gpt2"))
        if wanted is None:
            assert method not in strategy, given
            continue
        config: Any = strategy[method] or {}
        assert {key: config.get(key) for key in wanted} == wanted, given


def test_axes_are_those_of_the_grid(made: Callable[..., MerakArguments]) -> None:
    strategy: Any = strategy_of(made(), ALL, model("gpt2"))
    assert strategy["parallel_mode"]["axes"] == [["tensor", 2], ["sequence", 1], ["data", 2], ["pipeline", 2]]
    alone: Any = strategy_of(made(), Grid((1, 1, 1, 1), 0), model("gpt2"))
    assert alone.names == ("checkpoint",)


def test_micro_batches_are_those_of_gradient_accumulation(made: Callable[..., MerakArguments]) -> None:
    strategy: Any = strategy_of(made(gradient_accumulation_steps=6), PP, model("gpt2"))
    assert strategy["pipeline_parallel"]["num_micro_batches"] == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trace_method", "dynamo"),
        ("trace_model", "Qwen2ForCausalLM"),
        ("init_method_std", 0.01),
        ("input_names", ["input_ids"]),
        ("dealloc_pipeoutput", True),
        ("split_inputs", True),
    ],
)
def test_a_field_without_a_use_is_reported(
    name: str, value: Any, made: Callable[..., MerakArguments]
) -> None:
    assert made().without_use() == []
    notes = notes_of(made(**{name: value}), ALL)
    assert f"{name}={value!r} changes nothing: {_NO_USE[name]}." in notes


@pytest.mark.parametrize(
    ("grid", "given", "said"),
    [
        (TP, {"tp_overlapping_level": 2}, "tp_overlapping_level=2 is run as 1"),
        (TP, {"tp_overlapping_level": 3}, "tp_overlapping_level=3 is run as 1"),
        (DP, {"zero_stage": 2, "zero_reduce_bucket_size": 1000}, "zero_*_bucket_size change nothing"),
        (DP, {"zero_allgather_bucket_size": 1000}, "zero_allgather_bucket_size changes nothing"),
        (
            DP,
            {"zero_stage": 0, "zero_allgather_bucket_size": 1000},
            "zero_allgather_bucket_size changes nothing",
        ),
        (PP, {"split_method": "nearest_min_deps", "shard_count": 4}, "shard_count changes nothing"),
        (
            TP,
            {"sequence_parallel": True, "tp_overlapping_level": 1},
            "tp_overlapping_level=1 changes nothing",
        ),
    ],
)
def test_a_field_that_does_less_is_reported(
    grid: Grid, given: dict[str, Any], said: str, made: Callable[..., MerakArguments]
) -> None:
    assert any(note.startswith(said) for note in notes_of(made(**given), grid))


def test_usual_arguments_need_no_notes(made: Callable[..., MerakArguments]) -> None:
    for grid in (DP, TP, PP, Grid((1, 1, 1, 1), 0)):
        assert notes_of(made(), grid) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_schedule": "1f2b"}, "train_schedule='1f2b'"),
        ({"partition_method": "unifrom"}, "did you mean 'uniform'"),
        ({"split_method": "nearest"}, "split_method='nearest'"),
        ({"trace_method": "jit"}, "trace_method='jit'"),
        ({"zero_stage": 4}, "zero_stage=4: one of 0, 1, 2, 3"),
        ({"tp_overlapping_level": 5}, "tp_overlapping_level=5"),
        ({"checkpoint_num_layers": -1}, "checkpoint_num_layers=-1: at least 0"),
        ({"hysteresis": 0}, "hysteresis=0: at least 1"),
        ({"eval_iters": 0}, "eval_iters=0: at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5: at least 0"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0: a positive number"),
        (
            {"activation_checkpoint_ratio": ["1.5"]},
            "activation_checkpoint_ratio=['1.5']: numbers from 0 to 1",
        ),
        ({"activation_checkpoint_ratio": ["half"]}, "activation_checkpoint_ratio=['half']"),
        ({"custom_partition": ["0,4,8"]}, "it and partition_method='custom' need each other"),
        ({"partition_method": "custom"}, "it and partition_method='custom' need each other"),
        ({"partition_method": "custom", "custom_partition": ["a"]}, "custom_partition=['a']"),
        ({"custom_split_points": ["h.1"]}, "they need split_method='layer_split'"),
        ({"deepspeed": "ds.json"}, "use zero_stage, dp, tp and pp"),
        ({"fsdp": "full_shard"}, "use zero_stage=3"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    ],
)
def test_wrong_values_are_refused(
    given: dict[str, Any], said: str, made: Callable[..., MerakArguments]
) -> None:
    with pytest.raises(InputError) as caught:
        made(**given)
    assert said.lower() in str(caught.value).lower()


def test_all_wrong_values_are_named_at_once(made: Callable[..., MerakArguments]) -> None:
    with pytest.raises(InputError) as caught:
        made(zero_stage=7, eval_iters=0, split_method="cut")
    for name in ("zero_stage", "eval_iters", "split_method"):
        assert name in str(caught.value)


def test_gradients_are_not_divided_in_two_where_they_are_sharded(made: Callable[..., MerakArguments]) -> None:
    with pytest.raises(InputError, match="prescale_gradients: zero2 sums and divides gradients in one step"):
        strategy_of(made(zero_stage=2, prescale_gradients=True), DP, model("gpt2"))


@pytest.mark.parametrize("name", CHECKED_AGAINST_THE_MODEL)
def test_sizes_are_checked_against_the_model(name: str, made: Callable[..., MerakArguments]) -> None:
    right = CHECKED_AGAINST_THE_MODEL[name]
    check_sizes(made(**{name: right}), model("gpt2"))
    with pytest.raises(InputError, match=f"{name}={right + 1}, where the model's config has {right}"):
        check_sizes(made(**{name: right + 1}), model("gpt2"))
    check_sizes(
        made(**{name: right + 1}), nn.Linear(2, 2)
    )  # without a config there is nothing to differ from


def test_a_command_line_is_read(tmp_path: Path) -> None:
    parser = HfArgumentParser(MerakArguments)
    (args,) = parser.parse_args_into_dataclasses(
        [
            *("--output_dir", str(tmp_path)),
            *("--use_cpu", "true"),
            *("--train_schedule", "shifted_critical_path"),
            *("--partition_method", "custom"),
            *("--custom_partition", "0,3,8"),
            *("--activation_checkpoint_ratio", "0.5", "0.75"),
            *("--input_names", "input_ids", "attention_mask"),
            *("--checkpoint_num_layers", "2"),
            *("--activation_checkpointing", "false"),
            *("--zero_stage", "2"),
            *("--zero_reduce_bucket_size", "1000"),
            *("--loss_scale", "64"),
            *("--save", "true"),
            *("--save_steps", "3"),
            *("--trace_method", "fx"),
            "--sequence_parallel",
        ]
    )
    assert isinstance(args, MerakArguments)
    assert args.train_schedule == "shifted_critical_path"
    assert args.partition == (0, 3, 8)
    assert args.recompute_shares == (0.5, 0.75)
    assert args.input_names == ["input_ids", "attention_mask"]
    assert args.checkpoint_num_layers == 2
    assert args.activation_checkpointing is False
    assert args.zero_stage == 2
    assert args.zero_reduce_bucket_size == 1000
    assert args.loss_scale == 64.0
    assert args.save_steps == 3
    assert args.sequence_parallel is True


def test_every_documented_field_is_an_option_with_its_help() -> None:
    parser = HfArgumentParser(MerakArguments)
    options = {action.dest: action.help for action in parser._actions}
    for name in DOCUMENTED:
        assert options[name], name


def test_a_file_of_arguments_is_read(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"output_dir": str(tmp_path), "use_cpu": True, "zero_stage": 3, "save": True}))
    (args,) = HfArgumentParser(MerakArguments).parse_json_file(str(file))
    assert args.zero_stage == 3
    assert args.save_strategy == "steps"


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({}, "no"),
        ({"save": True}, "steps"),
        ({"save_steps": 7}, "steps"),
        ({"save_strategy": "epoch"}, "epoch"),
        ({"save_strategy": "steps"}, "steps"),
        ({"save": True, "save_strategy": "epoch"}, "epoch"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500}, "steps"),
    ],
)
def test_nothing_is_saved_unless_asked_for(
    given: dict[str, Any], strategy: str, made: Callable[..., MerakArguments]
) -> None:
    assert made(**given).save_strategy == strategy


def test_minus_one_checkpoints_are_all(made: Callable[..., MerakArguments]) -> None:
    assert made().save_total_limit is None
    assert made(save_total_limit=3).save_total_limit == 3


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_a_lora_config_is_a_file_of_an_object(
    text: str | None, tmp_path: Path, made: Callable[..., MerakArguments]
) -> None:
    file = tmp_path / "lora.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match="lora_config"):
        made(lora_config=str(file)).lora()
