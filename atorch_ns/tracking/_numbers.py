"""Whatever a caller gives as a metric, as a float; said once for what is none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["Numbers"]

log = logging.getLogger("atorch_ns")


class Numbers:
    """Turns metrics into floats and leaves out the others, with one warning for each name."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def of(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Floats, integers, booleans, numpy's numbers and tensors or arrays without a dim, each as a float.

        A CUDA tensor is waited for.
        """
        found = {}
        for name, value in metrics.items():
            try:
                found[name] = _number(value)
            except Exception as error:  # whatever an object's own code raises
                self._tell(name, value, error)
        return found

    def _tell(self, name: str, value: object, error: Exception) -> None:
        if str(name) in self._told:
            return
        self._told.add(str(name))
        log.warning(
            "the metric %r is left out, here and in later steps: its value is a %s, which is no number (%s). Give a "
            "float or a tensor without a dim.",
            name,
            type(value).__qualname__,
            error,
        )


def _number(value: Any) -> float:
    if isinstance(value, (bool, int, float)):
        return float(value)
    if hasattr(value, "placements"):  # reading a DTensor may wait for other ranks, which do not log
        raise TypeError("it is divided over ranks: call full_tensor() on all of them first")
    if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
        shape = getattr(value, "shape", None)
        raise TypeError("it has no float" if shape is None else f"it has the shape {tuple(shape)}")
    item = value.item()
    if not isinstance(item, (bool, int, float)):
        raise TypeError(f"it holds a {type(item).__qualname__}")
    return float(item)
