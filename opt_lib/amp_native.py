"""amp_native: torch's automatic mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, final

import torch
from pydantic import Field

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, Problem
from atorch_ns.job import Autocast, Job
from atorch_ns.method import Flag, Method, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib._config_checks import LossScalingConfig, ReducedDtype, searched_dtype


class AmpNativeConfig(LossScalingConfig):
    """dtype and what to do about gradients that overflow. A bare dtype is shorthand for ``dtype``."""

    dtype: ReducedDtype = Field(default="float16", description="dtype of matrix products: fp16 or bf16.")
    skip_if_nonfinite: Flag = Field(
        default=False,
        description="With bf16, check the gradients and skip a step if one is infinite or NaN. "
        "fp16 always does.",
    )

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``"bf16"``."""
        return {"dtype": value}


@final
class AmpNative(Method[AmpNativeConfig]):
    """Runs forward pass and loss under autocast; scales the loss for fp16."""

    name = "amp_native"
    phase = Phase.STEP
    Config = AmpNativeConfig
    provides = ("precision",)
    variants = MappingProxyType({"bf16": {"dtype": "bf16"}})

    def check(self, config: AmpNativeConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """bf16 needs a GPU that has it."""
        if config.dtype == "bfloat16" and cluster.capability is not None and cluster.capability < (8, 0):
            return [
                Problem(
                    message=f"{cluster.device_name} (sm {cluster.capability}) has no bf16 matrix units",
                    method=self.name,
                    key="dtype",
                    value="bf16",
                    accepted="fp16",
                )
            ]
        return []

    def plan(self, plan: Plan, config: AmpNativeConfig) -> Plan:
        """Matrix products in the reduced dtype."""
        plan = plan.changed(
            precision={"compute_dtype": config.dtype, "loss_scaling": config.dtype == "float16"}
        )
        if plan.sharding.follows_compute:  # as autocast would cast gathered weights anyway
            plan = plan.changed(sharding={"gather_dtype": config.dtype, "reduce_dtype": "float32"})
        return plan

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[AmpNativeConfig]:
        """bf16, or fp16 where the device has no bf16."""
        dtype = searched_dtype(profile, cluster)
        return () if dtype is None else (AmpNativeConfig(dtype=dtype),)

    def apply(self, job: Job, config: AmpNativeConfig) -> None:
        """Asks for autocast, and for a scaler with fp16."""
        job.precision.autocast = Autocast(job.cluster.device_type, getattr(torch, config.dtype))
        job.precision.skip_if_nonfinite = job.precision.skip_if_nonfinite or config.skip_if_nonfinite
        if config.dtype != "float16":
            return
        if job.inputs.loss_func is None and job.inputs.optim_func is not None:
            raise InputError("amp_native with fp16 scales the loss, so auto_accelerate needs loss_func.")
        trainable = [p for p in job.module.parameters() if p.requires_grad]
        if any(p.is_complex() for p in trainable):
            raise InputError(
                "amp_native with fp16 scales gradients, but the model has complex ones, which torch cannot check for overflow. "
                'Use ("amp_native", "bf16").'
            )
        if any(p.dtype is torch.float16 for p in trainable):
            raise InputError(
                "amp_native with fp16 scales gradients, which must be fp32, but the model has trainable weights in fp16. Give it "
                'to auto_accelerate in fp32 (model.float()), or use ("half", "fp16"), which keeps fp32 copies of them.'
            )
        job.precision.loss_scaling = config.loss_scaling

    def explain(self, config: AmpNativeConfig, cluster: Cluster) -> str:
        """Explains the effect of the dtype on loss scaling."""
        if config.dtype == "float16":
            return f"autocast in fp16 with {config.scale_words}; ranks skip bad steps together"
        suffix = "; steps with bad gradients are skipped" if config.skip_if_nonfinite else ""
        return f"autocast in bf16, which needs no loss scale{suffix}"
