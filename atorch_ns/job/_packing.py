"""Fused parameters are divided below this layer; jobs and methods find their class here."""

from __future__ import annotations

from atorch_ns.sharding import Packing

__all__ = ["Packing"]
