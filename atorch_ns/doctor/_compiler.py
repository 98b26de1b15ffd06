"""Check: a compiler for torch.compile."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from atorch_ns.doctor._base import Finding, Place

__all__ = ["check_compiler"]

_NAME: Final = "compiler"
_PROGRAM: Final = "#include <omp.h>\nint main() { return omp_get_max_threads() > 0 ? 0 : 1; }\n"
_APT: Final = "sudo apt install g++   # without it the method compile is left out"


def check_compiler(place: Place) -> list[Finding]:
    """inductor finds a C++ compiler with OpenMP, and Triton where there is a GPU."""
    import torch

    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return [
            Finding(
                check=_NAME,
                verdict="warn",
                text="there is no Triton, with which inductor compiles for GPUs",
                fix="pip install triton",
            )
        ]
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        return [
            Finding(
                check=_NAME,
                verdict="warn",
                text="there is no C++ compiler, which inductor needs on CPUs",
                fix=_APT,
            )
        ]
    name = Path(compiler).name
    problem = _try(compiler)
    if problem:
        return [
            Finding(
                check=_NAME,
                verdict="warn",
                text=f"{name} compiles no program with OpenMP: {problem}",
                fix=_APT,
            )
        ]
    return [
        Finding(
            check=_NAME, verdict="pass", text=f"{name} compiles programs with OpenMP, as inductor asks for"
        )
    ]


def _try(compiler: str) -> str:
    """Why the compiler fails; empty if it does not."""
    with tempfile.TemporaryDirectory(prefix="atorch_ns_doctor_") as folder:
        source = Path(folder) / "program.cpp"
        source.write_text(_PROGRAM)
        command = [compiler, "-fopenmp", str(source), "-o", str(Path(folder) / "program")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")
