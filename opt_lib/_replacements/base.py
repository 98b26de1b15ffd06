"""Modules of one class replaced by modules of another."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn
from torch.nn.utils import parametrize

from atorch_ns.cluster import OPTIONAL_PACKAGES, Cluster
from atorch_ns.errors import AtorchError, InputError, RegistrationError
from atorch_ns.profile import Profile
from atorch_ns.text import error_text, with_article
from opt_lib._replacements.making import Convert, move_state, settings_of


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """A replacement's requirements on a job. There are none by default.

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
        """Returns whether some job on ``cluster`` can use the replacement."""
        # The strategy that decides the dtype is not known yet.
        dtypes = self.dtypes or {"float32"}
        return any(self.unmet(cluster, dtype) is None for dtype in dtypes)

    def unmet(self, cluster: Cluster, dtype: str, axes: tuple[str, ...] = ()) -> str | None:
        """Why a job in ``dtype``, its model divided over ``axes``, cannot use it; ``None`` if it can."""
        if self.device_types is not None and cluster.device_type not in self.device_types:
            return f"it runs on {_join_names(self.device_types)}, and this job runs on {cluster.device_type}"
        if self.capability is not None and (cluster.capability or (0, 0)) < self.capability:
            return f"it needs compute capability {self.capability}; {cluster.device_name} has {cluster.capability}"
        if self.package is not None and self.package not in cluster.packages:
            distribution = OPTIONAL_PACKAGES.get(self.package, self.package)
            install = self.install or f"install it with: pip install {distribution}"
            return f"the package {self.package!r} is absent; {install}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"it supports {_join_names(self.dtypes)}, and this job computes in {dtype}"
        if clash := self.not_over.intersection(axes):
            return f"it cannot be used where the model is divided over the axis {_join_names(clash)}"
        error = next((reason for reason in map(_import_error, self.imports) if reason is not None), None)
        return error if error is None or self.install is None else f"{error}; {self.install}"


ANYWHERE = Requirements()
"""Requirements of a replacement that needs nothing but torch."""


@dataclass(frozen=True, kw_only=True)
class ReplacementOutcome:
    """The result of a replacement in a model.

    Attributes:
        model: the model, another object only if its root was replaced.
        replaced: counts of old and new module kinds.
        kept: counts of modules left unchanged, with the reason as a clause.
        new_modules: the new modules, which later replacements leave as they are.
    """

    model: nn.Module
    replaced: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    new_modules: set[nn.Module] = field(default_factory=set)


class Replacement(ABC):
    """One kind of optimized module.

    Attributes:
        name: the name in ``include`` and ``exclude``.
        requirements: what it needs of a job.
        looks_for: the modules that it replaces, as a plural noun phrase.
        by_user: whether a user registered it.
        only_by_name: whether it is used only where ``include`` names it, since it changes what a model gives.
    """

    name: str
    requirements: Requirements = ANYWHERE
    looks_for: ClassVar[str]
    by_user: ClassVar[bool] = False
    only_by_name: ClassVar[bool] = False

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """True if a search may gain from it. It must be usable on ``cluster`` and likely replace modules."""
        return False

    def traced(self, cluster: Cluster) -> Replacement | None:
        """Its form for a copy of the model traced for cost on ``cluster``; ``None`` if there is none."""
        return self if self.requirements.package is None else None

    def concerns(self, model: nn.Module) -> bool:
        """Returns whether ``model`` seems to hold modules that it replaces, judged without a trial."""
        return True

    def configured(self, config: Mapping[str, Any]) -> Replacement:
        """The same with settings of its own.

        Raises:
            InputError: if it has none.
        """
        raise InputError(f"the replacement {self.name!r} has no settings, but configs sets some.")

    def unknown_settings(self, config: Mapping[str, Any]) -> Mapping[str, Iterable[str]]:
        """Settings of ``config`` that it does not take, as far as known, each with those that it takes."""
        return {}

    @abstractmethod
    def replace(self, model: nn.Module, earlier: Set[nn.Module] = frozenset()) -> ReplacementOutcome:
        """Replaces what it can in ``model``, in place, keeping parameters, buffers and their names.

        Modules in ``earlier``, which earlier replacements made, stay.
        """


class ModuleReplacement(Replacement):
    """A replacement that makes a new module for each that it wants, whatever is around it."""

    @abstractmethod
    def wants(self, module: nn.Module) -> bool:
        """Returns whether a module is of the kind that is replaced."""

    @abstractmethod
    def make(self, module: nn.Module) -> nn.Module | str:
        """The new module, or the reason why there is none."""

    def concerns(self, model: nn.Module) -> bool:
        """Returns whether the model holds a module of the kind."""
        return any(map(self.wants, model.modules()))

    def replace(self, model: nn.Module, earlier: Set[nn.Module] = frozenset()) -> ReplacementOutcome:
        """Replaces every module of the kind for which there is a new one."""
        return replace_modules(model, self.wants, self.make, earlier)


def classes_in(profile: Profile) -> set[str]:
    """Names of the classes of all modules, bare and qualified."""
    return {name for names in profile.module_classes.values() for name in names}


def why_untouchable(module: nn.Module) -> str | None:
    """Why a module cannot be replaced without losing what was attached to it; ``None`` if it can be."""
    for part in module.modules():
        if any(
            (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        ):
            return "it has hooks, which a new module would not have"
        if "forward" in vars(part):
            return "its forward is set on the object"
        if parametrize.is_parametrized(part):
            return "it is parametrized"
    return None


@functools.cache
def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken wheel raises anything
        return f"{module} cannot be imported ({' '.join(error_text(error, 200).split())})"
    return None


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


@dataclass(frozen=True, kw_only=True)
class ClassPair(ModuleReplacement):
    """Replaces every module whose class is ``source``.

    Attributes:
        source: the class that is replaced.
        convert: makes the new module; parameters and buffers are moved into it afterwards.
        target: the class that ``convert`` must give; ``None`` for any module.
        include_subclasses: whether modules of the source's subclasses are replaced too.
        config: settings that the new modules are made with.
    """

    name: str
    source: type[nn.Module]
    convert: Convert
    target: type[nn.Module] | None = None
    requirements: Requirements = ANYWHERE
    include_subclasses: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    by_user = True

    @property
    def looks_for(self) -> str:  # type: ignore[override]  # it depends on the pair
        """Modules of the source class."""
        return f"{self.source.__name__} modules"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Returns whether the source class is there."""
        name = f"{self.source.__module__}.{self.source.__qualname__}"
        return name in classes_in(profile) and self.requirements.usable_on(cluster)

    def configured(self, config: Mapping[str, Any]) -> ClassPair:
        """The same with these settings over its own."""
        return replace(self, config={**self.config, **config})

    def unknown_settings(self, config: Mapping[str, Any]) -> Mapping[str, Iterable[str]]:
        """Settings that neither the function nor the constructor takes, each with the accepted ones."""
        keys = settings_of(self.convert)
        return {} if keys is None else {key: keys for key in config if key not in keys}

    def wants(self, module: nn.Module) -> bool:
        """True for a module of the source class, or of a subclass where these are included."""
        # With subclasses included, a target that derives from the source would be replaced again.
        if self.target is not None and type(module) is self.target:
            return False
        return isinstance(module, self.source) if self.include_subclasses else type(module) is self.source

    def make(self, module: nn.Module) -> nn.Module:
        """The new module, with the old one's parameters and buffers.

        Raises:
            RegistrationError: if it cannot be made, or does not have the old one's parameters and buffers.
        """
        old = f"{self.name!r}, replacing {type(module).__name__}"
        keys = settings_of(self.convert, module)
        unknown = [] if keys is None else [key for key in self.config if key not in keys]
        if unknown:
            raise RegistrationError(
                f"{old}: module_replace.configs.{self.name}.{unknown[0]} (or config= of register_replace_pair) "
                f"is not one of its settings. Accepted: {', '.join(keys or ()) or 'none'}."
            )
        try:
            new = self.convert(module, **self.config)
        except AtorchError as error:
            raise RegistrationError(f"{old}: {error}") from error
        except Exception as error:
            raise RegistrationError(f"{old}: making the new module failed: {error!r}") from error
        if not isinstance(new, nn.Module if self.target is None else self.target):
            target = "a module" if self.target is None else f"a {self.target.__name__}"
            raise RegistrationError(f"{old}: the function returned {with_article(new)} instead of {target}.")
        try:
            move_state(module, new)
        except RegistrationError as error:
            raise RegistrationError(f"{old}: {error}") from error
        return new


def replace_modules(
    model: nn.Module,
    wants: Callable[[nn.Module], bool],
    make: Callable[[nn.Module], nn.Module | str],
    earlier: Set[nn.Module] = frozenset(),
) -> ReplacementOutcome:
    """Replaces modules of ``model`` in place, wherever each of them stands; inner ones first.

    Args:
        model: the model, whose root may be replaced too.
        wants: whether a module is to be replaced.
        make: gives the new module, or the reason why there is none.
        earlier: modules that stay, since an earlier replacement made them; what is inside them does not.
    """
    places: defaultdict[nn.Module, list[str]] = defaultdict(list)
    # A module that stands at several paths is made once.
    for path, module in model.named_modules(remove_duplicate=False):
        if module not in earlier and wants(module):
            places[module].append(path)
    outcome = ReplacementOutcome(model=model)
    root = model
    # Paths list parents first; in reverse a new parent is made from new children.
    for module, paths in reversed(places.items()):
        new = why_untouchable(module) or make(module)
        if isinstance(new, str):
            outcome.kept[f"{type(module).__name__}: {new}"] += 1
            continue
        outcome.replaced[f"{type(module).__name__} → {type(new).__name__}"] += 1
        outcome.new_modules.add(new)
        for path in paths:
            if path:
                root.set_submodule(path, new)
            else:
                root = new  # the model itself
    return replace(outcome, model=root)
