"""TrainerArgs and its parts: everything that a Trainer is told, from Python or from a YAML file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from os import PathLike
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from atorch_ns.errors import InputError
from atorch_ns.parallel import ComputeConfig
from atorch_ns.text import count_noun
from atorch_ns.trainer.hooks import HOOKS

Named = str | Callable[..., Any] | None
"""A class or function, or its name: ``pkg.mod.Name``, ``pkg.mod:Name`` or ``file.py:Name``."""

PrecisionName = Literal["fp32", "fp16", "bf16", "none"]
Precision = PrecisionName | dict[Literal["param", "buffer", "input"], PrecisionName] | None


class _Strict:
    """Strict reading: an unknown key is an error, and values set in Python are checked as a file's are."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, revalidate_instances="always"
    )


@dataclass
class _TypeWithArgs(_Strict):
    """An object created as ``type(**args)``."""

    type: Named = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class _TypeOfData(_Strict):
    """An object created as ``type(**args)`` for each kind of data."""

    type: Named = None
    train_args: dict[str, Any] = field(default_factory=dict)
    val_args: dict[str, Any] = field(default_factory=dict)
    test_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptionalComputeConfig(_Strict):
    """The :class:`~atorch_ns.ComputeConfig` of one parallel module; ``None`` for the trainer's value."""

    constant_folding: bool | None = None
    trace_strategy: str | None = None
    use_zero: bool | None = None
    zero_ngroups: int | None = None
    zero_use_reduce_scatter: bool | None = None
    use_async_reducer: bool | None = None
    reducer_bucket_cap_mb: float | None = None
    pas_config: dict[str, Any] | None = None
    user_config: dict[str, Any] | None = None


@dataclass
class ModuleParallelizeConfig(_TypeWithArgs):
    """A class of modules inside the model that is parallelized instead of the whole model.

    Attributes:
        type: the class. Every module of it in the model is replaced and keeps its weights.
        args: accepted, but the model creates the modules.
        forward_args_gen_fn: ``(trainer_args) -> dummy arguments of forward by name``.
        tracing_from_weights: file with initial weights for all modules of the class.
        tracing_from_weights_prefix: in its place, where they stand in the trainer's ``tracing_from_weights``.
        compute_config: its own settings. ``None`` fields default to those of :class:`TrainerArgs`.
    """

    forward_args_gen_fn: Named = None
    tracing_from_weights: str | None = None
    tracing_from_weights_prefix: str | None = None
    compute_config: OptionalComputeConfig | None = None
    gen_savedir: str | None = None
    gen_reuse: str | None = None
    pas_policy: Named = None
    broadcast_strategy: str | None = None
    instance_name: str | None = None
    precision: Precision = None


@dataclass
class ModelConfig(_TypeWithArgs):
    """The model, ``type(**args)``. ``parallel_modules`` are parallelized instead of the whole model."""

    parallel_modules: list[ModuleParallelizeConfig] = field(default_factory=list)


@dataclass
class OptimizerConfig(_TypeWithArgs):
    """The optimizer: ``type(parameters, **args)``.

    Attributes:
        clip_gnorm: the norm that gradients are clipped to. 0 or ``None`` for none.
        loss_reduction: reduction of ``train_loss`` over the micro-batches of a step, ``mean`` or ``sum``.
        grad_reduction: ``mean`` or ``sum`` of gradients over micro-batches, or ``per-token-mean``.
        aggregate_outputs_fn: ``(loss_outputs, sync_group) -> AggregatedOutputs``: the outputs of a step
            on this rank, summed over ``sync_group``. ``per-token-mean`` needs it, for ``num_tokens``.
    """

    clip_gnorm: float | None = 0.0
    loss_reduction: Literal["mean", "sum"] = "mean"
    grad_reduction: Literal["mean", "sum", "per-token-mean"] = "mean"
    aggregate_outputs_fn: Named = None


@dataclass
class DatasetConfig(_TypeOfData):
    """Datasets: ``type(**train_args)``, and ``type(**val_args)`` if there are any."""


@dataclass
class DataloaderConfig(_TypeOfData):
    """Data loaders: ``type(dataset=, batch_size=, sampler=, **args)``; ``val_args``, else ``train_args``."""

    type: Named = "torch.utils.data.DataLoader"


@dataclass
class DatasetSamplerConfig(_TypeOfData):
    """Samplers: ``type(dataset=, num_replicas=, rank=, **args)``; those three in ``args`` are ignored."""

    type: Named = "torch.utils.data.DistributedSampler"


@dataclass
class LRSchedulerConfig(_TypeWithArgs):
    """The scheduler: ``type(optimizer, **args)``, stepped after each ``interval``: ``epoch`` or ``step``."""

    interval: Literal["epoch", "step"] = "epoch"


@dataclass
class CheckpointConfig(_Strict):
    """Settings for saving checkpoints, and for the one that training starts from.

    Attributes:
        save_dir: the folder of checkpoints, which all ranks share.
        no_save: whether to save nothing.
        save_type: ``sharded``, ``deduped``: each rank writes its part, a tensor once; ``merged``: a file too.
        save_last: whether ``last`` is the newest checkpoint.
        save_best: whether ``best`` is that of the lowest ``val_loss``, or ``train_loss`` without validation.
        symlink_best_and_last: whether these are links; else copies.
        every_n_train_steps: steps between checkpoints; ``None`` for none by steps.
        every_n_epochs: epochs between checkpoints; ``None`` for none by epochs. The end is always saved.
        keep_last_n_checkpoints: the newest that stay, besides ``last`` and ``best``; ``None`` for all.
        resume_from: ``last`` or ``best``, which need not exist yet; a folder, or a merged file.
    """

    save_dir: str = "./checkpoints"
    no_save: bool = False
    save_type: Literal["sharded", "deduped", "merged"] = "sharded"
    save_last: bool = True
    save_best: bool = True
    symlink_best_and_last: bool = True
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    keep_last_n_checkpoints: int | None = None
    resume_from: str | None = None


@dataclass
class LogConfig(_TypeWithArgs):
    """A logger: ``type(**args)``."""


@dataclass
class HookConfig(_TypeWithArgs):
    """A hook: ``type(**args)``, a :class:`~atorch_ns.trainer.TrainHook`."""


_Hooks = make_dataclass("_Hooks", [(name, Named, None) for name in HOOKS], bases=(_Strict,))


class HookMapConfig(_Hooks):  # type: ignore[misc,valid-type]
    """Functions by the names of :class:`~atorch_ns.trainer.TrainHook`'s methods."""


@dataclass
class TrainerArgs(_Strict):
    """Configuration of a :class:`~atorch_ns.trainer.Trainer`.

    Attributes:
        compute_config: the ranks; by default every rank is a scale unit of its own.
        gen_savedir: the folder of plans.
        gen_reuse: as ``reuse`` of :func:`~atorch_ns.parallelize`; ``auto`` is ``moo``: ranks may change.
        pas_policy: a policy of :func:`~atorch_ns.parallelize`, by name or as a function; a strategy file of
            :func:`~atorch_ns.auto_accelerate`; or ``auto``, which searches for a strategy.
        save_strategy_to_file: file that the strategy is written to as it was applied, JSON or YAML by suffix.
        broadcast_strategy: as that of :func:`~atorch_ns.parallelize`.
        instance_name: tells plans of one class apart.
        run_mode: ``run``, or ``compile`` to plan alone, which needs no ranks.
        tracing_from_weights: file of weights that training begins with.
        model: ``forward(sample)``, or ``forward(**sample)`` if it can, returns the loss first or as ``loss``.
        optimizer: the optimizer, and how gradients are reduced and clipped.
        dataset, dataloader: training and validation data, and what batches them.
        dataset_sampler: samplers that divide data over the scale units.
        lr_scheduler: the scheduler; ``None`` for none.
        checkpoint, log: settings for saving and resuming, and loggers.
        hook: a hook, or functions by name.
        precision: dtype of parameters, buffers and inputs, or of each; ``None`` leaves the model's.
        micro_batch_size: samples of one forward pass.
        global_batch_size: samples of a step over all ranks.
        grad_accumulation_steps: micro-batches of a step on each rank; by default from ``global_batch_size``.
        max_epochs, max_train_steps: ``None`` for no limit.
        max_val_steps: ``None`` for all validation data.
        val_every_n_train_steps, val_every_n_epochs: ``None`` for no validation by steps, or by epochs.
        enable_progress_bar: a bar on a terminal, else a line now and then.
        log_progress_every_n_train_steps: steps between lines of the log.
        seed: seed of all random numbers; scale unit u trains with ``seed + u``.
        init_env_fn: ``(trainer) -> None``, called before anything is made; may replace ``seed``.

    Raises:
        InputError: naming every field that is wrong.
    """

    compute_config: ComputeConfig | None = None

    gen_savedir: str = "./.atorch_ns"
    gen_reuse: Literal["auto", "match", "override", "moo", "graph"] = "auto"
    pas_policy: Named | PathLike[str] = "autodist"
    save_strategy_to_file: str | None = None
    broadcast_strategy: Literal["none", "all", "no_weights", "code"] = "all"
    instance_name: str | None = None
    run_mode: Literal["run", "compile"] = "run"
    tracing_from_weights: str | None = None

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    dataset_sampler: DatasetSamplerConfig = field(default_factory=DatasetSamplerConfig)
    lr_scheduler: LRSchedulerConfig | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: list[LogConfig] = field(default_factory=list)
    hook: HookConfig | HookMapConfig | None = None

    precision: Precision = None

    micro_batch_size: int = 1
    global_batch_size: int | None = None
    grad_accumulation_steps: int | None = None

    max_epochs: int | None = None
    max_train_steps: int | None = None
    max_val_steps: int | None = None

    val_every_n_train_steps: int | None = None
    val_every_n_epochs: int | None = 1

    enable_progress_bar: bool = True
    log_progress_every_n_train_steps: int = 100

    seed: int | None = None
    init_env_fn: Named = None

    def check(self) -> None:
        """Refuses configurations that cannot be trained.

        Raises:
            InputError: with every problem.
        """
        problems = [*self._find_missing(), *self._not_positive(), *self._find_contradictions()]
        if problems:
            raise InputError("TrainerArgs: " + "\nTrainerArgs: ".join(problems))

    def _find_missing(self) -> list[str]:
        types = {
            "model.type": self.model.type,
            "optimizer.type": self.optimizer.type,
            "dataset.type": self.dataset.type,
        }
        problems = [f"{name} must be set." for name, value in types.items() if value is None]
        if self.lr_scheduler is not None and self.lr_scheduler.type is None:
            problems.append("lr_scheduler.type must be set.")
        problems += [
            f"log.{index}.type must be set." for index, config in enumerate(self.log) if config.type is None
        ]
        return problems

    def _not_positive(self) -> list[str]:
        values: list[tuple[str, Any]] = [
            (name, getattr(self, name))
            for name in (
                "micro_batch_size", "global_batch_size", "grad_accumulation_steps", "max_epochs",
                "max_train_steps", "max_val_steps", "val_every_n_train_steps", "val_every_n_epochs",
                "log_progress_every_n_train_steps",
            )
        ]  # fmt: skip
        values += [
            (f"checkpoint.{name}", getattr(self.checkpoint, name))
            for name in ("every_n_train_steps", "every_n_epochs", "keep_last_n_checkpoints")
        ]
        return [
            f"{name} must be a positive integer; it is {value!r}."
            for name, value in values
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
        ]

    def _find_contradictions(self) -> list[str]:
        problems = []
        config = self.compute_config
        if config is not None and not config.use_end2end:
            problems.append(
                "compute_config.use_end2end must be True: the Trainer runs modules whose forward takes a sample and returns the loss."
            )
        if config is not None and config.inference_only:
            problems.append(
                "compute_config.inference_only must be False: there is nothing to train otherwise."
            )
        if self.optimizer.grad_reduction == "per-token-mean" and self.optimizer.aggregate_outputs_fn is None:
            problems.append(
                "optimizer.grad_reduction=per-token-mean needs optimizer.aggregate_outputs_fn, which counts the tokens."
            )
        clip = self.optimizer.clip_gnorm
        if clip is not None and not clip >= 0.0:  # also refuses NaN
            problems.append(f"optimizer.clip_gnorm must be a norm, or 0 for no clipping; it is {clip!r}.")
        problems += [
            f"dataloader.{name} has batch_size, which is micro_batch_size of the Trainer: set that."
            for name in ("train_args", "val_args", "test_args")
            if "batch_size" in getattr(self.dataloader, name)
        ]
        if self.checkpoint.every_n_train_steps is not None and self.checkpoint.every_n_epochs is not None:
            problems.append("checkpoint.every_n_train_steps and checkpoint.every_n_epochs: give one of them.")
        return problems

    def num_micro_batches(self, data_ranks: int) -> int:
        """Micro-batches of a step on each of the ranks that see different data.

        Raises:
            InputError: if the sizes contradict each other.
        """
        samples = self.micro_batch_size * data_ranks  # of one micro-batch on every rank
        if self.global_batch_size is None:
            return self.grad_accumulation_steps or 1
        ranks = f"{count_noun(data_ranks, 'rank')} with {'its' if data_ranks == 1 else 'their'} own data"
        if self.global_batch_size % samples:
            raise InputError(
                f"TrainerArgs: global_batch_size={self.global_batch_size} is not a multiple of micro_batch_size="
                f"{self.micro_batch_size} times {ranks}."
            )
        count = self.global_batch_size // samples
        if self.grad_accumulation_steps not in (None, count):
            raise InputError(
                f"TrainerArgs: global_batch_size={self.global_batch_size} on {ranks} makes {count} micro-batches of "
                f"{self.micro_batch_size}, but grad_accumulation_steps={self.grad_accumulation_steps}: leave one of them out."
            )
        return count

    @property
    def hook_functions(self) -> dict[str, Named]:
        """The functions of a hook map, by name."""
        if not isinstance(self.hook, HookMapConfig):
            return {}
        return {entry.name: value for entry in fields(self.hook) if (value := getattr(self.hook, entry.name))}
