"""The contract of a replacement."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.nn.utils import parametrize

from atorch_ns.cluster import OPTIONAL_PACKAGES, Cluster
from atorch_ns.errors import InputError
from atorch_ns.profile import Profile

__all__ = ["ANYWHERE", "Outcome", "Replacement", "Requirements", "classes_in", "why_untouchable"]


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a replacement needs of a job; nothing by default.

    Attributes:
        dtypes: names of the dtypes it computes in; ``None`` for any.
        package: import name of the package it calls; ``None`` for torch alone.
        install: how the package is installed, where ``pip install`` of its distribution is not the way.
        imports: modules of the package that must be importable here: a package may be there and be broken, or
            be another one of the same name.
        device_types: the kinds of device it runs on; ``None`` for any.
        capability: lowest CUDA compute capability; ``None`` for any.
        not_over: axes over which the model must not be divided.
    """

    dtypes: frozenset[str] | None = None
    package: str | None = None
    install: str | None = None
    imports: tuple[str, ...] = ()
    device_types: frozenset[str] | None = None
    capability: tuple[int, int] | None = None
    not_over: frozenset[str] = frozenset()

    def usable_on(self, cluster: Cluster) -> bool:
        """Whether some job on ``cluster`` can use it."""
        dtypes = self.dtypes or {"float32"}
        return any(self.unmet(cluster, dtype) is None for dtype in dtypes)

    def unmet(self, cluster: Cluster, dtype: str, divided: tuple[str, ...] = ()) -> str | None:
        """Why a job cannot use it; ``None`` if it can.

        Args:
            cluster: where the job runs.
            dtype: that the job computes in.
            divided: the axes that the model itself is divided over.
        """
        if self.device_types is not None and cluster.device_type not in self.device_types:
            return f"it runs on {_listed(self.device_types)}, and this job runs on {cluster.device_type}"
        if self.capability is not None and (cluster.capability or (0, 0)) < self.capability:
            return f"it needs compute capability {self.capability}; {cluster.device_name} has {cluster.capability}"
        if self.package is not None and self.package not in cluster.packages:
            distribution = OPTIONAL_PACKAGES.get(self.package, self.package)
            install = self.install or f"install it with: pip install {distribution}"
            return f"the package {self.package!r} is absent; {install}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"it supports {_listed(self.dtypes)}, and this job computes in {dtype}"
        if clash := self.not_over.intersection(divided):
            return f"it cannot be used where the model is divided over the axis {_listed(clash)}"
        broken = next((reason for reason in map(_import_error, self.imports) if reason is not None), None)
        return broken if broken is None or self.install is None else f"{broken}; {self.install}"


ANYWHERE = Requirements()
"""Of a replacement that needs nothing but torch."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a replacement did to a model.

    Attributes:
        model: the model, another object only if its root was replaced.
        replaced: what became what, and how often.
        kept: what was left as it is and why, as a clause, and how often.
        made: the new modules, which later replacements leave as they are.
    """

    model: nn.Module
    replaced: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    made: set[nn.Module] = field(default_factory=set)


class Replacement(ABC):
    """One kind of optimized module.

    Attributes:
        name: as written in ``include`` and ``exclude``.
        requirements: what it needs of a job.
        by_user: whether a user registered it.
        only_by_name: whether it is used only where ``include`` names it, since it changes what a model gives.
    """

    name: str
    requirements: Requirements = ANYWHERE
    by_user: ClassVar[bool] = False
    only_by_name: ClassVar[bool] = False

    @property
    @abstractmethod
    def looks_for(self) -> str:
        """What it replaces, as a noun phrase in the plural."""

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Whether a search may gain from it: it is usable on ``cluster``, and the model likely holds what it replaces."""
        return False

    def concerns(self, model: nn.Module) -> bool:
        """Whether ``model`` holds what it replaces, as far as that shows without trying."""
        return True

    def configured(self, config: Mapping[str, Any]) -> Replacement:
        """The same with settings of its own.

        Raises:
            InputError: if it has none.
        """
        raise InputError(f"the replacement {self.name!r} has no settings, and configs gives it some.")

    def unknown_settings(self, config: Mapping[str, Any]) -> Mapping[str, Iterable[str]]:
        """Settings of ``config`` that it does not take, each with those that it takes; as far as known unbuilt."""
        return {}

    @abstractmethod
    def replace(self, model: nn.Module, spared: Set[nn.Module] = frozenset()) -> Outcome:
        """Replaces what it can in ``model``, in place, keeping parameters, buffers and their names.

        Args:
            model: where to look.
            spared: modules that earlier replacements made; they stay.
        """


def classes_in(profile: Profile) -> set[str]:
    """Names of the classes of all modules, bare and qualified."""
    return {name for names in profile.module_classes.values() for name in names}


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


@functools.cache
def _import_error(module: str) -> str | None:
    """Why ``module`` cannot be imported in this process; ``None`` if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken wheel raises anything
        text = " ".join(str(error).split())
        return f"{module} cannot be imported ({type(error).__name__}: {text[:200]})"
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
