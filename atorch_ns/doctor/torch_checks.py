"""Checks of torch on one machine: compiler, products in each dtype, backends, and an all-reduce of ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from atorch_ns.doctor.base import Finding, Place, Verdict, as_check, call_isolated, failed, passed, warned
from atorch_ns.doctor.node_findings import all_reduce_finding
from atorch_ns.processes import RankEnd, run_local_ranks, scratch_folder
from atorch_ns.text import clip_text, error_text, seconds_text

_COMPILER: Final = "compiler"
_PROGRAM: Final = "#include <omp.h>\nint main() { return omp_get_max_threads() > 0 ? 0 : 1; }\n"
_APT: Final = "sudo apt install g++   # without it the method compile is left out"


@as_check
def check_compiler(machine: Place) -> Iterator[Finding]:
    """inductor finds a C++ compiler with OpenMP, and Triton where there is a GPU."""
    import torch

    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        text = "there is no Triton, with which inductor compiles for GPUs"
        yield warned(_COMPILER, text, "pip install triton")
        return
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        yield warned(_COMPILER, "there is no C++ compiler, which inductor needs on CPUs", _APT)
        return
    name, problem = Path(compiler).name, _try_compiler(compiler)
    if problem:
        yield warned(_COMPILER, f"{name} compiles no program with OpenMP: {problem}", _APT)
    else:
        yield passed(_COMPILER, f"{name} compiles programs with OpenMP, as inductor needs")


def _try_compiler(compiler: str) -> str:
    with tempfile.TemporaryDirectory(prefix="atorch_ns_doctor_") as folder:
        source = Path(folder) / "program.cpp"
        source.write_text(_PROGRAM)
        command = [compiler, "-fopenmp", str(source), "-o", str(Path(folder) / "program")]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = process.stderr.strip().splitlines()
    return "" if process.returncode == 0 else (lines[-1] if lines else f"exit code {process.returncode}")


_DTYPES: Final = "dtypes"
_SIZE: Final = 512
_REPEATS: Final = 7
# Share of the largest element: bfloat16 has 8 bits, and a sum of 512 products rounds to about 0.4%.
_TOLERANCE: Final = 0.02
_SHORTEST_S: Final = 60.0


class MatmulMeasurement(NamedTuple):
    """A matrix product in one dtype: seconds, and its largest error relative to float32."""

    seconds: float
    error: float
    problem: str = ""


@as_check
def check_dtypes(machine: Place) -> Iterator[Finding]:
    """float32, bfloat16 and float16 are tried forwards and backwards under autocast, and timed."""
    outcome = call_isolated(measure_dtypes, timeout_s=max(machine.timeout_s, _SHORTEST_S))
    if outcome.problem:
        text = f"matrix products cannot be computed: {outcome.problem}"
        yield failed(_DTYPES, text, _dtype_fix("float32"))
        return
    device, products = outcome.value
    texts = []
    for name, product in products.items():
        verdict, text = _judge_dtype(name, product, products["float32"])
        texts.append(text)
        if verdict != "pass":
            yield Finding(check=_DTYPES, verdict=verdict, text=text, fix=_dtype_fix(name))
    figures = {f"{name}_seconds": each.seconds for name, each in products.items() if not each.problem}
    yield passed(_DTYPES, f"on {device}: {'; '.join(texts)}", figures=figures)


def measure_dtypes() -> tuple[str, dict[str, MatmulMeasurement]]:
    """The device's name, and each dtype's matrix product on it."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    return name, {dtype: _measure_product(dtype, device) for dtype in ("float32", "bfloat16", "float16")}


def _measure_product(dtype: str, device: str) -> MatmulMeasurement:
    import torch

    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(_SIZE, _SIZE, generator=generator).to(device).requires_grad_() for _ in range(2)
    )

    def step() -> Any:
        with torch.autocast(device, dtype=getattr(torch, dtype), enabled=dtype != "float32"):
            product = first @ second
        product.float().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return product

    try:
        product = step()  # also warms up
        times = timeit.repeat(step, repeat=_REPEATS, number=1)
        exact = first.detach().double() @ second.detach().double()  # float64, to judge by
        error = float((product.detach().double() - exact).abs().max() / exact.abs().max())
    except Exception as failure:
        return MatmulMeasurement(float("nan"), float("nan"), error_text(failure))
    return MatmulMeasurement(statistics.median(times), error)


def _judge_dtype(name: str, product: MatmulMeasurement, plain: MatmulMeasurement) -> tuple[Verdict, str]:
    if product.problem:
        return ("fail" if name == "float32" else "warn"), f"{name} does not work here: {product.problem}"
    if not product.error <= _TOLERANCE:  # NaN is wrong
        return "fail", f"{name} is wrong here: its product is off by {product.error:.1%}"
    speed = "" if name == "float32" else f", {plain.seconds / product.seconds:.1f} × the speed of float32"
    return "pass", f"{name} works ({seconds_text(product.seconds)}, n={_REPEATS}{speed})"


def _dtype_fix(name: str) -> str:
    if name == "float32":
        return "pip install --force-reinstall torch"
    other = "bf16" if name == "float16" else "fp16"
    return f'leave {name} out: excluded=["{name}"], or use ("amp_native", "{other}")'


_NAME: Final = "all-reduce"
_SHOWN_CHARS: Final = 300


def check_backends(machine: Place) -> list[Finding]:
    """torch has the backends that jobs here need."""
    import torch
    import torch.distributed as dist

    has = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    backends = ["gloo", *(["nccl"] if torch.cuda.is_available() else [])]
    missing = [name for name in backends if not has[name]]
    if missing:
        text = f"torch was built without {' and '.join(missing)}, which jobs on this machine use"
        return [failed("backends", text, "pip install --force-reinstall torch")]
    there = ", ".join(name for name, present in has.items() if present)
    return [passed("backends", f"{there}; jobs here use {' and '.join(backends)}")]


def check_collectives(machine: Place) -> list[Finding]:
    """Ranks are started with a time limit and sum tensors; every rank must get the same, right sum."""
    with scratch_folder() as folder:
        program, args = "atorch_ns.doctor.benchmark", [str(folder), str(machine.timeout_s)]
        ends = run_local_ranks(program, args, machine.num_ranks, timeout_s=machine.timeout_s, shown=False)
        path = folder / "figures_0"
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not figures or any(end.code for end in ends):
        return [_rank_failure(machine, ends)]
    sums = [
        all_reduce_finding(_NAME, f"{machine.num_ranks} ranks by {name}", rounds["all"])
        for name, rounds in figures["backends"].items()
    ]
    return [*sums, *_not_tried(machine, figures["num_gpus"]), _check_clock(figures["clocks"]["monotonic"])]


def _not_tried(machine: Place, num_gpus: int) -> list[Finding]:
    if not 0 < num_gpus < machine.num_ranks:  # NCCL takes a GPU for every rank
        return []
    text = f"NCCL was not tried: there are {num_gpus} GPU(s) for {machine.num_ranks} ranks"
    return [warned(_NAME, text, f"atorch-ns doctor --nproc {num_gpus}")]


def _check_clock(monotonic: bool) -> Finding:
    if monotonic:
        return passed("clock", "the clock does not run backwards")
    text = "the clock ran backwards while it was watched"
    fix = "sudo systemctl restart chronyd   # or whatever sets this machine's time"
    return warned("clock", text, fix)


def _rank_failure(machine: Place, ends: list[RankEnd]) -> Finding:
    late = [end.rank for end in ends if end.ended_by_us]
    faulty = [end for end in ends if end.code and not end.ended_by_us]
    if faulty:
        why = f"rank {faulty[0].rank} failed: {last_error(faulty[0].output) or f'exit code {faulty[0].code}'}"
    else:
        why = f"rank(s) {', '.join(map(str, late))} gave no answer within {machine.timeout_s:.0f} s"
    fix = "GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=INFO atorch-ns doctor   # names the interface, and says more"
    return failed(_NAME, f"{machine.num_ranks} ranks could not sum a tensor: {why}", fix)


def last_error(output: str) -> str:
    """The line of a rank's output that names Python's exception; threads may print others afterwards."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] and ":" in line]
    return clip_text((errors or lines or [""])[-1], _SHOWN_CHARS)
