"""module_replace: put optimized modules in the place of a model's own."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from atorch_ns.job import Job
from atorch_ns.method import Method, MethodConfig, Phase
from atorch_ns.strategy import Plan

__all__ = ["ModuleReplace", "ModuleReplaceConfig"]


class ModuleReplaceConfig(MethodConfig):
    """Which replacements are used."""


@final
class ModuleReplace(Method[ModuleReplaceConfig]):
    """Replaces modules by optimized implementations; weights move without a copy."""

    name = "module_replace"
    phase = Phase.REPLACE
    Config = ModuleReplaceConfig

    def plan(self, plan: Plan, config: ModuleReplaceConfig) -> Plan:
        """Modules are replaced."""
        return replace(plan, replaced=True)

    def apply(self, job: Job, config: ModuleReplaceConfig) -> None:
        """Replaces nothing yet."""
