"""State of torch.compile, and of the CPU allocator's memory."""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from atorch_ns.torch_compat.modules import hooks_inside


def num_graphs() -> int:
    """Returns the number of graphs compiled so far (``torch._dynamo.utils.counters``). Cheap to read."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def num_compile_failures() -> int:
    """Number of failures of tracing so far, graph breaks and limits included."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())


def graph_breaks() -> dict[str, int]:
    """Number of graph breaks so far by the reason's first line, branches that depend on data included."""
    from torch._dynamo.utils import counters

    breaks: dict[str, int] = {}
    for kind in ("graph_break", "unimplemented"):
        for text, count in counters[kind].items():
            reason = str(text).strip().partition("\n")[0]
            if kind == "graph_break" or reason.startswith("Data-dependent"):
                breaks[reason] = breaks.get(reason, 0) + int(count)
    return breaks


def leave_uncompiled() -> None:
    """Ends the tracing of the frame that calls it; its callees are compiled.

    Inside a context manager or handler of the caller, no graph can resume: the whole frame runs in Python.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


def micro_pipelined(mode: str | None) -> dict[str, Any]:
    """Inductor options, including those of ``mode``, that fuse a gather or scattered sum with its product.
    One operator on symmetric memory then exchanges a piece while it multiplies another
    (``torch._inductor.fx_passes.micro_pipeline_tp``)."""
    options = {} if mode is None else torch._inductor.list_mode_options(mode)
    return {**options, "_micro_pipeline_tp": True}


class CompileRecord(NamedTuple):
    """One attempt of ``torch._dynamo`` to compile a function.

    Attributes:
        recompiled_for: the guard of an earlier compilation that failed; empty for a first compilation.
        failed_with: the reason of a failure; empty where the function was compiled.
    """

    recompiled_for: str
    failed_with: str


def compile_records(since_us: int) -> list[CompileRecord]:
    """Attempts after ``since_us`` (microseconds since the epoch). torch keeps only the last few dozen."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        CompileRecord(str(each.recompile_reason or ""), str(each.fail_reason or ""))
        for each in get_compilation_metrics()
        if (each.start_time_us or 0) >= since_us
        and (each.recompile_reason or each.fail_reason or each.co_name)
    ]


def compile_forward(module: nn.Module, watch: Callable[..., Any], **options: Any) -> None:
    """Has calls of a module run ``watch(compiled, *args, **kwargs)`` with its compiled forward pass.
    Unlike ``module.compile()``, it does not trace hooks. Copies omit ``_compiled_call_impl``."""
    run = partial(watch, torch.compile(module.forward, **options))
    module._compiled_call_impl = _CompiledCall(module, run)


class _CompiledCall:
    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._run = module, run
        self._override = vars(module).get("forward")  # set if a module replaces the method of its class
        self.note_inner_hooks()

    def note_inner_hooks(self) -> None:
        """Records the present hooks on inner modules as those that are compiled with this module."""
        self._tables = hooks_inside(self._module)
        self._num_hooks = sum(map(len, self._tables))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, override = self._module, self._override
        is_replaced = vars(module).get("forward") is not override  # for this call
        if is_replaced or self._has_other_hooks():
            return module._call_impl(*args, **kwargs)
        vars(module)["forward"] = self._run  # _call_impl calls it between the hooks
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            vars(module).pop("forward")
            if override is not None:
                vars(module)["forward"] = override

    def _has_other_hooks(self) -> bool:
        # Guards ignore hooks: compiled code would not call later ones.
        if sum(map(len, self._tables)) == self._num_hooks:
            return False
        warnings.warn(
            f"hooks were put on modules inside a compiled {type(self._module).__name__} after the call. It runs uncompiled, since "
            "compiled code would not call them: register them before the call.", stacklevel=2,
        )  # fmt: skip
        return True


def note_inner_hooks(models: Iterable[nn.Module]) -> None:
    """Records hooks inside compiled modules as compiled. A module with later hooks runs uncompiled."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module._compiled_call_impl, _CompiledCall):
            module._compiled_call_impl.note_inner_hooks()


def traced_modules(model: nn.Module) -> set[nn.Module]:
    """The modules inside of modules whose forward pass is compiled: the compiler traces their hooks."""
    parents = (module for module in model.modules() if module._compiled_call_impl is not None)
    return {child for module in parents for child in module.modules() if child is not module}


_SETTLING_S = 0.005  # time for threads of process groups to release buffers


class CpuMemoryRecord:
    """Live bytes of CPU tensor memory at every allocation and release between start and stop.

    torch's CPU allocator reports every allocation and release, in Python or C++ (gradients, DDP's buckets,
    buffers of collectives), to the profiler, which sees the thread that started it and its workers. The count
    in each event covers all threads once the flag ``caffe2_report_cpu_memory_usage`` is set. Without it the
    count drifts, since a gloo thread may release memory that the main thread allocated.
    """

    def __init__(self) -> None:
        self._flag = _cpu_memory_flag()
        self._profiler: Any = None

    def count(self, on: bool) -> None:
        """Switches the allocator's count for all threads on or off. It excludes earlier allocations."""
        if self._flag is not None:
            self._flag.value = on

    def start(self) -> None:
        """Begins a record."""
        with _silent_kineto():
            self._profiler = torch.autograd.profiler.profile(profile_memory=True)
            self._profiler.__enter__()

    def stop(self) -> list[int]:
        """Ends the record and returns the counts in order of time."""
        # Process groups release buffers a moment after a step; the profiler takes no events while it ends.
        time.sleep(_SETTLING_S)
        torch.empty(1)  # its release records the present count
        with _silent_kineto():
            self._profiler.__exit__(None, None, None)
        roots = self._profiler.kineto_results.experimental_event_tree()
        counts = [event.extra_fields.total_allocated for event in _find_allocations(roots)]
        del counts[-2]  # the allocation of that tensor
        return counts


def _find_allocations(roots: Any) -> list[Any]:
    from torch._C._profiler import _ExtraFields_Allocation

    matches, waiting = [], list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            matches.append(event)
    return sorted(matches, key=lambda event: event.start_time_ns)


def _cpu_memory_flag() -> Any:
    libraries = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("libc10.*")]
    try:
        library = ctypes.CDLL(libraries[0])
        return ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except (IndexError, OSError, ValueError):
        return None  # this build does not export it


@contextmanager
def _silent_kineto() -> Iterator[None]:
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silent, unless the user has chosen a level
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
