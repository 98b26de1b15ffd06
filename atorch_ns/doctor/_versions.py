"""Check: the versions of Python and torch, and whether torch suits the devices."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from typing import Final

from atorch_ns.doctor._base import Finding, Place

__all__ = ["check_versions"]

_NAME: Final = "versions"
_PYTHON: Final = (3, 11)
_TORCH: Final = (2, 11)


def check_versions(place: Place) -> list[Finding]:
    """Python and torch are new enough, and torch can use the devices that are there."""
    import torch

    found = []
    if sys.version_info < _PYTHON:
        found.append(
            Finding(
                check=_NAME,
                verdict="fail",
                text=f"Python {platform.python_version()}; 3.11 or later is needed",
                fix="python3.11 -m venv .venv",
            )
        )
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _TORCH:
        found.append(
            Finding(
                check=_NAME,
                verdict="fail",
                text=f"torch {torch.__version__}; 2.11 or later is needed",
                fix="pip install --upgrade 'torch>=2.11'",
            )
        )
    return found or [_device(torch.__version__)]


def _device(version: str) -> Finding:
    import torch

    text = f"Python {platform.python_version()}, torch {version}"
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return Finding(
            check=_NAME,
            verdict="pass",
            text=f"{text}, {torch.cuda.device_count()} × {', '.join(sorted(names))}",
        )
    if shutil.which("nvidia-smi") is None:
        return Finding(check=_NAME, verdict="pass", text=f"{text}, no GPU: jobs run on CPUs")
    why = (
        "torch was built without CUDA"
        if torch.version.cuda is None
        else "torch cannot use the driver or a device"
    )
    return Finding(
        check=_NAME,
        verdict="warn",
        text=f"{text}; there is an NVIDIA driver, but {why}",
        fix="pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        if torch.version.cuda is None
        else "nvidia-smi   # compare its CUDA version with torch.version.cuda, and see CUDA_VISIBLE_DEVICES",
    )
