"""mixed_parallel: every axis of parallel_mode is used, each by the method for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, final

from pydantic import Field

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem, StrategyError
from atorch_ns.job import Job
from atorch_ns.method import Expansion, Method, MethodConfig, Phase
from atorch_ns.strategy import MODEL_AXES, Plan

_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "pipeline": "pipeline_parallel",
        "tensor": "tensor_parallel",
        "sequence": "sequence_parallel",
        "expert": "expert_parallel",
    }
)
"""The method that uses an axis, by the axis."""

_SubConfig = dict[str, Any] | None


class MixedParallelConfig(MethodConfig):
    """The configs of the methods that it stands for; what is not given has that method's defaults."""

    tensor: _SubConfig = Field(default=None, description="Config of tensor_parallel.")
    sequence: _SubConfig = Field(default=None, description="Config of sequence_parallel.")
    expert: _SubConfig = Field(default=None, description="Config of expert_parallel.")
    pipeline: _SubConfig = Field(default=None, description="Config of pipeline_parallel.")
    data: Literal["ddp", "fsdp", "zero2"] | None = Field(
        default=None,
        description="The method that synchronises gradients over the data ranks; null for ddp, or for one "
        "that stands in the strategy itself. To configure it, write it into the strategy.",
    )


@final
class MixedParallel(Method[MixedParallelConfig]):
    """Trains with tensor, sequence, expert, pipeline and data parallelism, by the degrees of parallel_mode.

    It stands for the methods that use the axes of parallel_mode, and is replaced by them.
    """

    name = "mixed_parallel"
    phase = Phase.MESH
    Config = MixedParallelConfig
    needs_process_group = True

    def expand(self, config: MixedParallelConfig, others: Plan, cluster: Cluster) -> Expansion:
        """The methods that are configured here; those for the other axes are added as their defaults.

        Raises:
            StrategyError: if parallel_mode has no axis that divides a model, or lacks one configured here.
        """
        sizes = dict(others.axes)
        if not sizes.keys() & set(MODEL_AXES):  # an axis of size 1 is one, which divides nothing
            raise StrategyError([Problem(message=_no_axis(others, cluster))])
        configs = {axis: value for axis in _METHODS if (value := getattr(config, axis)) is not None}
        problems = [_absent_axis_problem(axis, others) for axis in configs if axis not in sizes]
        if problems:
            raise StrategyError(problems)
        idle_axes = [axis for axis in configs if sizes[axis] == 1]
        steps = [(_METHODS[axis], value or None) for axis, value in configs.items() if axis not in idle_axes]
        if config.data is not None:
            steps.append((config.data, None))
        notes = (f"{_METHODS[axis]} is left out: parallel_mode has {axis}=1" for axis in idle_axes)
        return Expansion(tuple(steps), tuple(notes))

    def apply(self, job: Job, config: MixedParallelConfig) -> None:
        """Nothing: by now it has been replaced."""


def _no_axis(others: Plan, cluster: Cluster) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in others.axes)
    has = f"parallel_mode has {sizes} only" if sizes else "there is no parallel_mode with their degrees"
    world = cluster.world_size
    axes = [("tensor", 2), ("pipeline", 2)] if world % 4 == 0 else [("tensor", 2)]
    if world > 1 and world % 2:  # 2 does not divide it
        axes = [("tensor", world)]
    return (
        f"it divides the model along the axes {', '.join(MODEL_AXES)}, and {has}. Write them into parallel_mode, "
        f"for example ('parallel_mode', ({axes}, None)), or leave mixed_parallel out"
    )


def _absent_axis_problem(axis: str, others: Plan) -> Problem:
    sizes = ", ".join(f"{name}={size}" for name, size in others.axes)
    return Problem(
        message=f"parallel_mode has {sizes} but no axis {axis!r}. Name its degree there, as in "
        f"({axis!r}, 2), or leave this config out",
        key=axis,
    )
