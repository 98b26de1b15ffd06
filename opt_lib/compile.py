"""compile: torch.compile for each repeated block."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import Field

from atorch_ns.capture.blocks import repeated_blocks, select_modules
from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Flag, Method, MethodConfig, ModuleSelectors, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from atorch_ns.text import clip_text, count_noun, first_few
from atorch_ns.torch_compat import (
    compile_forward,
    compile_records,
    graph_breaks,
    inner_hooks,
    micro_pipelined,
    num_compile_failures,
    num_graphs,
)
from opt_lib._config_checks import unmatched_problem

if TYPE_CHECKING:
    from torch import nn

_LIMIT = "recompile limit"  # in the reason of a failure
_SHOWN = 3  # reasons in a report
_WIDTH = 120  # characters of a reason


class CompileWatch:
    """Counts what calls of some modules make torch compile, and nothing that is compiled elsewhere.

    Two counters are read around every call; everything else only after a call that compiled.

    Attributes:
        method: the method's name, for warnings.
        num_calls: calls of the modules.
        num_graphs: compiled graphs, those of recompilations included.
        breaks: how often tracing stopped inside a function and went on behind it, by reason.
        recompiled: how often a function was compiled again, by the guard that failed.
        hit_limit: whether torch gave up on a function that was compiled too often, and runs it as it is.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.num_calls = 0
        self.num_graphs = 0
        self.breaks: Counter[str] = Counter()
        self.recompiled: Counter[str] = Counter()
        self.hit_limit = False
        self._known_failures = -1
        self._known_breaks: Counter[str] = Counter()

    def __call__(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``compiled`` and counts."""
        # torch counts for the whole process, and dates its records in microseconds since the epoch.
        graphs, failures, start = num_graphs(), num_compile_failures(), time.time_ns() // 1000
        if failures != self._known_failures:  # something else was compiled meanwhile
            self._known_failures, self._known_breaks = failures, Counter(graph_breaks())
        try:
            return compiled(*args, **kwargs)
        finally:
            self.num_calls += 1
            if num_graphs() != graphs or num_compile_failures() != failures:
                self._record_compilation(graphs, start)

    def summary(self) -> str:
        """The counts in words: ``"1 graph, 0 graph breaks, 0 recompiles"``, with reasons."""
        if not self.num_calls:
            return "nothing compiled yet: blocks are compiled at their first call"
        text = (
            f"{count_noun(self.num_graphs, 'graph')}, {count_noun(self.breaks.total(), 'graph break')}"
            f"{_format_reasons(self.breaks)}, {count_noun(self.recompiled.total(), 'recompile')}{_format_reasons(self.recompiled)}"
        )
        return f"{text}; a function hit the recompile limit and runs uncompiled" if self.hit_limit else text

    def _record_compilation(self, graphs: int, start: int) -> None:
        self.num_graphs += num_graphs() - graphs
        breaks = Counter(graph_breaks())
        self.breaks += breaks - self._known_breaks  # less those before this call
        self._known_failures, self._known_breaks = num_compile_failures(), breaks
        for record in compile_records(start):
            if _LIMIT in record.failed_with:
                self._warn_of_limit(record.recompiled_for)
            elif record.recompiled_for and not record.failed_with:
                self.recompiled[_shorten_guard(record.recompiled_for)] += 1

    def _warn_of_limit(self, reason: str) -> None:
        if self.hit_limit:
            return
        self.hit_limit = True
        warnings.warn(
            f"{self.method}: torch compiled one function as often as torch._dynamo.config.recompile_limit allows, "
            f"and runs it uncompiled from now on. The last guard that failed: {_shorten_guard(reason)}. If sizes change from "
            "batch to batch, set dynamic=True, or pad batches to a few sizes.",
            stacklevel=2,
        )


def _shorten_guard(reason: str) -> str:
    # A reason begins with the number of the compilation, as "0/1: ".
    head, _, rest = reason.partition(": ")
    return clip_text(" ".join((rest if "/" in head else reason).split()), _WIDTH)


def _format_reasons(reasons: Counter[str]) -> str:
    if not reasons:
        return ""
    items = [f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.most_common()]
    return f" ({first_few(items, _SHOWN, '; ')})"


_TRITON_CAPABILITY = 7
"""Volta, the oldest GPU that Triton compiles for (its README)."""


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

    def unavailable(self, config: CompileConfig, cluster: Cluster) -> str | None:
        """The requirement of inductor that is missing here."""
        return _missing_requirement(cluster.device_type) if config.backend == "inductor" else None

    def notices(self, config: CompileConfig, cluster: Cluster) -> Iterable[str]:
        """Modes that mean nothing here, or that the backend does not know."""
        if config.mode not in (None, "default") and config.backend != "inductor":
            yield f"compile: mode={config.mode} is a setting of inductor, and {config.backend} ignores it"
        elif config.mode == "reduce-overhead" and cluster.device_type == "cpu":
            yield "compile: mode=reduce-overhead stands for CUDA graphs; on a CPU it changes nothing"

    def check(self, config: CompileConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The backend and the modules must exist."""
        problems = _backend_problem(self.name, config.backend)
        return problems + unmatched_problem(self.name, "wrap_class", config.wrap_class, profile)

    def plan(self, plan: Plan, config: CompileConfig) -> Plan:
        """Blocks are compiled."""
        return replace(plan, compiled=True, compiler=config.backend)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[CompileConfig]:
        """The default where inductor works: on GPUs, and on CPUs with a C++ compiler."""
        if _missing_requirement(cluster.device_type) is None:
            yield CompileConfig()

    def apply(self, job: Job, config: CompileConfig) -> None:
        """Marks the modules; they are compiled at their first call."""
        if config.wrap_class is None:
            targets = [block.module for block in repeated_blocks(job.module)] or [job.module]
        else:
            targets = [
                match.module for match in select_modules(job.module, config.wrap_class, outermost=True)
            ]
        options: dict[str, Any] = {
            "backend": config.backend,
            "dynamic": config.dynamic,
            "fullgraph": config.fullgraph,
        }
        if config.mode is not None and config.backend == "inductor":
            options["mode"] = config.mode
        if config.backend == "inductor" and job.plan.tensor.asynchronous:
            # torch.compile takes options or a mode, so the mode goes into the options.
            options["options"] = micro_pipelined(options.pop("mode", None))
        targets, others = _equally_hooked(targets)
        if others:
            reason = (
                f"{len(others)} of {len(targets) + len(others)} module(s) stay uncompiled: hooks on modules inside of "
                "them differ from those of the others of their class, and a shared graph would run without them"
            )
            warnings.warn(f"{self.name}: {reason}", stacklevel=2)
            job.explain(self.name, reason)
        _forget_earlier_graphs()
        watch = CompileWatch(self.name)
        for module in targets:
            compile_forward(module, watch, **options)
        job.explain(self.name, f"{len(targets)} module(s) by {config.backend}")
        job.explain(self.name, watch.summary)


def _equally_hooked(targets: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules that may share graphs, and those whose inner hooks differ from most of their class."""
    hooks = [(type(module), inner_hooks(module)) for module in targets]
    counts = Counter(hooks)
    # For each class the hooks that most modules have; of equally frequent ones the fewest.
    usual = {
        kind: min(
            (pair for pair in counts if pair[0] is kind), key=lambda pair: (-counts[pair], len(pair[1]))
        )
        for kind, _ in hooks
    }
    same: list[nn.Module] = []
    others: list[nn.Module] = []
    for module, pair in zip(targets, hooks, strict=True):
        (same if pair == usual[pair[0]] else others).append(module)
    return same, others


def _forget_earlier_graphs() -> None:
    import torch

    # Graphs of an earlier job have its breaks, lack this one's inner hooks, and are counted by nobody.
    if num_graphs():
        torch.compiler.reset()


def _missing_requirement(device_type: str) -> str | None:
    """Returns the requirement of inductor that this machine lacks; ``None`` if it lacks none."""
    if device_type == "cpu":
        if _find_compiler("CXX", "g++", "clang++") is not None:
            return None
        return (
            "inductor needs a C++ compiler on a CPU, and there is neither $CXX nor g++ nor clang++. Install g++, or "
            "use backend='aot_eager', which compiles without one."
        )
    import torch

    if not torch.cuda.is_available():  # a machine that only plans for GPUs
        return None
    major, minor = torch.cuda.get_device_capability()
    if major < _TRITON_CAPABILITY:
        have = f"this one has {major}.{minor}. Use backend='aot_eager'."
        return f"inductor's Triton needs a GPU of compute capability {_TRITON_CAPABILITY}.0, and {have}"
    if importlib.util.find_spec("triton") is None:
        return "inductor needs Triton on a GPU. Install it with: pip install triton"
    # Triton compiles a launcher in C.
    if _find_compiler("CC", "gcc", "clang", "cc") is None:
        return "Triton needs a C compiler, and there is neither $CC nor gcc nor clang. Install gcc."
    return None


def _find_compiler(variable: str, *names: str) -> str | None:
    paths = (shutil.which(name) for name in (os.environ.get(variable) or "", *names))
    return next((path for path in paths if path is not None), None)


def _backend_problem(method: str, backend: str) -> list[Problem]:
    # To list backends takes a second of imports; the default one is there.
    if backend == CompileConfig().backend:
        return []
    import torch

    names = torch.compiler.list_backends(exclude_tags=())
    if backend in names:
        return []
    return [
        Problem(
            message="no such backend", method=method, key="backend", value=backend, accepted=", ".join(names)
        )
    ]
