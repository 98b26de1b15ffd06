"""Job: what the user gave, and what methods have decided about it so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster, Mesh
from atorch_ns.job._clip import clip_gradients
from atorch_ns.job._gradient_sums import GradientSums
from atorch_ns.job._gradient_sync import SkipSync, never_synchronised
from atorch_ns.job._groups import NamedGroup, name_groups
from atorch_ns.job._inputs import Inputs
from atorch_ns.job._loss import LossFunction
from atorch_ns.job._materialise import Materialiser, is_on_meta
from atorch_ns.job._packing import Packing
from atorch_ns.job._parameter_states import ParameterStates
from atorch_ns.job._randomness import SharedRandomness
from atorch_ns.job._runner import MakeRunner
from atorch_ns.job._states import MakeStates, parameter_names
from atorch_ns.pipeline import PipelineStep
from atorch_ns.profile._structure import copy_structure
from atorch_ns.strategy import Plan

__all__ = ["Autocast", "Clip", "Job", "LossScaling", "MakeOptimizer", "TakeOver"]

OPTIMIZER = "optimizer"
"""What is said of the user's optimizer stands under this name in :attr:`Job.explanations`."""

ParameterGroups = list[dict[str, Any]]
MakeOptimizer = Callable[[ParameterGroups], torch.optim.Optimizer]
"""Makes the optimizer from parameter groups."""

TakeOver = Callable[[ParameterGroups], tuple[nn.Module, torch.optim.Optimizer]]
"""A backend that owns model and optimizer together: makes both from parameter groups."""

Clip = Callable[[Iterable[torch.Tensor], float, float], torch.Tensor]
"""Clips gradients: ``(parameters, max_norm, norm_type) -> norm before``."""


@dataclass(frozen=True)
class Autocast:
    """Autocast around forward passes and the loss."""

    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling: the first scale and the steps between doublings."""

    init_scale: float = 2.0**16
    growth_interval: int = 2000


@dataclass(kw_only=True)
class Job:
    """A training job under construction. Methods write its fields; none reaches into another's wrapper.

    Attributes:
        inputs: what the user gave.
        cluster: what the job runs on.
        plan: what all methods decide together; known before the first is applied.
        model: the model as it stands, wrappers included: what the user will call.
        module: the model inside outer wrappers, with the user's attribute names.
        mesh: the arrangement of ranks; ``None`` in a process without a group.
        seed: seed for initial values, the same on every rank.
        groups: the user's parameter groups by name; ``None`` for one group of all that trains.
        model_class: name of the user's class, before any method gives it another.
        num_parameters: elements of the user's model, before any sharding.
        parameter_order: the first name of every parameter, in the order of the user's model.
        tied: for each parameter that has several names, the other names by the first one.
        placed: whether a method has put the model on its device.
        num_micro_batches: parts that ``train_step`` splits a batch into.
        split: splits a batch instead, where the number depends on its rows.
        skip_sync: keeps gradients local while micro-batches accumulate.
        clip: clips gradients.
        autocast: autocast around the step, if any.
        loss_scaling: dynamic loss scaling, if any.
        skip_if_nonfinite: whether steps with bad gradients are skipped without a scaler.
        input_dtype: dtype that floating inputs are cast to, if any.
        hooked: the module whose forward pass autocast and casts surround; ``None`` for :attr:`model`.
        make_optimizer: a method's way to make the optimizer; ``None`` for the user's own.
        take_over: a backend that makes model and optimizer together, if any.
        use_optim_backward: whether the backward pass is ``optim.backward(loss)``.
        requires_boundary: whether the optimizer must be told which micro-batch is the last.
        stages: the modules of this rank that are called in place of the model, in the order of a pipeline; empty
            where the model is called as one. Together they hold its parameters.
        experts: modules whose parameters are divided over the expert axis, so that only the other data ranks
            hold copies of them. They scale their gradients themselves to the mean over the expert axis.
        restore_precision: makes all layers of a copy of a module compute in the dtype of their weights again; ``None``
            where they do. See :meth:`in_full_precision`.
        listed_experts: likewise, modules that are never called themselves: :attr:`sums` averages the gradients of
            their copies, and nothing may shard them further.
        recompute: recomputes a module in the backward pass in the place of torch's ``checkpoint``, called as
            ``(module, *args, **kwargs)``; ``None`` for torch's.
        in_step: a context around everything that ``train_step`` and its ``evaluate`` run.
        watch_loss: puts something around the user's loss function, called with it; ``None`` for nothing.
        make_runner: how a batch is run where calling the model is not enough.
        sums: gradients to be summed over other ranks than those of the data.
        randomness: the random states that forward passes begin from, where ranks must share them.
        packings: parameters that lie divided over the tensor axis in another order than the user's, by name.
        elsewhere: names of parameters that another rank counts in norms of gradients.
        kept_whole: names of parameters that methods of data parallelism leave alone, since several stages of a rank
            use them; :attr:`sums` averages their gradients.
        pipeline: the schedule and the predicted costs of its stages, for the report; ``None`` without a pipeline.
        uncut: the structure of the whole model, its parameters without memory, from before it was cut into
            stages; ``None`` where it is in one piece.
        worked_out: settings that methods have found for themselves, by method, as its config would say them.
        make_states: how weights and optimizer states are read and written by name, for checkpoints.
        save_lane: what checkpoints written in the background need from one to the next.
        explanations: what each method did, by its name, for the report; read them by :meth:`explained`.
    """

    inputs: Inputs
    cluster: Cluster
    plan: Plan
    model: nn.Module
    module: nn.Module
    seed: int
    groups: tuple[NamedGroup, ...] | None = None
    model_class: str = ""
    num_parameters: int = 0
    parameter_order: tuple[str, ...] = ()
    tied: dict[str, list[str]] = field(default_factory=dict)
    mesh: Mesh | None = None
    placed: bool = False
    num_micro_batches: int = 1
    split: Callable[[Any], list[Any]] | None = None
    skip_sync: SkipSync = never_synchronised
    clip: Clip = clip_gradients
    autocast: Autocast | None = None
    loss_scaling: LossScaling | None = None
    skip_if_nonfinite: bool = False
    input_dtype: torch.dtype | None = None
    hooked: nn.Module | None = None
    make_optimizer: MakeOptimizer | None = None
    take_over: TakeOver | None = None
    use_optim_backward: bool = False
    requires_boundary: bool = False
    stages: tuple[nn.Module, ...] = ()
    experts: tuple[nn.Module, ...] = ()
    listed_experts: tuple[nn.Module, ...] = ()
    restore_precision: Callable[[nn.Module], None] | None = None
    recompute: Callable[..., Any] | None = None
    in_step: Callable[[], AbstractContextManager[object]] = nullcontext
    watch_loss: Callable[[LossFunction], LossFunction] | None = None
    make_runner: MakeRunner | None = None
    sums: GradientSums = field(default_factory=GradientSums)
    randomness: SharedRandomness | None = None
    packings: dict[str, Packing] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    kept_whole: set[str] = field(default_factory=set)
    pipeline: PipelineStep | None = None
    uncut: nn.Module | None = None
    worked_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    make_states: MakeStates = ParameterStates
    save_lane: object | None = None
    explanations: dict[str, list[str | Callable[[], str]]] = field(default_factory=dict)

    @classmethod
    def start(cls, inputs: Inputs, cluster: Cluster, plan: Plan, *, seed: int) -> Job:
        """A job to which nothing has been done yet.

        Raises:
            InputError: if ``optim_param_func`` does not give groups of the model's parameters.
        """
        model = inputs.model
        names = parameter_names(model).values()
        return cls(
            inputs=inputs,
            cluster=cluster,
            plan=plan,
            model=model,
            module=model,
            seed=seed,
            groups=name_groups(inputs),
            model_class=type(model).__name__,
            num_micro_batches=inputs.gradient_accumulation_steps,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            parameter_order=tuple(first for first, *_ in names),
            tied={first: others for first, *others in names if others},
        )

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return torch.device(self.cluster.device)

    @property
    def num_data_ranks(self) -> int:
        """How many ranks see different data."""
        return 1 if self.mesh is None else self.mesh.data.size()

    @property
    def data_rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.mesh is None else self.mesh.data.get_local_rank()

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules that together hold this rank's parameters and that are called: stages, or the model."""
        return self.stages or (self.module,)

    @property
    def agreeing_group(self) -> dist.ProcessGroup | None:
        """The ranks that must decide together (to skip a step, to scale a loss); ``None`` for this rank alone."""
        if self.mesh is None or dist.get_world_size() == 1:
            return None
        return dist.group.WORLD if self.mesh.divides_model else self.mesh.data_group

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the stages of one pipeline; ``None`` if the model is in one piece."""
        if self.mesh is None or self.mesh.size("pipeline") == 1:
            return None
        return self.mesh.axis("pipeline").get_group()

    def replace_model(self, model: nn.Module) -> None:
        """Puts ``model`` in the place of the user's, before any outer wrapper."""
        self.model = self.module = model

    def wrap(self, model: nn.Module) -> None:
        """Puts an outer wrapper around the model; :attr:`module` stays what it was."""
        self.model = model

    def materialiser(self, init: Callable[[nn.Module], object] | None = None) -> Materialiser:
        """Gives values to parts of the model that are on the meta device."""
        return Materialiser(self.module, self.device, seed=self.seed, init=init, packings=self.packings)

    def place(self) -> None:
        """Materialises what is on meta and moves the whole model to this rank's device."""
        if is_on_meta(self.module):
            self.materialiser().materialise([self.module])
        self.module.to(self.device)
        self.placed = True

    def keep_structure(self) -> None:
        """Keeps the structure of the model as it is, for methods that look at it after it has been cut."""

        def without_memory(kind: str, tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device="meta") if kind == "parameter" else tensor

        self.uncut = copy_structure(self.module, without_memory, {})

    def in_full_precision(self, model: nn.Module) -> nn.Module:
        """``model``, or, where a method has lowered the precision of single layers, a copy without that.

        The copy has the same parameters. In low precision a divided layer differs from the whole one by rounding, which
        hides what a test of the division is to find.
        """
        if self.restore_precision is None:
            return model
        copy = copy_structure(model, lambda _, tensor: tensor, {})
        self.restore_precision(copy)
        return copy

    def explain(self, method: str, text: str | Callable[[], str]) -> None:
        """Records what a method did or chose, for the report; a function, where later batches show more of it."""
        self.explanations.setdefault(method, []).append(text)

    def explained(self, method: str) -> list[str]:
        """What a method did or chose, by what is known now."""
        texts = (text if isinstance(text, str) else text() for text in self.explanations.get(method, []))
        return [text for text in texts if text]
