"""operator_parallel: divides every operator over the tensor axis by a placement of its own, as nnScaler does."""

from __future__ import annotations

import contextlib
import functools
import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, final

import torch
from pydantic import Field
from torch.distributed.tensor import Shard

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.capture.random_states import modes_kept
from atorch_ns.cluster import Cluster, or_refusal
from atorch_ns.data import call_arguments, split_batch
from atorch_ns.errors import BatchSizeError, InputError
from atorch_ns.job import Job
from atorch_ns.method import Conflict, Flag, Method, MethodConfig, Phase
from atorch_ns.operators import (
    CaptureError,
    DividedForward,
    OperatorPlan,
    Prices,
    Shallow,
    States,
    batch_plan,
    capture_shallow,
    check_division,
    check_plan,
    costs_text,
    division_of,
    random_plan,
    solved_plan,
)
from atorch_ns.operators.graph.graph import Operator
from atorch_ns.operators.rules.constraints import allowed, read_constraints, unused
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.profile import Profile
from atorch_ns.sharding import TensorGroup, divide_parameters
from atorch_ns.torch_compat import plain_name
from opt_lib._model_axes.sample_batch import common_sample, local_batch_size
from opt_lib._sharded.units import broadcast_from_first
from opt_lib.tensor_parallel import TensorParallel, TensorParallelConfig


class OperatorParallelConfig(MethodConfig):
    """Where a plan comes from. With none, the fastest that is found is used."""

    plan: dict[str, Any] | str | None = Field(
        default=None,
        description="The plan: a file's path, or what it holds. Operators that it does not name are whole.",
    )
    policy: Literal["solve", "batch", "random"] = Field(
        default="solve",
        description="How a plan is made where none is given: the fastest within the memory, the samples divided "
        "wherever they can be followed, or any legal rule for each operator, to test.",
    )
    seed: int = Field(default=1, description="Seed of the policy random.")

    constraints: str | None = Field(
        default=None,
        description="Path of a YAML file in nnScaler's form: the dimensions along which operators may be divided.",
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory of a rank that a found plan may need; by default the device's.",
    )
    self_test: Flag = Field(
        default=True,
        description="Run the divided graph of a shallow copy on simulated ranks, and compare every operator's results and "
        "gradients with those of the whole graph.",
    )


class _Planned(NamedTuple):
    """What one rank decides for all: the plan, and by name the dims of divided parameters and those that are summed."""

    plan: OperatorPlan
    dims: dict[str, int]
    summed: frozenset[str]
    note: str


@final
class OperatorParallel(Method[OperatorParallelConfig]):
    """Divides every operator over the tensor axis by a placement of its own, as nnScaler does."""

    name = "operator_parallel"
    phase = Phase.SHARD_LAYERS
    Config = OperatorParallelConfig
    provides = ("axis:tensor",)
    needs_process_group = True
    conflicts = tuple(
        Conflict(other, f"Operators are divided in the graph of the whole model, {what}.")
        for other, what in (
            ("pipeline_parallel", "not in that of a stage"),
            ("sequence_parallel", "which divides samples along any dimension itself"),
            ("expert_parallel", "which has no exchange of tokens"),
            ("compile", "whose generated code has collectives that the compiler would lose"),
        )
    )

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[OperatorParallelConfig]:
        """The fastest plan that the solver finds, where layers may be divided too."""
        if cluster.world_size > 1 and profile.trace is not None:
            yield OperatorParallelConfig()

    def apply(self, job: Job, config: OperatorParallelConfig) -> None:
        """Plans, divides the parameters in place and lets the model run by its divided graph; collective."""
        assert job.mesh is not None
        if job.mesh.size("tensor") == 1:
            job.explain(self.name, "the tensor axis has one rank, so nothing is divided")
            return
        group = TensorGroup(job.mesh.axis("tensor"))
        assert group.mesh is not None
        batch = common_sample(job, self.name, rows=_rows(job))
        found = job.cluster.on_first(
            lambda: or_refusal(lambda: _planned(job, config, batch, group.size)),
            what="finding an operator plan",
        )
        if isinstance(found, CaptureError) and config.plan is None:
            self._divide_layers(job, str(found))
            return
        if isinstance(found, InputError):  # which every rank raises
            raise found
        blocks = [block.name for block in repeated_blocks(job.module)]
        divide = functools.partial(division_of, found.plan, degree=group.size, summed=found.summed)
        forward = DividedForward(job.module, blocks, divide, group.process_group, job.device)
        divide_parameters(job.module, found.dims, group)
        ranks = group.mesh.get_group()
        whole = [p for name, p in job.module.named_parameters() if plain_name(name) not in found.dims]
        broadcast_from_first(job, (*whole, *job.module.buffers()), group=ranks)
        job.gradients.sums.add(found.summed, ranks)
        forward.attach(job.module)
        job.resolved_settings[self.name] = {"plan": found.plan.as_json()}
        for text in (found.note, found.plan.describe()):
            job.explain(self.name, text)

    def _divide_layers(self, job: Job, reason: str) -> None:
        """Divides layers, which needs no graph, and says so."""
        text = f"layers are divided instead, as tensor_parallel does: {reason}"
        job.warn(f"operator_parallel: {text}")
        job.explain(self.name, text)
        instead, config = TensorParallel(), TensorParallelConfig()
        job.plan = instead.plan(job.plan, config)
        instead.apply(job, config)
        for done in job.explained(instead.name):
            job.explain(self.name, done)


def _rows(job: Job) -> int | None:
    """Samples of a micro-batch, where the loader's arguments say so."""
    local = local_batch_size(job)
    return None if local is None else max(1, local // job.step.num_micro_batches)


def _planned(job: Job, config: OperatorParallelConfig, batch: Any, degree: int) -> _Planned:
    """The plan and what it means for each parameter of the model; nothing is communicated."""
    if job.inputs.sample_batch is not None:
        with contextlib.suppress(BatchSizeError):  # train_step says what is wrong with a real batch
            batch = split_batch(batch, job.num_data_ranks * job.step.num_micro_batches)[0]
    args, kwargs = call_arguments(job.module, batch, job.inputs.model_input_format)
    shallow = _captured(job, args, kwargs)
    plan, note = _given(config.plan), "the plan given"
    if plan is None:
        plan, note = _found(job, config, shallow, degree)
    elif plan.degree in (None, degree):  # what it is for is said below
        check_plan(plan, shallow.graph, degree)
    division = division_of(plan, shallow.graph, degree)
    if config.self_test:
        check_division(division, job.module, shallow.inputs, job.device)
    names = {plain_name(name): p for name, p in job.module.named_parameters(remove_duplicate=False)}
    placed = {name: division.parameters.get(shallow.copy_name(name)) for name in names}
    dims = {name: placement.dim for name, placement in placed.items() if isinstance(placement, Shard)}
    summed = frozenset(name for name in names if shallow.copy_name(name) in division.summed)
    return _Planned(plan, dims, summed, note)


def _found(
    job: Job, config: OperatorParallelConfig, shallow: Shallow, degree: int
) -> tuple[OperatorPlan, str]:
    """A plan by the policy, and what is known of it."""
    if config.policy != "solve":
        made = (
            random_plan(shallow.graph, degree, config.seed)
            if config.policy == "random"
            else batch_plan(shallow.graph, degree)
        )
        return made, f"the plan of the policy {config.policy}"
    precision = job.plan.precision
    prices = Prices.on(job.cluster, degree, precision.compute_dtype or precision.parameter_dtype)
    limit = config.memory_gib * 2**30 if config.memory_gib else float(prices.device.memory_bytes) or None
    constraints = read_constraints(config.constraints) if config.constraints else ()

    def allow(one: Operator, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return allowed(rules, one.call.name, (one.path, one.classes), constraints)

    sharding, num_data_ranks = job.plan.sharding, job.plan.num_data_ranks
    states = States(
        shards=num_data_ranks if sharding.optimizer_over else 1,
        gradients_stay=job.step.num_micro_batches > 1 or (num_data_ranks > 1 and not sharding.gradients_over),
    )
    solved = solved_plan(
        shallow.graph,
        degree,
        prices,
        states,
        job.device,
        memory_limit=limit,
        recomputed=job.plan.recomputation.kind != "none",
        allow=allow,
    )
    calls = [(one.call.name, (one.path, one.classes)) for one in shallow.graph.operators]
    for warning in unused(calls, constraints):
        job.warn(warning)
    return solved.plan, (
        f"found: {solved.text} Figures of the device: {prices.device.source}. The longest operators:\n"
        f"{textwrap.indent(costs_text(solved.costs, top=5), '    ')}"
    )


def _given(plan: Mapping[str, Any] | str | None) -> OperatorPlan | None:
    if plan is None or isinstance(plan, str):
        return None if plan is None else OperatorPlan.read(plan)
    return OperatorPlan.from_text(json.dumps(plan), source="in the strategy")


def _captured(job: Job, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shallow:
    """The operators of the model as it will run: in training, with the strategy's casts and dtypes of parameters."""
    precision = job.plan.precision
    stored = getattr(torch, precision.parameter_dtype)
    lowered = stored != torch.float32
    dtypes = {name: stored for name, p in job.module.named_parameters() if lowered and p.is_floating_point()}
    casts = precision.compute_dtype not in (None, precision.parameter_dtype)
    compute = getattr(torch, precision.compute_dtype or "float32")
    with modes_kept(job.module), torch.autocast(job.device.type, compute if casts else None, enabled=casts):
        return capture_shallow(job.module.train(), args, kwargs, dtypes=dtypes, device=job.device)
