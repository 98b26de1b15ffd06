"""Trainer: the loop of epochs, steps, validations and checkpoints, over the phases of a TrainStep."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from atorch_ns.capture.random_states import random_states_kept, seed_all
from atorch_ns.checkpoint.contents import capture_rng, restore_rng
from atorch_ns.cluster import Cluster, join_process_group
from atorch_ns.errors import InputError
from atorch_ns.job import Result
from atorch_ns.job.optimizer.step_optimizer import inner_optimizer
from atorch_ns.text import count_noun, with_article
from atorch_ns.tracking import ProgressTracker
from atorch_ns.trainer.args import HookConfig, TrainerArgs
from atorch_ns.trainer.batches import Data, Window, make_data, make_dataset
from atorch_ns.trainer.checkpoints import Checkpoints, Loaded, TrainStatus, merge_folder
from atorch_ns.trainer.components import check_names, make, resolve_component
from atorch_ns.trainer.hooks import HookChain, TrainHook, TrainStepMetrics, ValMetrics
from atorch_ns.trainer.loggers import BUILT_IN, LoggerBase, set_default_logger_level
from atorch_ns.trainer.outputs import Aggregation
from atorch_ns.trainer.prepare import compile_plan, prepare
from atorch_ns.trainer.reading import as_plain, check_arguments, made_args, read_args

log = logging.getLogger("atorch_ns")


class Trainer:
    """Trains a model as :class:`~atorch_ns.trainer.TrainerArgs` say, on all ranks that started it.

    Args:
        argv: words of a command line: ``-f config.yaml`` and overrides; by default those of this process.
        train_args: the arguments, or plain data for them, instead of ``argv``.

    Attributes:
        model: the trained model: a :class:`~atorch_ns.ParallelModule`, or the result of a strategy.
        optimizer, lr_scheduler: its optimizer and scheduler. The latter may be ``None``.
        result: the result of the strategy, with the report: ``print(trainer.result.report)``.
        train_status: progress of training.
        rank, world_size: this process, and the number of processes.

    Raises:
        InputError: for wrong arguments, naming every one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    result: Result

    def __init__(
        self, argv: Sequence[str] | None = None, *, train_args: TrainerArgs | Mapping[str, Any] | None = None
    ) -> None:
        if argv is not None and train_args is not None:
            raise InputError("Trainer takes argv or train_args, and not both.")
        if train_args is None:
            train_args = read_args(sys.argv[1:] if argv is None else argv)
        elif isinstance(train_args, Mapping):
            train_args = made_args(train_args)
        elif not isinstance(train_args, TrainerArgs):
            raise InputError(f"train_args must be TrainerArgs; it is {with_article(train_args)}.")
        self.train_args = check_arguments(train_args)
        self.train_status = TrainStatus()
        self._cluster = Cluster.detect()
        self.rank, self.world_size = self._cluster.rank, self._cluster.world_size
        self.hook = HookChain(self, (), {})
        self._loggers: list[LoggerBase] = []
        self._progress: ProgressTracker | None = None
        self._window = Window([], [])  # the step under way, for hooks
        self._epoch_rng: dict[str, torch.Tensor] = {}  # random states when the epoch began
        self._validated_at: int | None = None  # finished_train_steps of the last validation
        self._saved_at: int | None = None  # and of the last checkpoint: no step is saved twice

    def run(self) -> None:
        """Plans and trains, or only plans. Collective.

        Raises:
            AtorchError: on all ranks, with the cause.
        """
        args, cluster = self.train_args, self._cluster
        if args.run_mode == "compile":
            compile_plan(args, self._seed_and_make_dataset())
            return
        join_process_group(cluster)
        dataset = cluster.agree(self._seed_and_make_dataset, what="making the dataset")
        try:
            self._set_up(dataset)
            with self.result.train_step.sharing_failures():
                saved_run = self._checkpoints.load()
                if saved_run is not None:
                    self._resume_training(saved_run)
                self.hook.call("after_setup")
                self._run_training(saved_run)
                self.hook.call("on_finalize")
        finally:
            for logger in self._loggers:
                logger.finalize()
            if self._progress is not None:
                self._progress.close()

    def _seed_and_make_dataset(self) -> Any:
        args = self.train_args
        if args.init_env_fn is not None:
            resolve_component(args.init_env_fn, what="init_env_fn")(self)
        check_names(args, aliases=BUILT_IN)  # after that function, which may make modules known
        if args.seed is not None:
            seed_all(args.seed)  # before the dataset, which may draw from it
        return make_dataset(args, "train")

    @classmethod
    def merge_checkpoint(cls, checkpoint_files: Sequence[str], output_file: str) -> None:
        """Writes a checkpoint as one file for ``torch.load``. Any plan on any ranks resumes from it.

        Args:
            checkpoint_files: the folder of a checkpoint, or files in it.
            output_file: the file.

        Raises:
            CheckpointError: if the checkpoint is missing or damaged.
            InputError: if the files are of several checkpoints.
        """
        folders = {path if path.is_dir() else path.parent for path in map(Path, checkpoint_files)}
        if len(folders) != 1:
            raise InputError(f"checkpoint_files belong to {len(folders)} checkpoints; give those of one.")
        merge_folder(folders.pop().resolve(), Path(output_file))

    merge_checkpoints = merge_checkpoint

    # Setting up

    def _set_up(self, dataset: Any) -> None:
        args, cluster = self.train_args, self._cluster
        self.result, self.model = prepare(args, dataset, cluster)
        job = self.result.job
        assert self.result.optim is not None
        self.optimizer, self.lr_scheduler = self.result.optim, self.result.lr_scheduler
        cluster.agree(lambda: self._make_data(dataset), what="making data loaders, hooks and loggers")
        self._checkpoints = Checkpoints(args.checkpoint, self.result, as_plain(args))
        self._checkpoints.check_folder()
        if args.seed is not None:
            seed_all(args.seed + job.data_rank)  # ranks with the same data draw the same dropout

    def _make_data(self, dataset: Any) -> None:
        args, job = self.train_args, self.result.job
        data_ranks = job.num_data_ranks
        num = args.num_micro_batches(data_ranks)
        batch_size = args.micro_batch_size
        if job.step.num_micro_batches > 1:  # as a strategy has it
            per_rank = num * batch_size
            num, batch_size = job.step.num_micro_batches, per_rank // job.step.num_micro_batches
            if num * batch_size != per_rank:
                raise InputError(
                    f"the strategy makes {num} micro-batches, which do not divide the {per_rank} samples of a rank."
                )
        options = {
            "batch_size": batch_size,
            "num_micro_batches": num,
            "data_rank": job.data_rank,
            "data_ranks": data_ranks,
        }
        self._train_data = make_data(args, "train", dataset, **options)
        val = make_dataset(args, "val")
        self._val_data = None if val is None else make_data(args, "val", val, **options)
        self.train_status.global_batch_size = num * batch_size * data_ranks
        self._aggregation = Aggregation.of(args, job)
        self._make_hooks()
        self._make_loggers()

    def _make_hooks(self) -> None:
        args, step = self.train_args, self.result.train_step
        user_hook: Any = None
        if isinstance(args.hook, HookConfig):
            user_hook = make(args.hook.type, options=args.hook.args, what="hook")
            if not isinstance(user_hook, TrainHook):
                raise InputError(f"hook.type must make a TrainHook; it made {with_article(user_hook)}.")
        functions = {
            name: resolve_component(value, what=f"hook.{name}") for name, value in args.hook_functions.items()
        }
        plain = self.result.job.inputs.model
        self.hook = HookChain(
            self, (plain, inner_optimizer(self.optimizer), self.lr_scheduler, user_hook), functions
        )
        step.observe("zero", lambda: self.hook.call("before_zero_grad"), when="before")
        step.observe("zero", self._call_zero_grad_hooks)
        self._waits = False
        reducer = self.result.job.gradients.reducer
        if self.hook.has("before_sync_grad") and reducer is not None:
            reducer.wait_until_told()  # so that the hook sees whole gradients of this rank
            self._waits = True

    def _call_zero_grad_hooks(self) -> None:
        self.hook.call("after_zero_grad")
        self.hook.call("on_train_step_start", batches=self._window.real)
        if not self._waits:  # gradients are sent during the backward pass
            self.hook.call("before_sync_grad")

    def _make_loggers(self) -> None:
        args = self.train_args
        if self.rank != 0:
            return
        for index, config in enumerate(args.log):
            kind = BUILT_IN.get(config.type, config.type) if isinstance(config.type, str) else config.type
            logger = make(kind, options=config.args, what=f"log.{index}")
            if not callable(getattr(logger, "log_metrics", None)):
                raise InputError(f"log.{index}.type must make a LoggerBase; it made {with_article(logger)}.")
            logger.setup(as_plain(args))
            self._loggers.append(logger)
        if args.enable_progress_bar:
            self._progress = ProgressTracker(self._num_steps())

    def _num_steps(self) -> int | None:
        args, per_epoch = self.train_args, self._train_data.num_steps
        by_epochs = None if args.max_epochs is None or per_epoch is None else args.max_epochs * per_epoch
        limits = [number for number in (args.max_train_steps, by_epochs) if number is not None]
        return min(limits, default=None)  # unknown without a limit

    def _resume_training(self, saved_run: Loaded) -> None:
        size = self.train_status.global_batch_size
        self.train_status = saved_run.status
        status = self.train_status
        if not status.global_batch_size and self._train_data.num_steps:  # of a loop that counted no batches
            steps = status.finished_train_steps
            status.epoch, status.step_in_epoch = divmod(steps, self._train_data.num_steps)
        if not self._checkpoints.has_best:  # it is of another folder
            status.best_loss = float("inf")
        if status.global_batch_size not in (0, size):
            samples = status.step_in_epoch * status.global_batch_size  # of the epoch that have been seen
            status.step_in_epoch, rest = divmod(samples, size)
            log.warning(
                "The global batch changed from %d to %d: the epoch continues after %d of its steps%s.",
                status.global_batch_size,
                size,
                status.step_in_epoch,
                f", and sees {rest} samples again" if rest else "",
            )
        status.global_batch_size = size
        self._saved_at = self._validated_at = status.finished_train_steps  # nothing to validate or save yet
        self.hook.call("on_load_checkpoint", checkpoint={**saved_run.custom, **self._checkpoint_fields()})
        if self.rank == 0:
            log.info(
                "Resumed from %s: epoch %d, after %d steps; saved on %s, and going on on %s.",
                saved_run.path,
                status.epoch,
                status.finished_train_steps,
                count_noun(saved_run.world_size, "rank"),
                count_noun(self.world_size, "rank"),
            )

    # The loop

    def _run_training(self, saved_run: Loaded | None) -> None:
        args, status = self.train_args, self.train_status
        if self.rank == 0:
            log.info("Training...")
        self.hook.call("on_train_start")
        last_epoch = status.epoch
        while not self._is_over():
            last_epoch = status.epoch
            self._run_epoch(saved_run)
            saved_run = None  # only its epoch begins in the middle
        if self.rank == 0:
            limit, number = (
                ("epochs", args.max_epochs)
                if args.max_train_steps is None or status.finished_train_steps < args.max_train_steps
                else ("train steps", args.max_train_steps)
            )
            log.info("Reached max %s(%s): Training is done.", limit, number)
        if status.train_loss is not None:  # a step has been taken
            self._save_checkpoint(last_epoch)
        self.hook.call("on_train_end")

    def _is_over(self) -> bool:
        args, status = self.train_args, self.train_status
        return (args.max_epochs is not None and status.epoch >= args.max_epochs) or self._has_all_steps()

    def _has_all_steps(self) -> bool:
        most = self.train_args.max_train_steps
        return most is not None and self.train_status.finished_train_steps >= most

    def _run_epoch(self, saved_run: Loaded | None) -> None:
        args, status, data = self.train_args, self.train_status, self._train_data
        epoch = status.epoch
        self.hook.call("on_epoch_start", epoch=epoch)
        began = status.step_in_epoch
        windows = self._remaining_windows(data, saved_run)
        while True:
            if self._has_all_steps() and status.step_in_epoch != data.num_steps:
                return  # before more data are read, which may draw random numbers
            window = next(windows, None)
            if window is None:
                break
            self._run_train_step(epoch, window)
            self._after_step(epoch)
        if status.step_in_epoch == began == 0:
            raise InputError("the data loader yields no batches: there is nothing to train on.")
        is_due = args.lr_scheduler is not None and args.lr_scheduler.interval == "epoch"
        waits = isinstance(self.lr_scheduler, ReduceLROnPlateau)  # for the loss of this epoch's validation
        if is_due and not waits:
            self._step_scheduler()
        self.hook.call("on_epoch_end", epoch=epoch)
        status.epoch, status.step_in_epoch = epoch + 1, 0
        if self._val_data is not None and _is_due(epoch + 1, args.val_every_n_epochs):
            self._run_validation()
        if is_due and waits:
            self._step_scheduler()
        if _is_due(epoch + 1, args.checkpoint.every_n_epochs):
            self._save_checkpoint(epoch)

    def _remaining_windows(self, data: Data, saved_run: Loaded | None) -> Iterator[Window]:
        status, job = self.train_status, self.result.job
        data.set_epoch(status.epoch)
        skip = status.step_in_epoch
        now = capture_rng(job.device, job.step.randomness)
        if saved_run is not None and saved_run.epoch_rng is not None and skip:  # shuffled as in the first run
            restore_rng(saved_run.epoch_rng, job.device, job.step.randomness)
        self._epoch_rng = capture_rng(job.device, job.step.randomness)
        windows = data.windows()
        if skip:
            for _ in islice(windows, skip):  # batches that were trained on already
                pass
            restore_rng(now, job.device, job.step.randomness)  # states as they were at the save
        return windows

    def _after_step(self, epoch: int) -> None:
        args, status = self.train_args, self.train_status
        steps = status.finished_train_steps
        if self._val_data is not None and _is_due(steps, args.val_every_n_train_steps):
            self._run_validation()
        if _is_due(steps, args.checkpoint.every_n_train_steps):
            self._save_checkpoint(epoch)

    def _run_train_step(self, epoch: int, window: Window) -> None:
        args, status, step, hook = self.train_args, self.train_status, self.result.train_step, self.hook
        start, self._window = time.perf_counter(), window
        by_tokens = args.optimizer.grad_reduction == "per-token-mean"
        hook.call("on_step_start", epoch=epoch, idx=status.step_in_epoch)
        # Passes of all micro-batches; then gradients are reduced, scaled and clipped, with hooks in between.
        output = step.micro_gradients(
            window.samples,
            dummies=window.dummies,
            reduction="mean" if args.optimizer.grad_reduction == "mean" else "sum",
            outputs=self._aggregation.wants_outputs or hook.has("on_train_step_end"),
        )
        hook.call("on_train_step_end", outputs=list(output.outputs))
        totals = self._aggregation.over_ranks(output, len(window.real))
        is_sum = args.optimizer.loss_reduction == "sum"
        loss = status.train_loss = totals.loss_sum if is_sum else totals.mean_loss
        hook.call("after_aggregate_train_step_outputs", aggregated_outputs=totals, train_loss=loss)
        if self._waits:  # the reducer was told to wait for this hook
            hook.call("before_sync_grad")
        step.reduce()
        hook.call("after_sync_grad")
        step.scale(1.0 / totals.require_tokens() if by_tokens else None)
        hook.call("before_gnorm_clip")
        step.clip()
        assert step.grad_norm is not None
        hook.call("after_gnorm_clip", gnorm=step.grad_norm)
        rate = self.optimizer.param_groups[0]["lr"]  # this step's: the scheduler comes after it
        hook.call("before_optimizer_step")
        step.update()
        hook.call("after_optimizer_step")
        if args.lr_scheduler is not None and args.lr_scheduler.interval == "step":
            self._step_scheduler()
        idx = status.step_in_epoch
        status.step_in_epoch += 1
        status.finished_train_steps += 1
        metrics = TrainStepMetrics(
            train_loss=loss,
            loss=loss,
            lr=float(rate),
            gnorm=float(step.grad_norm),
            train_wall=time.perf_counter() - start,
            **_memory_metrics(self.result.device),
        )
        hook.call("before_log_train_metrics", step_metrics=metrics, aggregated_outputs=totals)
        self._log_metrics(asdict(metrics), "train")
        self._show_progress(epoch, idx, metrics)
        hook.call("on_step_end", epoch=epoch, idx=idx, step_metrics=metrics, aggregated_outputs=totals)

    def _step_scheduler(self) -> None:
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):  # which takes a metric
            status = self.train_status
            loss = status.train_loss if status.val_loss is None else status.val_loss
            assert loss is not None
            self.lr_scheduler.step(loss)
        else:
            self.lr_scheduler.step()

    # Validation, checkpoints and logs

    def _run_validation(self) -> None:
        data, status, hook = self._val_data, self.train_status, self.hook
        if data is None or self._validated_at == status.finished_train_steps:
            return
        start, losses, batches = time.perf_counter(), 0.0, 0
        step = self.result.train_step
        hook.call("on_val_start")
        with random_states_kept(self.result.device):  # training draws the same numbers as without it
            for window in islice(data.windows(), self.train_args.max_val_steps):
                hook.call("on_val_step_start", batches=window.real)
                wants = self._aggregation.wants_outputs or hook.has("on_val_step_end")
                output = step.infer(window.samples, dummies=window.dummies, outputs=wants)
                hook.call("on_val_step_end", outputs=list(output.outputs))
                totals = self._aggregation.over_ranks(output, len(window.real))
                hook.call(
                    "after_aggregate_val_step_outputs", aggregated_outputs=totals, val_loss=totals.mean_loss
                )
                losses, batches = losses + totals.loss_sum, batches + totals.num_batches
        if not batches:
            raise InputError("the validation data yields no batches.")
        metrics = ValMetrics(val_loss=losses / batches, val_wall=time.perf_counter() - start)
        status.val_loss, self._validated_at = metrics.val_loss, status.finished_train_steps
        hook.call("on_val_end", val_loss=metrics.val_loss)
        hook.call("before_log_val_metrics", metrics=metrics)
        self._log_metrics(asdict(metrics), "val")
        if self.rank == 0:
            log.info(
                "Validation after %d steps: val_loss=%.3f, val_wall=%.3f",
                status.finished_train_steps,
                metrics.val_loss,
                metrics.val_wall,
            )

    def _save_checkpoint(self, epoch: int) -> None:
        status = self.train_status
        if self.train_args.checkpoint.no_save or self._saved_at == status.finished_train_steps:
            return
        self._run_validation()  # its loss decides which checkpoint is best
        document, fields = self._checkpoint_fields(), self._checkpoint_fields()  # hooks change the first
        self.hook.call("on_save_checkpoint", checkpoint=document)
        custom = {key: value for key, value in document.items() if key not in fields}
        self._checkpoints.save(epoch, status, custom, self._epoch_rng)
        self._saved_at = status.finished_train_steps

    def _checkpoint_fields(self) -> dict[str, Any]:
        return {
            "train_status": self.train_status.as_json(),
            "train_args": as_plain(self.train_args),
            "rank": self.rank,
        }

    def _log_metrics(self, metrics: Mapping[str, Any], tag: str) -> None:
        numbers = {name: value for name, value in metrics.items() if value is not None}  # no memory on CPU
        for logger in self._loggers:
            logger.log_metrics(numbers, self.train_status.finished_train_steps, tag=tag)

    def _show_progress(self, epoch: int, idx: int, metrics: TrainStepMetrics) -> None:
        if self.rank != 0:
            return
        status, args = self.train_status, self.train_args
        steps = status.finished_train_steps
        if self._progress is not None:
            values = {
                "train/loss": metrics.train_loss,
                "train/grad_norm": metrics.gnorm,
                "train/lr": metrics.lr,
            }
            self._progress.log(values, steps)
        total = self._train_data.num_steps
        is_last = idx + 1 == total or self._has_all_steps()
        if is_last or _is_due(steps, args.log_progress_every_n_train_steps):
            of = f"{idx + 1:0{len(str(total))}d}/{total}" if total is not None else str(idx + 1)
            log.info(
                "Epoch %d: %s train_loss=%.3f, lr=%.3g, gnorm=%.3f, train_wall=%.3f",
                *(epoch, of, metrics.train_loss, metrics.lr, metrics.gnorm, metrics.train_wall),
            )


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number > 0 and number % every == 0


def _memory_metrics(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    free, _ = torch.cuda.mem_get_info(device)
    return {
        "cuda_gb_allocated": torch.cuda.max_memory_allocated(device) / 1e9,
        "cuda_gb_reserved": torch.cuda.max_memory_reserved(device) / 1e9,
        "cuda_gb_free": free / 1e9,
    }


def train(argv: Sequence[str]) -> Trainer:
    """Trains as ``-f config.yaml`` and overrides say, with a log of INFO level, which is reset afterwards."""
    logger = logging.getLogger("atorch_ns")
    level, handlers = logger.level, list(logger.handlers)
    set_default_logger_level("INFO")
    try:
        trainer = Trainer(argv)
        trainer.run()
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers
    return trainer
