"""The dtype that amp_native and half are given."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from atorch_ns.method import dtype_name

__all__ = ["ReducedDtype"]


def _reduced(name: str) -> str:
    if name == "float32":
        raise ValueError("float32 is full precision; leave the method out, or use fp16 or bf16")
    return name


ReducedDtype = Annotated[str, BeforeValidator(dtype_name), AfterValidator(_reduced)]
"""``float16`` or ``bfloat16``, however it is written."""
