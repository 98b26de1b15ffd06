"""half: the whole model in half precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, final

import torch
from pydantic import Field, model_validator
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.method import Flag, Method, Phase
from atorch_ns.profile import Profile
from atorch_ns.profile.record.steps import stays_in_fp32
from atorch_ns.strategy import Plan
from opt_lib._config_checks import LossScalingConfig, ReducedDtype, searched_dtype


class HalfConfig(LossScalingConfig):
    """dtype of the weights, and the loss scale of fp16. A bare dtype is shorthand for ``dtype``."""

    dtype: ReducedDtype = Field(
        default="float16", description="dtype of weights and activations: fp16 or bf16."
    )
    master_weights: Flag | None = Field(
        default=None,
        description="Keep fp32 copies that the optimizer updates; null for yes with fp16 and no with bf16.",
    )

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``"bf16"``."""
        return {"dtype": value}

    @model_validator(mode="after")
    def _fp16_needs_masters(self) -> HalfConfig:
        if self.dtype == "float16" and self.master_weights is False:
            raise ValueError(
                "fp16 without master_weights ends in NaN: Adam's epsilon of 1e-8 is 0 in fp16. "
                "Leave master_weights out, or use bf16"
            )
        return self

    @property
    def keeps_masters(self) -> bool:
        """True if the optimizer updates fp32 copies."""
        return self.dtype == "float16" if self.master_weights is None else self.master_weights


@final
class Half(Method[HalfConfig]):
    """Holds weights and activations in half precision, with fp32 master weights for fp16."""

    name = "half"
    phase = Phase.CAST
    Config = HalfConfig
    provides = ("precision",)
    variants = MappingProxyType({"bf16": {"dtype": "bf16"}})

    def plan(self, plan: Plan, config: HalfConfig) -> Plan:
        """Weights in half precision; masters in fp32."""
        return plan.changed(
            precision={
                "parameter_dtype": config.dtype,
                "master_dtype": "float32" if config.keeps_masters else None,
                "loss_scaling": config.dtype == "float16",
            }
        )

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[HalfConfig]:
        """Only configs with fp32 master weights: without them bf16 weights lose small updates.

        Whoever accepts that names it: ``included=[("half", "bf16")]``.
        """
        dtype = searched_dtype(profile, cluster)
        return () if dtype is None else (HalfConfig(dtype=dtype, master_weights=True),)

    def apply(self, job: Job, config: HalfConfig) -> None:
        """Casts the model; inputs follow by themselves."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        _cast_model(job.module, dtype)
        job.precision.input_dtype = dtype
        if dtype == torch.float16:
            if job.inputs.loss_func is None and job.inputs.optim_func is not None:
                raise InputError("half with fp16 scales the loss, so auto_accelerate needs loss_func.")
            job.precision.loss_scaling = config.loss_scaling

    def explain(self, config: HalfConfig, cluster: Cluster) -> str:
        """Explains the effect of the dtype on the optimizer."""
        masters = "fp32 master weights" if config.keeps_masters else "no master weights"
        scale = f", {config.scale_words}" if config.dtype == "float16" else ""
        return f"weights and activations in {config.dtype}, {masters}{scale}; the loss is computed in fp32"


def _cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    fp32_buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if stays_in_fp32(name)
    ]
    model.to(dtype)  # casts floating buffers too
    for module, name, buffer in fp32_buffers:
        module._buffers[name] = buffer
