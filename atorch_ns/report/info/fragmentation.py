"""Fragmentation: memory that the CUDA allocator reserved and tensors never used, and the setting against it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from atorch_ns.text import bytes_text, counted

_SHARE: Final = 0.2
_BYTES: Final = 2**30
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name since torch 2.9, and the older one, which works as well."""


def fragmentation_advice(stats: Mapping[str, int], environment: Mapping[str, str] = os.environ) -> str | None:
    """Advice to set ``expandable_segments``, with figures; ``None`` if little is lost, or it is set already.

    Much is lost if a fifth of what was reserved and more than 1 GiB was never used, or an allocation was retried.

    Args:
        stats: result of ``torch.cuda.memory_stats()``.
        environment: environment variables.
    """
    reserved = stats.get("reserved_bytes.all.peak", 0)
    unused = max(0, reserved - stats.get("allocated_bytes.all.peak", 0))
    num_retries = stats.get("num_alloc_retries", 0)
    settings = ",".join(environment.get(name, "") for name in _VARIABLES)
    is_high = num_retries > 0 or unused > max(_BYTES, _SHARE * reserved)
    if not is_high or "expandable_segments:True" in settings.replace(" ", ""):
        return None
    retried = f", and retried {counted(num_retries, 'allocation')}" if num_retries else ""
    return (
        f"the CUDA allocator holds {bytes_text(unused)} of {bytes_text(reserved)} that tensors "
        f"never use (measured){retried}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts"
    )
