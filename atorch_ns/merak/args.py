"""MerakArguments: transformers' TrainingArguments with Merak's fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from transformers import TrainingArguments

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.pipeline import get_schedule
from atorch_ns.system import table_rows
from atorch_ns.text import did_you_mean

_CHOICES: Final = {
    "partition_method": ("uniform", "uniform_floor", "parameters", "custom", "auto"),
    "split_method": ("farthest_min_deps", "nearest_min_deps", "layer_split"),
    "trace_method": (None, "fx", "dynamo"),
    "tp_overlapping_level": (0, 1, 2, 3),
    "zero_stage": (0, 1, 2, 3),
}


def _read_rule(rule: str) -> dict[str, str]:
    rows = table_rows(Path(__file__).with_name("fields.csv"))
    return {row["field"]: row["value"] for row in rows if row["rule"] == rule}


_AT_LEAST: Final = {field: int(least) for field, least in _read_rule("least").items()}
_NO_USE: Final = _read_rule("no use")  # fields without use here, and the reason
_REFUSED: Final = _read_rule("refused")  # TrainingArguments that a divided model does not support, and why

LARGEST_SCALE_POWER: Final = 127
"""Largest power of two for loss scales, limited by fp32."""

USUAL_SAVE_STEPS: Final = 500
"""The default of ``save_steps`` in TrainingArguments."""


def _define(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class MerakArguments(TrainingArguments):
    """Arguments of :class:`MerakTrainer`: transformers' own, and those for dividing and running the model.

    ``gradient_accumulation_steps`` counts micro-batches, each of ``per_device_train_batch_size`` samples.

    Raises:
        InputError: naming every field with an invalid value.
    """

    train_schedule: str = _define(
        "1f1b",
        "Schedule of the pipeline: 1f1b, ds_default, pre_recompute_1f1b, last_no_recompute_1f1b, "
        "shifted_critical_path, or any of pipeline_parallel's, such as interleaved_1f1b, zb1p, auto.",
    )
    partition_method: str = _define(
        "uniform",
        "How shards are divided over stages: uniform, uniform_floor, parameters, custom, auto (by time).",
    )
    split_method: str = _define(
        "farthest_min_deps", "How shards are formed: farthest_min_deps, nearest_min_deps, layer_split."
    )
    custom_split_points: list[str] | None = _define(None, "Modules that begin a shard, for layer_split.")  # noqa: RUF009
    trace_method: str | None = _define("fx", f"Not needed: {_NO_USE['trace_method']}.")
    trace_model: str = _define("", f"Not needed: {_NO_USE['trace_model']}.")
    init_method_std: float = _define(0.02, f"Not needed: {_NO_USE['init_method_std']}.")
    activation_checkpointing: bool = _define(True, "Recompute the blocks' activations in the backward pass.")
    checkpoint_num_layers: int = _define(
        1, "Neighbouring blocks that are recomputed as one; 0 for no recomputation."
    )
    input_names: list[str] | None = _define(None, f"Not needed: {_NO_USE['input_names']}.")  # noqa: RUF009
    num_layers: int | None = _define(None, "Blocks of the model, checked against its config.")
    seq_length: int | None = _define(None, "Longest sequence of the model, checked against its config.")
    num_heads: int | None = _define(None, "Heads of attention, checked against the config.")
    wall_clock_breakdown: bool = _define(
        False, "Time the passes of each rank, and log them as a table and a timeline."
    )
    shard_count: int | None = _define(
        None, "Shards of farthest_min_deps; twice the number of blocks if unset."
    )
    prescale_gradients: bool = _define(False, "Divide gradients before they are summed over data ranks.")
    gradient_predivide_factor: float = _define(
        1.0, "What prescale_gradients divides by first; the rest is divided afterwards."
    )
    zero_allow_untested_optimizer: bool = _define(
        False, "Use an optimizer that a test on small parameters found to differ when they are sharded."
    )
    zero_stage: int = _define(1, "What data ranks shard: 0 nothing, 1, 2, 3.")
    zero_allgather_bucket_size: float = _define(
        5e8, "Most elements of parameters that are gathered at a time."
    )
    zero_reduce_bucket_size: float = _define(5e8, "Most elements of gradients that are reduced at a time.")
    save: bool = _define(False, "Save checkpoints, every save_steps by default.")
    finetune: bool = _define(False, "Take the weights alone from a checkpoint, and begin at step 0.")
    no_save_rng: bool = _define(False, "Leave random states out of checkpoints.")
    no_save_optim: bool = _define(False, "Leave the optimizer's states out of checkpoints.")
    no_load_rng: bool = _define(False, "Do not load random states.")
    no_load_optim: bool = _define(False, "Do not load the optimizer's states.")
    split_inputs: bool = _define(False, f"Not needed: {_NO_USE['split_inputs']}.")
    parallel_vocab: bool = _define(False, "Divide the embedding of the vocabulary and the head under tp.")
    sequence_parallel: bool = _define(
        False, "Divide the sequence between divided layers, over the ranks of tp."
    )
    sequence_dim: int = _define(1, "The dimension of the sequence in hidden states.")
    dealloc_pipeoutput: bool = _define(False, f"Not needed: {_NO_USE['dealloc_pipeoutput']}.")
    activation_checkpoint_ratio: list[str] | None = _define(  # noqa: RUF009
        None,
        "Share of blocks that is recomputed: that of the first stage, from which Merak's formula gives the "
        "others, or one for each stage.",
    )
    tp_overlapping_level: int = _define(
        0, "Overlap reductions under tp with matrix products: 0 not, 1 inside layers; 2 and 3 run as 1."
    )
    loss_scale: float = _define(0.0, "Loss scale of fp16; 0 for a dynamic one.")
    initial_scale_power: int = _define(32, "The first dynamic loss scale is 2 to this power.")
    loss_scale_window: int = _define(1000, "Steps without overflow after which the scale doubles.")
    hysteresis: int = _define(2, "Overflows after which the scale is halved.")
    min_loss_scale: int = _define(1, "The least dynamic loss scale.")
    custom_partition: list[str] | None = _define(  # noqa: RUF009
        None, "For partition_method custom: the first shard of each stage, then the number of shards."
    )
    no_tie_modules: bool = _define(False, "Train tied weights as weights of their own.")
    save_strategy: str = _define(
        "no", "When checkpoints are saved: no (steps with save), steps, epoch, best."
    )
    save_total_limit: int | None = _define(-1, "Most checkpoints that are kept; -1 for all.")
    eval_iters: int | None = _define(None, "Most batches of an evaluation.")
    text_generation: bool = _define(False, "Generate text by trainer.generate; needs no data.")
    out_seq_length: int = _define(1024, "Longest text that is generated, prompt included.")
    temperature: float = _define(0.9, "Temperature of sampling; 0 takes the likeliest.")
    strategy_file: str | None = _define(
        None, "Strategy file of any front end, in the place of degrees and of fields about the division."
    )
    lora_config: str | None = _define(None, "JSON file of peft's LoraConfig.")
    adapter_name: str = _define("default", "Name of the adapter.")

    def __post_init__(self) -> None:
        self._check_fields()
        if self.save_total_limit is not None and self.save_total_limit < 0:
            self.save_total_limit = None  # Merak writes -1 for all, transformers None
        if isinstance(self.custom_split_points, str):
            self.custom_split_points = [self.custom_split_points]
        if self.gradient_checkpointing is False:  # the former name
            self.activation_checkpointing = False
        wants_saves = self.save or self.load_best_model_at_end or self.save_steps != USUAL_SAVE_STEPS
        if wants_saves and self.save_strategy == "no":
            # transformers demands that load_best_model_at_end saves whenever it evaluates.
            self.save_strategy = self.eval_strategy if self.load_best_model_at_end else "steps"
        if Cluster.detect().device_type == "cpu":
            self.use_cpu = True  # without it, accelerate sees no other process
        super().__post_init__()  # type: ignore[no-untyped-call]

    @property
    def recompute_shares(self) -> tuple[float, ...] | float | None:
        """``activation_checkpoint_ratio`` as numbers: one for the first stage, or one for each."""
        value = self.activation_checkpoint_ratio
        if value is None:
            return None
        shares = tuple(float(part) for part in _split_numbers(value))
        return shares[0] if len(shares) == 1 else shares

    @property
    def partition(self) -> tuple[int, ...]:
        """``custom_partition`` as numbers."""
        return tuple(int(part) for part in _split_numbers(self.custom_partition or ()))

    def lora(self) -> dict[str, Any] | None:
        """The contents of ``lora_config``.

        Raises:
            InputError: if it is not a file of a JSON object.
        """
        if self.lora_config is None:
            return None
        try:
            config = json.loads(Path(self.lora_config).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"lora_config: cannot read {self.lora_config}: {error}") from error
        if not isinstance(config, dict):
            raise InputError(
                f"lora_config: {self.lora_config} must hold a JSON object of LoraConfig's arguments."
            )
        return config

    def without_use(self) -> list[str]:
        """A sentence for each field that was set but has no use here."""
        defaults = type(self).__dataclass_fields__
        return [
            f"{name}={getattr(self, name)!r} changes nothing: {why}."
            for name, why in _NO_USE.items()
            if getattr(self, name) != defaults[name].default
        ]

    def _check_fields(self) -> None:
        problems = [
            f"{name}={value!r}:{did_you_mean(str(value), [str(choice) for choice in choices])} one of {', '.join(map(str, choices))}"
            for name, choices in _CHOICES.items()
            if (value := getattr(self, name)) not in choices or isinstance(value, bool)  # True equals 1
        ]
        problems += [
            f"{name}={value!r}: at least {least}"
            for name, least in _AT_LEAST.items()
            if (value := getattr(self, name)) is not None
            and not (isinstance(value, (int, float)) and value >= least)
        ]
        problems += [
            f"{name}={getattr(self, name)!r}: {why}"
            for name, why in _REFUSED.items()
            if getattr(self, name, None)
        ]
        problems += self._check_lists()
        try:
            if self.train_schedule != "auto":  # chooses among schedules
                get_schedule(self.train_schedule)
        except InputError as error:
            problems.append(f"train_schedule={self.train_schedule!r}: {error}")
        if not self.gradient_predivide_factor > 0:
            problems.append(
                f"gradient_predivide_factor={self.gradient_predivide_factor!r}: a positive number"
            )
        if not 0 <= self.initial_scale_power <= LARGEST_SCALE_POWER:
            problems.append(f"initial_scale_power={self.initial_scale_power!r}: 0 to {LARGEST_SCALE_POWER}")
        if problems:
            raise InputError("MerakArguments: " + "; ".join(problems) + ".")

    def _check_lists(self) -> list[str]:
        problems = []
        try:
            ratios = self.recompute_shares
            shares = ratios if isinstance(ratios, tuple) else () if ratios is None else (ratios,)
            if not all(0.0 <= share <= 1.0 for share in shares):
                raise ValueError  # reported below
        except (TypeError, ValueError):
            problems.append(
                f"activation_checkpoint_ratio={self.activation_checkpoint_ratio!r}: numbers from 0 to 1"
            )
        try:
            if (self.partition_method == "custom") != bool(self.partition):
                problems.append("custom_partition: it and partition_method='custom' need each other")
        except (TypeError, ValueError):
            problems.append(f"custom_partition={self.custom_partition!r}: numbers such as 0,6,12")
        if self.custom_split_points and self.split_method != "layer_split":
            problems.append("custom_split_points: they need split_method='layer_split'")
        return problems


def _split_numbers(numbers: Any) -> list[str]:
    items = numbers if isinstance(numbers, (list, tuple)) else [numbers]
    return [part for item in items for part in str(item).replace(",", " ").split()]  # ["0,6,12"]
