"""Planning of a module: a policy's methods, with an operator plan where it can be found without ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.capture.graph.capture import capture
from atorch_ns.capture.random_states import modes_kept
from atorch_ns.cluster import Cluster
from atorch_ns.data import call_arguments
from atorch_ns.errors import InputError
from atorch_ns.job import Result
from atorch_ns.operators import (
    CaptureError,
    OperatorGraph,
    OperatorPrices,
    PipelineTask,
    Shallow,
    States,
    Wanted,
    capture_shallow,
    find_plan,
    staged_plan,
)
from atorch_ns.operators.choose import allowed_by
from atorch_ns.operators.rules.constraints import read_constraints
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.parallel.graph import PolicyGraph
from atorch_ns.parallel.policies import Division, Step, division_by, is_strategy_file, pivots_of, strategy_of
from atorch_ns.pipeline import find_units
from atorch_ns.strategy import Strategy
from atorch_ns.system import write_whole
from atorch_ns.text import error_text, with_article

log = logging.getLogger("atorch_ns")


_OF_OPERATORS = {"mem_constraint", "partition_constraints_path", "load_plan_path", "save_plan_path"}


@dataclass(frozen=True)
class PlanSource:
    """The plain module of a plan, with the arguments of ``parallelize``.

    Attributes:
        is_class: whether modules are made of it again and again.
        sample: input of the module's call.
        input_format: ``unpack_dict`` by names, ``None`` with the sample as a whole.
    """

    module: nn.Module
    is_class: bool
    config: ComputeConfig
    dummies: Mapping[str, Any]
    policy: str | Callable[..., Any]
    sample: Any
    input_format: str | None


class Planned(NamedTuple):
    """The methods of a plan, and notes for the report."""

    steps: list[Step]
    notes: tuple[str, ...]


def plan_module(source: PlanSource, cluster: Cluster) -> Planned:
    """Creates a plan without communication.

    With ``hybrid``, operators of stages are divided when the module is created and its cuts are known.

    Raises:
        InputError: if the policy cannot satisfy the config, or no plan fits.
    """
    config, policy, has_stages = source.config, source.policy, False
    if is_strategy_file(policy):
        strategy = Strategy.load(policy)
        return Planned([(step.name, step.config) for step in strategy], tuple(_notes_of(config)))
    if isinstance(policy, str):
        division = division_by(policy, config)
        has_stages = policy == "autodist" and division.num_stages > 1  # divided stages are searched for
        if has_stages:
            division = _in_stages(source, division, cluster)
    else:
        division = _by_function(source, policy, cluster)
    steps = strategy_of(division, config)
    notes = (*_notes_of(config), *division.notes)
    methods = dict(steps)
    degree = dict(methods["parallel_mode"]["axes"])["tensor"]
    has_limits = policy == "autodist" and bool(_OF_OPERATORS & config.pas_config.keys())  # also on one rank
    # Operators of a pipeline's stages are divided by a search for stages, or once the module is cut.
    if "pipeline_parallel" in methods or not ("operator_parallel" in methods or has_limits):
        return Planned(steps, notes)
    try:
        graph = _capture_module(source, cluster).graph
    except CaptureError as error:
        if degree > 1:
            raise
        idle = ", ".join(sorted(_OF_OPERATORS & config.pas_config.keys()))
        return Planned(steps, (*notes, f"{idle}: not looked at, for the module is not captured: {error}"))
    prices, device = OperatorPrices.of(source.module, cluster, degree), torch.device(cluster.device)
    outcome = find_plan(
        graph, degree, _plan_request(division), prices, states=_build_states(config), device=device
    )
    path = config.pas_config.get("save_plan_path")
    if path is not None and not has_stages:  # which has been written, though one stage was best
        outcome.plan.write(path)
    if config.pas_config.get("verbose"):
        log.info("%s\n%s", outcome.note, outcome.plan.describe())
    settings = {"plan": outcome.plan.as_json()}
    steps = [(name, settings if name == "operator_parallel" else options) for name, options in steps]
    return Planned(steps, (*notes, outcome.note, *outcome.warnings))


def _plan_request(division: Division) -> Wanted:
    settings = dict(division.operators or {})
    return Wanted(
        plan=settings.get("plan"),
        policy=settings.get("policy", "solve"),
        seed=settings.get("seed", 1),
        constraints=settings.get("constraints"),
        memory_bytes=settings["memory_gib"] * 2**30 if "memory_gib" in settings else None,
        recomputed=division.recompute is not None,
    )


def _notes_of(config: ComputeConfig) -> list[str]:
    notes = []
    if config.constant_folding:
        notes.append(
            "constant_folding: sizes are fixed at each capture anyway, but for the number of samples"
        )
    if config.trace_strategy != "cuda_run_cpu_offload":
        notes.append(
            f"trace_strategy={config.trace_strategy}: operators are captured on tensors without values"
        )
    return notes


def _capture_module(source: PlanSource, cluster: Cluster, units: Sequence[str] | None = None) -> Shallow:
    module, device = source.module, torch.device(cluster.device)
    args, kwargs = call_arguments(module, source.sample, source.input_format)
    with modes_kept(module):
        return capture_shallow(module.train(), args, kwargs, device=device, units=units)


def _build_states(config: ComputeConfig) -> States:
    shards = config.num_units // config.zero_ngroups if config.use_zero else 1  # ranks that share states
    return States(shards=shards, gradients_stay=True)


def _in_stages(source: PlanSource, request: Division, cluster: Cluster) -> Division:
    config, settings = source.config, source.config.pas_config
    if "load_plan_path" in settings:
        return _read_stages(settings["load_plan_path"], request)
    pivots = pivots_of(settings)
    units = [unit.name for unit in find_units(source.module, at_least=request.num_stages, starts=pivots)]
    shallow = _capture_module(source, cluster, units)
    # Units in the order in which the captured model calls them; a path counts from its first segment.
    order = {segment.path: index for index, segment in reversed(list(enumerate(shallow.graph.segments)))}
    units = sorted(
        (unit for unit in units if shallow.copy_name(unit) in order),
        key=lambda unit: order[shallow.copy_name(unit)],
    )
    number = settings.get("pipeline_nstages", "auto")
    most = settings.get("max_partition_degree", config.plan_ngpus)
    memory = settings.get("mem_constraint")

    def task(num_segments: int) -> PipelineTask:
        return PipelineTask(
            num_segments=num_segments,
            num_devices=config.plan_ngpus,
            num_micro_batches=request.pipeline["num_micro_batches"],
            degrees=[degree for degree in range(1, most + 1) if config.plan_ngpus % degree == 0],
            num_stages=None if number == "auto" else number,
            equal_degrees=True,  # the mesh has one size of its tensor axis
            recompute=(True,) if request.recompute else (False, True),
            schedule=request.pipeline["schedule"],
            memory_limit=None if memory is None else memory * 1e9,  # mem_constraint is in GB
        )

    constraints = settings.get("partition_constraints_path")
    pipeline = staged_plan(
        shallow,
        units,
        task,
        lambda degree: OperatorPrices.of(source.module, cluster, degree),
        states=_build_states(config),
        device=torch.device(cluster.device),
        pivots=pivots,
        allow=allowed_by(read_constraints(constraints)) if constraints else None,
    )
    plan = {
        "stages_begin_with": list(pipeline.starts),
        "recompute": [float(again) for again in pipeline.recomputed],
        "operators": None if pipeline.operators is None else pipeline.operators.as_json(),
    }
    if "save_plan_path" in settings:
        path = Path(settings["save_plan_path"])
        try:
            write_whole(path, json.dumps(plan, indent=2) + "\n")
        except OSError as error:
            raise InputError(
                f"save_plan_path: {path} cannot be written: {error.strerror or error}."
            ) from error
    return _of_stages(plan, request)


def _read_stages(path: str, request: Division) -> Division:
    try:
        plan = json.loads(Path(path).read_text("utf-8"))
        starts, again, operators = plan["stages_begin_with"], plan["recompute"], plan["operators"]
        if not isinstance(operators, (dict, type(None))) or len(again) != len(starts) + 1:
            raise ValueError("recompute needs a number for each stage, and operators must be a plan or null")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"load_plan_path: {path} holds no plan of stages as written by save_plan_path: {error_text(error)}"
        ) from error
    return _of_stages(plan, request)


def _of_stages(plan: Mapping[str, Any], request: Division) -> Division:
    recompute = request.recompute
    if recompute is None and any(plan["recompute"]):  # recompute_modules has precedence
        recompute = {"share": plan["recompute"]}
    starts = plan["stages_begin_with"]
    pipeline = {**request.pipeline, "split_points": starts, "stages_per_rank": 1}
    return Division(
        num_stages=len(starts) + 1,
        operators=None if plan["operators"] is None else {"plan": plan["operators"]},
        pipeline=pipeline if starts else {},
        recompute=recompute,
        notes=request.notes,
    )


def _by_function(source: PlanSource, policy: Callable[..., Any], cluster: Cluster) -> Division:
    module = source.module
    args, kwargs = call_arguments(module, source.sample, source.input_format)
    with modes_kept(module), torch.enable_grad():
        trace = capture(module.train(), args, kwargs, device=torch.device(cluster.device))
    blocks = [block.name for block in repeated_blocks(module)]
    graph = PolicyGraph(OperatorGraph(trace, blocks), source.config)
    result = policy(graph, source.config)
    if not isinstance(result, PolicyGraph):
        raise InputError(f"a policy function must return the graph; it returned {with_article(result)}.")
    return result.division()


def resolved_steps(result: Result, steps: list[Step]) -> list[Step]:
    """The methods with the decisions that they made and tested when they were applied."""
    decision = result.job.resolved_settings.get("operator_parallel")
    if decision is None:
        return steps
    settings = {"plan": decision["plan"], "self_test": False}  # tested when it was applied
    return [(name, settings if name == "operator_parallel" else options) for name, options in steps]
