"""The estimate of ``auto_accelerate``: a trace on fake tensors, and the price of the resolved plan."""

from __future__ import annotations

from collections.abc import Callable

from atorch_ns.estimate import Workload
from atorch_ns.estimate.memory.peak import price_memory
from atorch_ns.estimate.table import PlanTable
from benchmarks._estimators._estimator import Estimator, Question
from benchmarks.estimate_memory import plan_of, profile_of

__all__ = ["OURS"]


def _start(question: Question) -> Callable[[], int]:
    sized, ranks = question.sized, question.setup.num_ranks
    model = sized.case.build()
    workload = Workload(global_batch=sized.global_batch, num_tokens=sized.num_tokens)

    def answer() -> int:
        profile = profile_of(sized, ranks, model)
        assert profile.trace is not None
        plan = plan_of(question.setup.strategy, profile, ranks)
        memory, *_ = price_memory(PlanTable.of([plan]), profile.trace, workload, device_type="cpu")
        return round(float(memory[0].sum()))

    return answer


OURS = Estimator(
    name="ours",
    claims="the peak of a training step: states, activations, buffers of collectives and temporaries",
    start=_start,
)
