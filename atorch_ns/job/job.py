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
from atorch_ns.job.loss import JobPrecision, LossCheck, LossFunction
from atorch_ns.job.materialise import Materialiser, is_on_meta
from atorch_ns.job.model import ModelParts, OriginalModel
from atorch_ns.job.randomness import SharedRandomness
from atorch_ns.job.same_place import SamePlace
from atorch_ns.job.states import ParameterStates, TrainingStates
from atorch_ns.strategy import Plan

OPTIMIZER = "optimizer"
"""Key of messages about the user's optimizer in :attr:`Job.explanations`."""

MODEL = "model"
"""Key of messages about the user's model in :attr:`Job.explanations`."""

ParameterGroups = list[dict[str, Any]]
MakeOptimizer = Callable[[ParameterGroups], torch.optim.Optimizer]
"""Makes the optimizer from parameter groups."""

TakeOver = Callable[[ParameterGroups], tuple[nn.Module, torch.optim.Optimizer]]
"""Creates both model and optimizer from parameter groups, for a backend that owns them together."""


MakeRunner = Callable[["Job", LossFunction], BatchRunner]
"""``(built job, the result's loss function) -> the runner``; called once the model is final."""

MakeStates = Callable[["Job", torch.optim.Optimizer | None], TrainingStates]
"""``(job, result.optim) -> its states``. Cheap, since every save and load creates them again."""


class KeptActivations:
    """Switch for whether recomputed modules keep their activations. Its context makes them keep them."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which modules keep their activations."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


@dataclass(kw_only=True)
class StepOptions:
    """Options for running a batch in ``train_step``.

    Attributes:
        num_micro_batches: number of parts that a batch is split into.
        split: splits a batch instead, if the number of parts depends on its rows.
        context: surrounds all work of ``train_step`` and its ``evaluate``.
        divides_outputs: whether the loss function may receive parts of outputs.
        loss_check: tests in the first step whether the loss is a mean or sum over samples; ``None`` for no test.
        make_runner: creates the runner of a batch if calling the model is not enough.
        recompute: recomputes a module in the backward pass instead of torch's ``checkpoint``, called as
            ``(module, *args, **kwargs)``; ``None`` for torch's.
        recomputed_blocks: paths of recomputed blocks, if a pipeline has chosen them by stage, or ``None``.
        recomputed_shares: the share of its blocks that each stage recomputes in that case.
        kept_activations: context whose forward passes need no recomputation afterwards.
        randomness: the initial random states of forward passes, if ranks must share them.
        same_batch: compares samples of ranks that must have the same; ``None`` if each rank has its own.
        same_weights: compares weights of ranks that hold replicas; ``None`` if there are none, or unknown.
        same_place: ends ranks that are at different places; ``None`` if their calls cannot be observed.
        shares_batch_norms: whether batch norms share statistics over the data ranks.
    """

    num_micro_batches: int = 1
    split: Callable[[Any], list[Any]] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    divides_outputs: bool = False
    loss_check: LossCheck | None = None
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
        """The parts of a batch on this rank's device, of equal size unless ``uneven``."""
        if self.split is not None and not uneven:
            return self.split(data)
        number = self.num_micro_batches
        return [data] if number == 1 else split_batch(data, number, uneven=uneven)


@dataclass(kw_only=True)
class OptimizerOptions:
    """Options for creating and calling the optimizer.

    Attributes:
        make: a method's function that creates the optimizer; ``None`` for the user's own.
        take_over: a backend that makes model and optimizer together; ``None`` for none.
        use_optim_backward: whether the backward pass is ``optim.backward(loss)``.
        requires_boundary: whether the optimizer must be told about the last micro-batch.
        takes_frozen: whether the optimizer also receives frozen parameters, in case they are thawed.
    """

    make: MakeOptimizer | None = None
    take_over: TakeOver | None = None
    use_optim_backward: bool = False
    requires_boundary: bool = False
    takes_frozen: bool = True


@dataclass(kw_only=True)
class Job:
    """A training job under construction. Methods write its fields but do not access each other's wrappers.

    Attributes:
        inputs: the user's inputs.
        cluster: the cluster that the job runs on.
        plan: the joint decisions of all methods, known before the first is applied.
        original: the user's model before any method.
        model: the current model including wrappers, which the user will call.
        module: the model inside outer wrappers, with the user's attribute names.
        seed: seed for initial values, the same on every rank.
        name: name of this job, the same on every rank and unique among jobs. Empty if nothing needs it.
        mesh: the arrangement of ranks; ``None`` in a process without a group.
        placed: whether a method has put the model on its device.
        parts: stages and experts into which the model was divided.
        precision: autocast, loss scaling and casts.
        gradients: synchronisation and clipping of gradients.
        step: options for running a batch in ``train_step``.
        optimizer: options for creating and calling the optimizer.
        resolved_settings: settings found by methods, by method name, in the form of its config.
        make_states: creates the access to weights and optimizer states by name, for checkpoints.
        save_lane: state that background checkpoint saves pass from one to the next.
        explanations: actions of each method, by its name, for the report. Read them with :meth:`explained`.
        idle_axes: by axis, the method that divides nothing over it, and the reason. No search chooses it.
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
        """Creates a job to which no method has been applied.

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
        """Number of ranks that see different data."""
        return 1 if self.mesh is None else self.mesh.data.size()

    @property
    def data_rank(self) -> int:
        """Index of this rank among the data ranks."""
        return 0 if self.mesh is None else self.mesh.data.get_local_rank()

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules that are called and together hold this rank's parameters: stages, or the model."""
        return self.parts.stages or (self.module,)

    @property
    def agreeing_group(self) -> dist.ProcessGroup | None:
        """The ranks that must skip steps and scale losses together, or ``None`` for this rank alone."""
        if self.mesh is None or dist.get_world_size() == 1:
            return None
        return dist.group.WORLD if self.mesh.divides_model else self.mesh.data_group

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the stages of one pipeline, or ``None`` if the model is not cut into stages."""
        if self.mesh is None or self.mesh.size("pipeline") == 1:
            return None
        return self.mesh.axis("pipeline").get_group()

    def replace_model(self, model: nn.Module) -> None:
        """Replaces the user's model by ``model``, before any outer wrapper."""
        self.model = self.module = model

    def wrap(self, model: nn.Module) -> None:
        """Puts an outer wrapper around the model. :attr:`module` does not change."""
        self.model = model

    def materialiser(self, init: Callable[[nn.Module], object] | None = None) -> Materialiser:
        """Creates an object that gives values to parts of the model on the meta device."""
        return Materialiser(self.module, self.device, seed=self.seed, init=init, packings=self.parts.packings)

    def place(self) -> None:
        """Materialises tensors on meta and moves the whole model to this rank's device."""
        if is_on_meta(self.module):
            self.materialiser().materialise([self.module])
        self.module.to(self.device)
        self.placed = True

    def keep_structure(self) -> None:
        """Records the structure of the model, for methods that need it after the model has been cut."""

        def without_memory(kind: str, tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device="meta") if kind == "parameter" else tensor

        self.parts.full_structure = copy_structure(self.module, without_memory, {})

    def in_full_precision(self, model: nn.Module) -> nn.Module:
        """``model``, or a copy in full precision if a method has lowered the precision of single layers.

        The copy has the same parameters. In low precision, a divided layer differs from the whole layer by
        rounding, which would hide errors of the division from a test.
        """
        if self.precision.restore is None:
            return model
        copy = copy_structure(model, lambda _, tensor: tensor, {})
        self.precision.restore(copy)
        return copy

    def explain(self, method: str, text: str | Callable[[], str]) -> None:
        """Records an action or choice of a method for the report. A function allows later changes."""
        self.explanations.setdefault(method, []).append(text)

    def warn(self, text: str) -> None:
        """Warns once for the whole job, on rank 0."""
        if self.cluster.rank == 0:
            warnings.warn(text, stacklevel=3)

    def explained(self, method: str) -> list[str]:
        """Actions and choices of a method, as currently known."""
        texts = (text if isinstance(text, str) else text() for text in self.explanations.get(method, []))
        return [text for text in texts if text]
