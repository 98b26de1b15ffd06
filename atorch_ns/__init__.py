"""Decides how a PyTorch model is trained, and applies it in one call.

The names here are loaded when first used; importing the package imports no torch and changes nothing in it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from atorch_ns._version import __version__

if TYPE_CHECKING:
    from atorch_ns.api import auto_accelerate
    from atorch_ns.apply import attach_optimizer
    from atorch_ns.job import Result
    from atorch_ns.parallel import (
        BroadcastGenFilesStrategy,
        ComputeConfig,
        ParallelModule,
        ReuseType,
        broadcast_weights,
        build_optimizer,
        deduped_state_dict,
        load_deduped_state_dict,
        load_merged_state_dict,
        merge_state_dicts,
        parallelize,
        register_op,
    )
    from atorch_ns.strategy import Strategy


__all__ = [
    "BroadcastGenFilesStrategy", "ComputeConfig", "ParallelModule", "Result", "ReuseType", "Strategy",
    "__version__", "attach_optimizer", "auto_accelerate", "broadcast_weights", "build_optimizer",
    "deduped_state_dict", "load_deduped_state_dict", "load_merged_state_dict", "merge_state_dicts", "parallelize",
    "register_op",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(__all__, "atorch_ns.parallel"),
    "attach_optimizer": "atorch_ns.apply",
    "auto_accelerate": "atorch_ns.api",
    "Result": "atorch_ns.job",
    "Strategy": "atorch_ns.strategy",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in (
        "checkpoint",
        "cluster",
        "data",
        "errors",
        "job",
        "method",
        "notebook",
        "parallel",
        "planning",
        "profile",
        "strategy",
        "testing",
        "tracking",
    ):
        return importlib.import_module(f"atorch_ns.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
