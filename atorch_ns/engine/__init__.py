"""The engine of the fully automatic mode: it runs a search's trials on the real ranks.

The names here are loaded when first used: a trial's process needs neither gRPC nor Optuna, and forks better
without their threads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atorch_ns.engine._asked import Asked
    from atorch_ns.engine._auth import Tls
    from atorch_ns.engine._find import find_strategy
    from atorch_ns.engine._rank_report import RankReport, Worker
    from atorch_ns.engine._request import EngineAddress, SearchRequest

__all__ = ["Asked", "EngineAddress", "RankReport", "SearchRequest", "Tls", "Worker", "find_strategy"]

_HOMES = {
    "Asked": "_asked",
    "EngineAddress": "_request",
    "RankReport": "_rank_report",
    "SearchRequest": "_request",
    "Tls": "_auth",
    "Worker": "_rank_report",
    "find_strategy": "_find",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
