"""operator_parallel: divides each operator over the tensor axis by its own placement, as nnScaler does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast, final

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.distributed.tensor import Shard

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.capture.random_states import modes_kept
from atorch_ns.cluster import Cluster, from_first, or_refusal
from atorch_ns.data import call_arguments, split_batch
from atorch_ns.errors import BatchSizeError, InputError
from atorch_ns.job import Job
from atorch_ns.method import Conflict, Flag, Method, MethodConfig, Phase
from atorch_ns.operators import (
    CaptureError,
    DividedForward,
    OperatorDivision,
    OperatorGraph,
    OperatorPlan,
    OperatorPrices,
    Shallow,
    States,
    Wanted,
    capture_shallow,
    check_division,
    division_of,
    find_plan,
    refit_plan,
)
from atorch_ns.pipeline import own_units
from atorch_ns.profile import Profile
from atorch_ns.sharding import TensorGroup, divide_parameters
from atorch_ns.sharding.rank_context import call_in_thread
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
        description="How a plan is made where none is given: the fastest within the memory, the samples "
        "divided wherever they can be followed, or any legal rule for each operator, to test.",
    )
    seed: int = Field(default=1, description="Seed of the policy random.")

    constraints: str | None = Field(
        default=None,
        description="Path of a YAML file in nnScaler's form, for the policy solve: the dimensions along "
        "which operators may be divided.",
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory of a rank that a found plan may need; by default the device's.",
    )
    self_test: Flag = Field(
        default=True,
        description="Run the divided graph of a shallow copy on simulated ranks, and compare every "
        "operator's results and gradients with those of the whole graph.",
    )

    @model_validator(mode="after")
    def _refuse_unused_settings(self) -> OperatorParallelConfig:
        idle = [name for name in ("constraints", "memory_gib") if getattr(self, name) is not None]
        if idle and self.plan is None and self.policy != "solve":
            raise ValueError(
                f"{' and '.join(idle)} can be used only with policy=solve, but it is {self.policy}"
            )
        return self


class _Planned(NamedTuple):
    """The decisions that one rank makes for all."""

    plan: OperatorPlan
    run: OperatorPlan  # the same, with tied parameters under the names of units of a pipeline too
    known: frozenset[str]  # keys of the operators that it was made for
    dims: dict[str, int]  # by name the dims of divided parameters
    summed: frozenset[str]  # names of whole parameters whose gradients are summed after the backward pass
    kinds: dict[str, str]  # for each unit of a pipeline its path as keys have it
    note: str  # findings about the plan, for the report


@final
class OperatorParallel(Method[OperatorParallelConfig]):
    """Divides every operator over the tensor axis by a placement of its own, as nnScaler does."""

    name = "operator_parallel"
    phase = Phase.SHARD_LAYERS
    Config = OperatorParallelConfig
    provides = ("axis:tensor",)
    needs_process_group = True
    refuses_by = ("num_micro_batches",)  # as whether any division pays
    conflicts = tuple(
        Conflict(other, f"Operators are divided in the graph of the whole model, {what}.")
        for other, what in (
            ("sequence_parallel", "which divides samples along any dimension itself"),
            ("expert_parallel", "which has no exchange of tokens"),
            ("compile", "whose generated code has collectives that the compiler would lose"),
        )
    )

    def notices(self, config: OperatorParallelConfig, cluster: Cluster) -> Iterable[str]:
        """Settings of a search for a plan, beside a plan."""
        keys = {"policy", "seed", "constraints", "memory_gib"} & config.model_fields_set
        if config.plan is not None and keys:
            yield f"operator_parallel has a plan, so {', '.join(sorted(keys))} are not used"

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[OperatorParallelConfig]:
        """The fastest plan that the solver finds, where layers may be divided too."""
        if cluster.world_size > 1 and profile.trace is not None:
            yield OperatorParallelConfig()

    def apply(self, job: Job, config: OperatorParallelConfig) -> None:
        """Plans, divides the parameters in place and lets the model run by its divided graph. Collective."""
        assert job.mesh is not None
        if job.mesh.size("tensor") == 1:
            job.explain(self.name, "the tensor axis has one rank, so nothing is divided")
            return
        group = TensorGroup(job.mesh.axis("tensor"))
        assert group.mesh is not None
        batch = common_sample(job, self.name, rows=_rows_per_micro_batch(job))
        units = sorted(set().union(*job.cluster.gathered(list(own_units(job.module)))))  # of all stages
        outcome = job.cluster.on_first(
            lambda: or_refusal(lambda: _make_plan(job, config, batch, group.size, units=units)),
            what="finding an operator plan",
        )
        if isinstance(outcome, CaptureError) and config.plan is None:
            self._divide_layers(job, str(outcome))
            return
        if isinstance(outcome, InputError):  # which every rank raises
            raise outcome
        attach = _run_by(outcome, job, group)
        # The plan is for all stages; a rank divides the parameters of its own.
        names = {plain_name(name) for name, _ in job.module.named_parameters(remove_duplicate=False)}
        dims = {name: dim for name, dim in outcome.dims.items() if name in names}
        divide_parameters(job.module, dims, group)
        ranks = group.mesh.get_group()
        whole = [p for name, p in job.module.named_parameters() if plain_name(name) not in outcome.dims]
        broadcast_from_first(job, (*whole, *job.module.buffers()), group=ranks)
        job.gradients.sums.add(outcome.summed & names, ranks)
        attach()
        job.resolved_settings[self.name] = {"plan": outcome.plan.as_json()}
        for text in (outcome.note, outcome.plan.describe()):
            job.explain(self.name, text)
        if not outcome.dims and not outcome.plan.operators:
            job.idle_axes["tensor"] = self.name, f"each of its {group.size} ranks computes all of its samples"
            job.warn(
                f"operator_parallel: nothing is divided, so each of the {group.size} tensor ranks computes all of its samples, "
                "and one process instead of these would train as fast."
            )

    def _divide_layers(self, job: Job, reason: str) -> None:
        text = f"layers are divided instead, as tensor_parallel does: {reason}"
        job.warn(f"operator_parallel: {text}")
        job.explain(self.name, text)
        instead, config = TensorParallel(), TensorParallelConfig()  # which needs no graph of operators
        job.plan = instead.plan(job.plan, config)
        instead.apply(job, config)
        for line in job.explained(instead.name):
            job.explain(self.name, line)


def _run_by(decision: _Planned, job: Job, group: TensorGroup) -> Callable[[], None]:
    units = own_units(job.module)
    # In a whole model blocks stay modules that are called; units of stages are divided each by itself.
    blocks = [] if units else [block.name for block in repeated_blocks(job.module)]
    pairs = []
    for path, module in units.items() or {"": job.module}.items():
        start = f"{path}." if path else ""
        sum_names = frozenset(name.removeprefix(start) for name in decision.summed if name.startswith(start))
        divide = functools.partial(_find_division, decision, job, group, sum_names)
        kind = decision.kinds.get(path, "")
        forward = DividedForward(module, blocks, divide, group.process_group, device=job.device, within=kind)
        pairs.append((module, forward))

    def attach() -> None:  # once parameters are divided
        for module, forward in pairs:
            forward.attach(module)

    return attach


def _find_division(
    decision: _Planned, job: Job, group: TensorGroup, sum_names: frozenset[str], graph: OperatorGraph
) -> OperatorDivision:
    """The division of a call: by the plan, or where it does not fit, the fastest with its parameters."""
    if decision.known.issuperset(graph.by_key):
        with contextlib.suppress(InputError):
            return division_of(decision.run, graph, group.size, sum_names)

    # For calls that the plan was not made for: without a mask, in evaluation, with indivisible sizes.
    def other() -> OperatorPlan:
        return refit_plan(decision.run, graph, group.size, _job_prices(job, group.size), device=job.device)

    assert group.mesh is not None
    proposal: OperatorPlan | InputError | None = None
    if group.rank == 0:  # collective, as the call itself is
        proposal = or_refusal(lambda: call_in_thread(other, job.device))
    reply = from_first(proposal, distributed=True, group=group.mesh.get_group())
    result = cast("OperatorPlan | InputError", reply)
    if isinstance(result, InputError):
        raise result
    return division_of(result, graph, group.size, sum_names)


def _job_prices(job: Job, degree: int) -> OperatorPrices:
    precision = job.plan.precision
    return OperatorPrices.on(job.cluster, degree, precision.compute_dtype or precision.parameter_dtype)


def _rows_per_micro_batch(job: Job) -> int | None:
    local = local_batch_size(job)
    return None if local is None else max(1, local // job.step.num_micro_batches)


def _make_plan(
    job: Job, config: OperatorParallelConfig, batch: Any, degree: int, *, units: Sequence[str]
) -> _Planned:
    """The plan, and what it means for each parameter; ``units`` are divided each by itself."""
    model = job.module if job.parts.full_structure is None else job.parts.full_structure
    if job.inputs.sample_batch is not None and not job.inputs.sample_is_micro_batch:
        with contextlib.suppress(BatchSizeError):  # train_step says what is wrong with a real batch
            batch = split_batch(batch, job.num_data_ranks * job.step.num_micro_batches)[0]
    args, kwargs = call_arguments(model, batch, job.inputs.model_input_format)
    shallow = _capture_model(job, model, args, kwargs, units=units)
    prices = _job_prices(job, degree)
    request, states = _plan_request(job, config, prices), _describe_states(job)
    solution = find_plan(shallow.graph, degree, request, prices, states=states, device=job.device)
    for warning in solution.warnings:
        job.warn(warning)
    division = division_of(solution.plan, shallow.graph, degree)
    if config.self_test:
        check_division(division, model, shallow.inputs, job.device)
    first_names = _find_first_names(model)
    # The graph has the first name of a parameter alone; every other name has the placement of that one.
    graph_names = {name: shallow.copy_name(first) for name, first in first_names.items()}
    placements = {name: division.parameters.get(inside) for name, inside in graph_names.items()}
    dims = {name: placement.dim for name, placement in placements.items() if isinstance(placement, Shard)}
    kinds = {segment.path: segment.kind for segment in shallow.graph.segments}
    of_units = {unit: kinds.get(shallow.copy_name(unit), unit) for unit in units}
    ties = {name: dim for name, dim in dims.items() if name != first_names[name]}
    return _Planned(
        plan=solution.plan,
        run=_add_ties(solution.plan, ties, of_units),
        known=frozenset(shallow.graph.by_key),
        dims=dims,
        summed=frozenset(name for name, inside in graph_names.items() if inside in division.summed),
        kinds=of_units,
        note=solution.note,
    )


def _find_first_names(model: nn.Module) -> dict[str, str]:
    # By each name of a parameter its first one: a tied parameter has several.
    pairs = [(plain_name(name), id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first.setdefault(parameter, name) for name, parameter in pairs}


def _add_ties(plan: OperatorPlan, ties: Mapping[str, int], of_units: Mapping[str, str]) -> OperatorPlan:
    # A unit has names of its own for the parameters tied to others: keys of the plan begin with its kind.
    shards = {
        kind + name.removeprefix(unit): Shard(dim)
        for name, dim in ties.items()
        for unit, kind in of_units.items()
        if name.startswith(f"{unit}.")
    }
    return replace(plan, parameters={**plan.parameters, **shards})


def _plan_request(job: Job, config: OperatorParallelConfig, prices: OperatorPrices) -> Wanted:
    limit = config.memory_gib * 2**30 if config.memory_gib else float(prices.device.memory_bytes)
    if job.mesh is not None:  # the graph is that of all stages, which share it
        limit *= job.mesh.size("pipeline")
    return Wanted(
        plan=config.plan,
        policy=config.policy,
        seed=config.seed,
        constraints=config.constraints,
        memory_bytes=limit or None,
        recomputed=job.plan.recomputation.kind != "none",
    )


def _describe_states(job: Job) -> States:
    sharding, num_data_ranks = job.plan.sharding, job.plan.num_data_ranks
    return States(
        shards=num_data_ranks if sharding.optimizer_over else 1,
        gradients_stay=job.step.num_micro_batches > 1 or (num_data_ranks > 1 and not sharding.gradients_over),
    )


def _capture_model(
    job: Job, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, units: Sequence[str]
) -> Shallow:
    """The operators of the model in training, with the strategy's casts and dtypes of parameters."""
    precision = job.plan.precision
    dtype = getattr(torch, precision.parameter_dtype)
    casts_weights = dtype != torch.float32
    dtypes = {name: dtype for name, p in model.named_parameters() if casts_weights and p.is_floating_point()}
    casts = precision.compute_dtype not in (None, precision.parameter_dtype)
    compute = getattr(torch, precision.compute_dtype or "float32")
    with modes_kept(model), torch.autocast(job.device.type, compute if casts else None, enabled=casts):
        return capture_shallow(
            model.train(), args, kwargs, dtypes=dtypes, device=job.device, units=units or None
        )
