"""The dtype that amp_native and half are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BeforeValidator

from atorch_ns.method import dtype_name

if TYPE_CHECKING:
    from atorch_ns.cluster import Cluster
    from atorch_ns.profile import Profile

__all__ = ["ReducedDtype", "searched_dtype"]


def _reduced(name: str) -> str:
    if name == "float32":
        raise ValueError("float32 is full precision; leave the method out, or use fp16 or bf16")
    return name


ReducedDtype = Annotated[str, BeforeValidator(dtype_name), AfterValidator(_reduced)]
"""``float16`` or ``bfloat16``, however it is written."""


def searched_dtype(profile: Profile, cluster: Cluster) -> str | None:
    """The reduced dtype that is worth a search on these devices; ``None`` if there is none.

    bf16 where the device multiplies it in hardware: GPUs from sm 8.0, and CPUs whose matrix products in bf16
    are known to be no slower than in fp32. fp16, which needs a loss scale, only on GPUs that have fp16 units
    (sm 7.0) and no bf16. A model that is not in fp32 has had its precision chosen.
    """
    if "float32" not in profile.parameter_dtypes:
        return None
    if cluster.device_type == "cuda":
        if cluster.capability is None or cluster.capability >= (8, 0):
            return "bfloat16"
        return "float16" if cluster.capability >= (7, 0) else None
    if cluster.hardware is None:
        return None
    rates = cluster.hardware.device.flops_per_s
    return "bfloat16" if rates.get("bfloat16", 0.0) >= rates.get("float32", float("inf")) else None
