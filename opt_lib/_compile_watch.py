"""What the calls of compiled modules compile: graphs, graph breaks, recompilations."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from atorch_ns.torch_compat import compile_records, graph_breaks, num_compile_failures, num_graphs

__all__ = ["CompileWatch"]

_LIMIT = "recompile limit"
_SHOWN = 3
_WIDTH = 120


class CompileWatch:
    """Counts what calls of some modules make torch compile, and nothing that is compiled elsewhere.

    Two counters are read around every call; everything else only after a call that compiled.

    Attributes:
        method: in warnings.
        num_calls: of the modules.
        num_graphs: compiled, those of recompilations included.
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
        graphs, failures, begun = num_graphs(), num_compile_failures(), time.time_ns() // 1000
        if failures != self._known_failures:  # something else was compiled meanwhile
            self._known_failures, self._known_breaks = failures, Counter(graph_breaks())
        try:
            return compiled(*args, **kwargs)
        finally:
            self.num_calls += 1
            if num_graphs() != graphs or num_compile_failures() != failures:
                self._take(graphs, begun)

    def summary(self) -> str:
        """What was counted, in words: ``"1 graph, 0 graph breaks, 0 recompiles"``, with reasons."""
        if not self.num_calls:
            return "nothing compiled yet: blocks are compiled at their first call"
        text = (
            f"{_counted(self.num_graphs, 'graph')}, {_counted(self.breaks.total(), 'graph break')}"
            f"{_reasons(self.breaks)}, {_counted(self.recompiled.total(), 'recompile')}{_reasons(self.recompiled)}"
        )
        return f"{text}; a function hit the recompile limit and runs uncompiled" if self.hit_limit else text

    def _take(self, graphs: int, begun: int) -> None:
        self.num_graphs += num_graphs() - graphs
        breaks = Counter(graph_breaks())
        self.breaks += breaks - self._known_breaks
        self._known_failures, self._known_breaks = num_compile_failures(), breaks
        for record in compile_records(begun):
            if _LIMIT in record.failed_with:
                self._warn_of_limit(record.recompiled_for)
            elif record.recompiled_for and not record.failed_with:
                self.recompiled[_short(record.recompiled_for)] += 1

    def _warn_of_limit(self, reason: str) -> None:
        if self.hit_limit:
            return
        self.hit_limit = True
        warnings.warn(
            f"{self.method}: torch compiled one function as often as torch._dynamo.config.recompile_limit allows, "
            f"and runs it uncompiled from now on. The last guard that failed: {_short(reason)}. If sizes change from "
            "batch to batch, set dynamic=True, or pad batches to a few sizes.",
            stacklevel=2,
        )


def _short(reason: str) -> str:
    """The guard without the number of the compilation, on one line."""
    head, _, rest = reason.partition(": ")
    text = " ".join((rest if "/" in head else reason).split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def _reasons(found: Counter[str]) -> str:
    if not found:
        return ""
    shown = [f"{count} x {reason}" if count > 1 else reason for reason, count in found.most_common(_SHOWN)]
    more = len(found) - len(shown)
    return " (" + "; ".join(shown) + (f"; and {more} more" if more else "") + ")"
