"""The part of an Accelerate config that is about Megatron-LM."""

from __future__ import annotations

from typing import Final

from atorch_ns.strategy._conversion import Converter, number, switch
from atorch_ns.strategy._convert_mesh import use_axes

__all__ = ["read_megatron"]

_SECTION: Final = "megatron_lm_config.megatron_lm_"


def read_megatron(converter: Converter, *, processes: int | None) -> None:
    """Adds the axes, their methods, and what is sharded over the data ranks."""
    sizes = {}
    for key, axis in (("tp_degree", "tensor"), ("pp_degree", "pipeline")):
        degree = converter.take(f"{_SECTION}{key}")
        if degree is None:
            continue
        if number(converter, f"{_SECTION}{key}", degree) == 1:
            converter.carry(f"{_SECTION}{key}", "1: nothing to divide")
            continue
        sizes[axis] = number(converter, f"{_SECTION}{key}", degree)
        converter.use(f"{axis}_parallel")
        converter.carry(f"{_SECTION}{key}", f"{degree} → the axis {axis}")
    _optimizer(converter)
    _sequence(converter, divided="tensor" in sizes)
    _micro_batches(converter, staged="pipeline" in sizes)
    recompute = converter.take(f"{_SECTION}recompute_activations")
    if recompute is not None:
        if switch(converter, f"{_SECTION}recompute_activations", recompute):
            converter.use("checkpoint")
            converter.carry(f"{_SECTION}recompute_activations", f"{recompute} → checkpoint")
        else:
            converter.carry(f"{_SECTION}recompute_activations", "false: nothing is recomputed")
    clip = converter.take(f"{_SECTION}gradient_clipping")
    if clip is not None:
        converter.leave(
            f"{_SECTION}gradient_clipping", f"an argument of auto_accelerate: max_grad_norm={clip}"
        )
    use_axes(converter, sizes, processes=processes)
    converter.carry("distributed_type", f"MEGATRON_LM → {'parallel_mode' if sizes else 'data parallelism'}")


def _optimizer(converter: Converter) -> None:
    key = f"{_SECTION}use_distributed_optimizer"
    given = converter.take(key)
    if given is None:
        return
    if switch(converter, key, given):
        converter.use("zero1")
        converter.carry(key, f"{given} → optimizer states are sharded over the data ranks, as by ZeRO 1")
    else:
        converter.carry(key, "false: every data rank holds the optimizer states")


def _sequence(converter: Converter, *, divided: bool) -> None:
    key = f"{_SECTION}sequence_parallelism"
    given = converter.take(key)
    if given is None:
        return
    on = switch(converter, key, given)
    if on and divided:
        converter.use("tensor_parallel", sequence=True)
        converter.carry(key, f"{given} → tensor_parallel.sequence")
    else:
        converter.carry(key, "true, but tp_degree is 1: nothing to divide" if on else "false: not used")


def _micro_batches(converter: Converter, *, staged: bool) -> None:
    """How many parts a step has; Accelerate accumulates gradients by these alone with Megatron-LM."""
    key, other = f"{_SECTION}num_micro_batches", "gradient_accumulation_steps"
    given = converter.take(key)
    if given is None:
        return
    count = number(converter, key, given)
    if staged:
        converter.use("pipeline_parallel", num_micro_batches=count)
        converter.carry(key, f"{given} → pipeline_parallel.num_micro_batches")
    elif count > 1:
        converter.use("gradient_accumulation", num_micro_batches=count)
        converter.carry(key, f"{given} → gradient_accumulation, since nothing is cut into stages")
    else:
        converter.carry(key, "1: every batch is computed in one pass")
    if converter.raw(other) is not None:
        converter.leave(other, f"Megatron-LM accumulates by {key}")
