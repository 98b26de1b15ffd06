"""Fragmentation: memory that the CUDA allocator reserved and tensors never used, and the setting against it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from atorch_ns.text import bytes_text, counted

_SHARE: Final = 0.2
_BYTES: Final = 2**30
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name since torch 2.9, and the older one, which works as well."""


class Fragmentation(NamedTuple):
    """The most that was reserved, and the most that was in use, in bytes, since the process began.

    Attributes:
        reserved_bytes: from the device.
        allocated_bytes: by tensors.
        num_retries: how often the allocator found no block large enough, released its cache and tried again.
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
        """Whether a fifth of what is reserved and more than 1 GiB is never used, or an allocation was retried."""
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
        stats: what ``torch.cuda.memory_stats()`` returns.
        environment: variables, among which the setting may be.
    """
    found = fragmentation(stats)
    settings = ",".join(environment.get(name, "") for name in _VARIABLES)
    if not found.is_high or "expandable_segments:True" in settings.replace(" ", ""):
        return None
    retried = f", and retried {counted(found.num_retries, 'allocation')}" if found.num_retries else ""
    return (
        f"the CUDA allocator holds {bytes_text(found.unused_bytes)} of {bytes_text(found.reserved_bytes)} that tensors "
        f"never use (measured){retried}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts"
    )
