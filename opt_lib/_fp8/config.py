"""The settings of fp8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from atorch_ns.method import Flag, MethodConfig
from atorch_ns.method.method import Names

TE_KEYS = ("margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax")
"""Settings that only Transformer Engine reads."""

TORCHAO_KEYS = ("recipe", "fsdp_all_gather", "emulate")
"""Settings that only torchao reads."""


class Fp8Config(MethodConfig):
    """Linears that compute in fp8, package and recipe. A bare string is shorthand for ``backend``."""

    backend: Literal["auto", "te", "torchao"] = Field(
        default="auto",
        description="Transformer Engine, torchao, or the first of them that can be used, beginning with the "
        "one whose settings are given.",
    )
    include: Names | None = Field(
        default=None, description="Parts of names, one of which a linear's name must contain; null for all."
    )
    exclude: Names = Field(default=(), description="Parts of names that a linear's name may not contain.")
    verbose: Flag = Field(default=False, description="Warn with the names of all linears, replaced or not.")
    margin: int = Field(default=0, description="Powers of two that a scale stays below the largest; te.")
    interval: int = Field(default=1, ge=1, description="Steps between new scales; te before 2.0.")
    fp8_format: Literal["HYBRID", "E4M3"] = Field(
        default="HYBRID", description="e4m3 forward and e5m2 backward, or e4m3 for both; te."
    )
    amax_history_len: int = Field(default=1024, ge=1, description="Steps that a scale is found from; te.")
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        default="max", description="Which of these steps decides; te."
    )
    reduce_amax: Flag = Field(default=True, description="Scales follow the values of all ranks; te.")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        default="tensorwise",
        description="One scale a tensor (fastest), one a row (more precise), or one a row with gradients of "
        "weights in high precision (most precise); torchao.",
    )
    fsdp_all_gather: Flag = Field(
        default=False, description="fsdp gathers weights in fp8: half the bytes of bf16; tensorwise; torchao."
    )
    emulate: Flag = Field(
        default=False,
        description="Compute the same numbers in high precision, slowly, on any device: for tests; torchao.",
    )

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``"torchao"``."""
        return {"backend": value}

    @model_validator(mode="before")
    @classmethod
    def _nothing_excluded(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("exclude", ()) is None:
            return {**value, "exclude": ()}
        return value

    @model_validator(mode="after")
    def _names_say_something(self) -> Fp8Config:
        if self.include == ():
            raise ValueError(
                "include is empty, so no linear would use fp8. List parts of names, or leave include out for all"
            )
        if "" in (*(self.include or ()), *self.exclude):
            raise ValueError("an empty string in include or exclude matches every name. Leave it out")
        both = sorted(set(self.include or ()).intersection(self.exclude))
        if both:
            raise ValueError(
                f"{', '.join(map(repr, both))} is in both include and exclude. Keep it in only one of them"
            )
        return self

    @model_validator(mode="after")
    def _gathers_one_scale(self) -> Fp8Config:
        if self.fsdp_all_gather and self.recipe != "tensorwise":
            raise ValueError(
                f"fsdp_all_gather needs one scale for a whole weight, but recipe={self.recipe!r} has one for each "
                "row. Use recipe='tensorwise', or leave fsdp_all_gather out"
            )
        return self
