"""How many micro-batches a batch is split into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atorch_ns.data import split_batch
from atorch_ns.errors import BatchSizeError
from atorch_ns.job import Job
from atorch_ns.pipeline import ScheduleInfo, num_rows

if TYPE_CHECKING:
    from opt_lib._pipeline_plan import CutRequest, PipelinePlan

__all__ = ["asked_micro_batches", "fitting_micro_batches", "number_problem", "splitter"]


def asked_micro_batches(job: Job, request: CutRequest) -> int | None:
    """The number that the user gave, here or as gradient accumulation; ``None`` for none."""
    if request.num_micro_batches is not None:
        return request.num_micro_batches
    given = (job.inputs.gradient_accumulation_steps, job.plan.num_micro_batches)
    return next((number for number in given if number > 1), None)


def fitting_micro_batches(info: ScheduleInfo, num_ranks: int, on_rank: int, rows: int) -> int:
    """The number that divides ``rows``, suits the schedule and is nearest to twice the stages, below four times them.

    Raises:
        BatchSizeError: if there is none.
    """
    number = info.usual_micro_batches(num_ranks, on_rank, rows)
    if number is None:
        parts = [part for part in range(1, rows + 1) if rows % part == 0]
        raise BatchSizeError(
            f"a batch of {rows} rows per data rank splits into {', '.join(map(str, parts))} micro-batches, but "
            f"{info.problem(num_ranks, rows, on_rank)} Use a larger batch_size, drop_last=True in dataloader_args if "
            "it is the last batch of an epoch, or schedule='GPipe', which runs any number."
        )
    return number


def number_problem(info: ScheduleInfo, num_ranks: int, on_rank: int, asked: int, rows: int) -> str:
    """Why a batch of so many rows is not run in ``asked`` micro-batches, and what to do."""
    legal = info.dividing(num_ranks, on_rank, rows)
    why = (
        f"a batch of {rows} rows per rank cannot be split into {asked} equal micro-batches."
        if rows % asked
        else info.reason(num_ranks, asked, on_rank)
    )
    return (
        f"{why} {_use(legal)}, drop_last=True in dataloader_args if it is the last batch of an epoch, or another "
        "batch_size."
    )


def splitter(plan: PipelinePlan, num_ranks: int) -> Callable[[Any], list[Any]]:
    """Splits batches: into the plan's number of micro-batches, and where it does not divide one and the user has not
    asked for it, into another."""

    def split(data: Any) -> list[Any]:
        number, rows = plan.num_micro_batches, num_rows(data)
        if rows is not None and rows % number:
            if plan.num_is_asked:
                raise BatchSizeError(number_problem(plan.info, num_ranks, plan.stages_per_rank, number, rows))
            number = fitting_micro_batches(plan.info, num_ranks, plan.stages_per_rank, rows)
        return split_batch(data, number)

    return split


def _use(legal: list[int]) -> str:
    return f"Use num_micro_batches={' or '.join(map(str, legal))}" if legal else "Use schedule='GPipe'"
