"""Choice of a schedule: every legal one is cut and simulated, and the fastest that fits is taken."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from atorch_ns.errors import InputError
from atorch_ns.pipeline.plan.partition import StageMemory, partition, stage_ranges
from atorch_ns.pipeline.schedule.actions import Orders, live_bytes, live_micro_batches
from atorch_ns.pipeline.schedule.recompute import RecomputeShare
from atorch_ns.pipeline.schedule.schedules import SCHEDULES, ScheduleInfo
from atorch_ns.pipeline.schedule.simulate import PipelineStep, StageCosts, simulate
from atorch_ns.text import bytes_text

BUFFERS: Final = 2
"""Buffers of a micro-batch's tensors on each side of a cut, per direction: one in use, one in transit."""

_WEIGHT_SHARE = 0.3
"""Share of linear layers' weight gradients in a backward pass: 0.28 to 0.33, in fp32 on one CPU core, for two
blocks of GPT-2, Llama and BERT, width 512 and 512 tokens (benchmark ``schedules``)."""


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """Seconds and bytes of a model's blocks for one micro-batch, in call order.

    Values are by block unless noted otherwise. Bytes are empty if memory does not matter.

    Attributes:
        forward, backward_input, backward_weight: seconds of these passes, without recomputation.
        backward: seconds of the whole backward pass; empty if it is the sum of its parts.
        recompute: seconds of recomputation, 0 for blocks that are never recomputed; empty for none.
        send: one-way seconds to send over the cut before block ``c``, at index ``c - 1``; empty for none.
        state_bytes: parameters, gradients and optimizer state.
        activation_bytes, recomputed_bytes: bytes kept for the backward pass, without and with recomputation.
        boundary_bytes: bytes sent over a cut, indexed like ``send``.
        allowed_cuts: positions that may be cut; ``None`` for all.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    recompute: tuple[float, ...] = ()
    send: tuple[float, ...] = ()
    state_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    recomputed_bytes: tuple[float, ...] = ()
    boundary_bytes: tuple[float, ...] = ()
    allowed_cuts: Collection[int] | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.forward)

    @property
    def kept_share(self) -> float:
        """Memory kept under recomputation, as a share of what the backward passes of such blocks need."""
        # Blocks that are never recomputed keep everything. The tuples are empty where memory does not matter.
        pairs = [
            (after, every)
            for after, every, again in zip(
                self.recomputed_bytes, self.activation_bytes, self.recompute, strict=False
            )
            if again
        ]
        return min(1.0, sum(part for part, _ in pairs) / (sum(every for _, every in pairs) or 1.0))

    def seconds(self, shares: Sequence[float]) -> list[list[float]]:
        """Seconds of forward and whole backward passes for recomputed shares, by stage and block."""
        whole = self.backward or tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))
        once = list(map(sum, zip(self.forward, whole, strict=True)))  # [block]
        again = self.recompute or (0.0,) * len(once)  # [block]
        return [[first + share * more for first, more in zip(once, again, strict=True)] for share in shares]

    def recomputed(self, cuts: Sequence[int], shares: Sequence[float]) -> tuple[frozenset[int], ...]:
        """The blocks that each stage recomputes: its first recomputable ones. Their number is rounded."""
        by_stage = []
        for blocks, share in zip(stage_ranges(cuts, self.num_blocks), shares, strict=True):
            able = [block for block in blocks if self.recompute and self.recompute[block]]
            by_stage.append(frozenset(able[: num_recomputed(len(able), share)]))
        return tuple(by_stage)

    def stages(self, cuts: Sequence[int], shares: Sequence[float] | None = None) -> StageCosts:
        """The costs of the stages between cuts for recomputed shares; ``None`` to recompute all blocks."""
        by_stage = self.recomputed(cuts, [1.0] * (len(cuts) + 1) if shares is None else shares)
        spans = stage_ranges(cuts, self.num_blocks)
        again = tuple(sum(self.recompute[block] for block in blocks) for blocks in by_stage)

        def stage_sums(values: tuple[float, ...], *more: tuple[float, ...]) -> tuple[float, ...]:
            sums = tuple(sum(values[block] for block in blocks) for blocks in spans)
            return tuple(map(sum, zip(sums, *more, strict=True)))

        return StageCosts(
            forward=stage_sums(self.forward),
            backward_input=stage_sums(self.backward_input, again),  # this part runs after the recomputation
            backward_weight=stage_sums(self.backward_weight),
            backward=stage_sums(self.backward, again) if self.backward else (),
            recompute=again,
            send=tuple(self.send[cut - 1] for cut in cuts) if self.send else (),
        )

    def memory(self, live: Sequence[int], num_micro_batches: int, shares: Sequence[float]) -> StageMemory:
        """The bytes of the blocks if stages hold ``live`` micro-batches and recompute ``shares``."""
        none = (0.0,) * self.num_blocks
        every = self.activation_bytes or none
        # Bytes of each block when it is recomputed; a block that cannot be recomputed keeps all of its bytes.
        again = tuple(
            part if more else whole
            for part, whole, more in zip(
                self.recomputed_bytes or every, every, self.recompute or none, strict=True
            )
        )
        return StageMemory(
            states=self.state_bytes or none,
            activations=[
                [whole + share * (part - whole) for whole, part in zip(every, again, strict=True)]
                for share in shares
            ],
            live=live,
            edges=tuple(min(num_micro_batches, BUFFERS) * size for size in self.boundary_bytes),
        )


def num_recomputed(num: int, share: float) -> int:
    """Number of blocks in a share of ``num`` blocks."""
    return min(num, math.floor(share * num + 0.5))  # round() would round halves to even numbers


def split_backward(backward: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Splits seconds of whole backward passes, without recomputation, into parts for inputs and weights.

    Example:
        >>> split_backward([1.0])
        ((0.7,), (0.3,))
    """
    weights = tuple(_WEIGHT_SHARE * seconds for seconds in backward)
    return tuple(seconds - part for seconds, part in zip(backward, weights, strict=True)), weights


_ALL: Final = RecomputeShare()
_SAME = 1e-6  # steps whose simulated seconds differ by less than this share are equal


@dataclass(frozen=True, kw_only=True)
class ScheduleCandidate:
    """A candidate schedule.

    Attributes:
        cuts: positions of the cuts; empty if it cannot be run.
        shares: recomputed share of the blocks of each stage; empty if it cannot be run.
        step: the step, which is simulated again for a timeline; ``None`` if it cannot be run.
        step_seconds: simulated seconds, without the optimizer and data parallelism.
        bubble_share: mean idle share of the ranks in the step.
        peak_bytes: peak bytes of states, activations and buffers, by rank.
        problem: the reason why it cannot be run or does not fit in memory; empty if it can be used.
    """

    schedule: ScheduleInfo
    stages_per_rank: int
    cuts: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    step: PipelineStep | None = None
    step_seconds: float = float("inf")
    bubble_share: float = 1.0
    peak_bytes: tuple[float, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """The fastest schedule that fits in memory, and all candidates.

    Attributes:
        candidates: all schedules, the fastest first. Unusable ones come last, each with its problem.
    """

    best: ScheduleCandidate
    candidates: tuple[ScheduleCandidate, ...]


def choose_schedule(
    costs: BlockCosts,
    num_ranks: int,
    num_micro_batches: int,
    *,
    limit_bytes: float | None = None,
    schedules: Iterable[ScheduleInfo] | None = None,
    stages_per_rank: Collection[int] = (1, 2),
    cuts: Sequence[int] | None = None,
    recompute: RecomputeShare = _ALL,
) -> ScheduleChoice:
    """Simulates every legal schedule on its own best cut, and takes the fastest that fits in memory.

    Ties are broken by the least memory, then by the simplest schedule.

    Args:
        limit_bytes: the bytes that a rank may hold; ``None`` for no limit.
        schedules: schedules that the stages can run; ``None`` for all useful ones.
        stages_per_rank: numbers of stages per rank to try.
        cuts: the user's cuts, which fix the number of stages; ``None`` to find the best cuts.
        recompute: the recomputed share of the blocks.

    Raises:
        InputError: if no schedule can be used, with the problem of each.
    """
    if schedules is None:
        schedules = _of_use(costs)
    trials = [
        _evaluate_schedule(
            costs,
            info,
            on_rank,
            num_ranks,
            num_micro_batches=num_micro_batches,
            limit_bytes=limit_bytes,
            cuts=cuts,
            recompute=recompute,
        )
        for info in schedules
        for on_rank in sorted(set(stages_per_rank))
        if info.fewest_stages <= on_rank and (info.most_stages is None or on_rank <= info.most_stages)
    ]
    usable = [candidate for candidate in trials if not candidate.problem]
    if not usable:
        raise InputError(_none_usable(trials, num_ranks, num_micro_batches, stages_per_rank))
    fastest = min(candidate.step_seconds for candidate in usable)
    equal = [trial for trial in usable if trial.step_seconds <= fastest * (1 + _SAME)]
    best = min(equal, key=lambda trial: max(trial.peak_bytes))  # of equal peaks the first: the simplest
    ranking = sorted(trials, key=lambda trial: (trial is not best, bool(trial.problem), trial.step_seconds))
    return ScheduleChoice(best=best, candidates=tuple(ranking))


def _of_use(costs: BlockCosts) -> list[ScheduleInfo]:
    return [info for info in SCHEDULES if any(costs.recompute) or not info.recomputes]


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
    recompute: RecomputeShare = _ALL,
) -> ScheduleChoice:
    """The schedule that a pipeline runs on a device, by :func:`choose_schedule`. Estimates use it too.

    Args:
        schedule: the user's schedule, for which only cuts are chosen; ``None`` for the fastest schedule.
        stages_per_rank: the user's number of stages on a rank; ``None`` for the usual one, or one and two.
        whole_backward: whether backward passes are never split, as for compiled blocks.
        limit_bytes: the user's limit for a rank; ``None`` for the device's memory, exceeded if none fits.
        memory_bytes: the memory of the device.
        cuts, recompute: as for :func:`choose_schedule`.

    Raises:
        InputError: as :func:`choose_schedule` does.
    """
    schedules = [info for info in _of_use(costs) if not (whole_backward and info.splits_backward)]
    numbers: tuple[int, ...] = (stages_per_rank,) if stages_per_rank else (1, 2)
    if schedule is not None:
        schedules, numbers = [schedule], (stages_per_rank or schedule.usual_stages,)

    choose = partial(
        choose_schedule,
        *(costs, num_ranks, num_micro_batches),
        schedules=schedules,
        stages_per_rank=numbers,
        cuts=cuts,
        recompute=recompute,
    )
    if limit_bytes is not None:
        return choose(limit_bytes=limit_bytes)
    try:
        return choose(limit_bytes=float(memory_bytes))
    except InputError:
        return choose(limit_bytes=None)  # bytes are an estimate, so a large pipeline may still run


@dataclass(frozen=True)
class _Pipeline:
    """A schedule on the ranks, before it is cut."""

    costs: BlockCosts
    info: ScheduleInfo
    orders: Orders
    num_stages: int
    num_micro_batches: int
    shares: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    def of_rank(self, values: Sequence[float], rank: int) -> float:
        stages = self.info.stages_of(rank, self.num_ranks, self.num_stages // self.num_ranks)
        return sum(values[stage] for stage in stages)

    def stage_bytes(self, cuts: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
        """By stage: bytes always held, and bytes of a micro-batch with its recomputation and with none."""
        costs, spans = self.costs, stage_ranges(cuts, self.costs.num_blocks)
        # Both stages at a cut have buffers for it: one sends from them and the other receives into them.
        edges = {
            cut: min(self.num_micro_batches, BUFFERS) * costs.boundary_bytes[cut - 1]
            for cut in cuts
            if costs.boundary_bytes
        }
        base, activations, every = [], [], []  # each by stage
        for blocks, again in zip(spans, costs.recomputed(cuts, self.shares), strict=True):
            states = sum(costs.state_bytes[block] for block in blocks) if costs.state_bytes else 0.0
            base.append(states + edges.get(blocks.start, 0.0) + edges.get(blocks.stop, 0.0))
            of_block = {
                block: costs.activation_bytes[block] if costs.activation_bytes else 0.0 for block in blocks
            }
            every.append(sum(of_block.values()))
            if costs.recomputed_bytes:
                of_block.update({block: costs.recomputed_bytes[block] for block in again})
            activations.append(sum(of_block.values()))
        return base, activations, every

    def most_able(self, cuts: Sequence[int]) -> int:
        """The most blocks that a stage can recompute."""
        return max(map(len, self.costs.recomputed(cuts, [1.0] * self.num_stages)))

    def with_share(self, rank: int, share: float, most: Sequence[float]) -> _Pipeline:
        """A copy with another share for the stages of a rank, up to the maximum of each stage."""
        stages = self.info.stages_of(rank, self.num_ranks, self.num_stages // self.num_ranks)
        shares = (min(most[s], share) if s in stages else fraction for s, fraction in enumerate(self.shares))
        return replace(self, shares=tuple(shares))

    def moving_bytes(self, cuts: Sequence[int], rank: int) -> float:
        """The most bytes of activations that a rank holds."""
        _, activations, every = self.stage_bytes(cuts)
        return live_bytes([self.orders[rank]], activations, every)[0]

    def peaks(self, cuts: Sequence[int], ranks: Sequence[int] | None = None) -> tuple[float, ...]:
        """Peak bytes of each rank, or of the given ranks."""
        rank_ids = range(self.num_ranks) if ranks is None else ranks
        base, activations, every = self.stage_bytes(cuts)
        moving = live_bytes([self.orders[rank] for rank in rank_ids], activations, every)
        return tuple(more + self.of_rank(base, rank) for more, rank in zip(moving, rank_ids, strict=True))

    def slowest(self, cuts: Sequence[int]) -> float:
        """Seconds of the slowest stage."""
        spans, seconds = stage_ranges(cuts, self.costs.num_blocks), self.costs.seconds(self.shares)
        return max(sum(of[block] for block in blocks) for of, blocks in zip(seconds, spans, strict=True))

    def step(self, cuts: Sequence[int]) -> PipelineStep:
        """The step, to be simulated."""
        return PipelineStep(
            schedule=self.info.name,
            num_ranks=self.num_ranks,
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.num_stages // self.num_ranks,
            costs=self.costs.stages(cuts, self.shares),
        )


def _evaluate_schedule(
    costs: BlockCosts,
    info: ScheduleInfo,
    on_rank: int,
    num_ranks: int,
    *,
    num_micro_batches: int,
    limit_bytes: float | None,
    cuts: Sequence[int] | None,
    recompute: RecomputeShare,
) -> ScheduleCandidate:
    num_stages = num_ranks * on_rank
    try:
        orders = info.orders(num_ranks, num_micro_batches, on_rank)
        live = live_micro_batches(orders)  # by stage
        recompute.check(num_stages)
        # Shares as if all blocks were alike, for the choice of the cut. "auto" and "level" adapt them to it.
        shares = recompute.of_stages(live, costs.kept_share, keeps_last=info.keeps_last)
        pipeline = _Pipeline(costs, info, orders, num_stages, num_micro_batches, shares)
        if cuts is not None and len(cuts) + 1 != num_stages:
            raise InputError(f"it has {num_stages} stages, but the cuts {list(cuts)} make {len(cuts) + 1}.")
        positions = _choose_cuts(pipeline, limit_bytes) if cuts is None else tuple(cuts)
        if recompute.is_chosen:
            pipeline, positions = _least_recomputing(pipeline, positions, limit_bytes, look=cuts is None)
        elif recompute.by_stage == "level":
            pipeline = _level_shares(pipeline, positions)
        step = pipeline.step(positions)
        timeline = simulate(orders, step.costs)
    except InputError as error:
        return ScheduleCandidate(schedule=info, stages_per_rank=on_rank, problem=str(error))
    peaks = pipeline.peaks(positions)
    return ScheduleCandidate(
        schedule=info,
        stages_per_rank=on_rank,
        cuts=positions,
        shares=pipeline.shares,
        step=step,
        step_seconds=timeline.step_seconds,
        bubble_share=timeline.bubble_share,
        peak_bytes=peaks,
        problem=_limit_problem(
            peaks,
            limit_bytes,
            "" if cuts is not None else " in its fastest cut, and none was found that fits",
        ),
    )


def _choose_cuts(pipeline: _Pipeline, limit_bytes: float | None) -> tuple[int, ...]:
    """The cut with the least time of its slowest stage that fits; the fastest cut if none was found."""
    costs, num_stages = pipeline.costs, pipeline.num_stages
    cut = partial(partition, costs.seconds(pipeline.shares), num_stages, allowed_cuts=costs.allowed_cuts)
    fastest = cut()  # the optimum where no limit binds
    if limit_bytes is None or not _limit_problem(pipeline.peaks(fastest), limit_bytes):
        return fastest
    # With several stages on a rank the limit applies to their sum. Here each stage gets a part of it.
    memory = costs.memory(live_micro_batches(pipeline.orders), pipeline.num_micro_batches, pipeline.shares)
    candidates = []
    for limits in _stage_limits(pipeline, fastest, limit_bytes):
        with suppress(InputError):
            candidates.append(cut(memory=memory, limit=limits))
    return min(candidates, key=pipeline.slowest, default=fastest)


def _least_recomputing(
    pipeline: _Pipeline, cuts: tuple[int, ...], limit_bytes: float | None, *, look: bool
) -> tuple[_Pipeline, tuple[int, ...]]:
    nothing = replace(pipeline, shares=(0.0,) * pipeline.num_stages)
    if limit_bytes is None:  # everything fits without recomputation
        return nothing, _choose_cuts(nothing, None) if look else cuts
    # Two cuts: the one that fits the most, and the fastest one, which may fit with little recomputation.
    options = [cuts, _choose_cuts(nothing, None)] if look else [cuts]
    candidates = [
        (fit, option)
        for option in options
        if (fit := _fit_shares(nothing, pipeline.shares, option, limit_bytes))
    ]
    return min(
        candidates,
        key=lambda pair: simulate(pair[0].orders, pair[0].costs.stages(pair[1], pair[0].shares)).step_seconds,
        default=(pipeline, cuts),  # nothing fits: the caller reports the excess with all blocks recomputed
    )


def _fit_shares(
    pipeline: _Pipeline, most: Sequence[float], cuts: tuple[int, ...], limit_bytes: float
) -> _Pipeline | None:
    able = pipeline.most_able(cuts)  # a share changes in steps of one block
    for rank in range(pipeline.num_ranks):

        def fitting(count: int) -> _Pipeline:
            return pipeline.with_share(rank, count / max(able, 1), most)  # noqa: B023 the function does not outlive its round

        def fits(count: int) -> bool:
            return fitting(count).peaks(cuts, [rank])[0] <= limit_bytes  # noqa: B023

        # The bytes of a rank fall as it recomputes more, so fits() turns from false to true once.
        least = min(able, bisect_left(range(able + 1), True, key=fits))
        if not fits(least):
            return None  # this rank does not fit at all
        pipeline = fitting(least)
    return pipeline


def _level_shares(pipeline: _Pipeline, cuts: tuple[int, ...]) -> _Pipeline:
    able = pipeline.most_able(cuts)
    most = [1.0] * (pipeline.num_stages - 1) + [0.0 if pipeline.info.keeps_last else 1.0]
    # Each rank recomputes whole blocks so that its activations come nearest to those of rank 0.
    target = pipeline.moving_bytes(cuts, 0)
    for rank in range(1, pipeline.num_ranks):
        candidates = [pipeline.with_share(rank, count / max(able, 1), most) for count in range(able + 1)]
        pipeline = min(candidates, key=lambda candidate: abs(candidate.moving_bytes(cuts, rank) - target))
    return pipeline


def _stage_limits(pipeline: _Pipeline, fastest: tuple[int, ...], limit_bytes: float) -> Iterator[list[float]]:
    on_rank = pipeline.num_stages // pipeline.num_ranks
    yield [limit_bytes / on_rank] * pipeline.num_stages  # equal parts of the rank's limit
    if on_rank == 1:
        return
    # The bytes that each stage takes in the fastest cut, plus an equal part of what its rank has left.
    base, activations, _ = pipeline.stage_bytes(fastest)
    live = live_micro_batches(pipeline.orders)
    sizes = [states + num * size for states, num, size in zip(base, live, activations, strict=True)]
    limits = [0.0] * pipeline.num_stages
    for rank in range(pipeline.num_ranks):
        slack = limit_bytes - pipeline.of_rank(sizes, rank)  # negative where the rank is over its limit
        for stage in pipeline.info.stages_of(rank, pipeline.num_ranks, on_rank):
            limits[stage] = sizes[stage] + slack / on_rank
    yield limits


def _limit_problem(peak_bytes: Sequence[float], limit_bytes: float | None, where: str = "") -> str:
    most = max(peak_bytes)
    if limit_bytes is None or most <= limit_bytes:
        return ""
    rank = peak_bytes.index(most)
    return (
        f"rank {rank} would hold {bytes_text(most)}, {bytes_text(most - limit_bytes)} over the limit of "
        f"{bytes_text(limit_bytes)}{where}."
    )


def _none_usable(
    trials: Sequence[ScheduleCandidate],
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: Collection[int],
) -> str:
    lines = [
        f"no schedule runs {num_micro_batches} micro-batches on a pipeline of {num_ranks} ranks:",
        *(
            f"  {candidate.schedule.name}, {candidate.stages_per_rank} on a rank: {candidate.problem}"
            for candidate in trials
        ),
    ]
    if not trials:
        lines.append(f"  none can have {' or '.join(map(str, sorted(stages_per_rank)))} stages on a rank.")
    if any(candidate.step is not None for candidate in trials):
        lines.append("Use a higher pipeline degree, more and smaller micro-batches, or recomputation.")
    return "\n".join(lines)
