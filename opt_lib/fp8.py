"""fp8: matrix products of linear layers in 8-bit floating point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, final

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, Problem
from atorch_ns.job import Job
from atorch_ns.method import Conflict, Method, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Extra, NarrowProducts, Plan
from opt_lib._fp8 import torchao, transformer_engine
from opt_lib._fp8.backend import Backend, choose, notices, why_unavailable
from opt_lib._fp8.config import Fp8Config
from opt_lib._fp8.select import (
    DIM_MULTIPLE,
    HEAD_NAMES,
    Selection,
    find_linears,
    fold_names,
    lora_layers,
    unmatched_parts,
)

__all__ = ["Fp8", "Fp8Config"]

_WHY_NOT_DIVIDED = (
    "the backend te updates its scales when a forward pass of the whole model ends, and its linears divide themselves. "
    "Use fp8 with the backend torchao."
)

CASTS_PER_OPERAND = 1.7
"""Bytes that casts move for each byte that a product reads and writes in 16 bits: two of its three tensors
are operands, each read once for its largest value and once to be rounded, and written in half the bytes."""

RESCALED = 2.0
"""The same for a result that torchao scales after its product: read and written in 16 bits, a factor an
element in 32. torchao does so in row-wise backward passes, where the row-wise kernel, fast only with fast
accumulation, is not used (torchao 0.18, float8_ops.py; pytorch/ao issue 2184). A compiler leaves 0.6 of these
bytes, as of the casts': factors stay in registers, while casts along columns read twice."""

ROWWISE_RATE = 0.95
"""Rate of the row-wise forward kernel over one scale: 0.9 to 1 on H100 (pytorch/pytorch issue 147971)."""

_RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tensorwise": {"casts_per_operand": CASTS_PER_OPERAND, "gathered": True},
        # Two of three products are scaled after.
        "rowwise": {
            "casts_per_operand": CASTS_PER_OPERAND + RESCALED * 2 / 3,
            "rate": 3 / (1 / ROWWISE_RATE + 2),  # one of three products is slower
        },
        # Two of three products are in fp8, and one of them is scaled after.
        "rowwise_with_gw_hp": {
            "casts_per_operand": CASTS_PER_OPERAND + RESCALED / 2,
            "share": 2 / 3,
            "rate": 2 / (1 / ROWWISE_RATE + 1),  # one of two products is slower
        },
    }
)
"""Costs of :class:`~atorch_ns.strategy.NarrowProducts` by recipe of torchao."""

TE_CASTS_PER_OPERAND = 0.44
"""The same for Transformer Engine: its norms and activations write fp8, and weights and gradients are read
once and written twice, transposes included."""

TE_COPIES = 0.5
"""2 of 4 bytes an element: Transformer Engine keeps fp32 weights and transposes in fp8 until backward."""


@final
class Fp8(Method[Fp8Config]):
    """Computes the matrix products of linear layers in fp8, by Transformer Engine or torchao."""

    name = "fp8"
    phase = Phase.FP8
    Config = Fp8Config
    conflicts = tuple(
        Conflict(other, _WHY_NOT_DIVIDED, when=lambda mine, _: mine.backend == "te")
        for other in (
            "tensor_parallel",
            "sequence_parallel",
            "pipeline_parallel",
            "expert_parallel",
            "ds_3d_parallel",
        )
    )
    variants = MappingProxyType({"te": {"backend": "te"}, "fp8 gathered": {"fsdp_all_gather": True}})

    def unavailable(self, config: Fp8Config, cluster: Cluster) -> str | None:
        """The device must have fp8 matrix units, and a package must be there."""
        return why_unavailable(None, config, cluster)

    def notices(self, config: Fp8Config, cluster: Cluster) -> Iterable[str]:
        """Settings of the package that is not used."""
        return notices(config, cluster)

    def check(self, config: Fp8Config, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """No LoRA among the linears."""
        if profile is None:
            return []
        adapters = lora_layers(profile.module_classes, config.include, config.exclude)
        if not adapters:
            return []
        return [
            Problem(
                message=f"{fold_names(adapters)} are LoRA layers of peft: in fp8 the products of their narrow matrices "
                "lose what they train, and neither package supports them. Leave fp8 out, or list their names in exclude",
                method=self.name,
            )
        ]

    def plan(self, plan: Plan, config: Fp8Config) -> Plan:
        """fp8 products of linears, by the recipe; Transformer Engine keeps weights and transposes in fp8."""
        # Heads stay as they are unless include names them.
        exclude = config.exclude if config.include is not None else (*config.exclude, *HEAD_NAMES)
        of_te = {"casts_per_operand": TE_CASTS_PER_OPERAND}
        narrow = NarrowProducts(
            dtype="float8",
            include=config.include,
            exclude=exclude,
            multiple=DIM_MULTIPLE,
            **of_te if config.backend == "te" else _RECIPES[config.recipe],
        )
        extras = tuple(extra for extra in plan.extras if extra.method != self.name)
        if config.backend == "te":
            extras = (*extras, Extra(method=self.name, parameter_copies=TE_COPIES))
        return plan.changed(extras=extras, precision={"narrow": narrow})

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[Fp8Config]:
        """Nothing: a trial of a few steps does not show whether a model converges in fp8 as in bf16.

        Whoever accepts that names it: ``included=["fp8"]``.
        """
        return ()

    def apply(self, job: Job, config: Fp8Config) -> None:
        """Replaces the linears. Collective, so that no rank goes on where another cannot."""
        job.cluster.agree(lambda: self._replace_linears(job, config), what="replacing linears by fp8")

    def _replace_linears(self, job: Job, config: Fp8Config) -> None:
        backend = choose(config, job.cluster, job.plan)
        if backend is None:
            raise InputError(_why_none(config, job))
        # Tied weights stay if weights are gathered in fp8: under one of their names they would not be.
        gathers = backend == "torchao" and torchao.gathers_in_fp8(job, config)
        selection = find_linears(
            job.module, config.include, config.exclude, degree=job.plan.size("tensor"), keep_tied=gathers
        )
        self._report_selection(job, config, backend, selection)
        self._tell_unmatched(job, config)
        if not selection.replaced:
            job.warn(f"fp8 is left out: {selection.why_nothing()}")
            return
        if backend == "te":
            transformer_engine.replace_linears(job, selection.replaced, config)
            return
        torchao.replace_linears(job, selection.replaced, config)
        if gathers:
            torchao.scale_after_steps(job)
        elif config.fsdp_all_gather:
            job.warn("fp8: fsdp_all_gather does nothing without fsdp or zero2, which gather weights")

    def _report_selection(self, job: Job, config: Fp8Config, backend: Backend, selection: Selection) -> None:
        package = "Transformer Engine" if backend == "te" else f"torchao, {config.recipe}"
        suffix = ", emulated" if backend == "torchao" and config.emulate else ""
        if selection.replaced:
            job.explain(self.name, f"by {package}{suffix}: {fold_names(selection.replaced)}")
            if selection.kept:
                job.explain(self.name, f"not replaced: {selection.describe_kept()}")
        else:
            job.explain(self.name, f"nothing was replaced: {selection.why_nothing()}")
        if selection.heads and selection.replaced:
            job.warn(
                f"fp8: {fold_names(selection.heads)} stays as it is: it makes the logits, which fp8 harms. Name it in "
                "include to run it in fp8, or in exclude to silence this warning"
            )
        for part, reason in selection.refused(config.include or ()).items() if selection.replaced else ():
            job.warn(f"fp8: {part!r} in include stays as it is: {reason}")
        if config.verbose:
            job.warn(f"fp8: {selection.listed()}")

    def _tell_unmatched(self, job: Job, config: Fp8Config) -> None:
        for key, parts in (("include", config.include or ()), ("exclude", config.exclude)):
            for part, near in unmatched_parts(job.module, parts).items():
                nearest = f" Nearest: {', '.join(near)}." if near else ""
                job.warn(f"fp8: no linear's name contains {part!r} from {key}.{nearest}")

    def explain(self, config: Fp8Config, cluster: Cluster) -> str:
        """The purpose only: the replaced layers are reported when it is applied."""
        return "for matrix products of linears, and for nothing else"


def _why_none(config: Fp8Config, job: Job) -> str:
    # Transformer Engine would be chosen but for the mesh of the plan.
    reason = transformer_engine.why_not(job.plan) if choose(config, job.cluster) == "te" else None
    return f"fp8 cannot be used: {reason or why_unavailable(None, config, job.cluster)}. {torchao.INSTALL}"
