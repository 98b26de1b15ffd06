"""module_replace: optimized modules in the place of a model's own.

Built-in replacements:

- ``sdpa_attention``: eager attention of transformers models (BERT, GPT-2, CLIP, Llama and all others that
  support it) becomes torch's scaled-dot-product attention, which picks a flash kernel where there is one.
- ``fused_rms_norm``: hand-written RMSNorms, those of transformers and your own, become torch's fused kernel.
- ``fused_layer_norm``: ``nn.LayerNorm`` runs torch's fused kernel already, so this one only says so.

Your own come first; :func:`register_replace_pair` makes them known. Methods that come after this one, such as
``checkpoint`` and ``fsdp``, still select modules by the class names of the original model.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, final

import torch
from pydantic import BeforeValidator, Field, model_validator

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Method, MethodConfig, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib._replacements import (
    Replacement,
    known_replacements,
    register_replace_pair,
    unregister_replace_pair,
)

__all__ = ["ModuleReplace", "ModuleReplaceConfig", "register_replace_pair", "unregister_replace_pair"]


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class ModuleReplaceConfig(MethodConfig):
    """Which replacements are used. Names alone are shorthand for ``include``."""

    include: Names | None = Field(
        default=None,
        description="Names of the replacements to use, registered ones and built-in ones; null for all.",
    )
    exclude: Names = Field(default=(), description="Names of replacements not to use.")

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``("fused_rms_norm", "my_optimized_module")``."""
        return {"include": value}

    @model_validator(mode="after")
    def _not_both(self) -> ModuleReplaceConfig:
        both = sorted(set(self.include or ()) & set(self.exclude))
        if both:
            raise ValueError(f"{', '.join(both)} stands in both include and exclude")
        return self


@final
class ModuleReplace(Method[ModuleReplaceConfig]):
    """Replaces modules by optimized ones that compute the same; weights move without a copy."""

    name = "module_replace"
    phase = Phase.REPLACE
    Config = ModuleReplaceConfig

    def check(self, config: ModuleReplaceConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The named replacements must be known to this process."""
        known = known_replacements()
        return [
            _unknown(self.name, key, name, known)
            for key, names in (("include", config.include or ()), ("exclude", config.exclude))
            for name in names
            if name not in known
        ]

    def plan(self, plan: Plan, config: ModuleReplaceConfig) -> Plan:
        """Modules are replaced."""
        return replace(plan, replaced=True)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[ModuleReplaceConfig]:
        """Everything, where the model has a class that a replacement looks for."""
        names = {name for classes in profile.module_classes.values() for name in classes}
        if any(candidate.wanted_among(names) for candidate in known_replacements().values()):
            yield ModuleReplaceConfig()

    def apply(self, job: Job, config: ModuleReplaceConfig) -> None:
        """Lets every chosen replacement do what it can, one after the other."""
        dtype = _compute_dtype(job)
        rows = [_use(job, candidate, dtype) for candidate in _chosen(config)]
        for row in rows:
            if row.found or row.by_user or config.include is not None:
                job.explain(self.name, row.text)
        idle = [row.text for row in rows if row.num_replaced == 0]
        if len(idle) == len(rows):
            job.explain(self.name, "nothing was replaced")
            _warn(job, f"{self.name} replaced nothing: {'; '.join(idle) or 'every replacement is excluded'}")
        elif idle and config.include is not None:
            _warn(job, f"{self.name} does without some of include: {'; '.join(idle)}")


class _Row(NamedTuple):
    """What one replacement did.

    Attributes:
        text: for the report.
        num_replaced: how many modules it replaced.
        found: whether there was anything for it to look at, or a reason to leave it out.
        by_user: whether a user registered it.
    """

    text: str
    num_replaced: int
    found: bool
    by_user: bool


def _chosen(config: ModuleReplaceConfig) -> list[Replacement]:
    return [
        candidate
        for name, candidate in known_replacements().items()
        if name not in config.exclude and (config.include is None or name in config.include)
    ]


def _use(job: Job, candidate: Replacement, dtype: str) -> _Row:
    unmet = candidate.requirements.unmet(job.cluster, dtype)
    if unmet is not None:
        return _Row(f"{candidate.name} is not used: {unmet}", 0, True, candidate.by_user)
    outcome = candidate.replace(job.module)
    if outcome.model is not job.module:
        job.replace_model(outcome.model)
    seen = [f"{count} × {what}" for what, count in (*outcome.replaced.items(), *outcome.kept.items())]
    text = f"{candidate.name}: {', '.join(seen) or f'the model has no {candidate.looks_for}'}"
    return _Row(text, outcome.replaced.total(), bool(seen), candidate.by_user)


def _compute_dtype(job: Job) -> str:
    """The dtype that most of the model computes in."""
    planned = job.plan.compute_dtype or job.plan.parameter_dtype
    if planned != Plan().parameter_dtype:
        return planned
    sizes: Counter[torch.dtype] = Counter()  # no method casts: the model may have come in another dtype
    for parameter in job.module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.") if sizes else planned


def _unknown(method: str, key: str, name: str, known: Mapping[str, Replacement]) -> Problem:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "Call register_replace_pair before auto_accelerate."
    return Problem(
        message=f"no such replacement. {hint}", method=method, key=key, value=name, accepted=", ".join(known)
    )


def _warn(job: Job, text: str) -> None:
    if job.cluster.rank == 0:
        warnings.warn(text, stacklevel=2)
