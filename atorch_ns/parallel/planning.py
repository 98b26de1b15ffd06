"""Planning of a module: the methods that a policy stands for, with an operator plan where one can be found without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.capture.random_states import modes_kept
from atorch_ns.cluster import Cluster
from atorch_ns.data import call_arguments
from atorch_ns.errors import InputError
from atorch_ns.job import Result
from atorch_ns.operators import OperatorGraph, Prices, States, Wanted, capture_shallow, find_plan
from atorch_ns.operators.graph.capture import capture
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.parallel.graph import PolicyGraph
from atorch_ns.parallel.policies import Division, Step, division_by, strategy_of
from atorch_ns.text import with_article


def planned_steps(
    module: nn.Module,
    sample: Any,
    policy: str | Callable[..., Any],
    config: ComputeConfig,
    cluster: Cluster,
) -> list[Step]:
    """The methods of a plan; nothing is communicated.

    Along a pipeline operators are divided when the module is made: only then it is known where it is cut.

    Raises:
        InputError: if the policy cannot do what the config asks for, or no plan fits.
    """
    if not isinstance(policy, str):
        return strategy_of(_by_function(module, sample, policy, config, cluster), config)
    division = division_by(policy, config)
    steps = strategy_of(division, config)
    methods = dict(steps)
    if "operator_parallel" not in methods or "pipeline_parallel" in methods:
        return steps
    graph = _captured(module, sample, config, cluster)
    degree = dict(methods["parallel_mode"]["axes"])["tensor"]
    parameter = next(module.parameters(), None)
    dtype = "float32" if parameter is None else str(parameter.dtype).removeprefix("torch.")
    settings = dict(methods["operator_parallel"])
    found = find_plan(
        graph,
        degree,
        Wanted(
            plan=settings.get("plan"),
            policy=settings.get("policy", "solve"),
            seed=settings.get("seed", 1),
            constraints=settings.get("constraints"),
            memory_bytes=settings["memory_gib"] * 2**30 if "memory_gib" in settings else None,
            recomputed=division.recompute is not None,
        ),
        Prices.on(cluster, degree, dtype),
        States(shards=config.num_units // config.zero_ngroups if config.use_zero else 1, gradients_stay=True),
        torch.device(cluster.device),
    )
    path = config.pas_config.get("save_plan_path")
    if path is not None:
        found.plan.write(path)
    settings = {"plan": found.plan.as_json()}
    return [(name, settings if name == "operator_parallel" else own) for name, own in steps]


def _captured(module: nn.Module, sample: Any, config: ComputeConfig, cluster: Cluster) -> OperatorGraph:
    args, kwargs = call_arguments(module, sample, None if config.use_end2end else "unpack_dict")
    with modes_kept(module):
        return capture_shallow(module.train(), args, kwargs, device=torch.device(cluster.device)).graph


def _by_function(
    module: nn.Module, sample: Any, policy: Callable[..., Any], config: ComputeConfig, cluster: Cluster
) -> Division:
    """What a policy function does with the operators of the whole module."""
    args, kwargs = call_arguments(module, sample, None if config.use_end2end else "unpack_dict")
    with modes_kept(module), torch.enable_grad():
        captured = capture(module.train(), args, kwargs, device=torch.device(cluster.device))
    graph = PolicyGraph(OperatorGraph(captured, [block.name for block in repeated_blocks(module)]), config)
    made = policy(graph, config)
    if not isinstance(made, PolicyGraph):
        raise InputError(f"a policy function must return the graph; it returned {with_article(made)}.")
    return made.division()


def resolved_steps(result: Result, steps: list[Step]) -> list[Step]:
    """The methods with what they have decided when they were applied."""
    decided = result.job.resolved_settings
    return [
        (name, {"plan": decided[name]["plan"]} if name == "operator_parallel" and name in decided else own)
        for name, own in steps
    ]
