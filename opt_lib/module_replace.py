"""module_replace: optimized modules in the place of a model's own.

Built-in replacements, those that want the same modules in order of preference:

- ``flash_attention_3``, ``flash_attention``: flash-attn's kernels in transformers models that support them,
  where the package is installed and the job computes in half precision on a GPU.
- ``sdpa_attention``: eager attention of transformers models (BERT, GPT-2, CLIP, Llama and all others that
  support it) becomes torch's scaled-dot-product attention, which picks a flash kernel where there is one.
- ``liger_rope``, ``liger_swiglu``, ``liger_rms_norm``: kernels of the package liger-kernel, on a GPU.
- ``apex_rms_norm``, ``apex_layer_norm``: kernels of NVIDIA's apex, on a GPU.
- ``fused_rms_norm``: hand-written RMSNorms, those of transformers and your own, become torch's fused kernel.
- ``fused_layer_norm``: ``nn.LayerNorm`` runs torch's fused kernel already, so this one only says so.
- ``liger_fused_linear_cross_entropy``, ``chunked_linear_cross_entropy``: last layer and loss of transformers'
  causal language models in one. Only where ``include`` names them: the model gives no logits in training.

Your own come first; :func:`register_replace_pair` makes them known. Methods that come after this one, such as
``checkpoint`` and ``fsdp``, still select modules by the class names of the original model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from pydantic import Field, JsonValue, model_validator
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, Problem
from atorch_ns.job import Job
from atorch_ns.method import Method, MethodConfig, Phase
from atorch_ns.method.method import Names
from atorch_ns.profile import Profile
from atorch_ns.strategy import MODEL_AXES, Plan
from atorch_ns.text import did_you_mean
from opt_lib._replacements.base import ClassPair, Replacement
from opt_lib._replacements.registry import (
    known_replacements,
    register_replace_pair,
    registered_pairs,
    set_registered_pairs,
    unregister_replace_pair,
)

__all__ = ["ModuleReplace", "ModuleReplaceConfig", "register_replace_pair", "unregister_replace_pair"]


class ModuleReplaceConfig(MethodConfig):
    """Which replacements are used. Names alone are shorthand for ``include``."""

    include: Names | None = Field(
        default=None,
        description="Names of the replacements to use, registered ones and built-in ones; null for all.",
    )
    exclude: Names = Field(default=(), description="Names of replacements not to use.")
    configs: Mapping[str, Mapping[str, JsonValue]] = Field(
        default={}, description="Settings of registered replacements, by their names."
    )

    def __hash__(self) -> int:
        """Hash of the JSON form: ``configs`` are mappings, which have no hash."""
        return hash(json.dumps(self.as_json(), sort_keys=True))

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``("fused_rms_norm", "my_optimized_module")``."""
        return {"include": value}

    @model_validator(mode="after")
    def _not_both(self) -> ModuleReplaceConfig:
        both = sorted(set(self.include or ()) & set(self.exclude))
        if both:
            raise ValueError(f"{', '.join(both)} is in both include and exclude")
        return self


@final
class ModuleReplace(Method[ModuleReplaceConfig]):
    """Replaces modules by optimized ones that compute the same; weights move without a copy."""

    name = "module_replace"
    phase = Phase.REPLACE
    Config = ModuleReplaceConfig

    def check(self, config: ModuleReplaceConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The named replacements must be known to this process, and those with settings must take some."""
        table = known_replacements()
        pairs = [("include", name) for name in config.include or ()]
        pairs += [("exclude", name) for name in config.exclude]
        problems = [_name_problem(self.name, key, name, table) for key, name in pairs if name not in table]
        for name, settings in config.configs.items():
            problems += _wrong_settings(self.name, config, name, settings, table=table)
        return problems

    def plan(self, plan: Plan, config: ModuleReplaceConfig) -> Plan:
        """Modules are replaced."""
        return replace(plan, replaced=True)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[ModuleReplaceConfig]:
        """Everything, where the model has what a replacement looks for and may be faster with it."""
        if any(each.wanted_in(profile, cluster) for each in known_replacements().values()):
            yield ModuleReplaceConfig()

    def rewritten(self, model: nn.Module, profile: Profile, cluster: Cluster) -> nn.Module | None:
        """The model with replacements that can be traced without their device."""
        if not any(True for _ in self.options(profile, cluster)):
            return None
        modules: set[nn.Module] = set()
        for candidate in _select_replacements(ModuleReplaceConfig()):
            variant = candidate.traced(cluster)
            if variant is not None:
                outcome = variant.replace(model, modules)
                model = outcome.model
                modules |= outcome.new_modules
        return model

    def carry(self) -> Mapping[str, ClassPair]:
        """The pairs that users registered."""
        return registered_pairs()

    def restore(self, carried: Mapping[str, ClassPair]) -> None:
        """Registers the carried pairs in this process."""
        set_registered_pairs(carried)

    def apply(self, job: Job, config: ModuleReplaceConfig) -> None:
        """Lets every chosen replacement do what it can, one after the other."""
        candidates = _select_replacements(config)
        unmet = _unmet_requirements(job, candidates)
        rows = []
        modules: set[nn.Module] = set()
        for candidate in candidates:
            reason = unmet[candidate.name]
            if reason is None:
                rows.append(_apply_replacement(job, candidate, modules))
            else:
                has_target = candidate.concerns(job.module)
                rows.append(_Row(candidate.name, reason, 0, has_target, candidate.by_user, left_out=True))
        # The report leaves out built-in replacements that found no module, unless include is given.
        for text in _row_texts(
            row for row in rows if row.has_modules or row.by_user or config.include is not None
        ):
            job.explain(self.name, text)
        idle = [row for row in rows if row.num_replaced == 0]
        if len(idle) == len(rows):
            job.explain(self.name, "nothing was replaced")
            why = "; ".join(_row_texts(idle)) or "every replacement is excluded"
            job.warn(f"{self.name} replaced nothing: {why}")
        elif idle and config.include is not None:
            job.warn(f"{self.name} did not apply all of include: {'; '.join(_row_texts(idle))}")


class _Row(NamedTuple):
    """The result of one replacement."""

    name: str
    text: str  # words of the report; for a replacement that was left out, the reason
    num_replaced: int  # modules
    has_modules: bool  # whether there was anything for it to look at
    by_user: bool  # whether a user registered it
    left_out: bool = False  # whether the job does not meet its requirements


def _select_replacements(config: ModuleReplaceConfig) -> list[Replacement]:
    candidates = []
    for name, candidate in known_replacements().items():
        is_wanted = not candidate.only_by_name if config.include is None else name in config.include
        if is_wanted and name not in config.exclude:
            settings = config.configs.get(name)
            candidates.append(candidate.configured(settings) if settings else candidate)
    return candidates


def _unmet_requirements(job: Job, candidates: Iterable[Replacement]) -> dict[str, str | None]:
    dtype = _compute_dtype(job)
    axes = tuple(axis for axis in MODEL_AXES if job.plan.size(axis) > 1)
    unmet = {each.name: each.requirements.unmet(job.cluster, dtype, axes) for each in candidates}
    if dist.is_initialized() and any(each.requirements.package for each in candidates):
        # A package may be broken on one node: then ranks would run different kernels.
        usable = "; ".join(f"{name}: {reason or 'usable'}" for name, reason in unmet.items())
        job.cluster.same_everywhere({"what module_replace can use": usable})
    return unmet


def _apply_replacement(job: Job, candidate: Replacement, new_modules: set[nn.Module]) -> _Row:
    outcome = candidate.replace(job.module, new_modules)
    new_modules |= outcome.new_modules
    if outcome.model is not job.module:
        job.replace_model(outcome.model)
    counts = [f"{count} × {what}" for what, count in (*outcome.replaced.items(), *outcome.kept.items())]
    text = f"{candidate.name}: {', '.join(counts) or f'the model has no {candidate.looks_for}'}"
    return _Row(candidate.name, text, outcome.replaced.total(), bool(counts), candidate.by_user)


def _row_texts(rows: Iterable[_Row]) -> list[str]:
    all_rows = list(rows)
    sharing: dict[str, list[str]] = {}  # those left out for one reason share a sentence
    for row in all_rows:
        if row.left_out:
            sharing.setdefault(row.text, []).append(row.name)
    texts = []
    for row in all_rows:
        if not row.left_out:
            texts.append(row.text)
        elif names := sharing.pop(row.text, None):
            texts.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not used: {row.text}")
    return texts


def _compute_dtype(job: Job) -> str:
    dtype = job.plan.precision.compute_dtype or job.plan.precision.parameter_dtype
    if dtype != Plan().precision.parameter_dtype:
        return dtype
    sizes: Counter[torch.dtype] = Counter()  # no method casts: the model may have come in another dtype
    for parameter in job.module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.") if sizes else dtype


def _wrong_settings(
    method: str,
    config: ModuleReplaceConfig,
    name: str,
    settings: Mapping[str, JsonValue],
    *,
    table: Mapping[str, Replacement],
) -> list[Problem]:
    # Nothing that ``configs`` says may be dropped in silence.
    key = f"configs.{name}"
    if name not in table:
        return [_name_problem(method, key, name, table)]
    wrong = None
    if name in config.exclude:
        wrong = "it has settings and is not used: exclude names it. Take them out, or use it."
    elif config.include is not None and name not in config.include:
        wrong = "it has settings and is not used: include does not name it. Take them out, or use it."
    elif table[name].only_by_name and config.include is None:
        wrong = "it has settings and is not used: it is used only where include names it."
    else:
        try:
            table[name].configured(settings)
        except InputError as error:
            wrong = str(error)
    if wrong is not None:
        return [Problem(message=wrong, method=method, key=key)]
    return [
        Problem(
            message=f"{name!r} has no such setting.",
            method=method,
            key=f"{key}.{setting}",
            accepted=", ".join(names) or "none",
        )
        for setting, names in table[name].unknown_settings(settings).items()
    ]


def _name_problem(method: str, key: str, name: str, table: Mapping[str, Replacement]) -> Problem:
    hint = did_you_mean(name, table, otherwise="Call register_replace_pair before auto_accelerate.")
    return Problem(
        message=f"no such replacement.{hint}", method=method, key=key, value=name, accepted=", ".join(table)
    )
