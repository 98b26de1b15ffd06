"""Stages of a pipeline: their costs, the task of planning, and the step as estimated and as simulated.

A step of ``m`` micro-batches is estimated as ``sum(t_s) + sends both ways + max((m - 1) * t_s + w_s)``.
In stage ``s``, ``t_s`` are a micro-batch's seconds, forward and backward, and ``w_s`` those paid once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atorch_ns.errors import InputError
from atorch_ns.pipeline.schedule.schedules import get_schedule
from atorch_ns.pipeline.schedule.simulate import StageCosts, simulate
from atorch_ns.text import count_noun


class StageCost(NamedTuple):
    """Seconds of one micro-batch in a stage, its collectives and recomputation included; a device's peak
    bytes; and seconds that are paid once a step, such as the synchronization of gradients."""

    forward: float
    backward: float
    memory: float = 0.0
    per_step: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


Cost = Callable[[int, int, int, bool, int], StageCost | None]
"""``(start, stop, degree, recompute, in_flight) -> cost`` of a stage; ``None`` if there is none.

It has the segments ``start`` to ``stop - 1`` on ``degree`` devices and holds ``in_flight`` micro-batches.
With more in flight it is never faster, needs no less memory, and is not possible where it was not.
"""


class Stage(NamedTuple):
    """A stage of a pipeline: the arguments of :data:`Cost` and the cost that it returned."""

    start: int
    stop: int
    degree: int
    recompute: bool
    in_flight: int
    cost: StageCost


@dataclass(frozen=True, kw_only=True)
class PipelineTask:
    """The task of planning a pipeline: the model's segments, the devices, and the limits.

    Attributes:
        num_segments: number of segments. A segment is never split between stages.
        num_devices: total number of devices.
        degrees: allowed numbers of devices per stage; ``None`` for divisors of :attr:`num_devices`.
        num_stages: the number of stages; ``None`` for the fastest.
        equal_degrees: whether all stages have the same degree.
        recompute: allowed choices of a stage: keep its activations, recompute them, or either.
        schedule: ``"1F1B"`` or ``"GPipe"``.
        send: one-way seconds to send over the cut before segment ``c``, at index ``c - 1``; empty for none.
        send_by_degree: one-way seconds to send over any cut, by stage degree, in place of ``send``.
        memory_limit: memory limit of a device in bytes; ``None`` for no limit.
    """

    num_segments: int
    num_devices: int
    num_micro_batches: int
    degrees: Collection[int] | None = None
    num_stages: int | None = None
    equal_degrees: bool = False
    recompute: Collection[bool] = (False, True)
    schedule: str = "1F1B"
    send: Sequence[float] = ()
    send_by_degree: Mapping[int, float] = field(default_factory=dict)
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        info = get_schedule(self.schedule)
        if info.name not in ("1F1B", "GPipe"):
            raise InputError(
                f"divided stages run in the order 1F1B or GPipe, not {info.name}. Use one of the two."
            )
        if not self.allowed_degrees:
            raise InputError(
                f"no stage of {self.num_devices} devices has a degree of {self.degrees}. Use smaller degrees."
            )
        most = min(self.num_segments, self.num_devices // min(self.allowed_degrees))
        if self.num_stages is not None and not 1 <= self.num_stages <= most:
            raise InputError(
                f"{count_noun(self.num_segments, 'segment')} on {count_noun(self.num_devices, 'device')} make 1 to {most} "
                f"stages, not {self.num_stages}. Use fewer stages, or none for the fastest number."
            )

    @property
    def allowed_degrees(self) -> tuple[int, ...]:
        """The degrees that a stage can have, in order."""
        devices = range(1, self.num_devices + 1)
        degrees = (
            [degree for degree in devices if self.num_devices % degree == 0]
            if self.degrees is None
            else self.degrees
        )
        return tuple(sorted({degree for degree in degrees if degree in devices}))

    def in_flight(self, position: int) -> int:
        """Number of micro-batches that a stage holds, by its position from the end (1 for the last)."""
        first = get_schedule(self.schedule).name == "1F1B"
        return min(self.num_micro_batches, position) if first else self.num_micro_batches  # GPipe holds all

    def sent(self, cut: int, degree: int) -> float:
        """Seconds to send over the cut before a segment, both ways, to a stage of the given degree."""
        every = self.send[cut - 1] if cut and self.send else 0.0  # position 0 is not a cut
        return 2.0 * (self.send_by_degree.get(degree, every) if cut else 0.0)


def step_seconds(stages: Sequence[Stage], task: PipelineTask) -> float:
    """Seconds of the simulated step. The once-a-step cost of a stage follows its last pass."""
    costs = StageCosts(
        forward=tuple(stage.cost.forward for stage in stages),
        backward_input=tuple(stage.cost.backward for stage in stages),
        backward_weight=(0.0,) * len(stages),  # 1F1B and GPipe do not split the backward pass
        # sent() counts both directions.
        send=tuple(task.sent(stage.start, stage.degree) / 2 for stage in stages[1:]),
    )
    timeline = simulate(get_schedule(task.schedule).orders(len(stages), task.num_micro_batches, 1), costs)
    return max(
        float(ends[-1]) + stage.cost.per_step for ends, stage in zip(timeline.ends, stages, strict=True)
    )


def estimated_seconds(stages: Sequence[Stage], task: PipelineTask) -> float:
    """The estimated seconds of a step, which planning minimizes."""
    costs = [stage.cost for stage in stages]
    sends = sum(task.sent(stage.start, stage.degree) for stage in stages)
    return max(largest_term(cost, task) for cost in costs) + sum(cost.seconds for cost in costs) + sends


def largest_term(cost: StageCost, task: PipelineTask) -> float:
    """A stage's term in the estimate's maximum over stages."""
    return (task.num_micro_batches - 1) * cost.seconds + cost.per_step
