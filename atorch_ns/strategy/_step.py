"""Step: a method's name and its config."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from atorch_ns.strategy._values import JSON, canonical, canonical_text

__all__ = ["Step"]


@dataclass(frozen=True, init=False)
class Step:
    """One method of a strategy.

    Attributes:
        name: the method's name, as registered, or one of its aliases.
        config: the config as plain JSON values; ``None`` means the method's defaults. A new copy at every
            access: a step cannot be changed.

    Raises:
        UnwritableValueError: if the config holds something that has no readable form.
    """

    name: str
    _config: str = field(repr=False)

    def __init__(self, name: str, config: Any = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_config", canonical_text(canonical(config)))

    @property
    def config(self) -> JSON:
        """The config, as plain JSON values."""
        value: JSON = json.loads(self._config)
        return value

    def __repr__(self) -> str:
        return f"Step({self.name!r})" if self.config is None else f"Step({self.name!r}, {self.config!r})"

    def __str__(self) -> str:
        return self.name if self.config is None else f"{self.name}({_shown(self.config)})"


def _shown(config: JSON) -> str:
    if isinstance(config, dict):
        return ", ".join(f"{key}={_shown_value(item)}" for key, item in config.items())
    return _shown_value(config)


def _shown_value(value: JSON) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_shown_value(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
