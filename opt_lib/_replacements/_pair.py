"""Modules of one class replaced by modules of another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import AtorchError, RegistrationError
from atorch_ns.profile import Profile
from opt_lib._replacements._base import (
    ANYWHERE,
    Outcome,
    Replacement,
    Requirements,
    classes_in,
    why_untouchable,
)
from opt_lib._replacements._making import Convert, move_state, settings_of

__all__ = ["ClassPair", "replace_modules"]


@dataclass(frozen=True, kw_only=True)
class ClassPair(Replacement):
    """Replaces every module whose class is ``source``.

    Attributes:
        name: as written in ``include`` and ``exclude``.
        source: the class that is replaced.
        convert: makes the new module; parameters and buffers are moved into it afterwards.
        target: the class that ``convert`` must give; ``None`` for any module.
        requirements: what the pair needs of a job.
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
    def looks_for(self) -> str:
        """Modules of the source class."""
        return f"{self.source.__name__} modules"

    def wanted_in(self, profile: Profile, cluster: Cluster) -> bool:
        """Whether the source class is there."""
        name = f"{self.source.__module__}.{self.source.__qualname__}"
        return name in classes_in(profile) and self.requirements.usable_on(cluster)

    def concerns(self, model: nn.Module) -> bool:
        """Whether a module of the class is there."""
        return any(map(self._wanted, model.modules()))

    def configured(self, config: Mapping[str, Any]) -> ClassPair:
        """The same with these settings over its own."""
        return replace(self, config={**self.config, **config})

    def unknown_settings(self, config: Mapping[str, Any]) -> Mapping[str, Iterable[str]]:
        """Those that neither the function nor the constructor takes."""
        accepted = settings_of(self.convert)
        return {} if accepted is None else {key: accepted for key in config if key not in accepted}

    def replace(self, model: nn.Module, spared: Set[nn.Module] = frozenset()) -> Outcome:
        """Replaces the modules of the class.

        Raises:
            RegistrationError: if a new module does not have the old one's parameters and buffers.
        """
        return replace_modules(model, self._wanted, self._make, spared)

    def _wanted(self, module: nn.Module) -> bool:
        if self.target is not None and type(module) is self.target:
            return False
        return isinstance(module, self.source) if self.include_subclasses else type(module) is self.source

    def _make(self, module: nn.Module) -> nn.Module:
        old = f"{self.name!r}, replacing {type(module).__name__}"
        accepted = settings_of(self.convert, module)
        unknown = [] if accepted is None else [key for key in self.config if key not in accepted]
        if unknown:
            raise RegistrationError(
                f"{old}: module_replace.configs.{self.name}.{unknown[0]} (or config= of register_replace_pair) "
                f"is no setting of it. Accepted: {', '.join(accepted or ()) or 'none'}."
            )
        try:
            new = self.convert(module, **self.config)
        except AtorchError as error:
            raise RegistrationError(f"{old}: {error}") from error
        except Exception as error:
            raise RegistrationError(f"{old}: making the new module failed: {error!r}") from error
        if not isinstance(new, nn.Module if self.target is None else self.target):
            wanted = "a module" if self.target is None else f"a {self.target.__name__}"
            raise RegistrationError(f"{old}: the function gave a {type(new).__name__} instead of {wanted}.")
        try:
            move_state(module, new)
        except RegistrationError as error:
            raise RegistrationError(f"{old}: {error}") from error
        return new


def replace_modules(
    model: nn.Module,
    wanted: Callable[[nn.Module], bool],
    make: Callable[[nn.Module], nn.Module | str],
    spared: Set[nn.Module] = frozenset(),
) -> Outcome:
    """Replaces modules of ``model`` in place, wherever each of them stands; inner ones first.

    Args:
        model: where to look, the root included.
        wanted: whether a module is to be replaced.
        make: gives the new module, or the reason why there is none.
        spared: modules that stay, since an earlier replacement made them; what is inside them does not.
    """
    places: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        if module not in spared and wanted(module):
            places[module].append(path)
    replaced: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    made: set[nn.Module] = set()
    root = model
    for module, paths in reversed(places.items()):
        new = why_untouchable(module) or make(module)
        if isinstance(new, str):
            kept[f"{type(module).__name__}: {new}"] += 1
            continue
        replaced[f"{type(module).__name__} → {type(new).__name__}"] += 1
        made.add(new)
        for path in paths:
            if path:
                parent, _, child = path.rpartition(".")
                setattr(root.get_submodule(parent), child, new)
            else:
                root = new
    return Outcome(model=root, replaced=replaced, kept=kept, made=made)
