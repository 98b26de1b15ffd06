"""parallel_mode: which ranks work together, along which axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, final

from pydantic import Field, StrictInt, field_validator

from atorch_ns.cluster import AXES, Cluster, Mesh, check_axes, fit, layout, mesh_ranks
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Method, MethodConfig, Need, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import DATA_AXES, MODEL_AXES, Plan
from opt_lib._mesh_options import model_shapes

__all__ = ["ParallelMode", "ParallelModeConfig"]


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
            raise ValueError(f"a rank order names each of the ranks 0 to {len(order) - 1} once")
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
        """Where the model is divided, groups must list their ranks in ascending order.

        torch numbers the ranks of a group by rank, a mesh by place: in another order a part of the model and the
        number it is known by would be of different ranks.
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
        """All ranks along ``data``, every division into ``zero`` inside and ``data`` outside, and every
        :func:`~opt_lib._mesh_options.model_shapes` with the rest of the ranks along ``data``.

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
        """Makes the mesh; collective."""
        job.mesh = Mesh(config.axes, device_type=job.cluster.device_type, rank_order=config.rank_order)

    def explain(self, config: ParallelModeConfig, cluster: Cluster) -> str:
        """The mesh in a few words."""
        shown = " × ".join(f"{name}={size}" for name, size in config.axes)
        return f"{cluster.world_size} process(es) as {shown}"
