"""gradient_accumulation: a batch is computed in several passes, which need less memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, final

from pydantic import Field

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.method import Method, MethodConfig, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan


class GradientAccumulationConfig(MethodConfig):
    """Into how many parts. A bare number is shorthand for ``num_micro_batches``."""

    num_micro_batches: int = Field(
        default=1,
        ge=1,
        description="Parts that train_step splits each rank's batch into; gradients are synchronised with "
        "the last one only.",
    )

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``4``."""
        return {"num_micro_batches": value}


@final
class GradientAccumulation(Method[GradientAccumulationConfig]):
    """Computes each batch in several passes and accumulates their gradients."""

    name = "gradient_accumulation"
    phase = Phase.STEP
    Config = GradientAccumulationConfig

    def plan(self, plan: Plan, config: GradientAccumulationConfig) -> Plan:
        """The number of passes."""
        return replace(plan, num_micro_batches=config.num_micro_batches)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[GradientAccumulationConfig]:
        """Numbers up to 128, and multiples of 16 up to 1,024; a search keeps divisors of a rank's batch."""
        numbers = (*range(2, 129), *range(144, 1025, 16))
        return (GradientAccumulationConfig(num_micro_batches=number) for number in numbers)

    def apply(self, job: Job, config: GradientAccumulationConfig) -> None:
        """Sets the number of micro-batches of ``train_step``."""
        number = job.inputs.gradient_accumulation_steps
        if number not in (1, config.num_micro_batches):  # 1 is the default
            raise InputError(
                f"gradient_accumulation_steps={number} was given to auto_accelerate, but the strategy has "
                f"gradient_accumulation with num_micro_batches={config.num_micro_batches}. Leave one of them out."
            )
        job.step.num_micro_batches = config.num_micro_batches

    def explain(self, config: GradientAccumulationConfig, cluster: Cluster) -> str:
        """Describes a training step."""
        return f"train_step computes each rank's batch in {config.num_micro_batches} part(s)"
