"""Hugging Face Accelerate: what ``accelerate estimate-memory`` says for training with Adam."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks._estimators._estimator import Estimator, Question, Setup

__all__ = ["ACCELERATE"]


def _start(question: Question) -> Callable[[], int]:
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
    from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]

    with init_empty_weights():
        model = question.sized.case.build()
    if callable(tie_weights := getattr(model, "tie_weights", None)):
        tie_weights()  # its empty weights have lost their ties, and it would count them twice
    # Of its command's dtypes, the one that it computes like bfloat16.
    precision = "float16" if question.setup.bf16 else "float32"

    def answer() -> int:
        total, _ = calculate_maximum_sizes(model)
        return int(max(estimate_training_usage(total, precision).values()))

    return answer


def _prepare() -> str:
    try:
        importlib.import_module("accelerate.commands.estimate")
    except Exception as error:  # a broken package raises anything
        return f"{type(error).__name__}: {error}"
    return ""


def _lacks(setup: Setup) -> str:
    return "" if setup.shards == "nothing" else "its answer is for one device that holds everything"


ACCELERATE = Estimator(
    name="Accelerate",
    claims="the states of training with Adam on one device, where each replica of DDP is one; no activations",
    states_only=True,
    start=_start,
    prepare=_prepare,
    lacks=_lacks,
)
