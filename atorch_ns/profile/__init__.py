"""What is known of a model without running it."""

from __future__ import annotations

from atorch_ns.profile._blocks import NamedModule, repeated_blocks
from atorch_ns.profile._profile import Profile
from atorch_ns.profile._select import class_names, matches, select_modules, stand_for

__all__ = [
    "NamedModule",
    "Profile",
    "class_names",
    "matches",
    "repeated_blocks",
    "select_modules",
    "stand_for",
]
