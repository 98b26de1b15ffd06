"""Pipeline plan: schedule, micro-batches and cuts, decided before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from atorch_ns.capture.blocks import NamedModule, repeated_blocks
from atorch_ns.cluster import Cluster, Hardware
from atorch_ns.costs import counted_seconds
from atorch_ns.data import split_batch
from atorch_ns.errors import BatchSizeError, InputError
from atorch_ns.job import Job, is_on_meta
from atorch_ns.method import MethodConfig, ModuleSelectors
from atorch_ns.pipeline import (
    BlockCosts,
    CallGraph,
    CallTracer,
    HowToRun,
    PipelineStep,
    RecomputeShare,
    ScheduleChoice,
    ScheduleInfo,
    Shards,
    Signature,
    choose_for_device,
    custom_cuts,
    find_units,
    get_schedule,
    live_micro_batches,
    make_shards,
    num_rows,
    partition,
    plan_crossings,
    refused_cuts,
    signature,
    split_backward,
    split_units,
    trace_with_values,
    uniform_cuts,
    uniform_floor_cuts,
)
from atorch_ns.strategy import Plan
from atorch_ns.text import first_few
from opt_lib._model_axes.sample_batch import local_batch_size, sample_micro_batch


class PipelineParallelConfig(MethodConfig):
    """How the model is cut, and how the stages are run."""

    split_points: tuple[str, ...] = Field(
        default=(), description="Names of the modules that begin a stage, the first stage's left out."
    )
    split_method: Literal["auto", "uniform", "uniform_floor", "parameters", "custom"] = Field(
        default="auto",
        description="How the cuts are found: by estimated time, by number of shards, or by number of "
        "parameters; custom takes custom_partition.",
    )
    custom_partition: tuple[int, ...] = Field(
        default=(), description="For custom: the first shard of every stage, then the number of shards."
    )
    shards: Literal["units", "farthest_min_deps", "nearest_min_deps", "split_points"] = Field(
        default="units",
        description="What stages are made of: every unit by itself; as many units as make shard_count shards of equal "
        "parameters, cut where the fewest tensors cross; as few as leave cuts where fewer cross than beside them; or what "
        "begins at the modules that split_points names, of which there may be more than stages.",
    )
    shard_count: int | None = Field(
        default=None,
        ge=1,
        description="About how many shards farthest_min_deps makes; null for twice the number of repeated blocks.",
    )
    leaf_modules: ModuleSelectors = Field(
        default=(), description="Classes or paths of modules inside of which the model is never cut."
    )
    num_micro_batches: int | None = Field(
        default=None,
        ge=1,
        description="Parts that the batch of a data rank is split into; null for "
        "gradient_accumulation_steps, or for what fits the batch where that is 1.",
    )
    schedule: str = Field(
        default="1F1B",
        description="Order of forward and backward passes: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, "
        "InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, PreRecompute1F1B, LastNoRecompute1F1B, ShiftedCriticalPath, "
        "one of your own as module:object, or auto for the fastest by a timed simulation.",
    )
    stages_per_rank: int | None = Field(
        default=None, ge=1, description="Stages on each rank; null for the schedule's usual number."
    )
    memory_limit_gib: float | None = Field(
        default=None, gt=0, description="What a rank may hold, for schedule auto; null for no limit."
    )

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        try:
            info = None if name == "auto" else get_schedule(name)
        except InputError as error:
            raise ValueError(str(error)) from error
        return name if info is None or info.note else info.name  # the report has the note of an alias

    @model_validator(mode="after")
    def _shards_have_a_use(self) -> PipelineParallelConfig:
        if self.shard_count is not None and self.shards != "farthest_min_deps":
            raise ValueError(
                f"shard_count applies only to shards=farthest_min_deps, but shards is {self.shards}. Leave out "
                "shard_count, or set shards to farthest_min_deps"
            )
        if not self.split_points and self.shards == "split_points":
            raise ValueError("shards=split_points needs split_points: name the modules where shards begin")
        if self.split_points and self.shards not in ("units", "split_points"):
            raise ValueError(
                f"split_points say where stages begin, so {self.shards} has nothing to decide. Leave out "
                "shards, or let split_method cut between them"
            )
        return self


def requested_micro_batches(job: Job, config: PipelineParallelConfig) -> int | None:
    """The number that the user gave, here or as gradient accumulation; ``None`` for none."""
    if config.num_micro_batches is not None:
        return config.num_micro_batches
    counts = (job.inputs.gradient_accumulation_steps, job.plan.num_micro_batches)
    return next((number for number in counts if number > 1), None)  # 1 is the default


def fitting_micro_batches(info: ScheduleInfo, num_ranks: int, on_rank: int, rows: int) -> int:
    """The divisor of ``rows`` that suits the schedule, nearest to twice the stages and below four times them.

    Raises:
        BatchSizeError: if there is none.
    """
    number = info.usual_micro_batches(num_ranks, on_rank, rows)
    if number is None:
        parts = [part for part in range(1, rows + 1) if rows % part == 0]
        raise BatchSizeError(
            f"a batch of {rows} rows per data rank can be split into {', '.join(map(str, parts))} micro-batches, but "
            f"{info.problem(num_ranks, rows, on_rank)} Use a larger batch_size, drop_last=True in dataloader_args if "
            "it is the last batch of an epoch, or schedule='GPipe', which accepts any number."
        )
    return number


def number_problem(info: ScheduleInfo, num_ranks: int, on_rank: int, number: int, *, rows: int) -> str:
    """The reason why a batch of ``rows`` is not run in ``number`` micro-batches, and the remedy."""
    legal = info.dividing(num_ranks, on_rank, rows)
    why = (
        f"a batch of {rows} rows per rank cannot be split into {number} equal micro-batches."
        if rows % number
        else info.reason(num_ranks, number, on_rank)
    )
    return (
        f"{why} {_micro_batch_advice(legal)}, drop_last=True in dataloader_args if it is the last batch of an epoch, or another "
        "batch_size."
    )


def splitter(plan: PipelinePlan, num_ranks: int) -> Callable[[Any], list[Any]]:
    """Splits batches into the plan's number of micro-batches, or another that fits if the user set none."""

    def split(data: Any) -> list[Any]:
        number, rows = plan.num_micro_batches, num_rows(data)
        if rows == 0:
            raise BatchSizeError("the batch has no rows.")
        if rows is not None and rows % number:
            if plan.num_is_requested:
                raise BatchSizeError(
                    number_problem(plan.info, num_ranks, plan.stages_per_rank, number, rows=rows)
                )
            number = fitting_micro_batches(plan.info, num_ranks, plan.stages_per_rank, rows)
        return split_batch(data, number)

    return split


def _micro_batch_advice(legal: list[int]) -> str:
    return f"Use num_micro_batches={' or '.join(map(str, legal))}" if legal else "Use schedule='GPipe'"


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A chosen pipeline.

    Attributes:
        info: the schedule.
        stages_per_rank: stages on each rank.
        num_micro_batches: parts of a batch.
        num_is_requested: whether the user gave that number.
        cuts: calls before which the model is cut.
        units: the modules that stages are made of.
        shards: a description of the shards; empty if every unit is one.
        graph: a pass of one micro-batch.
        traced_with: shapes of that micro-batch.
        tracer: traces more micro-batches; ``None`` for a model that had to run with real tensors.
        costs: seconds and bytes of the calls.
        shares: the share of its blocks that each stage recomputes.
        choice: how the cuts were chosen, if they were chosen by time.
        refused: places where the model cannot be cut, with the reasons.
    """

    info: ScheduleInfo
    stages_per_rank: int
    num_micro_batches: int
    num_is_requested: bool
    cuts: tuple[int, ...]
    units: tuple[NamedModule, ...]
    shards: str
    graph: CallGraph
    traced_with: Signature
    tracer: CallTracer | None
    costs: BlockCosts
    shares: tuple[float, ...]
    choice: ScheduleChoice | None
    refused: dict[int, str]

    @property
    def step(self) -> PipelineStep:
        """The step to simulate for a timeline."""
        return PipelineStep(
            schedule=self.info.name,
            num_ranks=(len(self.cuts) + 1) // self.stages_per_rank,
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.stages_per_rank,
            costs=self.costs.stages(self.cuts, self.shares),
        )

    @property
    def recomputed(self) -> frozenset[str]:
        """Paths of the blocks that are recomputed."""
        stages = self.costs.recomputed(self.cuts, self.shares)
        return frozenset(self.graph.paths[block] for blocks in stages for block in blocks)

    def rank_of(self, num_ranks: int) -> tuple[int, ...]:
        """The rank along the pipeline of every stage."""
        return tuple(self.info.rank_of(stage, num_ranks) for stage in range(len(self.cuts) + 1))


def plan_pipeline(job: Job, config: PipelineParallelConfig) -> PipelinePlan:
    """Decides a pipeline for the job's model and mesh, alike on every rank.

    Raises:
        InputError: naming the numbers and the choices.
    """
    assert job.mesh is not None
    num_ranks = job.mesh.size("pipeline")
    info = get_schedule(config.schedule if config.schedule != "auto" else "1F1B")  # auto: until one is chosen
    on_rank = config.stages_per_rank or info.usual_stages
    num = _num_micro_batches(job, config, info, num_ranks, on_rank=on_rank)
    batch = sample_micro_batch(job, num)
    units, tracer, graph = _trace_units(job, config, num_ranks * on_rank, batch)
    refused = refused_cuts(graph)
    blocks = {block.name for block in repeated_blocks(job.module)}
    shards = _find_shards(config, graph, units, refused, usual_count=2 * len(blocks))  # shard_count's default
    costs = call_costs(
        graph,
        units,
        job.plan,
        known_hardware(job.cluster),
        refused=refused,
        places=shards.starts,
        blocks=blocks,
    )
    # Under schedule auto the number of stages per rank is still open; one is the least.
    _check_count(graph, num_ranks, 1 if config.schedule == "auto" else on_rank, info, shards=shards)
    fixed_cuts = _find_fixed_cuts(config, graph, units, num_ranks * on_rank, refused=refused, shards=shards)
    choice, recompute = None, RecomputeShare.of(job.plan.recomputation)
    # Simulate if the cuts, the schedule or the shares are open.
    if fixed_cuts is None or config.schedule == "auto" or recompute.depends_on_cuts:
        try:
            choice = (
                choose_for_device(  # the fastest cut, and the fastest schedule where none is named, that fits
                    costs,
                    num_ranks,
                    num,
                    schedule=None if config.schedule == "auto" else info,
                    stages_per_rank=config.stages_per_rank if config.schedule == "auto" else on_rank,
                    whole_backward=job.plan.whole_backward,
                    limit_bytes=None if config.memory_limit_gib is None else config.memory_limit_gib * 2**30,
                    memory_bytes=known_hardware(job.cluster).device.memory_bytes,
                    cuts=fixed_cuts,
                    recompute=recompute,
                )
            )
        except InputError as error:
            raise InputError(f"{error}{_where_not(graph, refused)}") from error
        info, on_rank, fixed_cuts = choice.best.schedule, choice.best.stages_per_rank, choice.best.cuts
        shares = choice.best.shares
    else:
        live = live_micro_batches(info.orders(num_ranks, num, on_rank))  # by stage
        shares = recompute.of_stages(live, costs.kept_share, keeps_last=info.keeps_last)
    return PipelinePlan(
        info=info,
        stages_per_rank=on_rank,
        num_micro_batches=num,
        num_is_requested=requested_micro_batches(job, config) is not None,
        cuts=tuple(fixed_cuts),
        units=tuple(units),
        shards=shards.text,
        graph=graph,
        traced_with=signature(batch),
        tracer=tracer,
        costs=costs,
        shares=shares,
        choice=choice,
        refused=refused,
    )


def _trace_units(
    job: Job, config: PipelineParallelConfig, num_stages: int, batch: Any
) -> tuple[list[NamedModule], CallTracer | None, CallGraph]:
    units = find_units(
        job.module,
        at_least=max(num_stages * (1 if config.shards == "units" else 2), config.shard_count or 0),
        starts=config.split_points,
        leaves=config.leaf_modules,
    )
    tracer, graph = _trace_model(job, units, batch)
    # A unit whose parts are called from outside of it is not a single call.
    while graph.taken_apart:
        units = split_units(units, graph.taken_apart, leaves=config.leaf_modules)
        tracer, graph = _trace_model(job, units, batch)
    return units, tracer, graph


def _find_shards(
    config: PipelineParallelConfig,
    graph: CallGraph,
    units: Sequence[NamedModule],
    refused: Mapping[int, str],
    *,
    usual_count: int,
) -> Shards:
    if config.shards != "split_points":
        sizes, count = parameter_bytes(units, graph), config.shard_count or usual_count
        return make_shards(config.shards, graph, units, sizes, count=count, refused=refused)
    starts = sorted(set(_split_point_indices(config.split_points, graph, with_first=True)) - {0, *refused})
    return Shards(tuple(starts), f"{len(starts) + 1} shard(s) that begin at split_points")


def _trace_model(job: Job, units: Sequence[NamedModule], batch: Any) -> tuple[CallTracer | None, CallGraph]:
    how = HowToRun(model_input_format=job.inputs.model_input_format, loss_func=job.inputs.loss_func)
    tracer = CallTracer(job.module, units, job.device)
    try:
        return tracer, tracer.trace(batch, how)
    except InputError:  # it does not run without memory
        if is_on_meta(job.module):
            raise
        job.module.to(job.device)
        whole = replace(how, outputs=True)  # the one graph that there is, also where outputs are wanted
        return None, trace_with_values(job.module, units, batch, whole, device=job.device)


def _num_micro_batches(
    job: Job, config: PipelineParallelConfig, info: ScheduleInfo, num_ranks: int, *, on_rank: int
) -> int:
    """The user's number, or the result of :func:`fitting_micro_batches` for the loader's batches."""
    number = requested_micro_batches(job, config)
    size = local_batch_size(job)
    if number is not None:
        if info.problem(num_ranks, number, on_rank) and size is not None:
            raise BatchSizeError(number_problem(info, num_ranks, on_rank, number, rows=size))
        info.check(num_ranks, number, on_rank)
        return number
    if size is None:
        # The nearest number at or below twice the stages; two above it follow.
        return info.near_micro_batches(num_ranks, 2 * num_ranks * on_rank + 1, on_rank)[-3]
    return fitting_micro_batches(info, num_ranks, on_rank, size)


def _check_count(
    graph: CallGraph, num_ranks: int, on_rank: int, info: ScheduleInfo, *, shards: Shards
) -> None:
    num_stages, num_shards = num_ranks * on_rank, len(shards.starts) + 1
    if shards.text and num_shards < num_stages:
        raise InputError(
            f"pipeline={num_ranks} with {on_rank} stage(s) per rank ({info.name}) makes {num_stages} stages, but there "
            f"are {shards.text}. Use at most {num_shards} stages, a larger shard_count with "
            "shards='farthest_min_deps', or shards='units'."
        )
    if len(graph.calls) < num_stages:
        raise InputError(
            f"pipeline={num_ranks} with {on_rank} stage(s) per rank ({info.name}) makes {num_stages} stages, but the "
            f"model has {len(graph.calls)} units to make them of: {first_few(graph.paths, 8)}. Use "
            f"pipeline={len(graph.calls) // on_rank} or less, or name modules inside them in split_points."
        )


def _find_fixed_cuts(
    config: PipelineParallelConfig,
    graph: CallGraph,
    units: Sequence[NamedModule],
    num_stages: int,
    *,
    refused: Mapping[int, str],
    shards: Shards,
) -> tuple[int, ...] | None:
    starts, num = shards.starts, len(shards.starts) + 1
    begins = config.split_points if config.shards == "units" else ()
    points = begins or config.custom_partition
    # With auto the points say how many stages there are; custom_partition has the end too.
    if config.schedule == "auto" and points:
        num_stages = len(points) + 1 if begins else len(points) - 1
    if points:
        where = _split_point_indices(begins, graph) if begins else config.custom_partition
        if begins and len(where) != num_stages - 1:
            raise InputError(
                f"split_points names {len(where)} module(s) ({', '.join(config.split_points)}), but {num_stages} "
                f"stages need {num_stages - 1}: one for each stage except the first. Choose from {_stage_start_names(graph)}."
            )
        if begins and list(where) != sorted(set(where)):
            raise InputError(
                f"split_points must name each module once, in the order in which the model calls them; they are "
                f"{', '.join(config.split_points)}, but the model calls {_stage_start_names(graph)}."
            )
        try:
            # Positions among shards. Where shards are single units they are calls, some of which are refused.
            at = custom_cuts(where, num, num_stages, refused={} if shards.text else refused)
        except InputError as error:
            raise InputError(
                f"{error}{f' The blocks here are {shards.text}.' if shards.text else ''}"
            ) from error
        return tuple(starts[cut - 1] for cut in at)  # the calls that begin these shards
    even = {"uniform": uniform_cuts, "uniform_floor": uniform_floor_cuts}.get(config.split_method)
    try:
        if even is not None:
            legal_cuts = [cut for cut, start in enumerate(starts, 1) if start not in refused]
            return tuple(starts[cut - 1] for cut in even(num, num_stages, allowed_cuts=legal_cuts))
        if config.split_method == "parameters":
            legal_cuts = [start for start in starts if start not in refused]
            return partition(parameter_bytes(units, graph), num_stages, allowed_cuts=legal_cuts)
    except InputError as error:
        raise InputError(f"{error}{_where_not(graph, refused)}") from error
    return None


def _where_not(graph: CallGraph, refused: Mapping[int, str]) -> str:
    if not refused:
        return ""
    cut, reason = next(iter(refused.items()))
    return (
        f" The model cannot be cut in {len(refused)} place(s), such as before {graph.paths[cut]}: "
        f"{reason.rstrip('.')}."
    )


def _split_point_indices(points: Sequence[str], graph: CallGraph, *, with_first: bool = False) -> list[int]:
    indices = []
    for point in points:
        inside = [i for i, path in enumerate(graph.paths) if path == point or path.startswith(f"{point}.")]
        if not inside:
            raise InputError(
                f"split_points names {point!r}, which the model does not call. Stages can begin at {_stage_start_names(graph)}."
            )
        if inside[0] == 0 and not with_first:
            raise InputError(
                f"split_points names {point!r}, but the model already begins there: the first stage needs no name. "
                f"Name the modules that begin the other stages, out of {_stage_start_names(graph)}."
            )
        indices.append(inside[0])
    return indices


def _stage_start_names(graph: CallGraph) -> str:
    return first_few(list(dict.fromkeys(graph.paths[1:])), 24)


def call_costs(
    graph: CallGraph,
    units: Sequence[NamedModule],
    plan: Plan,
    hardware: Hardware,
    *,
    refused: Collection[int],
    places: Collection[int],
    blocks: Collection[str],
) -> BlockCosts:
    """Seconds and bytes of every call.

    Only their proportions matter for a cut, at ``places`` that are not ``refused``. ``blocks`` are paths.
    """
    device, link = hardware.device, hardware.within_node
    dtype = plan.precision.compute_dtype or plan.precision.parameter_dtype
    forward = tuple(float(counted_seconds(device, dtype, call.counts, "forward")) for call in graph.calls)
    able = [_is_recomputed(plan, call.path, blocks) for call in graph.calls]
    # A backward pass has two products for each one of the forward pass.
    for_input, for_weight = split_backward([2 * seconds for seconds in forward])
    sizes = _cut_bytes(graph, refused)  # [calls - 1]
    return BlockCosts(
        forward=forward,
        backward_input=for_input,
        backward_weight=for_weight,
        backward=tuple(2 * seconds for seconds in forward),
        recompute=tuple(seconds if flag else 0.0 for seconds, flag in zip(forward, able, strict=True)),
        send=tuple(float(link.message_seconds("send", size)) for size in sizes),
        state_bytes=tuple(size * _state_bytes_factor(plan) for size in parameter_bytes(units, graph)),
        activation_bytes=tuple(float(call.saved_bytes) for call in graph.calls),
        recomputed_bytes=tuple(
            float(_argument_bytes(graph, number) if able[number] else call.saved_bytes)
            for number, call in enumerate(graph.calls)
        ),
        boundary_bytes=sizes,
        allowed_cuts=[index for index in places if index not in refused],
    )


def known_hardware(cluster: Cluster) -> Hardware:
    """Speeds of devices and links. Unknown devices get a CPU's speeds, whose proportions suffice."""
    try:
        machine = cluster.with_hardware().hardware
    except InputError:
        machine = replace(cluster, device_type="cpu", hardware=None).with_hardware().hardware
        assert machine is not None
        machine = replace(machine, device=replace(machine.device, memory_bytes=cluster.device_memory_bytes))
    assert machine is not None
    return machine


def parameter_bytes(units: Sequence[NamedModule], graph: CallGraph) -> list[int]:
    """Parameter bytes of each call's unit. Parameters of several calls count for the first."""
    modules = {unit.name: unit.module for unit in units}
    counted_ids: set[int] = set()  # by identity
    sizes = []
    for path in graph.paths:
        new = [p for p in modules[path].parameters() if id(p) not in counted_ids]
        counted_ids.update(map(id, new))
        sizes.append(sum(p.numel() * p.element_size() for p in new))
    return sizes


def _state_bytes_factor(plan: Plan) -> float:
    """Bytes on a rank for each byte of a parameter: itself, its gradient, and two moments as of Adam."""
    sharding = plan.sharding
    axes_of_each = (sharding.parameters_over, sharding.gradients_over, sharding.optimizer_over)
    shares = [plan.size(axes) for axes in axes_of_each]
    degree = plan.size("tensor")
    return (1 / shares[0] + 1 / shares[1] + 2 / shares[2]) / degree


def _is_recomputed(plan: Plan, path: str, blocks: Collection[str]) -> bool:
    return plan.recomputation.kind == "blocks" and plan.recomputation.selectors is None and path in blocks


def _argument_bytes(graph: CallGraph, number: int) -> int:
    # A recomputed block keeps its inputs. Those that depend on no call are there in any case.
    arguments = set(graph.calls[number].arguments)
    return sum(
        graph.values[value].spec.num_bytes for value in arguments if graph.values[value].last_call >= 0
    )


def _cut_bytes(graph: CallGraph, refused: Collection[int]) -> tuple[float, ...]:
    return tuple(
        0.0 if cut in refused else float(plan_crossings(graph, [cut])[0].num_bytes)
        for cut in range(1, len(graph.calls))
    )
