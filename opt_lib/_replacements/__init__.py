"""Replacements that ``module_replace`` can put in the place of a model's own modules.

A replacement says by itself what it requires (package, device, dtypes). Those that want the same modules
stand in order of preference: each works on what the earlier ones left, so that torch's own fused kernel,
last, takes over wherever a faster package is absent.
"""

from __future__ import annotations

from opt_lib._replacements.base import ClassPair, Outcome, Replacement, Requirements
from opt_lib._replacements.registry import (
    known_replacements,
    register_replace_pair,
    registered_pairs,
    set_registered_pairs,
    unregister_replace_pair,
)

__all__ = [
    "ClassPair",
    "Outcome",
    "Replacement",
    "Requirements",
    "known_replacements",
    "register_replace_pair",
    "registered_pairs",
    "set_registered_pairs",
    "unregister_replace_pair",
]
