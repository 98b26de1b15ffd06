"""What torch.compile has done so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = [
    "CompileRecord",
    "compile_records",
    "graph_breaks",
    "leave_uncompiled",
    "num_compile_failures",
    "num_graphs",
    "watch_compiled",
]


def num_graphs() -> int:
    """Graphs compiled so far (``torch._dynamo.utils.counters``); cheap enough to be asked around every call."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def num_compile_failures() -> int:
    """How often tracing met what it does not support so far, graph breaks and limits included."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())


def graph_breaks() -> dict[str, int]:
    """How often tracing stopped inside a function so far, by the first line of the reason
    (``torch._dynamo.utils.counters``, which files branches that depend on data under what is not supported)."""
    from torch._dynamo.utils import counters

    breaks: dict[str, int] = {}
    for kind in ("graph_break", "unimplemented"):
        for text, count in counters[kind].items():
            reason = str(text).strip().partition("\n")[0]
            if kind == "graph_break" or reason.startswith("Data-dependent"):
                breaks[reason] = breaks.get(reason, 0) + int(count)
    return breaks


def leave_uncompiled() -> None:
    """Ends the tracing of the frame that calls it (``torch._dynamo.graph_break``), whose callees are compiled.

    Inside a context manager or handler of the caller, which no graph can resume in, all of the frame runs in Python.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


class CompileRecord(NamedTuple):
    """One attempt of ``torch._dynamo`` to compile a function.

    Attributes:
        recompiled_for: the guard that failed of what was compiled before; empty for a first compilation.
        failed_with: why nothing came of it; empty where it was compiled.
    """

    recompiled_for: str
    failed_with: str


def compile_records(since_us: int) -> list[CompileRecord]:
    """Attempts begun after ``since_us`` (microseconds since the epoch), of the last few dozen that torch keeps
    (``torch._dynamo.utils.get_compilation_metrics``)."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        CompileRecord(str(each.recompile_reason or ""), str(each.fail_reason or ""))
        for each in get_compilation_metrics()
        if (each.start_time_us or 0) >= since_us
        and (each.recompile_reason or each.fail_reason or each.co_name)
    ]


def watch_compiled(module: nn.Module, watch: Callable[..., Any]) -> None:
    """Has calls of a module that ``module.compile()`` prepared run as ``watch(compiled, *args, **kwargs)``
    (``_compiled_call_impl``)."""
    from functools import partial

    module._compiled_call_impl = partial(watch, module._compiled_call_impl)
