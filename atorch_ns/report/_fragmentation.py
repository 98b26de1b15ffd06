"""Memory that the CUDA allocator has reserved and cannot use, and the setting that mends it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["Fragmentation", "fragmentation", "fragmentation_advice"]

_SHARE: Final = 0.2
_BYTES: Final = 2**30
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name since torch 2.9, and the older one, which works as well."""


class Fragmentation(NamedTuple):
    """The most that was reserved, and the most that was in use, in bytes, over a process's life.

    Attributes:
        reserved_bytes: from the device.
        allocated_bytes: by tensors.
        num_retries: how often the allocator gave everything back and began anew, for want of a large enough block.
    """

    reserved_bytes: int
    allocated_bytes: int
    num_retries: int = 0

    @property
    def unused_bytes(self) -> int:
        """Reserved at the worst moment beyond what tensors ever used."""
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def is_high(self) -> bool:
        """Whether a fifth of what is reserved and more than 1 GiB is never used, or the allocator began anew."""
        share = self.unused_bytes / self.reserved_bytes if self.reserved_bytes else 0.0
        return self.num_retries > 0 or (share > _SHARE and self.unused_bytes > _BYTES)


def fragmentation(stats: Mapping[str, int]) -> Fragmentation:
    """Reads ``torch.cuda.memory_stats()``."""
    return Fragmentation(
        reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        num_retries=stats.get("num_alloc_retries", 0),
    )


def fragmentation_advice(stats: Mapping[str, int], environment: Mapping[str, str] = os.environ) -> str | None:
    """What to set, with the figures; ``None`` if little is lost, or it is set already.

    Args:
        stats: of ``torch.cuda.memory_stats()``.
        environment: where the setting may stand.
    """
    found = fragmentation(stats)
    settings = ",".join(environment.get(name, "") for name in _VARIABLES)
    if not found.is_high or "expandable_segments:True" in settings.replace(" ", ""):
        return None
    unused, reserved = found.unused_bytes / 2**30, found.reserved_bytes / 2**30
    again = f", and began anew {found.num_retries} times" if found.num_retries else ""
    return (
        f"the CUDA allocator holds {unused:.1f} of {reserved:.1f} GiB that tensors never use (measured){again}: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts"
    )
