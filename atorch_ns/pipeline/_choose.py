"""The fastest schedule that fits: every legal one is cut, simulated and weighed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from atorch_ns.errors import InputError
from atorch_ns.pipeline._actions import Orders, actions, live_bytes, live_micro_batches
from atorch_ns.pipeline._block_costs import BlockCosts
from atorch_ns.pipeline._partition import bytes_text, partition, stage_ranges
from atorch_ns.pipeline._schedules import SCHEDULES, ScheduleInfo
from atorch_ns.pipeline._simulate import simulate
from atorch_ns.pipeline._step import PipelineStep

__all__ = ["ScheduleCandidate", "ScheduleChoice", "choose_for_device", "choose_schedule"]

_SAME = 1e-6  # steps whose simulated seconds differ by less than this share are equal


@dataclass(frozen=True, kw_only=True)
class ScheduleCandidate:
    """A schedule that was weighed.

    Attributes:
        schedule: which.
        stages_per_rank: with how many stages on each rank.
        cuts: positions of the cuts; empty if it cannot be run.
        step: what can be simulated again for its timeline; ``None`` if it cannot be run.
        step_seconds: simulated, without the optimizer and what data parallelism adds.
        bubble_share: mean share of the step in which a rank is idle.
        peak_bytes: states, activations and buffers at their most, by rank.
        problem: why it cannot be run or does not fit; empty if it does.
    """

    schedule: ScheduleInfo
    stages_per_rank: int
    cuts: tuple[int, ...] = ()
    step: PipelineStep | None = None
    step_seconds: float = float("inf")
    bubble_share: float = 1.0
    peak_bytes: tuple[float, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """The fastest schedule that fits, and what it was weighed against.

    Attributes:
        best: the chosen one.
        candidates: all, the fastest first; those that cannot be used last, each with its problem.
    """

    best: ScheduleCandidate
    candidates: tuple[ScheduleCandidate, ...]


def choose_schedule(
    costs: BlockCosts,
    num_ranks: int,
    num_micro_batches: int,
    *,
    limit_bytes: float | None = None,
    schedules: Iterable[ScheduleInfo] = SCHEDULES,
    stages_per_rank: Collection[int] = (1, 2),
    cuts: Sequence[int] | None = None,
) -> ScheduleChoice:
    """Simulates every legal schedule on its own best cut, and takes the fastest that fits.

    Of steps that take equally long, the one that needs the least memory is taken, then the simplest.

    Args:
        costs: of the blocks.
        num_ranks: ranks of the pipeline.
        num_micro_batches: of a step.
        limit_bytes: what a rank may hold; ``None`` for no limit.
        schedules: those to weigh; leave out what cannot be used, such as schedules that split the backward
            pass where stages are compiled.
        stages_per_rank: numbers of stages on a rank to try.
        cuts: the user's cuts; then only schedules of as many stages are legal. ``None`` to look for the best.

    Raises:
        InputError: if there is none, with the problem of each.
    """
    weighed = [
        _weigh(costs, info, on_rank, num_ranks, num_micro_batches, limit_bytes, cuts)
        for info in schedules
        for on_rank in sorted(set(stages_per_rank))
        if info.fewest_stages <= on_rank and (info.most_stages is None or on_rank <= info.most_stages)
    ]
    usable = [candidate for candidate in weighed if not candidate.problem]
    if not usable:
        raise InputError(_none_usable(weighed, num_ranks, num_micro_batches, stages_per_rank))
    fastest = min(candidate.step_seconds for candidate in usable)
    equal = [one for one in usable if one.step_seconds <= fastest * (1 + _SAME)]
    best = min(equal, key=lambda one: max(one.peak_bytes))
    ranked = sorted(weighed, key=lambda one: (one is not best, bool(one.problem), one.step_seconds))
    return ScheduleChoice(best=best, candidates=tuple(ranked))


def choose_for_device(
    costs: BlockCosts,
    num_ranks: int,
    num_micro_batches: int,
    *,
    schedule: ScheduleInfo | None = None,
    stages_per_rank: int | None = None,
    whole_backward: bool = False,
    limit_bytes: float | None = None,
    memory_bytes: float,
    cuts: Sequence[int] | None = None,
) -> ScheduleChoice:
    """What a pipeline runs on a device, which is what an estimate prices: :func:`choose_schedule` of all schedules
    that can be used there.

    Args:
        costs: of the blocks.
        num_ranks: ranks of the pipeline.
        num_micro_batches: of a step.
        schedule: the one that the user names, only to be cut; ``None`` for the fastest.
        stages_per_rank: the user's; ``None`` for the schedule's own, or one and two.
        whole_backward: whether backward passes are never taken apart, as those of compiled blocks.
        limit_bytes: what the user lets a rank hold; ``None`` for the device's memory, which then is no condition:
            the bytes are an estimate.
        memory_bytes: of the device.
        cuts: the user's; ``None`` to look for the best.

    Raises:
        InputError: as :func:`choose_schedule` does.
    """
    schedules = [one for one in SCHEDULES if not (whole_backward and one.splits_backward)]
    numbers: tuple[int, ...] = (stages_per_rank,) if stages_per_rank else (1, 2)
    if schedule is not None:
        schedules, numbers = [schedule], (stages_per_rank or schedule.usual_stages,)

    def choose(limit: float | None) -> ScheduleChoice:
        return choose_schedule(
            costs,
            num_ranks,
            num_micro_batches,
            limit_bytes=limit,
            schedules=schedules,
            stages_per_rank=numbers,
            cuts=cuts,
        )

    if limit_bytes is not None:
        return choose(limit_bytes)
    try:
        return choose(float(memory_bytes))
    except InputError:
        return choose(None)


@dataclass(frozen=True)
class _Pipeline:
    """A schedule on the ranks, before it is cut."""

    costs: BlockCosts
    info: ScheduleInfo
    orders: Orders
    num_stages: int
    num_micro_batches: int

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def sends(self) -> tuple[float, ...]:
        """What a cut adds to the seconds of the stages beside it: one wait each way, unless it is hidden."""
        return () if self.info.hides_sends else tuple(2 * seconds for seconds in self.costs.send)

    def of_rank(self, values: Sequence[float], rank: int) -> float:
        stages = self.info.stages_of(rank, self.num_ranks, self.num_stages // self.num_ranks)
        return sum(values[stage] for stage in stages)

    def stage_bytes(self, cuts: Sequence[int]) -> tuple[list[float], list[float]]:
        """What each stage always holds, and what it holds of one micro-batch."""
        memory = self.costs.memory((), self.num_micro_batches)
        edges = {cut: memory.edges[cut - 1] for cut in cuts} if memory.edges else {}
        held, kept = [], []
        for blocks in stage_ranges(cuts, self.costs.num_blocks):
            states = sum(memory.states[block] for block in blocks)
            held.append(states + edges.get(blocks.start, 0.0) + edges.get(blocks.stop, 0.0))
            kept.append(sum(memory.activations[block] for block in blocks))
        return held, kept

    def peaks(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """The most bytes that each rank holds."""
        held, kept = self.stage_bytes(cuts)
        moving = live_bytes(self.orders, kept)
        return tuple(moving[rank] + self.of_rank(held, rank) for rank in range(self.num_ranks))

    def slowest(self, cuts: Sequence[int]) -> float:
        """Seconds of the slowest stage."""
        spans = stage_ranges(cuts, self.costs.num_blocks)
        return max(sum(self.costs.seconds[block] for block in blocks) for blocks in spans)


def _weigh(
    costs: BlockCosts,
    info: ScheduleInfo,
    on_rank: int,
    num_ranks: int,
    num_micro_batches: int,
    limit_bytes: float | None,
    cuts: Sequence[int] | None,
) -> ScheduleCandidate:
    num_stages = num_ranks * on_rank
    try:
        orders = actions(info, num_ranks, num_micro_batches, on_rank)
        pipeline = _Pipeline(costs, info, orders, num_stages, num_micro_batches)
        if cuts is not None and len(cuts) + 1 != num_stages:
            raise InputError(f"it has {num_stages} stages, but the cuts {list(cuts)} make {len(cuts) + 1}.")
        chosen = _cut(pipeline, limit_bytes) if cuts is None else tuple(cuts)
    except InputError as error:
        return ScheduleCandidate(schedule=info, stages_per_rank=on_rank, problem=str(error))
    step = PipelineStep(
        schedule=info.name,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        stages_per_rank=on_rank,
        costs=costs.stages(chosen),
    )
    timeline = simulate(orders, step.costs, hides_sends=info.hides_sends)
    peaks = pipeline.peaks(chosen)
    return ScheduleCandidate(
        schedule=info,
        stages_per_rank=on_rank,
        cuts=chosen,
        step=step,
        step_seconds=timeline.step_seconds,
        bubble_share=timeline.bubble_share,
        peak_bytes=peaks,
        problem=_over(
            peaks,
            limit_bytes,
            "" if cuts is not None else " in its fastest cut, and none was found that fits",
        ),
    )


def _cut(pipeline: _Pipeline, limit_bytes: float | None) -> tuple[int, ...]:
    """The cut with the fastest slowest stage that fits; if none was found, the fastest.

    With one stage on a rank it is exact. With several, the limit is of their sum: the fastest cut is taken if
    it fits, otherwise the faster of two in which every stage keeps to its part of the limit.
    """
    costs = pipeline.costs
    fastest = partition(
        costs.seconds, pipeline.num_stages, allowed_cuts=costs.allowed_cuts, sends=pipeline.sends
    )
    if limit_bytes is None or not _over(pipeline.peaks(fastest), limit_bytes):
        return fastest
    memory = costs.memory(live_micro_batches(pipeline.orders), pipeline.num_micro_batches)
    found = []
    for limits in _parts(pipeline, fastest, limit_bytes):
        with suppress(InputError):
            cuts = partition(
                costs.seconds,
                pipeline.num_stages,
                memory=memory,
                limit=limits,
                allowed_cuts=costs.allowed_cuts,
                sends=pipeline.sends,
            )
            found.append(cuts)
    return min(found, key=pipeline.slowest, default=fastest)


def _parts(pipeline: _Pipeline, fastest: tuple[int, ...], limit_bytes: float) -> Iterator[list[float]]:
    """Parts of a rank's limit for its stages: equal ones, then what they take in ``fastest`` and equal slack."""
    on_rank = pipeline.num_stages // pipeline.num_ranks
    yield [limit_bytes / on_rank] * pipeline.num_stages
    if on_rank == 1:
        return
    held, kept = pipeline.stage_bytes(fastest)
    live = live_micro_batches(pipeline.orders)
    taken = [states + num * size for states, num, size in zip(held, live, kept, strict=True)]
    limits = [0.0] * pipeline.num_stages
    for rank in range(pipeline.num_ranks):
        slack = limit_bytes - pipeline.of_rank(taken, rank)
        for stage in pipeline.info.stages_of(rank, pipeline.num_ranks, on_rank):
            limits[stage] = taken[stage] + slack / on_rank
    yield limits


def _over(peak_bytes: Sequence[float], limit_bytes: float | None, where: str = "") -> str:
    most = max(peak_bytes)
    if limit_bytes is None or most <= limit_bytes:
        return ""
    rank = peak_bytes.index(most)
    return (
        f"rank {rank} would hold {bytes_text(most)}, {bytes_text(most - limit_bytes)} over the limit of "
        f"{bytes_text(limit_bytes)}{where}."
    )


def _none_usable(
    weighed: Sequence[ScheduleCandidate],
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: Collection[int],
) -> str:
    lines = [
        f"no schedule runs {num_micro_batches} micro-batches on a pipeline of {num_ranks} ranks:",
        *(f"  {one.schedule.name}, {one.stages_per_rank} on a rank: {one.problem}" for one in weighed),
    ]
    if not weighed:
        lines.append(f"  none can have {' or '.join(map(str, sorted(stages_per_rank)))} stages on a rank.")
    if any(one.step is not None for one in weighed):
        lines.append("Use a higher pipeline degree, more and smaller micro-batches, or recomputation.")
    return "\n".join(lines)
