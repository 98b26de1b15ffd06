"""parallel_mode: which ranks work together, along which axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from pydantic import Field, StrictInt, field_validator

from atorch_ns.cluster import AXES, Cluster, Mesh, check_axes, fit, layout, mesh_ranks
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Method, MethodConfig, Need, Phase
from atorch_ns.profile import Profile, Trace
from atorch_ns.strategy import DATA_AXES, MODEL_AXES, Plan


class ParallelModeConfig(MethodConfig):
    """The mesh of the job."""

    axes: tuple[tuple[str, StrictInt], ...] = Field(
        default=(("data", 1),),
        description=f"(name, size) of each axis, innermost first; names are {', '.join(AXES)}. "
        "The size of data is fitted to the number of processes.",
    )
    rank_order: tuple[int, ...] | None = Field(
        default=None, description="The rank at each position of the mesh; null for 0, 1, 2, ….", min_length=1
    )

    @field_validator("axes")
    @classmethod
    def _known_axes(cls, axes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return check_axes(axes)

    @field_validator("rank_order")
    @classmethod
    def _each_rank_once(cls, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if order is not None and sorted(order) != list(range(len(order))):
            raise ValueError(f"a rank order must name each of the ranks 0 to {len(order) - 1} once")
        return order

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``([("tensor", 4), ("data", 2)], None)``, or the list of axes alone."""
        if not isinstance(value, (list, tuple)):
            raise ValueError("write its config as ([(name, size), ...], rank_order or None)")
        pairs_alone = all(
            isinstance(item, (list, tuple)) and item and isinstance(item[0], str) for item in value
        )
        if pairs_alone:
            return {"axes": value}
        if len(value) == 2:
            return {"axes": value[0], "rank_order": value[1]}
        raise ValueError("write its config as ([(name, size), ...], rank_order or None)")


@final
class ParallelMode(Method[ParallelModeConfig]):
    """Arranges the ranks along named axes."""

    name = "parallel_mode"
    phase = Phase.MESH
    Config = ParallelModeConfig
    provides = ("mesh",)
    default_for = "mesh"
    needs_process_group = True

    def fit(self, config: ParallelModeConfig, cluster: Cluster) -> ParallelModeConfig:
        """Sets the size of ``data`` and checks the rank order."""
        axes = fit(config.axes, cluster.world_size)
        mesh_ranks(axes, cluster.world_size, config.rank_order)
        return config.model_copy(update={"axes": axes})

    def needs(self, config: ParallelModeConfig, cluster: Cluster) -> Iterable[Need]:
        """Somebody must synchronise gradients, and somebody must use every other axis."""
        ranks = 1
        for name, size in config.axes:
            if name in DATA_AXES:
                ranks *= size
            if name in MODEL_AXES and size > 1:
                yield Need(
                    f"axis:{name}", f"parallel_mode has {name}={size}, which divides nothing by itself"
                )
        if ranks > 1:
            yield Need("gradient_sync", f"{ranks} ranks see different data and must agree on gradients")

    def check(self, config: ParallelModeConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """Groups must list their ranks in ascending order if the model is divided.

        torch numbers a group's ranks by rank, a mesh by place: in another order the two would differ.
        """
        if config.rank_order is None or not any(n in MODEL_AXES and size > 1 for n, size in config.axes):
            return []
        for name, groups in layout(config.axes, cluster.world_size, config.rank_order).items():
            for group in groups:
                if group != sorted(group):
                    return [
                        Problem(
                            message=f"the ranks of a group along {name!r} are {group}, not in ascending order, while "
                            "the model is divided over ranks",
                            method=self.name,
                            key="rank_order",
                            accepted="an order in which every group ascends, or null",
                        )
                    ]
        return []

    def plan(self, plan: Plan, config: ParallelModeConfig) -> Plan:
        """The mesh."""
        return replace(plan, axes=config.axes, rank_order=config.rank_order)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[ParallelModeConfig]:
        """All ranks along ``data``, splits into ``zero`` inside ``data``, and all :func:`model_shapes`.

        Groups along ``zero`` lie within a node or are made of whole nodes.
        """
        world, node = cluster.world_size, cluster.local_world_size
        if world == 1:
            return
        yield ParallelModeConfig(axes=(("data", world),))
        for zero in range(2, world):
            if world % zero == 0 and (node % zero == 0 or zero % node == 0):
                yield ParallelModeConfig(axes=(("zero", zero), ("data", world // zero)))
        for axes in model_shapes(profile, cluster):
            yield ParallelModeConfig(axes=axes)

    def apply(self, job: Job, config: ParallelModeConfig) -> None:
        """Makes the mesh. Collective."""
        job.mesh = Mesh(config.axes, device_type=job.cluster.device_type, rank_order=config.rank_order)

    def explain(self, config: ParallelModeConfig, cluster: Cluster) -> str:
        """The mesh in a few words."""
        axes = " × ".join(f"{name}={size}" for name, size in config.axes)
        return f"{cluster.world_size} process(es) as {axes}"


LONG_SAMPLE = 8192
"""Tokens of a sample from which on dividing it is tried."""

_SMALL_WORLD = 64  # ranks up to which all of them may divide one replica of the model


def model_shapes(profile: Profile, cluster: Cluster) -> Iterator[tuple[tuple[str, int], ...]]:
    """Axes, innermost first, of meshes that divide the model; the smallest divisions first.

    Limits, besides divisibility:

    - sizes along ``tensor``, ``sequence`` and ``pipeline`` are powers of two;
    - ``tensor`` and ``sequence`` together stay inside a node: they exchange activations in every layer;
    - ``sequence`` is for samples of at least :data:`LONG_SAMPLE` tokens: for shorter ones a smaller
      micro-batch saves as much memory and costs no exchange;
    - ``expert`` is combined with ``pipeline`` only: experts are whole within ``tensor``;
    - a pipeline has at most one rank for every two blocks, so that its stages can be even;
    - shards of states lie on whole nodes: the data ranks of one, of 8, of 64, …, or all of them;
    - at least a quarter of a large cluster's ranks see different data; larger models need fsdp as well.

    Without a trace nothing is known that could be divided.
    """
    trace, world = profile.trace, cluster.world_size
    if trace is None:
        return
    tensors = [size for size in _powers_of_two(cluster.local_world_size) if _divides_tensor(trace, size)]
    sequences = [size for size in _powers_of_two(cluster.local_world_size) if _divides_sequence(trace, size)]
    pipelines = [size for size in _powers_of_two(world) if size == 1 or 2 * size <= len(profile.blocks)]
    experts = [size for size in range(1, world + 1) if size == 1 or _divides_experts(trace, size)]
    shapes = itertools.product(tensors, sequences, experts, pipelines)
    for tensor, sequence, expert, pipeline in sorted(shapes, key=lambda shape: (math.prod(shape), shape)):
        model = tensor * sequence * pipeline
        data, rest = divmod(world, model * expert)
        # Skip shapes that do not divide, that divide nothing, or whose layers exchange between nodes.
        if rest or model * expert == 1 or cluster.local_world_size % (tensor * sequence):
            continue
        if expert > 1 and tensor * sequence > 1:  # experts are whole within tensor
            continue
        if world > _SMALL_WORLD and 4 * model > world:  # a quarter see different data
            continue
        inner = (("tensor", tensor), ("sequence", sequence), ("expert", expert))
        for zero in (1, *_within_data(data, cluster.local_world_size // (tensor * sequence), expert)):
            sizes = (*inner, ("zero", zero), ("data", data // zero), ("pipeline", pipeline))
            yield tuple((name, size) for name, size in sizes if size > 1)


def _within_data(data: int, in_node: int, expert: int) -> Iterator[int]:
    """Sizes of an axis ``zero`` inside ``data``: ranks of one node, of 8, of 64, …, fewer than all."""
    zero = max(1, in_node)  # within a node sharding over fewer ranks costs the same
    while expert == 1 and zero < data and data % zero == 0:
        if zero > 1:
            yield zero
        zero *= 8


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, … that divide ``most``."""
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0]


def _divides_tensor(trace: Trace, size: int) -> bool:
    if size == 1:
        return True
    dims = [
        spec.shape[spec.tensor_dim]
        for segment in trace.segments
        for spec in segment.parameters
        if segment.is_block and spec.tensor_dim is not None
    ]
    return bool(dims) and all(dim % size == 0 for dim in dims) and _divides_heads(trace, size)


def _divides_sequence(trace: Trace, size: int) -> bool:
    if size == 1:
        return True
    # Heads need not divide, for a ring. It gives each rank an early and a late piece: hence 2 * size.
    attends = any(segment.num_attentions for segment in trace.segments if segment.is_block)
    long = trace.num_tokens >= LONG_SAMPLE and trace.num_tokens % (2 * size) == 0
    return attends and long


def _divides_heads(trace: Trace, size: int) -> bool:
    heads = [trace.num_heads, trace.num_key_value_heads]  # 0 where unknown
    heads += [count for segment in trace.segments for count in segment.heads]
    return all(count % size == 0 for count in heads)


def _divides_experts(trace: Trace, size: int) -> bool:
    has = any(segment.num_routed for segment in trace.segments)
    return has and trace.num_experts % size == 0
