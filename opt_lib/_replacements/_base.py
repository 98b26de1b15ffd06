"""The contract of a replacement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn
from torch.nn.utils import parametrize

from atorch_ns.cluster import OPTIONAL_PACKAGES, Cluster

__all__ = ["ANYWHERE", "Outcome", "Replacement", "Requirements", "why_untouchable"]


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a replacement needs of a job; nothing by default.

    Attributes:
        dtypes: names of the dtypes it computes in; ``None`` for any.
        package: import name of the package it calls; ``None`` for torch alone.
        device_types: the kinds of device it runs on; ``None`` for any.
        capability: lowest CUDA compute capability; ``None`` for any.
    """

    dtypes: frozenset[str] | None = None
    package: str | None = None
    device_types: frozenset[str] | None = None
    capability: tuple[int, int] | None = None

    def unmet(self, cluster: Cluster, dtype: str) -> str | None:
        """Why a job that computes in ``dtype`` on ``cluster`` cannot use it; ``None`` if it can."""
        if self.device_types is not None and cluster.device_type not in self.device_types:
            return f"it runs on {_listed(self.device_types)}, and this job runs on {cluster.device_type}"
        if self.capability is not None and (cluster.capability or (0, 0)) < self.capability:
            return f"it needs compute capability {self.capability}; {cluster.device_name} has {cluster.capability}"
        if self.package is not None and self.package not in cluster.packages:
            distribution = OPTIONAL_PACKAGES.get(self.package, self.package)
            return f"the package {self.package!r} is absent; install it with: pip install {distribution}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"it supports {_listed(self.dtypes)}, and this job computes in {dtype}"
        return None


ANYWHERE = Requirements()
"""Of a replacement that needs nothing but torch."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a replacement did to a model.

    Attributes:
        model: the model, another object only if its root was replaced.
        replaced: what became what, and how often.
        kept: what was left as it is and why, as a clause, and how often.
    """

    model: nn.Module
    replaced: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)


class Replacement(ABC):
    """One kind of optimized module.

    Attributes:
        name: as written in ``include`` and ``exclude``.
        requirements: what it needs of a job.
        by_user: whether a user registered it.
    """

    name: str
    requirements: Requirements = ANYWHERE
    by_user: ClassVar[bool] = False

    @property
    @abstractmethod
    def looks_for(self) -> str:
        """What it replaces, as a noun phrase in the plural."""

    def wanted_among(self, class_names: Set[str]) -> bool:
        """Whether modules with these class names, bare and qualified, are likely to hold what it replaces."""
        return False

    @abstractmethod
    def replace(self, model: nn.Module) -> Outcome:
        """Replaces what it can in ``model``, in place, keeping parameters, buffers and their names."""


def why_untouchable(module: nn.Module) -> str | None:
    """Why a module cannot be replaced without losing what was attached to it; ``None`` if it can be."""
    for part in module.modules():
        if _has_hooks(part):
            return "it has hooks, which a new module would not have"
        if "forward" in vars(part):
            return "its forward is set on the object"
        if parametrize.is_parametrized(part):
            return "it is parametrized"
    return None


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
