"""DeepSpeed: the functions behind its ``estimate_zero2_…`` and ``estimate_zero3_model_states_mem_needs_all_live``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from benchmarks._estimators._estimator import Estimator, Question, Setup

__all__ = ["DEEPSPEED"]

_MODULES = {
    "gradients": "deepspeed.runtime.zero.stage_1_and_2",
    "parameters": "deepspeed.runtime.zero.stage3",
}


def _start(question: Question) -> Callable[[], int]:
    setup = question.setup
    module = importlib.import_module(_MODULES[setup.shards])
    # It tells tied parameters by their addresses, which parameters on the meta device do not have.
    model = question.sized.case.build()
    given: dict[str, Any] = {"num_gpus_per_node": setup.num_ranks, "num_nodes": 1, "cpu_offload": False}

    def zero2() -> int:
        _, of_device = module.estimate_zero2_model_states_mem_needs(module.model_to_params(model), **given)
        return int(of_device)

    def zero3() -> int:
        total, largest = module.model_to_params(model)
        _, of_device, _ = module.estimate_zero3_model_states_mem_needs(
            total, largest, cpu_offload_params=False, **given
        )
        return int(of_device)

    return zero3 if setup.shards == "parameters" else zero2


def _prepare() -> str:
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        for module in _MODULES.values():
            importlib.import_module(module)
    except Exception as error:  # a broken package raises anything
        return f"{type(error).__name__}: {error}"
    return ""


def _lacks(setup: Setup) -> str:
    if setup.shards in _MODULES:
        return ""
    return "it has estimators for ZeRO 2 and ZeRO 3 only"


DEEPSPEED = Estimator(
    name="DeepSpeed",
    claims="the states under ZeRO 2 or 3, with 16-bit weights and fp32 masters on the device; no activations",
    states_only=True,
    start=_start,
    prepare=_prepare,
    lacks=_lacks,
)
