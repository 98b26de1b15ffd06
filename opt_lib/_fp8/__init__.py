"""fp8 training: which linears compute in fp8, and the packages that do it."""

from __future__ import annotations

from opt_lib._fp8.backend import Backend, choose, notices, why_unavailable
from opt_lib._fp8.config import Fp8Config
from opt_lib._fp8.select import Selection, find_linears, lora_layers, unmatched

__all__ = [
    "Backend",
    "Fp8Config",
    "Selection",
    "choose",
    "find_linears",
    "lora_layers",
    "notices",
    "unmatched",
    "why_unavailable",
]
