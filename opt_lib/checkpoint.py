"""checkpoint: recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as recompute

from atorch_ns.capture.blocks import NamedModule, repeated_blocks, select_modules
from atorch_ns.capture.operators import WEIGHT_PRODUCTS, is_saved, label
from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, Problem
from atorch_ns.job import Job, KeptActivations
from atorch_ns.method import Flag, Method, MethodConfig, ModuleSelectors, Phase
from atorch_ns.pipeline import RecomputeShare, StageModule, num_recomputed
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from atorch_ns.torch_compat import checkpoint_wrapper, plain_name
from opt_lib._config_checks import no_blocks_problem, unmatched_problem
from opt_lib._recompute import BufferSafeRecompute, offload_saved
from opt_lib._recompute_chunks import Chunk


class ActivationCheckpointConfig(MethodConfig):
    """Which modules are recomputed, and how. A tuple of classes or names is shorthand for ``wrap_class``."""

    wrap_class: ModuleSelectors | None = Field(
        default=None, description="Modules to recompute, by class or name; null for the repeated blocks."
    )
    no_reentrant: Flag = Field(
        default=True,
        description="Use the non-reentrant implementation; false only for models it fails on "
        "(torch.jit.script).",
    )
    every_n: int = Field(default=1, ge=1, description="Recompute every n-th of the modules.")
    share: float | tuple[float, ...] | Literal["auto"] | None = Field(
        default=None,
        description="Share of the repeated blocks that is recomputed, the first ones of the model or of each "
        "stage of a pipeline: one number, one for each stage (the last holds for all that follow), or auto: "
        "the least of each stage with which it fits into memory, chosen together with cuts and schedule "
        "(without a pipeline: all). null for every_n.",
    )
    by_stage: Literal["same", "level", "merak"] = Field(
        default="same",
        description="How one share, then that of a pipeline's first stage, gives those of the others: the same; level, so "
        "that all stages keep as many bytes; merak, the formula of Merak's activation_checkpoint_ratio.",
    )
    chunk: int = Field(
        default=1,
        ge=1,
        description="Recompute so many neighbouring blocks as one, which keeps the input of the first alone (Merak's "
        "checkpoint_num_layers). The model must call them one after the other, with the same other arguments.",
    )
    save_operators: Literal["every_second_product", "all_but_attention"] | tuple[str, ...] = Field(
        default=(),
        description="Operators whose results are kept, as aten.mm or aten._scaled_dot_product_flash_attention; everything "
        "else is recomputed. every_second_product keeps every second product with weights and fused attention "
        "(torchtitan's per-operator recomputation); all_but_attention keeps products, normalisations and activation "
        "functions, so that little but attention is recomputed (Megatron's selective recomputation).",
    )
    preserve_rng_state: Flag = Field(
        default=True,
        description="Draw the same dropout masks in the recomputation; without it, dropout makes gradients wrong.",
    )
    offload: Flag = Field(
        default=False,
        description="Keep what the modules are recomputed from, their inputs, in pinned host memory. GPUs only.",
    )

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``(GPT2Attention, "GPT2MLP")``."""
        return {"wrap_class": value}

    @model_validator(mode="after")
    def _shares_fit(self) -> ActivationCheckpointConfig:
        if self.share is None:
            if self.by_stage != "same":
                raise ValueError(f"by_stage={self.by_stage!r} needs share, for the first stage")
            return self
        if self.wrap_class is not None or self.every_n != 1 or self.save_operators:
            raise ValueError(
                "share applies to the repeated blocks; leave out wrap_class, every_n and save_operators"
            )
        RecomputeShare(self.share, self.by_stage)  # which checks them
        return self

    @model_validator(mode="after")
    def _chunks_fit(self) -> ActivationCheckpointConfig:
        if self.chunk > 1 and (self.every_n != 1 or self.save_operators):
            raise ValueError("chunk joins neighbouring blocks; leave out every_n and save_operators")
        return self

    @field_validator("save_operators")
    @classmethod
    def _operators_exist(cls, names: tuple[str, ...] | str) -> tuple[str, ...] | str:
        for name in names if isinstance(names, tuple) else ():
            _find_operator(name)
        return names


@final
class Checkpoint(Method[ActivationCheckpointConfig]):
    """Recomputes the activations of blocks in the backward pass instead of keeping them."""

    name = "checkpoint"
    phase = Phase.RECOMPUTE
    Config = ActivationCheckpointConfig

    def notices(self, config: ActivationCheckpointConfig, cluster: Cluster) -> Iterable[str]:
        """Offloading on a CPU, where it moves nothing."""
        if config.offload and cluster.device_type == "cpu":
            yield "checkpoint: offload is not used: activations are in host memory already"

    def check(
        self, config: ActivationCheckpointConfig, cluster: Cluster, profile: Profile | None
    ) -> list[Problem]:
        """The modules must exist, and the reentrant implementation cannot select operators."""
        problems = []
        if config.save_operators and not config.no_reentrant:
            problems.append(
                Problem(
                    message="needs the non-reentrant implementation",
                    method=self.name,
                    key="save_operators",
                    accepted="no_reentrant=True",
                )
            )
        if config.wrap_class is None:
            return problems + no_blocks_problem(self.name, "wrap_class", "to recompute", profile)
        return problems + unmatched_problem(self.name, "wrap_class", config.wrap_class, profile)

    def plan(self, plan: Plan, config: ActivationCheckpointConfig) -> Plan:
        """Blocks are recomputed."""
        return plan.changed(
            recomputation={
                "kind": "selective" if config.save_operators else "blocks",
                "every": config.every_n,
                "share": config.share,
                "by_stage": config.by_stage,
                "chunk": config.chunk,
                "selectors": config.wrap_class,
                "saved_operators": config.save_operators,
                "offload_activations": config.offload,
            }
        )

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[ActivationCheckpointConfig]:
        """All blocks, about half of their computation, attention, or of each stage the least that fits."""
        if profile.blocks:
            yield ActivationCheckpointConfig()
        if profile.blocks and _writes_out_attention(profile):
            yield ActivationCheckpointConfig(save_operators="all_but_attention")
        # Every second product takes as long as every second block (torchtitan's docs/performance.md: 2.76 s
        # and 2.82 s on 64 A100, 4.30 s and 4.28 s) and less memory; a CPU does not hide Python's overhead.
        if profile.blocks and cluster.device_type != "cpu":
            yield ActivationCheckpointConfig(save_operators="every_second_product")
        elif len(profile.blocks) > 1:
            yield ActivationCheckpointConfig(every_n=2)
        if len(profile.blocks) > 1 and cluster.world_size > 1:
            yield ActivationCheckpointConfig(share="auto")

    def apply(self, job: Job, config: ActivationCheckpointConfig) -> None:
        """Wraps the modules in place."""
        counts: Counter[str] = Counter()
        function = (
            _make_recompute_function(config)
            if job.step.recompute is None
            else _check_recompute_function(job.step.recompute, config)
        )
        if not config.preserve_rng_state:
            _warn_of_dropout(job, config)
        if config.offload:
            function = offload_saved(function, job.device)
        targets = _find_targets(job.module, config)
        if config.chunk > 1:
            _refuse_chunks(job, config)
        for blocks in _group_chunks(_select_recomputed(targets, job, config), config.chunk):
            stage = next(iter(job.parts.stages), None)
            # In a pipeline each call of a block has a seed of its own.
            names = [plain_name(block.name) for block in blocks]
            draw_seeds = (
                functools.partial(stage.call_seeds, names) if isinstance(stage, StageModule) else None
            )
            chunk = Chunk(BufferSafeRecompute(function), job.device, draw_seeds)
            for block in blocks:
                call = chunk.part(block.module) if len(blocks) > 1 else BufferSafeRecompute(function)
                wrapper = checkpoint_wrapper(block.module, _UnlessKept(job.step.kept_activations, call))
                job.module.set_submodule(block.name, wrapper)
                counts[type(block.module).__name__] += 1
        if not targets and not job.parts.stages:  # a stage may hold none of them
            raise InputError(
                f"checkpoint found no module to recompute: {config.wrap_class or 'the repeated blocks'} matches "
                "nothing in the model as earlier methods left it."
            )
        operators = (
            config.save_operators if isinstance(config.save_operators, tuple) else (config.save_operators,)
        )
        details = f", results of {', '.join(operators).replace('_', ' ')} kept" if operators else ""
        where = ", from inputs in host memory" if config.offload and job.device.type != "cpu" else ""
        if job.step.recomputed_shares and config.share is not None:
            details = f", of the blocks of the stages {', '.join(f'{ratio:.2g}' for ratio in job.step.recomputed_shares)}"
        kinds = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
        job.explain(
            self.name, f"{counts.total()} module(s) recomputed{f': {kinds}' if kinds else ''}{where}{details}"
        )


def _writes_out_attention(profile: Profile) -> bool:
    """Returns whether attention keeps its scores [..., T, T]. Fused kernels do not."""
    segments = () if profile.trace is None else profile.trace.segments
    names = {each.name for segment in segments for cost in segment.costs.values() for each in cost.operators}
    return "aten._softmax" in names and not any("scaled_dot_product" in name for name in names)


def _select_recomputed(
    targets: list[NamedModule], job: Job, config: ActivationCheckpointConfig
) -> list[NamedModule]:
    if job.step.recomputed_blocks is not None:  # chosen with a pipeline's cuts
        return [block for block in targets if plain_name(block.name) in job.step.recomputed_blocks]
    if config.share is None:
        return targets[:: config.every_n]
    recompute = RecomputeShare(config.share, config.by_stage)
    recompute.check(1)  # the whole model is one stage
    (share,) = recompute.of_stages([1])
    return targets[: num_recomputed(len(targets), share)]


def _refuse_chunks(job: Job, config: ActivationCheckpointConfig) -> None:
    stages = len(job.parts.stages)
    why = (
        "the parameters of a block are gathered when it is called"
        if job.plan.gradient_sync == "reduce_scatter"
        else "blocks are compiled one by one"
        if job.plan.compiled
        else f"a rank has {stages} stages"
        if stages > 1
        else ""
    )
    if why:
        raise InputError(
            f"checkpoint: chunk={config.chunk} cannot be used here, since {why}: leave it out, or use ddp or zero1."
        )


def _group_chunks(blocks: list[NamedModule], size: int) -> list[list[NamedModule]]:
    chunks: list[list[NamedModule]] = []
    for block in blocks:
        container = plain_name(block.name).rpartition(".")[0]  # a chunk lies in one container
        if (
            chunks
            and len(chunks[-1]) < size
            and plain_name(chunks[-1][0].name).rpartition(".")[0] == container
        ):
            chunks[-1].append(block)
        else:
            chunks.append([block])
    return chunks


@dataclass(frozen=True)
class _UnlessKept:
    """Calls a module and recomputes its activations unless they are kept; copied with a model."""

    kept: KeptActivations
    recomputed: Callable[..., Any]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs) if self.kept.on else self.recomputed(module, *args, **kwargs)


def _find_targets(model: nn.Module, config: ActivationCheckpointConfig) -> list[NamedModule]:
    if config.wrap_class is None:
        return repeated_blocks(model)
    return select_modules(model, config.wrap_class, outermost=True)


def _warn_of_dropout(job: Job, config: ActivationCheckpointConfig) -> None:
    classes = {
        type(module).__name__: None
        for block in _find_targets(job.module, config)
        for module in block.module.modules()
        # A part in evaluation drops nothing, unless the whole model is in evaluation for now.
        if _has_dropout(module) and (module.training or not job.module.training)
    }
    if classes:
        job.warn(
            f"checkpoint: with preserve_rng_state=False the recomputation draws different dropout masks from the forward "
            f"pass, so gradients are wrong: {', '.join(classes)} drop(s) activations. Leave the setting out, or set "
            "their probability to 0."
        )


def _has_dropout(module: nn.Module) -> bool:
    # A probability that is handed to a function is an attribute, such as attn_dropout; Dropout's is p.
    names = [name for name in vars(module) if "drop" in name]
    if "Dropout" in type(module).__name__:
        names.append("p")
    values = [getattr(module, name, None) for name in names]
    return any(
        isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values
    )


def _check_recompute_function(
    function: Callable[..., Any], config: ActivationCheckpointConfig
) -> Callable[..., Any]:
    unusable = [
        key
        for key in ("no_reentrant", "save_operators", "preserve_rng_state")
        if key in config.model_dump(exclude_defaults=True)
    ]
    if unusable:
        raise InputError(
            f"checkpoint cannot use {', '.join(unusable)} here: the blocks hold modules of another package, which "
            "recomputes in its own way. Leave these settings out."
        )
    return function


def _make_recompute_function(config: ActivationCheckpointConfig) -> Callable[..., Any]:
    if not config.no_reentrant:
        return functools.partial(_recompute_reentrant, preserve_rng_state=config.preserve_rng_state)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": config.preserve_rng_state}
    if config.save_operators:
        options["context_fn"] = functools.partial(_selective_contexts, config.save_operators)
    return functools.partial(recompute, **options)


def _selective_contexts(choice: tuple[str, ...] | str) -> tuple[Any, Any]:
    # Called for each forward pass of a block, so products are counted anew.
    number, operators = 0, [_find_operator(name) for name in choice] if isinstance(choice, tuple) else None

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal number
        name = label(func)
        keeps = is_saved(choice, name, number)
        number += name in WEIGHT_PRODUCTS
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return cast(tuple[Any, Any], create_selective_checkpoint_contexts(operators or policy))


def _recompute_reentrant(module: nn.Module, *args: Any, preserve_rng_state: bool, **kwargs: Any) -> Any:
    """Reentrant recomputation that keeps gradients when no input requires one, and takes keywords."""
    names = list(kwargs)
    count = len(args)

    def run(_: torch.Tensor, *values: Any) -> Any:
        return module(*values[:count], **dict(zip(names, values[count:], strict=True)))

    # torch looks at positional tensors alone: if none requires a gradient, parameters get none.
    anchor = torch.empty((), requires_grad=torch.is_grad_enabled())
    return recompute(
        run, anchor, *args, *kwargs.values(), use_reentrant=True, preserve_rng_state=preserve_rng_state
    )


def _find_operator(name: str) -> Any:
    path = name.removeprefix("torch.ops.").split(".")
    op: Any = torch.ops
    try:
        for part in path:
            op = getattr(op, part)
    except AttributeError:
        op = None
    if op is None or len(path) < 2:
        raise ValueError(f"{name!r} is not a torch operator; write it as aten.mm or aten.mm.default")
    return op.default if len(path) == 2 else op  # aten.mm is a packet of overloads
