"""Modules of one class replaced by modules of another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass

from torch import nn

from atorch_ns.errors import AtorchError, RegistrationError
from opt_lib._replacements._base import ANYWHERE, Outcome, Replacement, Requirements, why_untouchable
from opt_lib._replacements._making import Convert, move_state

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
    """

    name: str
    source: type[nn.Module]
    convert: Convert
    target: type[nn.Module] | None = None
    requirements: Requirements = ANYWHERE
    include_subclasses: bool = False

    by_user = True

    @property
    def looks_for(self) -> str:
        """Modules of the source class."""
        return f"{self.source.__name__} modules"

    def wanted_among(self, class_names: Set[str]) -> bool:
        """Whether the source class is there."""
        return f"{self.source.__module__}.{self.source.__qualname__}" in class_names

    def replace(self, model: nn.Module) -> Outcome:
        """Replaces the modules of the class.

        Raises:
            RegistrationError: if a new module does not have the old one's parameters and buffers.
        """
        return replace_modules(model, self._wanted, self._make)

    def _wanted(self, module: nn.Module) -> bool:
        if self.target is not None and type(module) is self.target:
            return False
        return isinstance(module, self.source) if self.include_subclasses else type(module) is self.source

    def _make(self, module: nn.Module) -> nn.Module:
        old = f"{self.name!r}, replacing {type(module).__name__}"
        try:
            new = self.convert(module)
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
) -> Outcome:
    """Replaces modules of ``model`` in place, wherever each of them stands; inner ones first.

    Args:
        model: where to look, the root included.
        wanted: whether a module is to be replaced.
        make: gives the new module, or the reason why there is none.
    """
    places: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        if wanted(module):
            places[module].append(path)
    replaced: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    root = model
    for module, paths in reversed(places.items()):
        new = why_untouchable(module) or make(module)
        if isinstance(new, str):
            kept[f"{type(module).__name__}: {new}"] += 1
            continue
        replaced[f"{type(module).__name__} → {type(new).__name__}"] += 1
        for path in paths:
            if path:
                parent, _, child = path.rpartition(".")
                setattr(root.get_submodule(parent), child, new)
            else:
                root = new
    return Outcome(model=root, replaced=replaced, kept=kept)
