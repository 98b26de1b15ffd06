"""Classes that a strategy names by the module of another script."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from atorch_ns.method._chosen import Chosen, Note
from atorch_ns.method._config import selector_keys
from atorch_ns.profile import Profile

__all__ = ["named_as_here"]

_SCRIPT = "__main__."


def named_as_here(chosen: Iterable[Chosen], profile: Profile) -> tuple[list[Chosen], list[Note]]:
    """Replaces names of classes so that they mean the model's, and so that they mean the same elsewhere.

    A class is called ``__main__.Block`` in the script that defines it and ``train.Block`` where the script is
    imported. A full name that matches nothing is therefore taken as its qualified name, ``Block``, if exactly one
    class of the model has it, and a class of ``__main__`` is called by its qualified name from the beginning,
    unless another class has it too.
    """
    renamed: list[Chosen] = []
    notes: list[Note] = []
    for item in chosen:
        changes: dict[str, tuple[str, ...]] = {}
        for key in selector_keys(type(item.config)):
            old = getattr(item.config, key) or ()
            new = tuple(_name_here(selector, profile) for selector in old)
            if new == old:
                continue
            changes[key] = new
            notes += [
                Note("fitted", item.method.name, f"{item.method.name}.{key}: {_said(before, after, profile)}")
                for before, after in zip(old, new, strict=True)
                if before != after and profile.unmatched([before])
            ]
        renamed.append(replace(item, config=item.config.model_copy(update=changes)) if changes else item)
    return renamed, notes


def _name_here(selector: str, profile: Profile) -> str:
    if not selector.startswith(_SCRIPT) and not profile.unmatched([selector]):
        return selector
    name, classes = profile.namesakes(selector)
    return name if len(classes) == 1 and name not in profile.module_classes else selector


def _said(before: str, after: str, profile: Profile) -> str:
    (full,) = profile.namesakes(before)[1]
    return f"{before} is not in this model; taken as {after}, the one class of that name here ({full})"
