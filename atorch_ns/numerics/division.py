"""Test of a division: a small model divided over ranks, against the undivided one before the first step."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.capture.blocks import call_hooks
from atorch_ns.capture.nests import tensors_of
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.cluster import Cluster
from atorch_ns.cluster.memory_limit import room_bytes
from atorch_ns.data import default_prepare_input
from atorch_ns.errors import AtorchError, StrategyError
from atorch_ns.job import Inputs, Result, is_out_of_memory
from atorch_ns.job.sampling import forward_loss
from atorch_ns.method import Registry, Resolved
from atorch_ns.numerics.probe import ProbeResult, judge_run, prepare_small, run_small
from atorch_ns.numerics.reference import distance, part_of_ranks
from atorch_ns.numerics.run import judged_job, train_step
from atorch_ns.numerics.setup import Prepared
from atorch_ns.sharding.compare import largest
from atorch_ns.strategy import MODEL_AXES, Strategy
from atorch_ns.text import error_line, error_text, first_few
from atorch_ns.torch_compat import pipeline_unit, plain_name

_DIFFERS: Final = 1e-4
"""A result off by this share of its largest value has more than rounding errors, in fp32 and few blocks."""


def check_division(inputs: Inputs, cluster: Cluster, resolved: Resolved, registry: Registry) -> str:
    """Trains a small copy of the model for two steps, divided by a strategy and in one process. Collective.

    Only methods that divide the model, or synchronise what they leave, take part, in full precision. The
    small model has the first and the last block and one of each kind between. A micro-batch is one sample.

    Returns:
        The finding, as a sentence for the report.

    Raises:
        StrategyError: on every rank, if a loss or a parameter differs from one process (it names the module),
            if the divided model fails, or if a closure reads parameters of which ranks hold different parts.
    """
    axes = [axis for axis in MODEL_AXES if resolved.plan.size(axis) > 1]
    strategy = _dividing_strategy(resolved, registry)
    prefix = f"the model as a whole, divided over {' and '.join(axes)}, was not compared with one process"
    # What a comparison frees is not all given back, and training may need it.
    if room_bytes(torch.device(cluster.device)) is not None:
        return f"{prefix}: a limit of memory is enforced, which training alone must keep to"
    with random_states_kept(torch.device(cluster.device)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the job itself warns of the same
        outcome = _compare_small_run(inputs, cluster, strategy, registry)
        gc.collect()  # hooks hold the small job in cycles
        if isinstance(outcome, str):
            return f"{prefix}: {outcome}"
        if not outcome.passed:
            where = _first_difference(inputs, cluster, strategy, registry) or outcome.text
            raise StrategyError(
                f"divided over {' and '.join(axes)}, the model trains otherwise than in one process: {where}. Its blocks "
                "passed their tests one by one, so the code around them depends on what is divided. Train without "
                f"{'this axis' if len(axes) == 1 else 'one of these axes'}, or leave that module whole."
            )
    return (
        f"the model as a whole, divided over {' and '.join(axes)}, trains as in one process: {outcome.num_judged} of "
        f"{outcome.num_parameters} parameters compared after two steps of it in small"
    )


def _dividing_strategy(resolved: Resolved, registry: Registry) -> Strategy:
    roles = {item.method.name: item.method.roles(item.config) for item in resolved.chosen}

    def divides(name: str) -> bool:
        method_roles = roles.get(registry.get(name).name, ())
        return any(role == "mesh" or role.startswith("axis:") for role in method_roles)

    return Strategy([step for step in resolved.strategy if divides(step.name)])


def _compare_small_run(
    inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry
) -> ProbeResult | str:
    setup = prepare_small(inputs, cluster, strategy, registry, rows=1)
    if isinstance(setup, str):
        return setup
    if setup.closed_over:
        read = f"a hook or a function of its closes over {first_few(setup.closed_over, 3)}"
        plan = setup.resolved.plan
        if plan.size("pipeline") > 1 or plan.size("sequence") > 1:
            raise StrategyError(
                f"the model cannot be divided over pipeline or sequence: {read}, so nothing shows which stage or part "
                "of a sequence its gradient comes from. Make it a parameter of the module that reads it (a hook is given that "
                "module), or use the axes data, zero and tensor."
            )
        return f"{read}, and a copy of the model would read those of the model itself"
    # No agreement here: if the divided model raises, the ranks are at different points.
    try:
        run = run_small(setup, cluster)
    except AtorchError as error:  # of a method, on all ranks; the whole model may well be divided
        return error_text(error)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        axes = " and ".join(axis for axis in MODEL_AXES if setup.resolved.plan.size(axis) > 1)
        raise StrategyError(
            f"divided over {axes}, the model fails, which runs in one process: {error_line(error)}. Its blocks passed their "
            "tests one by one, so what they hand to each other depends on the division. Train it over other axes, or leave "
            "the modules in the traceback whole."
        ) from error
    return judge_run(setup, inputs, cluster, run)


@dataclass(frozen=True)
class _Difference:
    error: float  # share of the largest value; nan where shapes differ
    actual: torch.Tensor | None = None  # sums over the dims that differ
    expected: torch.Tensor | None = None  # the same sums of the reference, times this rank's share


def _first_difference(inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry) -> str:
    """A sentence about the first module, in the order of calls, whose result differs; empty if none does."""
    setup = prepare_small(inputs, cluster, strategy, registry, rows=1)
    assert not isinstance(setup, str)
    whole = copy.deepcopy(setup.inputs.model)  # a copy, since training uses the model up
    small = replace(setup.inputs, sample_batch=setup.batches[0][0])
    result = judged_job(
        small, cluster, setup.resolved, learning_rate=setup.learning_rate, training=setup.training
    )
    batch = setup.batches[0][part_of_ranks(result.job.num_data_ranks)[result.job.data_rank]]
    parts = result.job.parts
    # Experts are called with the samples of all ranks, so they cannot be compared.
    experts = (*parts.experts, *parts.listed_experts)
    alone = {id(inside) for each in experts for inside in each.modules()}
    with _record_results(result.job.module, alone) as results:
        train_step(result, batch)
    reference = _reference_results(whole, setup, result, batch)
    ranks = cluster.gathered(
        {name: _find_difference(results[name], value) for name, value in reference.items() if name in results}
    )
    # Stages run the code between their units on stand-ins, so that one rank alone has its right results.
    one_is_enough = setup.resolved.plan.size("pipeline") > 1
    for name in reference:
        rows = [rank[name] for rank in ranks if name in rank]
        if rows and (error := _combine_errors(rows, one_is_enough=one_is_enough)) > _DIFFERS:
            return f"the first module whose result differs is {name or 'the model itself'} (off by {error:.1g} of its largest value)"
    return ""


def _reference_results(
    whole: nn.Module, setup: Prepared, result: Result, batch: Any
) -> Mapping[str, torch.Tensor]:
    whole.train(setup.training)
    prepare = setup.inputs.prepare_input or default_prepare_input
    micro_batches = result.job.step.micro_batches(prepare(batch, result.job.device))
    with _record_results(whole) as results:
        forward_loss(setup.inputs)(whole, micro_batches[0])
    return results


@contextmanager
def _record_results(model: nn.Module, alone: Collection[int] = ()) -> Iterator[dict[str, torch.Tensor]]:
    """The first floating tensor that each module returns, by path; ``alone`` has ids of modules left out."""
    results: dict[str, torch.Tensor] = {}

    def note(path: str, _: nn.Module, __: Any, output: Any) -> None:
        floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        if floating:
            results.setdefault(path, floating[0].detach().to("cpu", copy=True))  # the first call only

    modules = [
        (plain_name(path), module)
        for path, module in model.named_modules()
        if id(module) not in alone and pipeline_unit(module)[1] is module  # the inside of a unit is there too
    ]
    with call_hooks(modules, lambda *_: None, note):
        yield results


def _find_difference(actual: torch.Tensor, reference: torch.Tensor) -> _Difference:
    if actual.shape == reference.shape:
        return _Difference(distance(actual, reference) / max(largest(reference), 1e-12))
    if actual.dim() != reference.dim():
        return _Difference(0.0)  # nothing to compare
    dims = [dim for dim in range(actual.dim()) if actual.size(dim) != reference.size(dim)]
    share = actual.numel() / reference.numel()
    return _Difference(math.nan, actual.double().sum(dims), share * reference.double().sum(dims))


def _combine_errors(rows: list[_Difference], *, one_is_enough: bool) -> float:
    errors = [row.error for row in rows if not math.isnan(row.error)]
    if errors:
        return min(errors) if one_is_enough else max(errors)
    actual = [row.actual for row in rows if row.actual is not None]
    reference = [row.expected for row in rows if row.expected is not None]
    if len({tuple(tensor.shape) for tensor in (*actual, *reference)}) != 1:
        return 0.0  # nothing to compare
    # Sums of parts add up to the sum of the whole, however they were divided.
    total = torch.stack(reference).sum(0)
    return distance(torch.stack(actual).sum(0), total) / max(largest(total), 1e-12)
