"""The engine of the fully automatic mode: it runs a search's trials on the real ranks."""

from __future__ import annotations

from atorch_ns.engine._rank_report import RankReport, Worker

__all__ = ["RankReport", "Worker"]
