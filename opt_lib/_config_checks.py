"""Checks of configs that several methods make: selectors, dtypes, optional packages, meshes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import ModuleType
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from atorch_ns.cluster import Cluster
from atorch_ns.errors import MissingPackageError, Problem
from atorch_ns.job import LossScaling
from atorch_ns.method import Conflict, Flag, MethodConfig, dtype_name
from atorch_ns.profile import Profile
from atorch_ns.text import error_text


def unmatched_problem(
    method: str, key: str, selectors: Iterable[str] | None, profile: Profile | None
) -> list[Problem]:
    """The problem of selectors that match no module of the model; none if the model is unknown."""
    missing = [] if profile is None else profile.unmatched(selectors or ())
    if profile is None or not missing:
        return []
    return [
        Problem(
            message=f"no module of {profile.model_class} has this class or name{_namesake_clause(missing, profile)}",
            method=method,
            key=key,
            value=", ".join(missing),
            accepted=", ".join(profile.own_class_names()) or "nothing: the model has no submodules",
        )
    ]


def no_blocks_problem(method: str, key: str, purpose: str, profile: Profile | None) -> list[Problem]:
    """The problem of a model without repeated blocks if ``key`` is unset. ``purpose`` is like "to run"."""
    if profile is None or profile.blocks:
        return []
    return [
        Problem(
            message=f"the model repeats no block, so say which modules {purpose}, or leave {method} out",
            method=method,
            key=key,
            accepted=", ".join(profile.own_class_names()),
        )
    ]


def _namesake_clause(missing: Iterable[str], profile: Profile) -> str:
    several = [pair for pair in map(profile.namesakes, missing) if len(pair[1]) > 1]
    return "".join(
        f"; several are called {name}, {' and '.join(classes)}: name one in full" for name, classes in several
    )


def _refuse_float32(name: str) -> str:
    if name == "float32":
        raise ValueError("float32 is full precision; leave the method out, or use fp16 or bf16")
    return name


ReducedDtype = Annotated[str, BeforeValidator(dtype_name), AfterValidator(_refuse_float32)]
"""``float16`` or ``bfloat16``, however it is written."""

SyncBatchNorm = Annotated[
    Flag,
    Field(
        description="Batch norms in training share mean and variance over the ranks that see different data."
    ),
]


class LossScalingConfig(MethodConfig):
    """How fp16 scales the loss: fields that methods of precision share."""

    static_scale: float | None = Field(
        default=None,
        gt=0,
        description="The loss scale of all steps, fp16 only: a step that overflows is skipped and the scale "
        "stays. null for a scale that adapts, as the fields below say.",
    )
    init_scale: float = Field(default=2.0**16, gt=0, description="First loss scale, fp16 only.")
    growth_interval: int = Field(
        default=2000, ge=1, description="Steps without overflow after which the scale doubles, fp16 only."
    )
    hysteresis: int = Field(
        default=1,
        ge=1,
        description="Overflows until the scale halves, fp16 only: with 2 the first one just skips its step. "
        "Later ones halve it each; they are counted anew when it has doubled.",
    )
    min_scale: float = Field(
        default=0.0, ge=0, description="Least loss scale that overflows lead to, fp16 only."
    )

    @model_validator(mode="after")
    def _begins_above_the_least(self) -> Self:
        if self.init_scale < self.min_scale:
            raise ValueError(f"init_scale {self.init_scale} is less than min_scale {self.min_scale}")
        return self

    @property
    def loss_scaling(self) -> LossScaling:
        """The fields as a job takes them."""
        return LossScaling(**{field.name: getattr(self, field.name) for field in fields(LossScaling)})

    @property
    def scale_words(self) -> str:
        """The scale in words, for explanations."""
        return "dynamic loss scale" if self.static_scale is None else f"loss scale {self.static_scale:g}"


def searched_dtype(profile: Profile, cluster: Cluster) -> str | None:
    """The reduced dtype that is worth a search on these devices; ``None`` if there is none.

    bf16 on GPUs from sm 8.0, and on CPUs whose products in bf16 are known to be no slower than in fp32.
    fp16, which needs a loss scale, on GPUs of sm 7.x. A model that is not in fp32 keeps its precision.
    """
    if "float32" not in profile.parameter_dtypes:
        return None
    if cluster.device_type == "cuda":
        if cluster.capability is None or cluster.capability >= (8, 0):  # Ampere
            return "bfloat16"
        return "float16" if cluster.capability >= (7, 0) else None  # Volta
    if cluster.hardware is None:
        return None
    rates = cluster.hardware.device.flops_per_s  # unknown rates choose nothing
    return "bfloat16" if rates.get("bfloat16", 0.0) >= rates.get("float32", float("inf")) else None


def require(package: str, *, needed_by: str, install: str) -> ModuleType:
    """Imports an optional package; ``needed_by`` is the subject of a sentence, ``install`` a command.

    Raises:
        MissingPackageError: if it is absent, or its import fails in any way: packages built for another
            machine raise RuntimeError and OSError as well.
    """
    try:
        return importlib.import_module(package)
    except Exception as error:  # see the docstring
        raise MissingPackageError(
            package, needed_by=needed_by, install=install, reason=error_text(error)
        ) from error


def missing_problem(method: str, package: str, *, install: str) -> list[Problem]:
    """The problem of a method whose backend cannot be imported; none if it can be."""
    try:
        require(package, needed_by="this backend", install=install)
    except MissingPackageError as error:
        return [Problem(message=str(error), method=method)]
    return []


_WHOLE = {"data", "zero"}  # axes along which ranks hold all of the model


def one_axis_only(uses: Callable[[Any], bool], backend: str) -> Conflict:
    """The conflict of ``backend`` with meshes on which its group is not all processes.

    Args:
        uses: whether a config of the method chooses the backend.
        backend: name of the backend, for the reason.
    """
    reason = (
        f"{backend} shards over all processes at once, so the mesh must have no more than one axis larger than 1, "
        f"{' or '.join(sorted(_WHOLE))}. Use another backend for this mesh."
    )
    return Conflict(
        "parallel_mode", reason, when=lambda mine, mesh: uses(mine) and not _has_single_axis(mesh.axes)
    )


def _has_single_axis(axes: Iterable[tuple[str, int]]) -> bool:
    large = [name for name, size in axes if size > 1]
    return len(large) <= 1 and set(large) <= _WHOLE
