"""How a plan uses the axes that divide the model: what its rows in a table may differ in besides sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from atorch_ns.strategy import Plan

__all__ = ["AxisUse"]


class AxisUse(NamedTuple):
    """The fields of a :class:`~atorch_ns.strategy.Plan` that say how an axis is used.

    Attributes:
        schedule: of a pipeline.
        stages_per_rank: of a pipeline; 0 for what the schedule needs.
        tensor_sequence: whether ``tensor`` divides the residual stream too.
        parallel_loss: whether logits stay divided over ``tensor`` in the loss.
        sequence_exchange: how attention sees tokens of other ranks.
    """

    schedule: str = "1F1B"
    stages_per_rank: int = 0
    tensor_sequence: bool = False
    sequence_exchange: Literal["ulysses", "ring"] = "ulysses"
    parallel_loss: bool = False

    @classmethod
    def of(cls, plan: Plan) -> AxisUse:
        """That of a plan."""
        return cls(
            plan.schedule,
            plan.stages_per_rank,
            plan.tensor_sequence,
            plan.sequence_exchange,
            plan.parallel_loss,
        )

    def onto(self, plan: Plan) -> Plan:
        """The plan with its axes used like this."""
        return plan if AxisUse.of(plan) == self else replace(plan, **self._asdict())

    def over(self, own: AxisUse) -> AxisUse:
        """This use, where ``own`` does not say otherwise already."""
        usual = AxisUse()._asdict()
        return self._replace(**{name: mine for name, mine in own._asdict().items() if mine != usual[name]})
