"""What methods that select modules by class or name share."""

from __future__ import annotations

from collections.abc import Iterable

from atorch_ns.errors import Problem
from atorch_ns.profile import Profile

__all__ = ["unmatched_problem"]


def unmatched_problem(
    method: str, key: str, selectors: Iterable[str] | None, profile: Profile
) -> list[Problem]:
    """One problem that names the selectors matching no module and the classes the model has."""
    missing = profile.unmatched(selectors or ())
    if not missing:
        return []
    return [
        Problem(
            message=f"no module of {profile.model_class} has this class or name{_namesakes(missing, profile)}",
            method=method,
            key=key,
            value=", ".join(missing),
            accepted=", ".join(profile.own_class_names()) or "nothing: the model has no submodules",
        )
    ]


def _namesakes(missing: Iterable[str], profile: Profile) -> str:
    """Which classes of other modules have a name that is asked for, where there are several."""
    several = [found for found in map(profile.namesakes, missing) if len(found[1]) > 1]
    return "".join(
        f"; several are called {name}, {' and '.join(classes)}: name one in full" for name, classes in several
    )
