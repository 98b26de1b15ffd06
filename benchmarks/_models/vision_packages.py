"""torchvision and timm: taken from the environment, or installed into a folder beside it, made for a torch without CUDA.

PyPI's torchvision is built for CUDA. Beside a torch without it its operators do not load, ``import torchvision`` fails, and
with it every import of transformers' models. So it is not a dependency of this project. The copy in the folder has the one
operator that is needed in Python, non-maximum suppression, and its own Python code for ``roi_align``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch

__all__ = ["prepare"]

_FOLDER: Final = Path(os.environ.get("BENCHMARK_PEERS", Path(__file__).parent.parent / ".peers")) / "vision"
_CONSTRAINTS: Final = Path(__file__).parents[2] / "constraints.txt"

# Appended to torchvision/extension.py: ``nms`` as an operator, for boxes [N, 4] and scores [N].
_OPERATORS: Final = """

if not _has_ops():
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def _nms(dets, scores, iou_threshold):
        from torchvision.ops import box_iou

        order = scores.argsort(descending=True, stable=True)
        overlaps = (box_iou(dets[order], dets[order]) > iou_threshold).tolist()
        kept = []
        for position, row in enumerate(overlaps):
            if not any(row[other] for other in kept):
                kept.append(position)
        return order[kept]

    _library.impl("nms", _nms, "CPU")

    def _assert_has_ops():
        pass
"""


def prepare() -> str:
    """Makes both importable; the reason if that fails, else an empty text."""
    if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("timm") is None:
        if reason := _install():
            return reason
        sys.path.append(str(_FOLDER))
        importlib.invalidate_caches()
    try:
        import timm  # noqa: F401
        import torchvision  # noqa: F401
    except Exception as error:  # a torchvision of another build: its operators are missing
        return f"torchvision and timm cannot be imported: {error}"
    return ""


def _install() -> str:
    """Installs both into the folder, once; the reason if that fails."""
    if (_FOLDER / "made").exists():
        return ""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    (_FOLDER.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--upgrade",
        "--target",
        str(_FOLDER),
    ]
    command += ["-c", str(_CONSTRAINTS), "torchvision", "timm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"torchvision and timm cannot be installed: {done.stderr.strip()[-300:]}"
    if torch.version.cuda is None:
        _adapt(_FOLDER / "torchvision")
    (_FOLDER / "made").touch()
    return ""


def _adapt(package: Path) -> None:
    """Operators in Python, and ``roi_align`` in Python without compiling it."""
    extension, aligned = package / "extension.py", package / "ops" / "roi_align.py"
    extension.write_text(extension.read_text(encoding="utf-8") + _OPERATORS, encoding="utf-8")
    aligned.write_text(
        aligned.read_text(encoding="utf-8").replace("@lazy_compile(dynamic=True)\n", ""), encoding="utf-8"
    )
