"""MerakTrainer: transformers' Trainer on a model that ranks divide."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset
from transformers import Trainer

from atorch_ns import checkpoint
from atorch_ns.apply import attach_optimizer
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.checkpoint.contents import restore_rng
from atorch_ns.cluster import Cluster
from atorch_ns.errors import CheckpointError, InputError
from atorch_ns.job import Result
from atorch_ns.merak import checkpoints, mpu
from atorch_ns.merak.accelerator import (
    Batches,
    DataAccelerator,
    DataDraws,
    DistributedModel,
    First,
    SteppedOptimizer,
)
from atorch_ns.merak.args import MerakArguments
from atorch_ns.merak.auto import FoundDegrees, read_file, search
from atorch_ns.merak.generation import continued, ends_of, tokens_alone, tokens_of
from atorch_ns.merak.job import (
    arguments_of,
    build_job,
    check_recipe,
    num_micro_batches,
    options_by_name,
    refuse_hooks,
)
from atorch_ns.merak.losses import Sample, TrainerLoss, class_of, flat_loss
from atorch_ns.merak.models import prepare_model, structure_of_adapted
from atorch_ns.merak.strategy import notes_of, strategy_of
from atorch_ns.merak.wall_clock import WallClock
from atorch_ns.text import error_text, with_article

log = logging.getLogger("atorch_ns")


class MerakTrainer(Trainer):
    """transformers' ``Trainer`` for a model divided over the ranks arranged by :func:`init`.

    Every method is collective: all ranks call it. Arguments are those of ``Trainer``, and:

    Args:
        loss_fn: ``(logits, labels) -> loss``, both flattened if labels index classes. Otherwise the loss
            of ``Trainer``: the model's, ``compute_loss_func``'s, with label smoothing, or ``compute_loss``'s.
        leaf_modules: classes or names of modules that are never cut internally.

    Raises:
        InputError: for arguments that contradict each other or the model, before anything is divided.
    """

    args: MerakArguments
    model: Any
    optimizer: Any
    processing_class: Any
    accelerator: DataAccelerator

    def __init__(
        self,
        model: nn.Module | None = None,
        args: MerakArguments | None = None,
        *positional: Any,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        leaf_modules: tuple[type[nn.Module] | str, ...] = (),
        **others: Any,
    ) -> None:
        if not isinstance(args, MerakArguments):
            raise InputError(f"MerakTrainer needs args, a MerakArguments; it was given {with_article(args)}.")
        if loss_fn is not None and not callable(loss_fn):
            raise InputError(f"loss_fn must be callable; it is {with_article(loss_fn)}.")
        refuse_hooks(type(self))
        mpu.asked_degrees()
        self.loss_fn, self.leaf_modules = loss_fn, tuple(leaf_modules)
        self._recomputes = args.activation_checkpointing  # train() turns the argument off
        self._result: Result | None = None
        self._divided_model: nn.Module | None = None  # the model that _result was made of
        self._structure: nn.Module | None = None  # a copy without memory, for peft's files
        self._loss = TrainerLoss(self)
        self._distributed_model: DistributedModel | None = None
        self._waiting: list[Sample] = []  # micro-batches of the step under way
        self._begins_with: str | None = None  # a checkpoint whose weights alone are taken
        self._goes_on_from: str | None = None  # a checkpoint of another front end
        self._random: dict[str, torch.Tensor] | None = None  # random states to go on with
        self._draws: DataDraws | None = None
        if model is not None:
            model = prepare_model(args, model)
        super().__init__(model, args, *positional, **others)
        args._n_gpu = min(args._n_gpu, 1)  # several would mean nn.DataParallel
        if self.lr_scheduler is not None:
            raise InputError(
                "optimizers: the scheduler belongs to an optimizer of the undivided model. Give (optimizer, None) and name "
                "lr_scheduler_type, or override create_scheduler."
            )

    @property
    def result(self) -> Result:
        """The job with its report, strategy and training step.

        Raises:
            InputError: before the first training or evaluation.
        """
        if self._result is None:
            raise InputError(
                "the model is divided when training or evaluation begins; no job exists before that."
            )
        return self._result

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model of ``model_init``, checked and given adapters like a given model."""
        return prepare_model(self.args, super().call_model_init(trial))

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        arguments.pop("parallelism_config", None)  # the strategy decides on it
        arguments.pop("dynamo_plugin", None)  # compile is a method of the strategy
        arguments["mixed_precision"] = "no"  # precision is the strategy's
        arguments["dataloader_config"].dispatch_batches = False  # each data rank reads its own samples
        self._accelerator_args = arguments
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Creates an accelerator that counts the ranks which see different data."""
        super().create_accelerator_and_postprocess()
        self.accelerator = DataAccelerator(**self._accelerator_args)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        if self.args.eval_iters is not None and not is_training:
            most = self.args.eval_iters * batch_size * self.accelerator.num_processes  # of all data ranks
            has_length = hasattr(dataset, "__len__")
            dataset = Subset(dataset, range(min(most, len(dataset)))) if has_length else First(dataset, most)
        return super()._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Number of samples of a step over all ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """Like ``Trainer.train``, from a checkpoint of any rank layout. The strategy controls recomputation.

        Raises:
            CheckpointError: if there is no such checkpoint.
        """
        if self.args.text_generation:
            raise InputError("text_generation is for trainer.generate: leave it out to train.")
        path, goes_on = Cluster.detect().on_first(
            lambda: checkpoints.resolve_checkpoint(resume_from_checkpoint, self.args.output_dir or "."),
            what="looking for the checkpoint",
        )
        self._begins_with, resume_path = (None, path) if goes_on and not self.args.finetune else (path, None)
        self._goes_on_from = None
        if resume_path is not None and not checkpoints.has_trainer_state(resume_path):  # of another front end
            self._goes_on_from, resume_path = resume_path, None
        self.args.activation_checkpointing = False  # of transformers' own
        try:
            return super().train(resume_path, trial, ignore_keys_for_eval)
        finally:
            self.args.activation_checkpointing = self._recomputes

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._waiting = []
        if self._goes_on_from is not None:
            kwargs["resume_from_checkpoint"] = self._goes_on_from
        with self._ensure_job(partial(_draw_batch, self.get_train_dataloader)).train_step.sharing_failures():
            return super()._inner_training_loop(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Like ``Trainer.get_batch_samples``. Ranks with the same samples draw the same numbers for them."""
        with contextlib.nullcontext() if self._draws is None else self._draws.apart():
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if (
            self.args.train_sampling_strategy == "batch_rebalance"
            and self.accelerator.num_processes != self.args.world_size
        ):
            raise InputError(
                "train_sampling_strategy='batch_rebalance' splits samples over all processes, but some need the same ones here: "
                "use 'group_by_length'."
            )
        return super()._get_train_sampler(train_dataset)

    def _ensure_job(self, batch_of: Callable[[], Mapping[str, Any]]) -> Result:
        """The job of the current model, created at its first use. Collective."""
        if self._result is not None and self._divided_model is self.model:  # model_init makes new ones
            return self._result
        cluster = Cluster.detect()

        # The model gets this for a batch. compute_loss is called with a stand-in; no model runs.
        def look() -> Sample:
            batch = self._prepare_inputs(dict(batch_of()))
            return self._loss.sample(batch, torch.ones((), device=self.args.device))  # any number of items

        sample = cluster.agree(look, what="taking a sample of the data")
        self._loss.divides_by_items = None  # found at the first step of this model
        if self.optimizer is None and type(self).create_optimizer is not MerakTrainer.create_optimizer:
            self.create_optimizer()  # of a subclass, which makes it of the whole model
        self._decays = frozenset(self.get_decay_parameter_names(self.model))
        self._given_options = None if self.optimizer is None else options_by_name(self.optimizer, self.model)
        choice = self._find_strategy(cluster, sample)
        arguments = (self.args, mpu.get_grid(), self.model)
        read = partial(strategy_of, *arguments, self.leaf_modules, recomputes=self._recomputes)
        strategy = cluster.agree(read, what="reading the arguments")
        self._structure = structure_of_adapted(self.model)
        self._result = build_job(
            self.model,
            strategy if choice is None else choice.strategy,
            self._loss.of,
            sample,
            notes=notes_of(*arguments, recomputes=self._recomputes),
            outcome=None if choice is None else choice.outcome,
            optimizer_is_trusted=self.args.zero_allow_untested_optimizer,
        )
        self._divided_model = self.model
        self.accelerator.train_step = self._result.train_step
        shared = self.accelerator.num_processes < cluster.world_size  # some ranks need the same samples
        self._draws = DataDraws() if shared else None
        job = self._result.job
        roots = [job.module, *job.parts.stages]
        self._distributed_model = DistributedModel(self._result.train_step, roots, class_of(self.model))
        if self.is_world_process_zero():
            log.info("%s", self._result.applied)
        return self._result

    def _find_strategy(self, cluster: Cluster, sample: Sample) -> FoundDegrees | None:
        """The strategy of a file, or of a search if ``init`` left degrees open. Collective."""
        path = self.args.strategy_file
        if path is None:
            return None if mpu.is_decided() else self._search_degrees(cluster, sample)
        reader = partial(read_file, path, mpu.asked_degrees(), self._global_batch_size(cluster))
        return self._lay_out(cluster.agree(reader, what="reading the strategy"), cluster)

    def _search_degrees(self, cluster: Cluster, sample: Sample) -> FoundDegrees:
        if not self.is_in_train:
            raise InputError(
                "only training searches for degrees; set dp, tp and pp in init to evaluate or generate."
            )
        args = self.args
        # Each rank reads its own, and those that divide a model need the same.
        inputs = cluster.from_first(self._loss.sample(sample[1] or {}, None)[0])
        size = self._global_batch_size(cluster)
        result = search(
            self.model, args, mpu.asked_degrees(), inputs, optimizer=self._optimizer_recipe(), batch_size=size
        )
        return self._lay_out(result, cluster)

    def _global_batch_size(self, cluster: Cluster) -> int:
        """Samples of a step with searched degrees, as in transformers' Trainer on as many processes."""
        return self._train_batch_size * self.args.gradient_accumulation_steps * cluster.world_size

    def _lay_out(self, result: FoundDegrees, cluster: Cluster) -> FoundDegrees:
        """Arranges the ranks as found, and sizes micro-batches accordingly. Collective."""
        args, batch_size = self.args, self._global_batch_size(cluster)
        mpu.decide(result.sizes, cluster)
        args.gradient_accumulation_steps = result.num_micro_batches
        args.per_device_train_batch_size = batch_size // (result.sizes[1] * result.num_micro_batches)
        self._train_batch_size = args.train_batch_size  # Trainer has read it before
        return result

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        self._steps_per_epoch = per_epoch = num_update_steps_per_epoch
        arguments = max_steps, per_epoch, num_train_epochs, resume_from_checkpoint, trial
        begin: tuple[int, int] = super()._init_training_state(*arguments)
        if self._goes_on_from is None:
            return begin
        # Another front end saves no trainer state. Its steps and data position give its progress.
        folder, size = self._goes_on_from, self.get_total_train_batch_size(self.args)
        look = partial(checkpoints.position, folder, per_epoch, size)
        cluster = self.result.job.cluster
        steps, epoch, epoch_steps = cluster.on_first(look, what="reading the position in the data")
        self.state.global_step, self.state.epoch = steps, epoch + epoch_steps / per_epoch
        return epoch, 0 if self.args.ignore_data_skip else epoch_steps * self.args.gradient_accumulation_steps

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        assert self._distributed_model is not None
        return self._distributed_model  # instead of DDP

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        if self._created_lr_scheduler:  # by an earlier train()
            self.lr_scheduler, self._created_lr_scheduler = None, False
        MerakTrainer.create_optimizer(self)  # a subclass has made its own of the undivided model
        self.create_scheduler(num_training_steps=max_steps)
        self._result = self.result.having(lr_scheduler=self.lr_scheduler)
        self.model_wrapped = self._wrap_model(self.model)
        if self._begins_with is not None:
            checkpoints.load(self._result, self._begins_with, optimizer=False)
            self._result.train_step.num_steps = 0  # weights alone: step 0
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the divided model. A subclass may make one for the whole model. Collective.

        Raises:
            InputError: for one that needs the whole model.
        """
        if self._result is None:
            return super().create_optimizer()
        present = self.optimizer
        if isinstance(present, SteppedOptimizer) and self.result.optim is not None:
            return present
        make, arguments = self._optimizer_recipe()
        self._result = attach_optimizer(self.result, make, options_of=self._options_of, **arguments)
        assert self._result.optim is not None
        self.optimizer = optimizer = SteppedOptimizer(self._result.optim, self._result.train_step)
        if self.args.wall_clock_breakdown:
            self.add_callback(WallClock(self._result))
        return optimizer

    def _optimizer_recipe(self) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
        if self._given_options is not None:
            return type(self.optimizer), arguments_of(self.optimizer)
        make, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        check_recipe(self.args.optim, make, arguments)
        return make, {key: value for key, value in arguments.items() if key != "fused"}

    def _options_of(self, name: str) -> Mapping[str, Any]:
        if self._given_options is not None:
            return self._given_options.get(name, {})
        return {"weight_decay": self.args.weight_decay if name in self._decays else 0.0}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Like ``Trainer.compute_loss``, or ``loss_fn`` of logits and labels. It must call the model once."""
        if self.loss_fn is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        names = self.label_names or ["labels"]  # which forward need not name
        labels = [inputs[name] for name in names if name in inputs]
        if not labels:
            raise InputError(f"loss_fn needs {' or '.join(names)}, which the batch does not have.")
        outputs = model(**{name: value for name, value in inputs.items() if name not in names})
        loss = flat_loss(self.loss_fn, outputs, labels[0])
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Stores a micro-batch. The last one of a step runs the forward and backward passes of all.

        Returns:
            The loss of the step over all ranks, or 0 for micro-batches before the last.
        """
        model.train()
        self.optimizer.train()  # schedule-free optimizers have modes
        batch, loss = self._prepare_inputs(inputs), self._loss
        adds_up = loss.adds_up(num_items_in_batch, self.loss_fn is not None)
        # transformers assumes that every model with **kwargs divides by num_items: one batch decides.
        if adds_up and None is self.loss_is_scaled_for_ga is loss.divides_by_items:
            loss.look(partial(self.result.train_step.infer, outputs=False), batch, num_items_in_batch)
        self._waiting.append(loss.sample(batch, num_items_in_batch))
        if len(self._waiting) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)  # the last micro-batch runs all
        samples, self._waiting = self._waiting, []
        # A mean over data ranks, and over micro-batches unless their losses are parts of the step's mean.
        factor = 1.0 / (self.accelerator.num_processes * (1 if adds_up else len(samples)))
        step = self.result.train_step
        count = num_micro_batches(self.result.job, len(samples), self.args.gradient_accumulation_steps)
        dummies = [number >= len(samples) for number in range(count)]  # fill up to what the schedule takes
        output = step.micro_gradients(
            [*samples, *samples[:1] * sum(dummies)],
            dummies=dummies,
            scale_fn=partial(torch.mul, other=factor),
            outputs=False,
        )
        step.reduce()
        return output.loss * factor

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.result.train_step.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self.result.train_step.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Like ``Trainer.evaluation_loop``, on all ranks together."""
        result = self._ensure_job(partial(_draw_batch, lambda: dataloader))
        batches: Any = dataloader if self._draws is None else Batches(dataloader, self._draws)
        with result.train_step.sharing_failures():
            return super().evaluation_loop(batches, *args, **kwargs)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Like ``Trainer.prediction_step``. If only the loss is wanted, outputs stay on their ranks.

        A loss is the mean over the items of its own batch, as in one process.
        """
        averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            return self._prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self.args.average_tokens_across_devices = averages

    def _prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Any, Any, Any]:
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        if not (prediction_loss_only and has_labels):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        batch = self._prepare_inputs(inputs)
        sample = self._loss.sample(batch, self._loss.count_items(batch))
        output = self.result.train_step.infer([sample], outputs=False)
        return output.losses[0].detach(), None, None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model for ``from_pretrained``, using one rank's memory for it. Collective."""
        if self._result is None:
            super().save_model(output_dir, _internal_call)
            return
        cluster, folder = self._result.job.cluster, output_dir or self.args.output_dir
        whole = checkpoint.export_state_dict(self._result)
        # peft looks for adapters at their place in the undivided model, which stages and wrappers hide.
        present, self.model = self.model, self._structure or self.model
        try:
            cluster.on_first(partial(self._save, folder, whole), what="writing the model")
        finally:
            self.model = present
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state, size = self.state, self.get_total_train_batch_size(self.args)
        checkpoints.save(
            *(self.result, output_dir, state.global_step),
            position=checkpoints.position_at(state.epoch or 0.0, self._steps_per_epoch, size),
            optimizer=not self.args.no_save_optim,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        if not self.args.no_save_rng:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Does nothing, since a checkpoint is loaded once the model is divided."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        assert checkpoint is not None
        random = checkpoints.load(self.result, checkpoint, optimizer=not self.args.no_load_optim)
        self._random = None if self.args.no_load_rng else random

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._random is not None:
            try:
                super()._load_rng_state(checkpoint)
            except Exception as error:  # a file that was cut short may raise anything
                raise CheckpointError(
                    f"the random states in {checkpoint} are damaged: {error_text(error)}. Skip them with no_load_rng=True."
                ) from error
            restore_rng(self._random, self.result.device, self.result.job.step.randomness)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        checkpoints.load(self.result, self.state.best_model_checkpoint, optimizer=False)

    def generate(
        self, prompts: Any, *, out_seq_length: int | None = None, temperature: float | None = None
    ) -> list[Any]:
        """Continues prompts by a causal language model. Collective.

        Args:
            prompts: texts for ``processing_class``, or tokens as lists or a tensor.
            out_seq_length: maximum length in tokens, prompt included; ``None`` for that of the arguments.
            temperature: sampling temperature. 0 takes the likeliest tokens, ``None`` that of the arguments.

        Returns:
            Texts for texts, lists of tokens for tokens; the same on every rank.

        Raises:
            InputError: for prompts without tokens, and for models with an encoder.
        """
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            raise InputError("generate supports only causal language models; this one has an encoder.")
        warmth = self.args.temperature if temperature is None else temperature
        if warmth < 0:
            raise InputError(f"generate: temperature must be at least 0; got {warmth}.")
        tokens = tokens_of(prompts, self.processing_class)
        result = self._ensure_job(partial(tokens_alone, tokens[0]))
        longest = min(
            out_seq_length or self.args.out_seq_length,
            getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize,
        )
        model = self._distributed_model
        assert model is not None
        texts = continued(
            lambda batch: model(**batch),
            tokens,
            length=longest,
            temperature=warmth,
            ends=ends_of(self.model),
            device=result.device,
            agree=result.job.cluster.from_first,
        )
        as_text = isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts)
        return [self.processing_class.decode(text) for text in texts] if as_text else texts


def _draw_batch(make_loader: Callable[[], Any]) -> Mapping[str, Any]:
    with random_states_kept():
        return next(iter(make_loader()))
