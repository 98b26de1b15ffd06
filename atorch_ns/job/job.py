"""Job: what the user gave, and what methods have decided about it so far."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.capture.random_states import turn_off_caches
from atorch_ns.capture.structure import copy_structure
from atorch_ns.cluster import Cluster, Mesh
from atorch_ns.data import BatchRunner, split_batch
from atorch_ns.job.agreement import SameBatch, SameWeights
from atorch_ns.job.gradients import Gradients
from atorch_ns.job.inputs import Inputs
from atorch_ns.job.loss import JobPrecision, LossFunction, MeanCheck
from atorch_ns.job.materialise import Materialiser, is_on_meta
from atorch_ns.job.model import ModelParts, OriginalModel
from atorch_ns.job.randomness import SharedRandomness
from atorch_ns.job.same_place import SamePlace
from atorch_ns.job.states import ParameterStates, TrainingStates
from atorch_ns.strategy import Plan

OPTIMIZER = "optimizer"
"""What is said of the user's optimizer stands under this name in :attr:`Job.explanations`."""

MODEL = "model"
"""What is said of the user's model stands under this name in :attr:`Job.explanations`."""

ParameterGroups = list[dict[str, Any]]
MakeOptimizer = Callable[[ParameterGroups], torch.optim.Optimizer]
"""Makes the optimizer from parameter groups."""

TakeOver = Callable[[ParameterGroups], tuple[nn.Module, torch.optim.Optimizer]]
"""A backend that owns model and optimizer together: makes both from parameter groups."""


MakeRunner = Callable[["Job", LossFunction], BatchRunner]
"""``(built job, the result's loss function) -> the runner``; called once the model is final."""

MakeStates = Callable[["Job", torch.optim.Optimizer | None], TrainingStates]
"""``(job, result.optim) -> its states``. Cheap: made anew for every save and load."""


class KeptActivations:
    """Whether modules that are recomputed keep their activations for now; a context that makes them do so."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What runs inside keeps its activations."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


@dataclass(kw_only=True)
class StepOptions:
    """How ``train_step`` runs a batch.

    Attributes:
        num_micro_batches: parts that it splits a batch into.
        split: splits a batch instead, where the number depends on its rows.
        context: surrounds everything that ``train_step`` and its ``evaluate`` run.
        divides_outputs: whether the loss function may be given parts of outputs.
        mean_check: tests in the first step whether the loss is a mean over samples; ``None`` for no test.
        make_runner: makes what runs a batch where calling the model is not enough.
        recompute: recomputes a module in the backward pass in the place of torch's ``checkpoint``, called as
            ``(module, *args, **kwargs)``; ``None`` for torch's.
        recomputed_blocks: paths of recomputed blocks, if a pipeline has chosen them by stage, or ``None``.
        recomputed_shares: the share of its blocks that each stage recomputes then.
        kept_activations: forward passes inside recompute nothing afterwards.
        randomness: the random states that forward passes begin from, where ranks must share them.
        same_batch: compares samples of ranks that must have the same; ``None`` where each has its own.
        same_weights: compares weights of ranks that hold copies; ``None`` where there are none, or unknown.
        same_place: ends ranks that are at different places; ``None`` where nobody sees their calls.
        shares_batch_norms: whether batch norms share statistics over the data ranks.
    """

    num_micro_batches: int = 1
    split: Callable[[Any], list[Any]] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    divides_outputs: bool = False
    mean_check: MeanCheck | None = None
    make_runner: MakeRunner | None = None
    recompute: Callable[..., Any] | None = None
    recomputed_blocks: frozenset[str] | None = None
    recomputed_shares: tuple[float, ...] = ()
    kept_activations: KeptActivations = field(default_factory=KeptActivations)
    randomness: SharedRandomness | None = None
    same_batch: SameBatch | None = None
    same_weights: SameWeights | None = None
    same_place: SamePlace | None = None
    shares_batch_norms: bool = False

    def micro_batches(self, data: Any, *, uneven: bool = False) -> list[Any]:
        """The parts that a batch on this rank's device is split into: of one size unless ``uneven``."""
        if self.split is not None and not uneven:
            return self.split(data)
        number = self.num_micro_batches
        return [data] if number == 1 else split_batch(data, number, uneven=uneven)


@dataclass(kw_only=True)
class OptimizerOptions:
    """How the optimizer is made and called.

    Attributes:
        make: a method's way to make the optimizer; ``None`` for the user's own.
        take_over: a backend that makes model and optimizer together; ``None`` for none.
        use_optim_backward: whether the backward pass is ``optim.backward(loss)``.
        requires_boundary: whether the optimizer must be told which micro-batch is the last.
        takes_frozen: whether the optimizer is given frozen parameters too, for when they are thawed.
    """

    make: MakeOptimizer | None = None
    take_over: TakeOver | None = None
    use_optim_backward: bool = False
    requires_boundary: bool = False
    takes_frozen: bool = True


@dataclass(kw_only=True)
class Job:
    """A training job under construction. Methods write its fields; none reaches into another's wrapper.

    Attributes:
        inputs: what the user gave.
        cluster: what the job runs on.
        plan: what all methods decide together; known before the first is applied.
        original: the user's model before any method.
        model: the model as it stands, wrappers included: what the user will call.
        module: the model inside outer wrappers, with the user's attribute names.
        seed: seed for initial values, the same on every rank.
        name: of this job, the same on every rank and of no other job; empty where nobody asks for it.
        mesh: the arrangement of ranks; ``None`` in a process without a group.
        placed: whether a method has put the model on its device.
        parts: stages and experts that the model has been divided into.
        precision: autocast, loss scaling and casts.
        gradients: how they are synchronised and clipped.
        step: how ``train_step`` runs a batch.
        optimizer: how the optimizer is made and called.
        resolved_settings: settings that methods have found, by method, as its config would say them.
        make_states: how weights and optimizer states are read and written by name, for checkpoints.
        save_lane: what checkpoints written in the background need from one to the next.
        explanations: what each method did, by its name, for the report; read them by :meth:`explained`.
        idle_axes: by axis, the method that divides nothing over it, and why; no search chooses it.
    """

    inputs: Inputs
    cluster: Cluster
    plan: Plan
    original: OriginalModel
    model: nn.Module
    module: nn.Module
    seed: int
    name: str = ""
    mesh: Mesh | None = None
    placed: bool = False
    parts: ModelParts = field(default_factory=ModelParts)
    precision: JobPrecision = field(default_factory=JobPrecision)
    gradients: Gradients = field(default_factory=Gradients)
    step: StepOptions = field(default_factory=StepOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    resolved_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    make_states: MakeStates = ParameterStates
    save_lane: object | None = None
    explanations: dict[str, list[str | Callable[[], str]]] = field(default_factory=dict)
    idle_axes: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def start(cls, inputs: Inputs, cluster: Cluster, plan: Plan, *, seed: int, name: str = "") -> Job:
        """A job to which nothing has been done yet.

        Raises:
            InputError: if ``optim_param_func`` does not give groups of the model's parameters.
        """
        job = cls(
            inputs=inputs,
            cluster=cluster,
            plan=plan,
            original=OriginalModel.of(inputs),
            model=inputs.model,
            module=inputs.model,
            seed=seed,
            name=name,
            step=StepOptions(num_micro_batches=inputs.gradient_accumulation_steps),
        )
        if turn_off_caches(inputs.model):
            job.explain(
                MODEL,
                "forward passes with gradients run without the cache that config.use_cache=True asks for, because "
                "training does not read it; the config is unchanged for evaluation and generation.",
            )
        return job

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
        return self.parts.stages or (self.module,)

    @property
    def agreeing_group(self) -> dist.ProcessGroup | None:
        """The ranks that must skip steps and scale losses together; ``None`` for this rank alone."""
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
        return Materialiser(self.module, self.device, seed=self.seed, init=init, packings=self.parts.packings)

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

        self.parts.full_structure = copy_structure(self.module, without_memory, {})

    def in_full_precision(self, model: nn.Module) -> nn.Module:
        """``model``, or, where a method has lowered the precision of single layers, a copy without that.

        The copy has the same parameters. In low precision a divided layer differs from the whole one by
        rounding, which would hide errors of the division from a test.
        """
        if self.precision.restore is None:
            return model
        copy = copy_structure(model, lambda _, tensor: tensor, {})
        self.precision.restore(copy)
        return copy

    def explain(self, method: str, text: str | Callable[[], str]) -> None:
        """Records what a method did or chose, for the report; a function, if later batches change it."""
        self.explanations.setdefault(method, []).append(text)

    def warn(self, text: str) -> None:
        """Warns once for the whole job, on rank 0."""
        if self.cluster.rank == 0:
            warnings.warn(text, stacklevel=3)

    def explained(self, method: str) -> list[str]:
        """What a method did or chose, by what is known now."""
        texts = (text if isinstance(text, str) else text() for text in self.explanations.get(method, []))
        return [text for text in texts if text]
