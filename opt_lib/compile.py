"""compile: torch.compile for each repeated block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, final

from pydantic import Field

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Flag, Method, MethodConfig, ModuleSelectors, Phase
from atorch_ns.profile import Profile, repeated_blocks, select_modules
from atorch_ns.strategy import Plan
from opt_lib._selectors import unmatched_problem

__all__ = ["Compile", "CompileConfig"]


class CompileConfig(MethodConfig):
    """Arguments of ``torch.compile``. A bare string is shorthand for ``backend``."""

    wrap_class: ModuleSelectors | None = Field(
        default=None,
        description="Modules to compile, by class or name; null for the repeated blocks, or the whole model "
        "if nothing repeats.",
    )
    backend: str = Field(default="inductor", description="The compiler's backend.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        default=None, description="What the compiler optimizes for."
    )
    dynamic: Flag | None = Field(
        default=None, description="Compile for changing shapes; null to find out while running."
    )
    fullgraph: Flag = Field(default=False, description="Fail where the graph would break.")

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``"aot_eager"``."""
        return {"backend": value}


@final
class Compile(Method[CompileConfig]):
    """Compiles each repeated block; equal blocks share what was compiled."""

    name = "compile"
    aliases = ("native_dynamo",)
    phase = Phase.COMPILE
    Config = CompileConfig

    def check(self, config: CompileConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The backend and the modules must exist."""
        problems = _backend_problem(self.name, config.backend)
        if profile is not None:
            problems += unmatched_problem(self.name, "wrap_class", config.wrap_class, profile)
        return problems

    def plan(self, plan: Plan, config: CompileConfig) -> Plan:
        """Blocks are compiled."""
        return replace(plan, compiled=True, compiler=config.backend)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[CompileConfig]:
        """Where inductor works: on GPUs, and on CPUs where there is a C++ compiler."""
        if cluster.device_type == "cuda" or _cpp_compiler() is not None:
            yield CompileConfig()

    def apply(self, job: Job, config: CompileConfig) -> None:
        """Marks the modules; they are compiled at their first call."""
        if config.wrap_class is None:
            targets = [block.module for block in repeated_blocks(job.module)] or [job.module]
        else:
            targets = [
                found.module for found in select_modules(job.module, config.wrap_class, outermost=True)
            ]
        options: dict[str, Any] = {
            "backend": config.backend,
            "dynamic": config.dynamic,
            "fullgraph": config.fullgraph,
        }
        if config.mode is not None:
            options["mode"] = config.mode
        for module in targets:
            module.compile(**options)
        job.explain(self.name, f"{len(targets)} module(s) by {config.backend}, at their first call")


def _cpp_compiler() -> str | None:
    """The compiler that inductor would call for CPU code; ``None`` if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


def _backend_problem(method: str, backend: str) -> list[Problem]:
    """The problem of a backend that torch does not know; to list those it knows takes a second of imports."""
    if backend == CompileConfig().backend:
        return []
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    if backend in known:
        return []
    return [
        Problem(
            message="no such backend",
            method=method,
            key="backend",
            value=backend,
            accepted=", ".join(known),
        )
    ]
