"""torchvision and timm: taken from the environment, or installed into a folder beside it, where torch's build has no CUDA.

PyPI's torchvision is built for CUDA. Beside a torch without it its operators do not load, ``import torchvision`` fails, and
with it every import of transformers' models. So it is never installed into the environment of this project. Its two
operators that training of detectors needs are defined here in Python then: non-maximum suppression, and ``roi_align``,
for which torchvision has Python code of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

__all__ = ["prepare"]

_FOLDER: Final = Path(os.environ.get("BENCHMARK_PEERS", Path(__file__).parent.parent / ".peers")) / "vision"
_CONSTRAINTS: Final = Path(__file__).parents[2] / "constraints.txt"
_SCHEMAS: Final = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def prepare() -> str:
    """Makes both importable; the reason if that fails, else an empty text."""
    if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("timm") is None:
        if reason := _install():
            return reason
        sys.path.append(str(_FOLDER))
        importlib.invalidate_caches()
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # "operator torchvision::nms does not exist"
        _without_operators()
    except ImportError as error:
        return f"torchvision cannot be imported: {error}"
    return ""


def _install() -> str:
    if (_FOLDER / "timm").is_dir() and (_FOLDER / "torchvision").is_dir():
        return ""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    (_FOLDER.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(_FOLDER)]
    command += ["-c", str(_CONSTRAINTS), "torchvision", "timm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        ""
        if done.returncode == 0
        else f"torchvision and timm cannot be installed: {done.stderr.strip()[-300:]}"
    )


def _without_operators() -> None:
    """Imports torchvision without the library of its operators."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", _nms, "CPU")
    _KEPT.append(library)
    import torchvision
    from torchvision.ops import boxes, roi_align

    boxes._assert_has_ops = lambda: None
    module = sys.modules[roi_align.__module__]
    module._roi_align = module._roi_align.__wrapped__  # as it is, not compiled
    assert torchvision.ops.nms(torch.zeros(1, 4), torch.ones(1), 0.5).tolist() == [0]


_KEPT: Final[list[torch.library.Library]] = []


def _nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes [N, 4] that no box of a higher score overlaps by more than ``iou_threshold``."""
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True)
    overlaps = (box_iou(dets[order], dets[order]) > iou_threshold).tolist()
    kept: list[int] = []
    for position, row in enumerate(overlaps):
        if not any(row[other] for other in kept):
            kept.append(position)
    return order[kept]
