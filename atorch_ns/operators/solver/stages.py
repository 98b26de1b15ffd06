"""Pipelines of divided stages: where a model is cut, how many devices divide each stage, and which stages recompute.

A model is ``n`` segments between the positions where it may be cut. The step of ``m`` micro-batches is estimated as

    the sum of ``t_s``, and of all sends there and back, plus the largest ``(m - 1) * t_s + w_s``,

``t_s`` are the seconds of a micro-batch in stage ``s``, forward and backward, and ``w_s`` those of its weights' synchronization,
once a step. A dynamic program finds the least sum below a given largest term; lowering the term from one solution to the
next gives every pair of the two that no other beats, thus the exact minimum. The best few are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atorch_ns.errors import InputError
from atorch_ns.pipeline.schedule.schedules import get_schedule
from atorch_ns.pipeline.schedule.simulate import StageCosts, simulate
from atorch_ns.text import bytes_text, counted

_NUM_SIMULATED = 8
_GROWTH = 1.5
"""The factor between two guesses of the largest term, until the first that a pipeline keeps to."""


class StageCost(NamedTuple):
    """Seconds of one micro-batch in a stage, its own collectives and recomputation included; bytes of a device at their peak;
    and seconds that are paid once a step, such as the synchronization of gradients."""

    forward: float
    backward: float
    memory: float = 0.0
    per_step: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


Cost = Callable[[int, int, int, bool, int], StageCost | None]
"""``(start, stop, degree, recompute, in_flight) -> cost`` of a stage of the segments from ``start`` up to but without ``stop``,
divided over ``degree`` devices, that holds the activations of ``in_flight`` micro-batches; ``None`` if there is none.

With more in flight a stage is never faster, needs no less memory, and is not possible where it was not.
"""


class Stage(NamedTuple):
    """A stage of a pipeline, with what :data:`Cost` is asked for, and its answer."""

    start: int
    stop: int
    degree: int
    recompute: bool
    in_flight: int
    cost: StageCost


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A pipeline.

    Attributes:
        stages: in the order of the model.
        step_seconds: of the simulated step.
        estimated_seconds: of the estimate above, which the plan minimizes among those that were simulated.
        num_simulated: the number of pipelines that were simulated.
    """

    stages: tuple[Stage, ...]
    step_seconds: float
    estimated_seconds: float
    num_simulated: int


@dataclass(frozen=True, kw_only=True)
class PipelineTask:
    """What a pipeline is planned for.

    Attributes:
        num_segments: the segments, each of which is in one stage as a whole.
        num_devices: devices of all stages together.
        num_micro_batches: of a step.
        degrees: the numbers of devices that a stage may have; ``None`` for the divisors of :attr:`num_devices`.
        num_stages: the number of stages; ``None`` for the fastest.
        equal_degrees: whether all stages have the same degree.
        recompute: whether stages may keep their activations, recompute them, or both.
        schedule: ``"1F1B"`` or ``"GPipe"``.
        send: seconds to carry the tensors over the cut before segment ``c``, one way, at index ``c - 1``; empty for none.
        memory_limit: bytes of a device; ``None`` for no limit.
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
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        info = get_schedule(self.schedule)
        if info.name not in ("1F1B", "GPipe"):
            raise InputError(
                f"divided stages run in the order 1F1B or GPipe, not {info.name}. Use one of the two."
            )
        most = min(self.num_segments, self.num_devices // min(self.allowed_degrees, default=1))
        if self.num_stages is not None and not 1 <= self.num_stages <= most:
            raise InputError(
                f"{counted(self.num_segments, 'segment')} on {counted(self.num_devices, 'device')} make 1 to {most} "
                f"stages, not {self.num_stages}. Use fewer stages, or none for the fastest number."
            )

    @property
    def allowed_degrees(self) -> tuple[int, ...]:
        """The degrees that a stage can have, in order."""
        devices = range(1, self.num_devices + 1)
        given = (
            [one for one in devices if self.num_devices % one == 0] if self.degrees is None else self.degrees
        )
        return tuple(sorted({one for one in given if one in devices}))

    def in_flight(self, position: int) -> int:
        """Micro-batches whose activations a stage holds, by its position from the end: 1 for the last."""
        first = get_schedule(self.schedule).name == "1F1B"
        return min(self.num_micro_batches, position) if first else self.num_micro_batches

    def sent(self, cut: int) -> float:
        """Seconds over the cut before a segment, there and back."""
        return 2.0 * self.send[cut - 1] if cut and self.send else 0.0


def plan_stages(cost: Cost, task: PipelineTask) -> StagePlan:
    """The fastest pipeline, of those with the best estimates.

    Raises:
        InputError: if none fits.
    """
    different = {stages: estimate for estimate, stages in _candidates(cost, task)}
    found = sorted(different.items(), key=lambda one: one[1])[:_NUM_SIMULATED]
    if not found:
        raise InputError(_none_fits(cost, task))
    simulated = [(step_seconds(stages, task), estimate, stages) for stages, estimate in found]
    seconds, estimate, stages = min(simulated, key=lambda one: one[:2])
    return StagePlan(
        stages=stages, step_seconds=seconds, estimated_seconds=estimate, num_simulated=len(simulated)
    )


def step_seconds(stages: Sequence[Stage], task: PipelineTask) -> float:
    """Seconds of the simulated step, with what each stage pays once a step after its last pass."""
    costs = StageCosts(
        forward=tuple(stage.cost.forward for stage in stages),
        backward_input=tuple(stage.cost.backward for stage in stages),
        backward_weight=(0.0,) * len(stages),
        send=tuple(task.sent(stage.start) / 2 for stage in stages[1:]),
    )
    timeline = simulate(get_schedule(task.schedule).orders(len(stages), task.num_micro_batches, 1), costs)
    return max(
        float(ends[-1]) + stage.cost.per_step for ends, stage in zip(timeline.ends, stages, strict=True)
    )


def estimated_seconds(stages: Sequence[Stage], task: PipelineTask) -> float:
    """The estimate of a step that plans minimize."""
    costs = [stage.cost for stage in stages]
    sent = sum(task.sent(stage.start) for stage in stages)
    return max(_largest(one, task) for one in costs) + sum(one.seconds for one in costs) + sent


def _candidates(cost: Cost, task: PipelineTask) -> Iterator[tuple[float, tuple[Stage, ...]]]:
    """Estimates and stages of all pipelines that no other beats in both terms of the estimate."""
    degrees, devices = task.allowed_degrees, task.num_devices
    most = min(task.num_segments, devices // min(degrees, default=devices))
    if not task.equal_degrees:
        counts = (
            range(1, most + 1) if task.num_stages is None else range(task.num_stages, task.num_stages + 1)
        )
        searches = [(degrees, counts)]
    else:
        searches = [
            ((degree,), range(devices // degree, devices // degree + 1))
            for degree in degrees
            if devices % degree == 0 and task.num_stages in (None, devices // degree)
        ]
    for own, counts in searches:
        if own and counts[0] <= task.num_segments:
            yield from _Search(cost, task, own, counts).frontier()


class _Search:
    """Pipelines with given degrees and numbers of stages.

    Attributes:
        columns: degree and recomputation, by column.
        seconds: of a micro-batch in a stage and over the cut before it, ``[in flight, column, length, start]``; infinite
            where there is no such stage. A stage with more in flight than there are entries costs what the last one says.
        largest: the term of the estimate of which the largest counts, likewise.
    """

    def __init__(self, cost: Cost, task: PipelineTask, degrees: Sequence[int], counts: range) -> None:
        self._cost = cost
        self._task = task
        self._counts = counts
        self.columns = [(degree, again) for degree in degrees for again in sorted(set(task.recompute))]
        self._levels = range(task.in_flight(1), task.in_flight(counts[-1]) + 1)
        shape = (len(self._levels), len(self.columns), task.num_segments + 1, task.num_segments)
        self.seconds = np.full(shape, math.inf)
        self.largest = np.full(shape, math.inf)
        varies = False
        for column in range(len(self.columns)):
            for start in range(task.num_segments):
                for stop in range(start + 1, task.num_segments + 1):
                    varies |= self._fill(column, start, stop)
        if not varies:
            self.seconds, self.largest = self.seconds[:1], self.largest[:1]
        self._least = self.largest.min(axis=(0, 3))

    def frontier(self) -> Iterator[tuple[float, tuple[Stage, ...]]]:
        """Estimates and stages of pipelines, one of the least estimate among them."""
        terms = np.unique(self._least[np.isfinite(self._least)])
        guess = 0.0
        while (found := self._least_sum(guess)) is None:
            if not terms.size or guess >= self.largest[np.isfinite(self.largest)].max():
                return
            guess = max(_GROWTH * guess, terms[terms > guess][0] if guess < terms[-1] else 0.0)
        best = estimated_seconds(found[1], self._task)
        yield best, found[1]
        most = best - self._bound()
        while (found := self._least_sum(most)) is not None:
            total, stages = found
            estimate = estimated_seconds(stages, self._task)
            yield estimate, stages
            best = min(best, estimate)
            below = math.nextafter(max(_largest(stage.cost, self._task) for stage in stages), -math.inf)
            most = min(below, best - total)

    def _fill(self, column: int, start: int, stop: int) -> bool:
        """Asks for the costs of the stages of some segments; returns whether they vary with the micro-batches in flight."""
        length, sent = stop - start, self._task.sent(start)

        def write(levels: slice, cost: StageCost) -> None:
            self.seconds[levels, column, length, start] = cost.seconds + sent
            self.largest[levels, column, length, start] = _largest(cost, self._task)

        def between(low: int, first: StageCost, high: int, last: StageCost | None) -> None:
            """Writes what follows ``low`` up to ``high``, of which the costs are known."""
            if last is not None and _times(first) == _times(last):
                write(slice(low, high + 1), first)
            elif high - low > 1:
                middle = (low + high) // 2
                cost = self._ask(column, start, stop, self._levels[middle])
                between(low, first, middle, cost)
                if cost is not None:
                    between(middle, cost, high, last)
            elif last is not None:
                write(slice(high, high + 1), last)

        first = self._ask(column, start, stop, self._levels[0])
        if first is None:
            return False
        write(slice(0, 1), first)
        high = len(self._levels) - 1
        last = self._ask(column, start, stop, self._levels[high]) if high else first
        between(0, first, high, last)
        return last is None or _times(first) != _times(last)

    def _ask(self, column: int, start: int, stop: int, in_flight: int) -> StageCost | None:
        cost = self._cost(start, stop, *self.columns[column], in_flight)
        limit = self._task.memory_limit
        return None if cost is None or (limit is not None and cost.memory > limit) else cost

    def _bound(self) -> float:
        """A sum of seconds that no pipeline is below."""
        num = self._task.num_segments
        stage = self.seconds.min(axis=(0, 1))
        rest = np.zeros(num + 1)
        for start in reversed(range(num)):
            rest[start] = (stage[1 : num - start + 1, start] + rest[start + 1 :]).min()
        return float(rest[0])

    def _least_sum(self, most: float) -> tuple[float, tuple[Stage, ...]] | None:
        """The pipeline of the least sum of seconds whose largest term is at most ``most``; ``None`` if there is none."""
        num, devices = self._task.num_segments, self._task.num_devices
        legal = [(int(column), int(length)) for column, length in np.argwhere(self._least <= most)]
        table = np.full(
            (num + 1, devices + 1), math.inf
        )  # [first segment, devices of the stages from there on]
        table[num, 0] = 0.0
        tables = [table]
        for position in range(1, self._counts[-1] + 1):
            table = np.full_like(table, math.inf)
            for column, length in legal:
                degree = self.columns[column][0]
                longer = (
                    self._row(position, column, length, most)[:, None]
                    + tables[-1][length:, : devices + 1 - degree]
                )
                view = table[: num + 1 - length, degree:]
                np.minimum(view, longer, out=view)
            tables.append(table)
        total, count = min((float(tables[count][0, devices]), count) for count in self._counts)
        if total == math.inf:
            return None
        stages, start, left = [], 0, devices
        for position in range(count, 0, -1):
            column, length = next(
                (column, length)
                for column, length in legal
                if self.columns[column][0] <= left
                and start + length <= num
                and self._row(position, column, length, most)[start]
                + tables[position - 1][start + length, left - self.columns[column][0]]
                == tables[position][start, left]
            )
            in_flight = self._task.in_flight(position)
            cost = self._ask(column, start, start + length, in_flight)
            assert cost is not None, "a stage is possible when it is asked for again"
            stages.append(Stage(start, start + length, *self.columns[column], in_flight, cost))
            start, left = start + length, left - self.columns[column][0]
        return total, tuple(stages)

    def _row(self, position: int, column: int, length: int, most: float) -> NDArray[np.float64]:
        """Seconds of the stages of a length at a position from the end, by first segment."""
        where = (
            min(position, len(self.seconds)) - 1,
            column,
            length,
            slice(self._task.num_segments + 1 - length),
        )
        return np.where(self.largest[where] <= most, self.seconds[where], math.inf)


def _times(cost: StageCost) -> tuple[float, float]:
    return cost.seconds, cost.per_step


def _largest(cost: StageCost, task: PipelineTask) -> float:
    return (task.num_micro_batches - 1) * cost.seconds + cost.per_step


def _none_fits(cost: Cost, task: PipelineTask) -> str:
    """The error where there is no pipeline, with the segment that fits in no stage, if there is one."""
    what = f"no pipeline of {counted(task.num_segments, 'segment')} fits on {counted(task.num_devices, 'device')}: "
    for start in range(task.num_segments):
        asked = [
            cost(start, start + 1, degree, again, task.in_flight(1))
            for degree in task.allowed_degrees
            for again in task.recompute
        ]
        least = min((one.memory for one in asked if one is not None), default=None)
        if least is None or (task.memory_limit is not None and least > task.memory_limit):
            need = (
                "cannot be divided so"
                if least is None
                else f"needs {bytes_text(least)} of {bytes_text(task.memory_limit)}"
            )
            return f"{what}segment {start} alone {need}. Use more devices, other degrees, or a smaller micro-batch."
    return (
        f"{what}no stages with {' or '.join(map(str, task.allowed_degrees))} devices each use all devices and keep to the "
        f"memory. Use other degrees or stages, more devices, recomputation, or a smaller micro-batch."
    )
