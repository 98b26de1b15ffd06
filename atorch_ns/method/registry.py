"""Method registry: the built-in methods and those of plug-ins, by name and alias."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atorch_ns.errors import MethodNotFoundError, Problem, RegistrationError
from atorch_ns.method.method import CarriesState, Method
from atorch_ns.text import did_you_mean, error_text

ENTRY_POINT_GROUP = "atorch_ns.methods"


class Registry:
    """Methods by name and alias, from their classes.

    Raises:
        RegistrationError: if a name is taken or a class is not a finished method.
    """

    def __init__(self, methods: Iterable[type[Method[Any]]] = ()) -> None:
        self._methods: dict[str, Method[Any]] = {}
        self._names: dict[str, str] = {}
        self._origins: dict[str, str] = {}
        for method in methods:
            self.add(method)

    def add(self, kind: type[Method[Any]], *, origin: str = "atorch_ns") -> None:
        """Registers a method class; ``origin`` is the distribution it comes from."""
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise RegistrationError(f"{kind!r} is not a subclass of atorch_ns.method.Method")
        try:
            method = kind()
        except TypeError as error:
            raise RegistrationError(f"{kind.__name__} cannot be made: {error}") from error
        for name in (method.name, *method.aliases):
            if name in self._names:
                owner = self._names[name]
                raise RegistrationError(
                    f"the method name {name!r} is taken by {type(self._methods[owner]).__qualname__} "
                    f"of {self._origins[owner]}; {kind.__qualname__} of {origin} cannot use it"
                )
        self._methods[method.name] = method
        self._origins[method.name] = origin
        for name in (method.name, *method.aliases):
            self._names[name] = method.name

    def get(self, name: str) -> Method[Any]:
        """The method of this name or alias.

        Raises:
            MethodNotFoundError: with the nearest names.
        """
        if name not in self._names:
            raise MethodNotFoundError([self.unknown(name)])
        return self._methods[self._names[name]]

    def unknown(self, name: str) -> Problem:
        """The problem of a name that is not registered, with suggestions."""
        hint = did_you_mean(name, self._names, otherwise=f"Known: {', '.join(sorted(self._methods))}.")
        return Problem(message=f"unknown method {name!r}.{hint}")

    def default_for(self, role: str) -> Method[Any] | None:
        """The method added if no method of a strategy fills ``role``."""
        return next((method for method in self if method.default_for == role), None)

    def carried(self) -> dict[str, Any]:
        """State that methods carry to another process, by their names."""
        states = ((method.name, method.carry()) for method in self if isinstance(method, CarriesState))
        return {name: state for name, state in states if state is not None}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Gives every method the state that it carried from another process."""
        for name, state in states.items():
            if name in self and isinstance(method := self.get(name), CarriesState):
                method.restore(state)

    def origin(self, name: str) -> str:
        """The distribution that a method comes from."""
        return self._origins[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[Method[Any]]:
        return iter(self._methods.values())

    def __len__(self) -> int:
        return len(self._methods)


def load_registry() -> Registry:
    """All methods of the installed distributions, including the built-in ones.

    A plug-in that fails to load causes a warning with its distribution's name. Other plug-ins are loaded.

    Raises:
        RegistrationError: if there is no distribution, for example if the sources are not installed.
    """
    registry = Registry()
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    if not points:
        sources = Path(__file__).parents[2]
        raise RegistrationError(
            f"no methods were found: atorch_ns was imported from {sources} but is not installed. Methods are found by the "
            f"entry points of installed packages. Install it: pip install {sources}, or pip install -e {sources}"
        )
    # Built-ins first, so that a plug-in that takes a built-in name is the one refused.
    distributions = {point.dist for point in points}  # each reads its name from a file
    names = {dist: dist.name if dist is not None else "an unknown distribution" for dist in distributions}
    for point in sorted(points, key=lambda point: (not point.value.startswith("opt_lib."), point.name)):
        origin = names[point.dist]
        try:
            registry.add(point.load(), origin=origin)
        except MemoryError:  # the method is not broken
            raise
        except Exception as error:  # a broken plug-in must not take the built-in methods with it
            warnings.warn(
                f"the method {point.name!r} of {origin} was not loaded: {error_text(error)}", stacklevel=2
            )
    return registry
