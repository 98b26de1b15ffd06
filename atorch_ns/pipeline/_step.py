"""One step of a pipeline, as little as is needed to simulate it."""

from __future__ import annotations

from dataclasses import dataclass

from atorch_ns.pipeline._actions import actions
from atorch_ns.pipeline._schedules import get_schedule
from atorch_ns.pipeline._simulate import StageCosts, Timeline, simulate

__all__ = ["PipelineStep"]


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A schedule on a pipeline whose costs are known.

    Attributes:
        schedule: its name.
        num_ranks: ranks of the pipeline.
        num_micro_batches: of a step.
        stages_per_rank: stages on each rank.
        costs: seconds of the stages.
    """

    schedule: str
    num_ranks: int
    num_micro_batches: int
    stages_per_rank: int
    costs: StageCosts

    def timeline(self) -> Timeline:
        """When each pass begins and ends.

        Raises:
            InputError: if the schedule is unknown or cannot run this pipeline.
        """
        info = get_schedule(self.schedule)
        orders = actions(info, self.num_ranks, self.num_micro_batches, self.stages_per_rank)
        return simulate(orders, self.costs, hides_sends=info.hides_sends)
