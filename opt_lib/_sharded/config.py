"""Settings of fully sharded training and their effect on a plan, shared by fsdp and zero2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator

from atorch_ns.errors import Problem
from atorch_ns.method import Flag, MethodConfig, ModuleSelectors, dtype_name
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib._config_checks import SyncBatchNorm, unmatched_problem

_STRATEGIES = {"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"}  # of FSDP1


class MixedPrecisionConfig(MethodConfig):
    """dtypes of fully sharded training, as torch's ``MixedPrecision`` or ``MixedPrecisionPolicy``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    param_dtype: str | None = Field(default=None, description="dtype of gathered parameters and of compute.")
    reduce_dtype: str | None = Field(default=None, description="dtype of gradient reduction.")
    buffer_dtype: str | None = Field(default=None, description="Not used: buffers keep their own dtype.")
    output_dtype: str | None = Field(default=None, description="dtype of outputs.")
    cast_forward_inputs: Flag = Field(default=True, description="Cast floating inputs to param_dtype.")

    @field_validator("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", mode="before")
    @classmethod
    def _parse_dtype(cls, value: Any) -> Any:
        return None if value is None else dtype_name(value)

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """A dtype: compute in it, reduce gradients in fp32."""
        return {"param_dtype": value, "reduce_dtype": "float32"}


class ShardConfig(MethodConfig):
    """The arguments of FullyShardedDataParallel that users know, and this project's own."""

    version: Literal[1, 2] = Field(
        default=2, description="Version of torch's FSDP. 1, which torch has deprecated, is trained by 2."
    )
    atorch_wrap_cls: ModuleSelectors | None = Field(
        default=None,
        description="Modules sharded as one unit each, by class or name; null for the repeated blocks.",
    )
    atorch_size_based_min_num_params: int | None = Field(
        default=None, ge=1, description="Make a unit of every module with at least this many parameters."
    )
    atorch_ignored_cls: ModuleSelectors = Field(
        default=(), description="Modules whose parameters are replicated instead of sharded."
    )
    wrap_trainable_outmost: Flag = Field(
        default=False,
        validation_alias=AliasChoices("wrap_trainable_outmost", "fsdp_wrap_params_outmost"),
        description="Gather trainable parameters together, in one unit of their own (for LoRA).",
    )
    reshard_after_forward: bool | int | None = Field(
        default=None,
        description="Free gathered parameters after the forward pass; a number re-shards to groups of that "
        "size. null follows sharding_strategy, and in a pipeline keeps them for the step.",
    )
    sharding_strategy: str | None = Field(
        default=None, description="FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD; null for the method's own."
    )
    mixed_precision: MixedPrecisionConfig | Literal["auto"] | None = Field(
        default="auto",
        description="dtypes of communication and compute; auto follows amp_native, null keeps the weights' own.",
    )
    cpu_offload: Flag = Field(
        default=False, description="Keep parameters, gradients and optimizer states in host memory."
    )
    forward_prefetch: Flag = Field(
        default=False, description="Gather the next unit while the current one computes."
    )
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = Field(
        default="BACKWARD_PRE", description="Not used: the backward pass always gathers ahead (BACKWARD_PRE)."
    )
    sync_module_states: Flag = Field(
        default=True, description="Begin with the parameters and buffers of rank 0 on all ranks."
    )
    limit_all_gathers: Flag = Field(
        default=True, description="Not used: the gathered parameters in flight are always bounded."
    )
    use_orig_params: Flag = Field(
        default=True, description="Not used: the model always keeps its own parameters."
    )
    param_init_fn: str | None = Field(
        default=None,
        description="A function, given itself or by its qualified name, that initialises one module of a "
        "model on the meta device.",
    )
    device_id: int | str | None = Field(default=None, description="Not used: the launcher gives the device.")
    reduce_each_micro_batch: Literal["auto"] | Flag | None = Field(
        default=None,
        description="With gradient accumulation: true reduces and shards gradients after every micro-batch "
        "(less memory, more traffic), false keeps whole ones until the last. null or auto reduces each where "
        "whole gradients would take more than a quarter of the device's memory, and in a search where they "
        "would not fit. A pipeline reduces at the end of a step.",
    )
    sync_batchnorm: SyncBatchNorm = False
    ignored_modules: ModuleSelectors = Field(
        default=(), description="As atorch_ignored_cls: modules by class or name."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_wrap_policy(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or value.get("auto_wrap_policy") is None:
            is_given = isinstance(value, Mapping)
            return {k: v for k, v in value.items() if k != "auto_wrap_policy"} if is_given else value
        rest = {key: item for key, item in value.items() if key != "auto_wrap_policy"}
        return {**_from_wrap_policy(value["auto_wrap_policy"]), **rest}  # explicit keys win

    @field_validator("cpu_offload", mode="before")
    @classmethod
    def _read_offload(cls, value: Any) -> Any:
        if isinstance(value, Mapping):  # CPUOffload(offload_params=...) or CPUOffloadPolicy(pin_memory=...)
            return bool(value.get("offload_params", True))
        return False if value is None else value

    @field_validator("reduce_each_micro_batch", mode="after")
    @classmethod
    def _read_automatic(cls, value: bool | str | None) -> bool | None:
        return None if isinstance(value, str) else value

    @field_validator("sharding_strategy", mode="after")
    @classmethod
    def _known_strategy(cls, value: str | None) -> str | None:
        if value is None or value in _STRATEGIES - {"NO_SHARD"}:
            return value
        if value == "NO_SHARD":
            raise ValueError("NO_SHARD replicates the model; use the method ddp")
        raise ValueError(f"accepted: {', '.join(sorted(_STRATEGIES - {'NO_SHARD'}))}")

    @model_validator(mode="after")
    def _one_way_to_wrap(self) -> ShardConfig:
        if self.atorch_wrap_cls is not None and self.atorch_size_based_min_num_params is not None:
            raise ValueError("give atorch_wrap_cls or atorch_size_based_min_num_params, not both")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """All selectors of modules that are not sharded."""
        return (*self.atorch_ignored_cls, *self.ignored_modules)

    @property
    def keeps_gathered(self) -> bool:
        """True if parameters stay gathered between forward and backward, as in ZeRO 2."""
        return self.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")

    def following(self, plan: Plan) -> Self:
        """The settings with what a search has decided."""
        if self.reduce_each_micro_batch is not None or not plan.sharding.reduces_each:
            return self
        return self.model_copy(update={"reduce_each_micro_batch": True})

    def not_used(self) -> Iterator[str]:
        """Settings of FSDP1 that FSDP2 does not have, each with what FSDP2 does instead."""
        if self.version == 1:
            yield (
                "version=1: torch has deprecated FullyShardedDataParallel (FSDP1); fully_shard (FSDP2) trains the same"
            )
        if self.backward_prefetch != "BACKWARD_PRE":
            yield (
                f"backward_prefetch={self.backward_prefetch}: FSDP2 always gathers the next unit before it computes "
                "the gradients of the present one (BACKWARD_PRE)"
            )
        if not self.limit_all_gathers:
            yield "limit_all_gathers=False: FSDP2 always bounds the gathered parameters in flight"
        if not self.use_orig_params:
            yield "use_orig_params=False: FSDP2 always keeps the model's own parameters"
        precision = self.mixed_precision
        if isinstance(precision, MixedPrecisionConfig) and precision.buffer_dtype is not None:
            yield f"mixed_precision.buffer_dtype={precision.buffer_dtype}: FSDP2 leaves buffers in their own dtype"
        if self.device_id is not None:
            yield "device_id is not used: the launcher's local rank gives the device"


def _from_wrap_policy(policy: Any) -> dict[str, Any]:
    """torch's own wrap policies, already reduced to names, as the keys they amount to."""
    if isinstance(policy, Mapping) and isinstance(policy.get("function"), str):
        function = policy["function"].rpartition(".")[2]
        arguments = policy.get("arguments", {})
        if function == "transformer_auto_wrap_policy":
            return {"atorch_wrap_cls": arguments.get("transformer_layer_cls", ())}
        if function == "ModuleWrapPolicy":
            return {"atorch_wrap_cls": arguments.get("module_classes", ())}
        if function == "size_based_auto_wrap_policy":
            return {"atorch_size_based_min_num_params": arguments.get("min_num_params", int(1e8))}
    if isinstance(policy, str) and policy.endswith("size_based_auto_wrap_policy"):
        return {"atorch_size_based_min_num_params": int(1e8)}  # torch's default
    raise ValueError(
        "auto_wrap_policy may be ModuleWrapPolicy, or a functools.partial of transformer_auto_wrap_policy or "
        "size_based_auto_wrap_policy; otherwise use atorch_wrap_cls or atorch_size_based_min_num_params"
    )


def unmatched_selectors(method: str, config: ShardConfig, profile: Profile | None) -> list[Problem]:
    """The problems of selectors that match no module of the model."""
    return [
        *unmatched_problem(method, "atorch_wrap_cls", config.atorch_wrap_cls, profile),
        *unmatched_problem(method, "atorch_ignored_cls", config.ignored, profile),
    ]


def plan_shards(plan: Plan, config: ShardConfig, *, keep_gathered: bool) -> Plan:
    """The plan with parameters, gradients and optimizer states divided over the axes for shards.

    In a pipeline parameters stay gathered for the step, unless the user says otherwise. torch keeps a stage
    gathered after a backward pass anyway, for the next micro-batch. Freeing it after forward passes would
    lower the peak by what one micro-batch keeps, at most, and gather every unit again for each micro-batch.

    ``keep_gathered``: whether the method keeps parameters gathered from forward to backward.
    """
    axes = plan.unit_axes
    keeps = keep_gathered or config.keeps_gathered
    if config.sharding_strategy is None and plan.size("pipeline") > 1:
        keeps = True
    if config.reshard_after_forward is not None:
        keeps = config.reshard_after_forward is False  # a number frees them too, into smaller groups
    precision = config.mixed_precision
    explicit = precision if precision is not None and precision != "auto" else None
    return plan.changed(
        gradient_sync="reduce_scatter",
        offload=config.cpu_offload,
        sharding={
            "parameters_over": axes,
            "gradients_over": axes,
            "optimizer_over": axes,
            "units": config.atorch_wrap_cls,
            "keeps_gathered": keeps,
            "gather_dtype": explicit.param_dtype if explicit else None,
            "reduce_dtype": explicit.reduce_dtype if explicit else None,
            "follows_compute": precision == "auto",
            "reduces_each": config.reduce_each_micro_batch,
            "layout": "rows",
        },
    )
