"""One thread, no network, the same random numbers every time, and a check that a test left nothing behind."""

from __future__ import annotations

import os

# Before torch is imported: ranks are forked from this process, which is safe with one thread only.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Inductor compiles in the process that asks: its pool of workers costs more to start than tests compile.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import contextlib
import functools
import gc
import importlib.util
import inspect
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.child_processes import child_processes
from tests.sample import BUDGETS, CostRecord, draw_tests, read_costs
from tests.warm import COLD_PYTHON, warm_python

torch.set_num_threads(1)
# The machine is shared: how long an example takes says nothing.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# Threads end at once; a process that was killed is gone when its parent has had its turn on a busy machine.
_ENDING_S = {"thread": 3.0, "process": 15.0}
_MANY = 30
_IMPORTED_BY_RANKS = (
    "atorch_ns.api",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torchao.float8",
    "deepspeed",
    "fairscale.optim",
    "bitsandbytes",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
)
# What pytest, imports of torch, and kernels compiled for GPUs set.
_OTHERS_VARIABLES = re.compile(
    "PYTEST_CURRENT_TEST|TORCHINDUCTOR_CACHE_DIR|PYTORCH_NVML_BASED_CUDA_CHECK|CUDA_|TRITON_|NCCL_|KMP_"
)


# What starts processes, as it stands in the source of a test module or of a helper that it imports.
_STARTS_PROCESSES = re.compile(
    r"\b(run_ranks|catch_ranks|subprocess|multiprocessing|Popen|os\.fork|start_ranks|TrialWorker|Zygote|run_strategies)\b"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--sample SEED``: what of the dear tests is run is drawn by this seed (tests/sample.py)."""
    parser.addoption("--sample", metavar="SEED", help="run all cheap tests, and dear ones drawn by SEED")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks ``processes`` every test that, or whose module, or a helper module that it imports, starts processes."""
    for item in items:
        if isinstance(item, pytest.Function) and (
            _starts_processes(item.module.__name__)
            or _STARTS_PROCESSES.search(inspect.getsource(item.function))
        ):
            item.add_marker(pytest.mark.processes)
    seed = config.getoption("--sample")
    if seed is not None:
        # A test that is marked slow costs the sample nothing: the expression of marks leaves it out.
        quick = [item.nodeid for item in items if item.get_closest_marker("slow") is None]
        drawn = draw_tests(quick, seed, read_costs(), BUDGETS)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in drawn])
        items[:] = [item for item in items if item.nodeid in drawn]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Records what each test costs."""
    starts_processes = item.get_closest_marker("processes") is not None
    record = _cost_record()
    record.start(starts_processes=starts_processes)
    yield
    record.stop(item.nodeid, starts_processes=starts_processes)


@functools.cache
def _cost_record() -> CostRecord:
    return CostRecord()


@functools.cache
def _starts_processes(name: str) -> bool:
    source = inspect.getsource(sys.modules[name])
    helpers = re.findall(r"^from (tests\.[\w.]+) import", source, re.MULTILINE)
    return bool(_STARTS_PROCESSES.search(source)) or any(map(_starts_processes, helpers))


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from tests that do not ask for one, and make interrupts work as in a terminal.

    Where a GPU is seen, the first backward starts a thread for it, and a rank forked later has no backward.
    """
    if "gpu" not in str(config.getoption("markexpr", "")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Shells let jobs in the background ignore interrupts, and what these start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Commands of many tests, and their ranks, are forks of processes that have imported what they need.

    The few tests that somebody works on are not worth it.
    """
    if sum(item.get_closest_marker("processes") is not None for item in request.session.items) < _MANY:
        yield
        return
    with warm_python():
        for name in filter(_is_installed, _IMPORTED_BY_RANKS):
            with contextlib.suppress(
                Exception
            ):  # a broken package (no nvcc, an older torch) fails its own tests
                importlib.import_module(name)
        yield


@pytest.fixture
def cold_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are fresh: for tests that look at the tree of processes, of which a fork of the server is not part."""
    monkeypatch.setattr(sys, "executable", COLD_PYTHON)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, and every fixture that it is the first to use, draws the same numbers on every run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _starts_no_rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests with processes are left out, one that starts Python all the same fails: it needs the mark."""
    if "not processes" not in str(request.config.getoption("markexpr", "")):
        return
    start = subprocess.Popen.__init__

    def refuse(*_: Any) -> None:
        pytest.fail("this test starts a process: mark it with pytest.mark.processes", pytrace=False)

    def start_others(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        first = args if isinstance(args, (str, os.PathLike)) else args[0]
        if any(name in str(first) for name in ("python", "torchrun", "atorch-ns")):
            refuse()
        start(self, args, *rest, **options)

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", start_others)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Environment, process group, threads, processes and default dtype are as before; else the test fails.

    What can be put right is put right, so that one leak fails one test.
    """
    environment, threads, processes = dict(os.environ), _threads(), _processes()
    dtype = torch.get_default_dtype()
    yield
    leaks = [
        *_environment_leaks(environment),
        *_process_group_leaks(),
        *_dtype_leaks(dtype),
        *_lasting("thread", threads, _threads, str),
        *_lasting("process", processes, _processes, _end_process),
    ]
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _environment_leaks(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    names = [name for name in before.keys() | now.keys() if not _OTHERS_VARIABLES.match(name)]
    changed = sorted(name for name in names if before.get(name) != now.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}: {before.get(name)!r} became {now.get(name)!r}" for name in changed]


def _process_group_leaks() -> list[str]:
    if not (dist.is_available() and dist.is_initialized()):
        return []
    dist.destroy_process_group()
    return ["a live process group"]


def _dtype_leaks(before: torch.dtype) -> list[str]:
    now = torch.get_default_dtype()
    torch.set_default_dtype(before)
    return [] if now == before else [f"default dtype {before} became {now}"]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _processes() -> set[psutil.Process]:
    return child_processes(recursive=True)


def _lasting(
    what: str, before: set[Any], now: Callable[[], set[Any]], describe: Callable[[Any], str]
) -> list[str]:
    """New threads or processes that are still there after a moment in which they may end by themselves."""
    limit = time.monotonic() + _ENDING_S[what]
    if now() - before:
        gc.collect()  # a data loader ends its workers when it is collected
    while (new := now() - before) and time.monotonic() < limit:
        time.sleep(0.02)
    return [f"a {what}: {describe(one)}" for one in new]


def _end_process(process: psutil.Process) -> str:
    text = str(process)
    try:
        process.kill()
        process.wait(timeout=_ENDING_S["process"])
    except psutil.Error:
        pass
    return text
