"""The engine of the fully automatic mode: it runs a search's trials on the real ranks.

Names are loaded on first use: a trial's process needs no gRPC, and forks better without its threads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atorch_ns.engine.find import find_strategy
    from atorch_ns.engine.request import EngineAddress, SearchRequest
    from atorch_ns.engine.rpc.auth import Tls
    from atorch_ns.engine.trial.report import RankReport, Worker

__all__ = ["EngineAddress", "RankReport", "SearchRequest", "Tls", "Worker", "find_strategy"]

_HOMES = {
    "EngineAddress": "request",
    "RankReport": "trial.report",
    "SearchRequest": "request",
    "Tls": "rpc.auth",
    "Worker": "trial.report",
    "find_strategy": "find",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
